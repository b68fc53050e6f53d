package kvcache_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// A block of a finished prompt stays cached, and a longer prompt finds it.
func ExamplePool_Match() {
	p, err := kvcache.NewPool(kvcache.Config{Blocks: 8, BlockTokens: 4})
	if err != nil {
		panic(err)
	}
	root := kvcache.Root("a-model", "", "")
	prompt := []int32{1, 2, 3, 4}
	chain := p.NewChain(root, len(prompt))
	p.Extend(&chain, prompt)
	block, _ := p.Alloc() // the engine computes its KV
	p.Store(block, 0, &chain, 0)
	p.Unref(block)

	longer := []int32{1, 2, 3, 4, 5, 6}
	next := p.NewChain(root, len(longer))
	p.Extend(&next, longer)
	fmt.Println(p.Match(&next, len(longer)-1), "tokens are cached")
	// Output: 4 tokens are cached
}
