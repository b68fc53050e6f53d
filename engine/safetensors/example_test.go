package safetensors_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// The tensors of a checkpoint are read by name, without a copy.
func ExampleOpenFS() {
	c, err := safetensors.OpenFS(builtin.FS())
	if err != nil {
		panic(err)
	}
	defer c.Close()
	t, ok := c.Tensor("model.norm.weight")
	fmt.Println(ok, t.DType, len(t.Shape), len(t.Data) == 2*t.Shape[0])
	// Output: true BF16 1 true
}
