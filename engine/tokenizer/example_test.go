package tokenizer_test

import (
	"fmt"
	"io/fs"

	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// A text is encoded, and decoded token by token as a stream of answers is.
func ExampleTokenizer() {
	file, err := fs.ReadFile(builtin.FS(), "tokenizer.json")
	if err != nil {
		panic(err)
	}
	t, err := tokenizer.Load(file)
	if err != nil {
		panic(err)
	}
	ids := t.Encode("What is prefill?", false)
	s := t.NewStream(true)
	text := ""
	for _, id := range ids {
		text += s.Next(id)
	}
	fmt.Println(len(ids) > 1, text+s.Flush())
	// Output: true What is prefill?
}
