package profiler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/tandem-serving/tandem/bench/sim/profile"
)

// ErrLive means that a node's counters do not give a profile.
var ErrLive = errors.New("profiler: live node")

// LiveOptions describe a measurement of nodes that serve.
type LiveOptions struct {
	URLs  []string         // of the nodes' metrics
	For   time.Duration    // length of the measurement
	Every time.Duration    // between two scrapes
	Base  *profile.Profile // whose step times are replaced
	Log   io.Writer        // progress
	// Stop, if not nil, ends the measurement early when it is closed.
	Stop <-chan struct{}
}

// LeastEvery is the least time between two scrapes.
const LeastEvery = 10 * time.Millisecond

// LeastIntervals is the least number of intervals with steps of one kind.
const LeastIntervals = 8

// Bounds of what counters have to have for a fit.
const (
	leastPerRow   = 5   // steps of an interval
	leastSpread   = 1.5 // largest to smallest mean of a coordinate
	maxScrape     = 8 << 20
	scrapeTimeout = 10 * time.Second
	maxFailed     = 3 // scrapes of a node in a row
)

// Metrics of nodes that a fit reads.
const (
	workMetric    = "tandem:engine_work_total"
	secondsMetric = "tandem:engine_work_seconds_total"
	cacheMetric   = "vllm:cache_config_info"
)

// counters are a node's counters of steps of one kind.
type counters struct{ steps, sequences, context, prompt, attended, seconds float64 }

// scrape is a node's counters by kind of step, and the size of its KV memory.
type scrape struct {
	kinds               map[string]counters
	blocks, blockTokens int
}

// Live fits step times to the counters of nodes over a time. Intervals between two scrapes are the
// measured steps, by their means: step times are nearly linear in what a step computes. Measured
// points of the base profile keep their proportions, because counters have only means: all are
// multiplied by one factor. Otherwise coefficients are fitted. Every second interval is left out of
// the fit, and compared with it.
func Live(ctx context.Context, o LiveOptions) (*Result, error) {
	if o.Every < LeastEvery || o.For < (LeastIntervals+1)*o.Every {
		return nil, fmt.Errorf("%w: --for %v with --every %v: give at least %d readings, %v or more apart", ErrOption, o.For, o.Every, LeastIntervals+1, LeastEvery)
	}
	p := *o.Base
	rows := map[string][]profile.TimedStep{}
	last, known := make([]*scrape, len(o.URLs)), make([]bool, len(o.URLs))
	failed := make([]int, len(o.URLs))
	began := time.Now()
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	for time.Since(began) < o.For {
		for i, url := range o.URLs {
			s, err := readScrape(ctx, url)
			if err != nil {
				if failed[i]++; failed[i] >= maxFailed || !known[i] {
					return nil, err
				}
				last[i] = nil // the node may have been started again
				continue
			}
			failed[i], known[i] = 0, true
			if s.blocks > 0 && s.blockTokens > 0 {
				p.Memory = profile.Memory{Blocks: s.blocks, BlockTokens: s.blockTokens}
			}
			addRows(rows, last[i], s)
			last[i] = s
		}
		select {
		case <-tick.C:
			continue
		case <-o.Stop:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		break
	}
	p.Measured = profile.Origin{Seconds: round(time.Since(began).Seconds())}
	return fitLive(&p, rows)
}

// CheckURLs returns an error for the first of the nodes' metrics that cannot be read now.
func CheckURLs(ctx context.Context, urls []string) error {
	errs := make([]error, len(urls))
	var wg sync.WaitGroup
	for i, url := range urls {
		wg.Go(func() { _, errs[i] = readScrape(ctx, url) })
	}
	wg.Wait()
	return cmp.Or(errs...)
}

// addRows adds the mean steps between two scrapes of a node. If any counter of a kind has shrunk,
// the process is a new one, and its first steps do not count. Values that are not finite, and steps
// without work of their kind, are left out.
func addRows(rows map[string][]profile.TimedStep, last, now *scrape) {
	if last == nil {
		return
	}
	for kind, b := range now.kinds {
		a := last.kinds[kind]
		n := b.steps - a.steps
		s := profile.TimedStep{
			Chunk: (b.prompt - a.prompt) / n, Attended: (b.attended - a.attended) / n, Streams: (b.sequences - a.sequences) / n, ContextSum: (b.context - a.context) / n,
			Seconds: (b.seconds - a.seconds) / n, Weight: n,
		}
		sound := n >= leastPerRow && s.Seconds > 0 && (kind != "decode" || s.Streams > 0) && (kind != "prefill" || s.Chunk > 0)
		for _, x := range []float64{s.Chunk, s.Attended, s.Streams, s.ContextSum, s.Seconds, n} {
			sound = sound && x >= 0 && !math.IsInf(x, 0)
		}
		if sound {
			rows[kind] = append(rows[kind], s)
		}
	}
}

// fitLive fits the phases that the rows span.
func fitLive(p *profile.Profile, rows map[string][]profile.TimedStep) (*Result, error) {
	r := &Result{Profile: p}
	var missing []string
	for _, phase := range []struct {
		kind, of string
		names    [2]string
		at       func(s *profile.TimedStep) [2]float64
		points   *[][]float64
		coefs    []*float64
		fit      func(rows []profile.TimedStep)
	}{
		{"decode", "decoding", [2]string{"sequences of a step", "context tokens of a sequence"},
			func(s *profile.TimedStep) [2]float64 { return [2]float64{s.Streams, s.ContextSum / s.Streams} },
			&p.Step.Decode.Points, []*float64{&p.Step.Decode.Fixed, &p.Step.Decode.PerCtx, &p.Step.Decode.PerSeq},
			func(rows []profile.TimedStep) { p.Step.Decode = profile.Decode{}; p.Step.Decode.FitDecode(rows) }},
		{"prefill", "prompts", [2]string{"prompt tokens of a step", "tokens before them"},
			func(s *profile.TimedStep) [2]float64 { return [2]float64{s.Chunk, s.Attended / s.Chunk} },
			&p.Step.Prefill.Points, []*float64{&p.Step.Prefill.Floor, &p.Step.Prefill.Fixed, &p.Step.Prefill.PerToken, &p.Step.Prefill.PerPair},
			func(rows []profile.TimedStep) { p.Step.Prefill = profile.Prefill{}; p.Step.Prefill.FitPrefill(rows) }},
	} {
		all := rows[phase.kind]
		if len(all) < LeastIntervals {
			missing = append(missing, fmt.Sprintf("%s: %d intervals with steps of this kind, at least %d are needed", phase.of, len(all), LeastIntervals))
			continue
		}
		fitted, held := halves(all)
		if f, ok := factor(p, fitted); len(*phase.points) > 0 && ok {
			*phase.points = scaled(*phase.points, f)
			for _, c := range phase.coefs {
				*c *= f
			}
			r.Notes = append(r.Notes, fmt.Sprintf("The times of %s are those of the base profile multiplied by %.3f", phase.of, f))
		} else if why := spans(all, phase.names, phase.at); why == "" {
			phase.fit(fitted)
		} else {
			missing = append(missing, phase.of+": "+why)
			continue
		}
		roundAll(p)
		times := p.Times()
		for _, s := range held {
			at := phase.at(&s)
			r.HeldOut = append(r.HeldOut, Comparison{fmt.Sprintf("%.0f steps of %s: %.4g %s, %.4g %s", s.Weight, phase.of, at[0], phase.names[0], at[1], phase.names[1]), times.Predict(&s), s.Seconds})
		}
	}
	switch {
	case len(missing) == 2:
		return nil, fmt.Errorf("%w: the counters do not span enough: %s: measure for longer, under a load that varies, or give the URLs of more nodes", ErrLive, strings.Join(missing, "; "))
	case len(missing) == 1:
		r.Notes = append(r.Notes, fmt.Sprintf("Those of the base profile (%s) remain for %s", p.Basis(), missing[0]))
	default:
		p.Step.Source, p.Step.Error = profile.Measured, 0
	}
	if mean, _ := r.Errors(); mean > MaxFitError {
		return r, fmt.Errorf("%w: intervals that were not fitted are off by %.1f %% on average, at most %.0f %% are accepted: measure for longer, or give --accept to write the profile all the same", ErrFit, 100*mean, 100*MaxFitError)
	}
	return r, nil
}

// factor returns by what to multiply a profile's times so that their sum over rows is the measured
// one; false: the products would miss the rows by more than MaxFitError on average.
func factor(p *profile.Profile, rows []profile.TimedStep) (f float64, ok bool) {
	times := p.Times()
	measured, predicted, off := 0.0, 0.0, 0.0
	for i := range rows {
		measured += rows[i].Weight * rows[i].Seconds
		predicted += rows[i].Weight * times.Predict(&rows[i])
	}
	f = measured / predicted
	for i := range rows {
		off += math.Abs(f*times.Predict(&rows[i])/rows[i].Seconds-1) / float64(len(rows))
	}
	return f, off <= MaxFitError
}

// scaled returns points whose seconds and spreads are multiplied by f.
func scaled(points [][]float64, f float64) [][]float64 {
	list := make([][]float64, len(points))
	for i, p := range points {
		list[i] = slices.Clone(p)
		for k := 2; k < len(p); k++ {
			list[i][k] = round(f * p[k])
		}
	}
	return list
}

// spans returns why rows do not determine coefficients, or "".
func spans(rows []profile.TimedStep, names [2]string, at func(*profile.TimedStep) [2]float64) string {
	var low, high, sum, squares [2]float64
	product := 0.0
	for i := range rows {
		v := at(&rows[i])
		for k, x := range v {
			if i == 0 {
				low[k], high[k] = x, x
			}
			low[k], high[k] = min(low[k], x), max(high[k], x)
			sum[k] += x
			squares[k] += x * x
		}
		product += v[0] * v[1]
	}
	for k := range names {
		if !(high[k] >= leastSpread*low[k]) {
			return fmt.Sprintf("%s were %.4g to %.4g on average, and have to vary by a factor of %g", names[k], low[k], high[k], leastSpread)
		}
	}
	n := float64(len(rows))
	variance := func(k int) float64 { return squares[k]/n - sum[k]*sum[k]/n/n }
	if c := (product/n - sum[0]*sum[1]/n/n) / math.Sqrt(variance(0)*variance(1)); math.Abs(c) > 0.995 {
		return fmt.Sprintf("%s and %s varied together", names[0], names[1])
	}
	return ""
}

// halves splits rows into every first and every second one, in order of time.
func halves(rows []profile.TimedStep) (a, b []profile.TimedStep) {
	for i, s := range rows {
		if i%2 == 0 {
			a = append(a, s)
		} else {
			b = append(b, s)
		}
	}
	return a, b
}

// Masked returns a URL, which need not be valid, without its user and password.
func Masked(url string) string {
	scheme, rest, found := strings.Cut(url, "://")
	if !found {
		scheme, rest = "", url
	}
	// A password that is not escaped may have a slash, so that the last @ counts.
	rest = rest[strings.LastIndexByte(rest, '@')+1:]
	if found {
		scheme += "://"
	}
	return scheme + rest
}

// readScrape reads the metrics of a node.
func readScrape(ctx context.Context, url string) (*scrape, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: --from %s: give a node's URL such as http://10.0.0.2:7301/metrics", ErrOption, Masked(url))
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, fmt.Errorf("%w: --from: %w: give the address of a node's metrics, which tandem status shows", ErrLive, err)
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%w: %s answered %s: give the address of a node's metrics, which tandem status shows", ErrLive, Masked(url), a.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(a.Body, maxScrape))
	if err != nil {
		return nil, fmt.Errorf("%w: %s sends no metrics: %w", ErrLive, Masked(url), err)
	}
	work, seconds := families[workMetric], families[secondsMetric]
	if work == nil || seconds == nil {
		return nil, fmt.Errorf("%w: %s has no %s: give a prefill or decode node of this release, not a gateway", ErrLive, Masked(url), workMetric)
	}
	s := &scrape{kinds: map[string]counters{}}
	for _, m := range slices.Concat(work.GetMetric(), seconds.GetMetric()) {
		var kind, of string
		for _, l := range m.GetLabel() {
			switch l.GetName() {
			case "step":
				kind = l.GetValue()
			case "of":
				of = l.GetValue()
			}
		}
		c := s.kinds[kind]
		switch v := m.GetCounter().GetValue(); of { // a newer node may count more
		case "steps":
			c.steps = v
		case "sequences":
			c.sequences = v
		case "context":
			c.context = v
		case "prompt":
			c.prompt = v
		case "attended":
			c.attended = v
		case "":
			c.seconds = v
		}
		s.kinds[kind] = c
	}
	for _, m := range families[cacheMetric].GetMetric() {
		for _, l := range m.GetLabel() {
			n, err := strconv.Atoi(l.GetValue())
			switch {
			case err != nil:
			case l.GetName() == "num_gpu_blocks":
				s.blocks = n
			case l.GetName() == "block_size":
				s.blockTokens = n
			}
		}
	}
	return s, nil
}
