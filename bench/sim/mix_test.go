package sim

import (
	"errors"
	"math"
	"reflect"
	"testing"
)

func TestParseMix(t *testing.T) {
	kinds, err := ParseMix("0.8:64:96,2:1024:16")
	if want := []Kind{{0.8, 64, 96}, {2, 1024, 16}}; err != nil || !reflect.DeepEqual(kinds, want) {
		t.Errorf("%v, %v", kinds, err)
	}
	for _, bad := range []string{"", "64", "1:64", "1:64:96:3", "0:64:96", "-1:64:96", "1:0:96", "1:64:0", "1:64:96,", "1:64:96 x", "NaN:1:1"} {
		if kinds, err := ParseMix(bad); !errors.Is(err, ErrMix) {
			t.Errorf("%q: %v, %v", bad, kinds, err)
		}
	}
}

// The kinds have their shares, arrivals their rate, and no two prompts share a block.
func TestMix(t *testing.T) {
	const n = 20_000
	trace := Mix([]Kind{{4, 64, 96}, {1, 1024, 16}}, n, 50, 7)
	long, blocks := 0, map[any]bool{}
	for i, q := range trace {
		if i > 0 && q.At < trace[i-1].At {
			t.Fatal("out of order")
		}
		if q.Tokens == 1024 {
			long++
		}
		for _, b := range q.Blocks {
			if blocks[b] {
				t.Fatal("a block twice")
			}
			blocks[b] = true
		}
	}
	if share, rate := float64(long)/n, n/trace[n-1].At.Seconds(); math.Abs(share-0.2) > 0.02 || math.Abs(rate-50) > 2 {
		t.Errorf("%.3f are long, %.1f per second", share, rate)
	}
	if !reflect.DeepEqual(trace, Mix([]Kind{{4, 64, 96}, {1, 1024, 16}}, n, 50, 7)) {
		t.Error("a second draw differs")
	}
}
