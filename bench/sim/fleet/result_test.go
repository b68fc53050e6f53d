package fleet

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// The class of a duration is the whole part of its logarithm.
func TestHistogramClasses(t *testing.T) {
	check := func(d time.Duration) {
		want := 0
		if s := d.Seconds(); s > classBase {
			want = min(int(math.Log(s/classBase)/math.Log(classRatio)), len(histogram{}.counts)-1)
		}
		if got := classOf(d); got != want {
			t.Fatalf("%d ns are in class %d, want %d", d, got, want)
		}
	}
	for d := time.Duration(-2); d < 100_000; d++ {
		check(d)
	}
	for _, least := range classes().least {
		for d := least - 2; d <= least+2; d++ {
			check(d)
		}
	}
	draw := rand.New(rand.NewPCG(3, 4))
	for range 100_000 {
		check(time.Duration(draw.Uint64() >> (1 + draw.IntN(63))))
	}
	check(math.MaxInt64)
}
