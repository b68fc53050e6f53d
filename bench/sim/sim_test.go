package sim

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/route"
)

func mooncake(t testing.TB) []Request {
	t.Helper()
	f, err := os.Open("testdata/mooncake_synthetic.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	trace, err := ReadTrace(z)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// On the Mooncake trace the fleet's caches work nearly as one, and the first
// token comes in at most half the time that round robin takes.
func TestPrefixOnMooncake(t *testing.T) {
	trace := mooncake(t)
	for _, cache := range []int{1000, 2000} {
		o := Options{Nodes: 16, BlockTokens: 512, CacheBlocks: cache, Rate: 10000}
		one := OneCache(trace, cache*o.Nodes, o.BlockTokens)
		for _, load := range []float64{0.5, 0.7, 0.9} {
			var err error
			if o.Stretch, err = Stretch(trace, o, load); err != nil {
				t.Fatal(err)
			}
			results := map[route.Policy]Result{}
			for p := route.Prefix; p <= route.RoundRobin; p++ {
				o.Policy = p
				r, err := Run(trace, o)
				if err != nil {
					t.Fatal(err)
				}
				results[p] = r
				t.Logf("note: %d blocks a node, load %.0f %%: %-15s hit %.1f %% (one cache %.1f %%), first token mean %v, p50 %v, p99 %v",
					cache, 100*load, p, 100*r.Hit, 100*one, r.Mean.Round(1e6), r.P50.Round(1e6), r.P99.Round(1e6))
			}
			ours, rr := results[route.Prefix], results[route.RoundRobin]
			if ours.Hit < one-0.03 {
				t.Errorf("%d blocks, load %g: hit rate %.3f, one cache has %.3f", cache, load, ours.Hit, one)
			}
			if ours.Mean > rr.Mean/2 {
				t.Errorf("%d blocks, load %g: mean first token %v, round robin %v", cache, load, ours.Mean, rr.Mean)
			}
		}
	}
}

// Two gateways of one fleet send a request to the same node. Each knows the other's
// requests from the nodes' reports twice a second.
func TestGatewaysChooseAlike(t *testing.T) {
	trace := mooncake(t)
	for _, load := range []float64{0.5, 0.7, 0.9} {
		o := Options{Nodes: 16, BlockTokens: 512, CacheBlocks: 2000, Rate: 10000}
		var err error
		if o.Stretch, err = Stretch(trace, o, load); err != nil {
			t.Fatal(err)
		}
		one, err := Run(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		o.Gateways, o.Heartbeat, o.EventDelay = 2, 100*time.Millisecond, 20*time.Millisecond
		two, err := Run(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("note: load %.0f %%: two gateways choose alike for %.1f %% of requests; hit %.1f %% (one gateway %.1f %%), first token mean %v (%v)",
			100*load, 100*two.Alike, 100*two.Hit, 100*one.Hit, two.Mean.Round(1e6), one.Mean.Round(1e6))
		if two.Alike < 0.9 || two.Hit < one.Hit-0.01 { // they draw among nodes that are about as good
			t.Errorf("load %g: two gateways choose alike for %.3f of the requests and hit %.3f, one gateway %.3f", load, two.Alike, two.Hit, one.Hit)
		}
	}
}

func TestReadTraceRefuses(t *testing.T) {
	for _, bad := range []string{"{", `{"timestamp":1,"input_length":0,"hash_ids":[1]}`, `{"timestamp":1,"input_length":5,"hash_ids":[]}`, "[]"} {
		if _, err := ReadTrace(strings.NewReader(bad)); !errors.Is(err, ErrTrace) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if _, err := Run(nil, Options{Nodes: 1, BlockTokens: 1, CacheBlocks: 1, Rate: 1, Stretch: 1}); err == nil {
		t.Error("an empty trace was played")
	}
}

// Lines of traces are read as json.Unmarshal reads them, whatever their form.
func FuzzLine(f *testing.F) {
	for _, line := range []string{
		`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}`, `{"hash_ids":[7],"block_tokens":16,"timestamp":1.50,"input_length":1,"output_length":2}`,
		`{"timestamp": -1.5e3, "input_length": 1}`, `{"timestamp": 01, "input_length": 1}`, `{"timestamp": 1., "input_length": 1}`, `{"timestamp": 1, "input_length": 1.5}`, `{}`, `{"timestamp": 1,}`,
		`{"input_length": 99999999999999999999}`, `{"hash_ids": [18446744073709551615]}`, `{"hash_ids": []}`, `{"hash_ids": null}`, `{"INPUT_LENGTH": 3}`, `{"input_length": 3} x`, `{"input_length": 3, "input_length": 4}`,
		`{"chat_id": "a", "input_length": 3}`, `{"input_length": }`, `{"hash_ids": [1,,2]}`, `{"hash_ids": [1 2]}`, `{`, `[`, ``, "{\"input_length\":\t3}",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		got, ok := usualLine([]byte(line), nil)
		var want traceLine
		if err := json.Unmarshal([]byte(line), &want); ok && (err != nil || !reflect.DeepEqual(got, want)) {
			t.Errorf("%q: %+v, want %+v, %v", line, got, want, err)
		}
	})
}
