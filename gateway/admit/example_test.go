package admit_test

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
)

// A better priority goes first. Within a priority, flows share tokens by their weights.
func ExampleQueue() {
	q := admit.New(admit.Limits{Requests: 10, Tokens: 1000})
	batch, chat := admit.NewFlow(1), admit.NewFlow(1)
	now := time.Now()
	for _, i := range []*admit.Item{
		{Flow: batch, Priority: 1, Tokens: 100, Owner: "batch"},
		{Flow: chat, Priority: 0, Tokens: 100, Owner: "chat"},
	} {
		if _, refusal := q.Push(now, i, time.Minute); refusal != nil {
			panic(refusal)
		}
	}
	fmt.Println(q.Take(now).Owner, q.Take(now).Owner, q.Len())
	// Output: chat batch 0
}
