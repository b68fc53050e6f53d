package load

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// ErrOption is wrapped by every error about an option.
var ErrOption = errors.New("load: bad option")

// Arrivals describes when requests arrive.
type Arrivals struct {
	Rate       float64 // requests per second; +Inf: all at once
	Burstiness float64 // shape of the gamma distributed gaps; 1: a Poisson process
	Ramp       string  // "", "linear" or "exponential": the rate changes from From to To
	From, To   float64 // requests per second
	Seed       uint64
}

// Change is the time at which a ramp's rate reached another integer.
type Change struct {
	RPS int
	At  time.Duration // scheduled, since the start
}

func (a Arrivals) check() error {
	switch {
	case a.Ramp == "" && !(a.Rate > 0):
		return fmt.Errorf("%w: --request-rate %g: want more than 0", ErrOption, a.Rate)
	case !(a.Burstiness > 0) || math.IsInf(a.Burstiness, 1):
		return fmt.Errorf("%w: --burstiness %g: want more than 0", ErrOption, a.Burstiness)
	case a.Ramp != "" && a.Ramp != "linear" && a.Ramp != "exponential":
		return fmt.Errorf("%w: --ramp-up-strategy %q: want linear or exponential", ErrOption, a.Ramp)
	case a.Ramp != "" && (a.From < 0 || a.To <= a.From || a.Ramp == "exponential" && a.From == 0):
		return fmt.Errorf("%w: --ramp-up-start-rps %g, --ramp-up-end-rps %g: want a start that is smaller than the end, and not 0 for an exponential ramp", ErrOption, a.From, a.To)
	}
	return nil
}

// rate returns the rate at request i of n.
func (a Arrivals) rate(i, n int) float64 {
	progress := float64(i) / float64(max(n-1, 1))
	switch a.Ramp {
	case "linear":
		return a.From + (a.To-a.From)*progress
	case "exponential":
		return a.From * math.Pow(a.To/a.From, progress)
	}
	return a.Rate
}

// Times draws the sending time of each of n requests, since the start. Without a ramp
// the times are scaled so that the last request is sent at n/Rate: the average rate is
// exact and only the gaps are random.
func (a Arrivals) Times(n int) ([]time.Duration, []Change, error) {
	if err := a.check(); err != nil {
		return nil, nil, err
	}
	at := make([]time.Duration, n)
	if a.Ramp == "" && math.IsInf(a.Rate, 1) {
		return at, nil, nil
	}
	rng := rand.New(rand.NewPCG(a.Seed, 0x6172726976616c73))
	sums := make([]float64, n)
	rates := make([]float64, n)
	sum := 0.0
	for i := range n {
		rates[i] = a.rate(i, n)
		if rates[i] > 0 { // a linear ramp may start at 0: its first request is sent at once
			sum += gamma(rng, a.Burstiness) / (rates[i] * a.Burstiness)
		}
		sums[i] = sum
	}
	stretch := 1.0
	if a.Ramp == "" && sum > 0 {
		stretch = float64(n) / a.Rate / sum
	}
	var changes []Change
	last := -1
	for i := range n {
		seconds := sums[i] * stretch
		if seconds > 1e8 {
			return nil, nil, fmt.Errorf("%w: at this rate request %d would be sent after %.0f s", ErrOption, i, seconds)
		}
		at[i] = time.Duration(seconds * float64(time.Second))
		if r := int(rates[i]); a.Ramp != "" && r > last {
			changes = append(changes, Change{r, at[i]})
			last = r
		}
	}
	return at, changes, nil
}

// gamma draws from the gamma distribution of this shape and scale 1 by the method of
// Marsaglia and Tsang. Shapes below 1 use shape+1 and the factor U^(1/shape). Very large
// shapes return the mean.
func gamma(rng *rand.Rand, shape float64) float64 {
	if shape > 1e12 {
		return shape
	}
	if shape < 1 {
		return gamma(rng, shape+1) * math.Pow(1-rng.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-rng.Float64()) < 0.5*x*x+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}
