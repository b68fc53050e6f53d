package route_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// The same prefix has the same node, unless that node cannot be used.
func ExampleTable_Pick() {
	t := route.New([]route.Node{{Name: "d1"}, {Name: "d2"}}, nil)
	tokens := make([]int32, 64)
	root := kvcache.Root("a-model", "", "")
	r := route.Request{Policy: route.Prefix, Key: route.Key(root, kvcache.AppendHashes(nil, root, tokens, 16), tokens), Uncached: 64}
	v := route.View{Decode: []route.State{{Usable: true}, {Usable: true}}}
	home := t.Pick(r, v, nil).Decode
	again := t.Pick(r, v, nil).Decode
	v.Decode[home].Usable = false
	other := t.Pick(r, v, nil).Decode
	fmt.Println(home == again, home == other)
	// Output: true false
}
