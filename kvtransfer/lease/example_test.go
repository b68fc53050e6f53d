package lease_test

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// A write lands only under a live lease, and each piece once.
func ExampleTable() {
	t := lease.New(lease.Options{Epoch: 1, Regions: 1, Pages: 8, MaxLeases: 4, Quarantine: time.Second})
	k, err := t.Grant(0, []int32{5, 6}, time.Minute)
	if err != nil {
		panic(err)
	}
	pages := make([]int32, 2)
	fmt.Println(t.Admit(k, 1, 0, []uint32{0, 1}, pages) == lease.Admitted, pages)
	t.BeginRead(k, 2)
	fmt.Println(t.EndRead(0, k, 0, []uint32{0, 1}))
	// Output:
	// true [5 6]
	// complete
}
