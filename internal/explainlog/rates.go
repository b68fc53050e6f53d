package explainlog

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Sample is one line of rates.
type Sample struct {
	Line             int
	At               time.Duration // of the log's clock; 0: unknown
	Prompt, Generate float64       // tokens a second
	Running, Waiting int           // requests; -1: not in the line
	KV               float64       // percent of the cache
	Hit              float64       // percent of prompt tokens found in the prefix cache; -1: not in the line
	Preempted        int           // in the interval
}

// Series is the rates of one engine or process.
type Series struct {
	Name    string
	Samples []Sample
	Lines   int // of rates, thinned out ones included

	skip, step  int
	preempted   int
	maxWaiting  int
	fullWaiting int // lines with requests waiting while KV is nearly full
	seqWaiting  int // lines with requests waiting while there is KV
	top         Sample
	hasTop      bool
	kvMax       float64
}

// add keeps a sample. Past maxSamples every second one is dropped, and then only every second,
// fourth, … new one is kept.
func (z *Series) add(p Sample) {
	z.Lines++
	z.preempted += p.Preempted
	z.maxWaiting = max(z.maxWaiting, p.Waiting)
	z.kvMax = max(z.kvMax, p.KV)
	if p.Waiting > 0 {
		if p.KV >= 90 {
			z.fullWaiting++
		} else {
			z.seqWaiting++
		}
	}
	if p.Generate > 0 && (!z.hasTop || p.Generate > z.top.Generate) {
		z.top, z.hasTop = p, true
	}
	if z.step == 0 {
		z.step = 1
	}
	if z.skip++; z.skip < z.step {
		return
	}
	z.skip = 0
	z.Samples = append(z.Samples, p)
	if len(z.Samples) >= maxSamples {
		kept := z.Samples[:0]
		for i := 0; i < len(z.Samples); i += 2 {
			kept = append(kept, z.Samples[i])
		}
		z.Samples, z.step = kept, z.step*2
	}
}

func (z *Series) fact() string {
	if !z.hasTop {
		return ""
	}
	low := math.Inf(1)
	for _, p := range z.Samples {
		if p.Generate > 0 && p.Running != 0 {
			low = min(low, p.Generate)
		}
	}
	if math.IsInf(low, 1) {
		low = z.top.Generate
	}
	text := fmt.Sprintf("Rates%s: %d %s, %.1f to %.1f tokens/s generated", named(" of", z.Name), z.Lines, plural(z.Lines, "line"), low, z.top.Generate)
	if z.kvMax > 0 {
		text += fmt.Sprintf(", KV use up to %.1f %%", z.kvMax)
	}
	return text
}

// sample adds a line of rates to the series of its engine or process.
func (s *state) sample(name string, p Sample) *Series {
	for i := range s.series {
		if s.series[i].Name == name {
			s.series[i].add(p)
			return &s.series[i]
		}
	}
	if len(s.series) >= maxSeries {
		return &s.series[maxSeries-1]
	}
	s.series = append(s.series, Series{Name: name})
	z := &s.series[len(s.series)-1]
	z.add(p)
	return z
}

// rate explains a line of rates of vLLM or of a node.
func rate(s *state, r record, m []string, n *note) {
	p := Sample{Line: n.line, At: r.at, Running: -1, Waiting: -1, Hit: -1, KV: -1}
	name := ""
	if m != nil && m[1] != "" {
		name = "Engine " + m[1]
	} else if r.process != "" && !strings.Contains(r.process, "pid=") {
		name = r.process
	}
	for part := range strings.SplitSeq(r.msg[strings.Index(r.msg, "Avg "):], ", ") {
		key, value, ok := strings.Cut(part, ": ")
		if !ok {
			continue
		}
		word, _, _ := strings.Cut(value, " ")
		word = strings.TrimSuffix(strings.TrimSuffix(word, "%"), ".")
		switch {
		case strings.HasPrefix(key, "Avg prompt"):
			p.Prompt = number(word)
		case strings.HasPrefix(key, "Avg generation"):
			p.Generate = number(word)
		case key == "Running":
			p.Running = whole(word)
		case key == "Waiting", key == "Pending":
			p.Waiting = max(p.Waiting, whole(word))
		case key == "Preemptions":
			p.Preempted = whole(word)
		case strings.HasSuffix(key, "KV cache usage") && !strings.HasPrefix(key, "CPU"):
			p.KV = number(word)
		case strings.HasSuffix(key, "refix cache hit rate") && !strings.HasPrefix(key, "External") && p.Hit < 0 && word != "n/a":
			p.Hit = number(word)
		}
	}
	z := s.sample(name, p)
	var last *Sample
	if len(z.Samples) > 1 {
		last = &z.Samples[len(z.Samples)-2]
	}
	s.rateNote(p, last, n)
}

// rateNote is the arithmetic of one line of rates.
func (s *state) rateNote(p Sample, last *Sample, n *note) {
	if p.Generate == 0 && p.Prompt == 0 {
		n.what = "Nothing was computed in the interval: the server is idle."
		if p.Running > 0 || p.Waiting > 0 {
			n.find(Warning, "Requests are there, and no token was computed in the interval.", "Look for a hang: `py-spy dump` of the engine process, or the next lines of the log.")
		}
		n.fold = true
		return
	}
	if p.KV >= 0 && s.kvTokens > 0 {
		n.math("KV: %.1f %% of %s = about %s tokens", p.KV, thousands(s.kvTokens), thousands(int(p.KV/100*float64(s.kvTokens))))
	}
	switch {
	case p.Generate <= 0:
	case p.Running > 0:
		n.math("%d running ÷ %.1f tokens/s = %.1f ms a token of each request", p.Running, p.Generate, 1000*float64(p.Running)/p.Generate)
	case p.Running == 0:
		n.math("no request runs at the end of the interval: the rate is the mean over an interval that was idle in part")
	default:
		n.math("1 ÷ %.1f tokens/s = %.2f ms for each token of all requests", p.Generate, 1000/p.Generate)
	}
	if last != nil && last.KV >= 0 && p.KV > last.KV && p.At > last.At && last.At > 0 && s.kvTokens > 0 && p.Generate > 0 {
		grown := (p.KV - last.KV) / 100 * float64(s.kvTokens)
		made := (p.Generate + last.Generate) / 2 * (p.At - last.At).Seconds()
		if made > 0 && p.KV-last.KV >= 2 {
			n.math("in %s use grew by %.1f points = %s tokens, for about %s generated: %.2f of a cache token each", seconds(p.At-last.At), p.KV-last.KV, thousands(int(grown)), thousands(int(made)), grown/made)
			if each := s.growth(); each > 0 && math.Abs(grown/made-each) < 0.1*each {
				n.math("as expected: %.2f for each token, because only the groups without a window grow", each)
			}
		}
	}
	switch {
	case p.Preempted > 0:
		n.find(Warning, fmt.Sprintf("%d preemptions in an interval: requests gave their blocks back and are computed again.", p.Preempted), "Lower --max-num-seqs, or give more KV memory.")
	case p.Waiting > 0 && p.KV >= 90:
		n.find(Note, fmt.Sprintf("%d requests wait while %.1f %% of the KV cache is in use: the KV memory is the limit.", p.Waiting, p.KV), "More KV memory, fp8 KV, shorter contexts, or another replica.")
	case p.Waiting > 0 && p.KV >= 0 && p.Running > 0:
		n.find(Note, fmt.Sprintf("%d requests wait while %.1f %% of the KV cache is in use: --max-num-seqs or the token budget of a step is the limit.", p.Waiting, p.KV), "Raise --max-num-seqs if latency allows.")
	}
}

// growth returns how much of a cache token each generated token takes in a model some of whose
// layers have a window, 0 for others.
func (s *state) growth() (each float64) {
	p, unit, ok := s.plan()
	if !ok || len(p.KV.Groups) < 2 {
		return 0
	}
	for _, g := range p.KV.Groups {
		if g.Window == 0 {
			each += float64(unit) / float64(len(p.KV.Groups)*g.BlockTokens)
		}
	}
	return each
}

// Fit is the least-squares line of seconds a token over KV use.
type Fit struct {
	Series                    string
	From, To                  Sample  // with the least and the most KV use
	Base, Slope               float64 // seconds a token at 0 %, and more for each percent
	R2                        float64
	Running                   int  // requests of all points; 0: unknown
	Assumed                   bool // Running is --max-num-seqs
	StepFrom, StepTo          float64
	GiB, Bandwidth, FullAfter float64 // more KV read a step; GB/s; seconds until the cache is full
}

// fit compares throughput with KV use in the series with the most lines.
func (s *state) fit() *Fit {
	best := -1
	for i := range s.series {
		if best < 0 || len(s.series[i].Samples) > len(s.series[best].Samples) {
			best = i
		}
	}
	z := &s.series[best]
	counts := map[int]int{}
	usual, most := -1, 0
	for _, p := range z.Samples { // the number of running requests that most lines have
		if p.Generate <= 0 || p.KV < 0 || p.Running == 0 {
			continue
		}
		if counts[p.Running]++; counts[p.Running] > most {
			usual, most = p.Running, counts[p.Running]
		}
	}
	var points []Sample
	for i, p := range z.Samples {
		if p.Generate <= 0 || p.KV < 0 || p.Running != usual || p.Prompt > 0.2*p.Generate {
			continue
		}
		if i == 0 && p.Running >= 0 && p.Prompt > 0 || usual >= 0 && len(points) == 0 && p.Prompt > 0 { // an interval that was idle in part
			continue
		}
		points = append(points, p)
	}
	if len(points) < 4 {
		return nil
	}
	f := &Fit{Series: z.Name, From: points[0], To: points[0]}
	var sx, sy, sxx, sxy, syy float64
	for _, p := range points {
		if p.KV < f.From.KV {
			f.From = p
		}
		if p.KV > f.To.KV {
			f.To = p
		}
		x, y := p.KV, 1/p.Generate
		sx, sy, sxx, sxy, syy = sx+x, sy+y, sxx+x*x, sxy+x*y, syy+y*y
	}
	n := float64(len(points))
	if f.To.KV-f.From.KV < 5 {
		return nil
	}
	f.Slope = (n*sxy - sx*sy) / (n*sxx - sx*sx)
	f.Base = (sy - f.Slope*sx) / n
	if d := (n*sxx - sx*sx) * (n*syy - sy*sy); d > 0 {
		f.R2 = (n*sxy - sx*sy) * (n*sxy - sx*sy) / d
	}
	f.Running = max(usual, 0)
	if usual < 0 && s.maxSeqs > 0 {
		f.Running, f.Assumed = s.maxSeqs, true
	}
	if f.Running > 0 {
		f.StepFrom, f.StepTo = float64(f.Running)/f.From.Generate, float64(f.Running)/f.To.Generate
		if s.mem.kv > 0 && f.StepTo > f.StepFrom {
			f.GiB = (f.To.KV - f.From.KV) / 100 * s.mem.kv
			f.Bandwidth = f.GiB * (1 << 30) / 1e9 / (f.StepTo - f.StepFrom)
		}
	}
	if f.To.At > f.From.At && f.From.At > 0 {
		f.FullAfter = (100 - f.To.KV) / ((f.To.KV - f.From.KV) / (f.To.At - f.From.At).Seconds())
	}
	return f
}

// At returns the fitted rate, tokens/s, at a use of the KV cache in percent.
func (f *Fit) At(use float64) float64 { return 1 / (f.Base + f.Slope*use) }

// rateFindings adds what all lines of rates together give.
func (s *state) rateFindings() {
	for i := range s.series {
		z := &s.series[i]
		of := ""
		if z.Name != "" {
			of = z.Name + ": "
		}
		if z.preempted > 0 {
			s.find(Finding{Severity: Warning, Text: fmt.Sprintf("%s%d preemptions: the KV cache was full, and requests are computed again.", of, z.preempted), Change: "Lower --max-num-seqs, raise the KV memory, or shorten contexts."})
		}
		if z.fullWaiting > 0 {
			s.find(Finding{Severity: Note, Text: fmt.Sprintf("%s%d of %d lines have requests waiting with a KV cache that is at least 90 %% in use.", of, z.fullWaiting, z.Lines), Change: "KV memory is the limit: fp8 KV, more GPU memory, shorter contexts, or another replica."})
		}
		if z.seqWaiting > 0 {
			s.find(Finding{Severity: Note, Text: fmt.Sprintf("%s%d of %d lines have requests waiting (up to %d) while KV is free.", of, z.seqWaiting, z.Lines, z.maxWaiting), Change: "--max-num-seqs or the token budget is the limit: raise it, or add a replica."})
		}
		s.singleRequest(z, of)
	}
	if len(s.series) == 0 {
		return
	}
	f := s.fit()
	if f == nil || f.Slope <= 0 || f.To.Generate > 0.95*f.From.Generate {
		return
	}
	fall := 100 * (1 - f.To.Generate/f.From.Generate)
	finding := Finding{Severity: Note, Text: fmt.Sprintf("Generation falls from %.1f to %.1f tokens/s (%.0f %% less) while KV use rises from %.1f %% to %.1f %%.", f.From.Generate, f.To.Generate, fall, f.From.KV, f.To.KV)}
	add := func(format string, args ...any) { finding.Math = append(finding.Math, fmt.Sprintf(format, args...)) }
	add("1 ÷ %.1f = %.3f ms a token, 1 ÷ %.1f = %.3f ms: %.3f ms more for %.1f points", f.From.Generate, 1000/f.From.Generate, f.To.Generate, 1000/f.To.Generate, 1000/f.To.Generate-1000/f.From.Generate, f.To.KV-f.From.KV)
	add("least squares over the lines: %.3f ms + %.4f ms x use in %% (r² %.3f): %.0f tokens/s at 0 %%, %.0f at 100 %%", 1000*f.Base, 1000*f.Slope, f.R2, f.At(0), f.At(100))
	if f.Running > 0 {
		with := fmt.Sprintf("with %d running", f.Running)
		if f.Assumed {
			with = fmt.Sprintf("if all --max-num-seqs %d run", f.Running)
		}
		add("%s, a step takes %.1f ms and then %.1f ms", with, 1000*f.StepFrom, 1000*f.StepTo)
		if f.GiB > 0 {
			add("a step reads the KV in use: %.1f points of %s GiB = %.2f GiB more in %.1f ms = %.0f GB/s", f.To.KV-f.From.KV, gib(s.mem.kv), f.GiB, 1000*(f.StepTo-f.StepFrom), f.Bandwidth)
		}
	}
	if f.FullAfter > 0 && f.FullAfter < 24*3600 {
		add("at this pace the cache is full %s after the last of these lines: then requests are preempted", seconds(time.Duration(f.FullAfter*float64(time.Second))))
	}
	finding.Change = "Each generated token reads all KV of its request. Shorter histories, fp8 KV (--kv-cache-dtype fp8) or another replica keep the rate up."
	s.find(finding)
}

// singleRequest adds the speed of a request that runs alone.
func (s *state) singleRequest(z *Series, of string) {
	var alone []float64
	for _, p := range z.Samples {
		if p.Running == 1 && p.Waiting <= 0 && p.Generate > 0 && p.Prompt == 0 {
			alone = append(alone, p.Generate)
		}
	}
	if len(alone) < 3 {
		return
	}
	slices.Sort(alone)
	rate := alone[len(alone)/2]
	f := Finding{Severity: Note, Text: fmt.Sprintf("%sOne request alone gets %.1f tokens/s (median of %d lines): %.1f ms a token.", of, rate, len(alone), 1000/rate)}
	if s.mem.weights > 0 {
		f.Math = append(f.Math, fmt.Sprintf("%.1f GiB of weights x %.1f tokens/s = %.0f GB/s, if a step reads all weights; a mixture of experts reads fewer", s.mem.weights, rate, s.mem.weights*(1<<30)/1e9*rate))
	}
	if s.eager {
		f.Change = "Eager mode starts each operation by itself, which dominates small batches: leave --enforce-eager out."
	}
	s.find(f)
}
