package sample_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/sample"
)

// A draw depends on seed, choice and position only, so that another node repeats it.
func ExamplePick() {
	logits := []float32{0.5, 2, 1.5, -1}
	p := &sample.Params{Seed: 42, Temperature: 1, TopP: 0.9}
	var here, there sample.Scratch
	first := sample.Pick(logits, p, 7, &here)
	fmt.Println(first == sample.Pick(logits, p, 7, &there))
	fmt.Println(sample.Pick(logits, new(sample.Params), 7, &here)) // greedy
	// Output:
	// true
	// 1
}
