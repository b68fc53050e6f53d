package pools

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// present returns options of the command's defaults, and a fleet with a small load.
func present(t *testing.T) (*Options, *Present) {
	t.Helper()
	o := options()
	l, err := sim.ParseLoad("rps=25,n=100,in=lognormal(7.5,0.9),out=10-40,prefix=0.3")
	if err != nil {
		t.Fatal(err)
	}
	o.Loads, o.MinRemote, o.Growth, o.Budget, o.MaxNodes = nil, []int{16, 512}, 1.2, 1600, 6
	load, err := l.Trace(3)
	if err != nil {
		t.Fatal(err)
	}
	p, _, err := profile.Named("h100:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	return &o, &Present{
		Profile: p, Prefill: 2, Decode: 4, Prefills: []string{"p1", "p0"}, Decodes: []string{"d0", "d$(x)&", "d2", "d3"}, URL: "http://gw:8000", Keyed: true,
		Load: load, Source: "recorded from http://gw:8000",
	}
}

// worked returns advice that is ready to be written. What it measured is what it predicts.
func worked(t *testing.T, o *Options, now *Present) *advice {
	t.Helper()
	a := &advice{run: &run{Options: o}, now: now}
	if err := a.work(); err != nil {
		t.Fatal(err)
	}
	known := func(q planner.Quantiles) [3]Known { return [3]Known{Exactly(q.P50), Exactly(q.P90), Exactly(q.P99)} }
	now.Measured = &Measured{
		Window: a.took, TTFT: known(a.predicted.TTFT), TPOT: known(a.predicted.TPOT), ITL: known(a.predicted.ITL),
		Prompt: a.predicted.Input, Output: a.predicted.Output, Requests: len(now.Load),
	}
	a.now = now
	return a
}

// written returns the advice as it is written.
func (a *advice) written(t *testing.T) string {
	t.Helper()
	var out bytes.Buffer
	if err := a.write(&out); err != nil {
		t.Fatal(err)
	}
	for _, never := range []string{"NaN", "Inf", "-9223", "%!"} {
		if strings.Contains(out.String(), never) {
			t.Errorf("the text has %q:\n%s", never, &out)
		}
	}
	return out.String()
}

// A fleet that is too large is told what it saves, what to change and what it risks. Equal inputs
// give equal text.
func TestAdviseSavings(t *testing.T) {
	o, now := present(t)
	a := worked(t, o, now)
	text := a.written(t)
	at := 0
	for _, want := range []string{
		"The fleet now: 2 prefill nodes and 4 decode nodes of h100:llama-8b", ", $17.70 an hour. It meets every objective: TTFT p90 ", "Savings: ", " would be enough for 1.2 times this load (", "instead of 6)", "less, $", " a month.",
		"With that fleet, at 1.2 times this load: TTFT p90", "It holds ", "All figures rest on an estimate",
		"Predicted and measured", "TTFT p50", "+0 %", "ITL p99", "answer tokens/s", "rests on a prediction that agrees with the measurement",
		"What to change, in this order", "Drain ", `curl -X POST -H "Authorization: Bearer $TANDEM_API_KEY" http://gw:8000/admin/drain/p1`, "helm upgrade tandem deploy/helm/tandem --reuse-values --set pools.prefill.", "tandem up --prefill ",
		"What the fleet of now does if", "load × 2.5", "one of 3 zones fails", "upgrade, 2 nodes at a time", "min-remote 512", "one of 3 zones fails: 1 prefill node and 2 decode nodes die, because nodes name no zones", "only its beginning was simulated",
		"Cost of the advised fleet", "What the figures rest on", "recorded from http://gw:8000, at 1.2 times its pace",
	} {
		i := strings.Index(text[at:], want)
		if i < 0 {
			t.Fatalf("no %q after byte %d of\n%s", want, at, text)
		}
		at += i
	}
	if strings.Contains(text, "$(x)") || !strings.Contains(text, "/d%24%28x%29%26") && strings.Contains(text, "drain/d0;") {
		t.Errorf("a node's name reaches the shell:\n%s", text)
	}
	var again bytes.Buffer
	if err := Advise(o, now, &again); err != nil || again.String() != text {
		t.Errorf("equal inputs gave another text: %v\n%s", err, &again)
	}

	// Where prediction and measurement disagree, the first sentence says so.
	now.Measured.TTFT[1] = Exactly(10 * now.Measured.TTFT[1].Value)
	now.Notes = []string{"A note."}
	text = a.written(t)
	if !strings.HasPrefix(text, "Do not act on this advice: the prediction disagrees with the measurement (TTFT p90: predicted ") || !strings.Contains(text, "-90 %  disagrees") ||
		!strings.Contains(text, "Disagreement: TTFT p90.") || !strings.Contains(text, "What to change, if the prediction were right") || !strings.Contains(text, "  A note.\n") {
		t.Error(text)
	}
	for i := range now.Measured.TTFT { // most requests were refused
		now.Measured.TTFT[i] = Exactly(planner.Failing)
	}
	if text := a.written(t); !strings.Contains(text, "fails") {
		t.Error(text)
	}
	o.JSON = true
	if text := a.written(t); !strings.Contains(text, `"measured": null`) {
		t.Error(text)
	}
	o.JSON, now.Measured = false, nil
	if text := a.written(t); !strings.HasPrefix(text, "The fleet now: ") || !strings.Contains(text, "Nothing was measured, so that the advice rests on the profile alone") {
		t.Error(text)
	}
}

// A fleet that is too small is told what it needs, in JSON too.
func TestAdviseNeeds(t *testing.T) {
	o, now := present(t)
	now.Prefill, now.Decode, now.Prefills, now.Decodes = 0, 1, nil, nil
	for i := range now.Load {
		now.Load[i].At /= 4
	}
	now.WhatIf = []string{"load=0.1", "gpu=h200", "fleet=2P2D", "upgrade=1"}
	o.Helm, o.JSON = filepath.Join(t.TempDir(), "values.yaml"), true
	var got struct {
		Agrees     *bool
		Comparison []any
		Notes      []string
		Now        struct {
			Fleet string
			Load  float64
			Meets bool `json:"meets_objectives"`
		}
		WhatIf []struct {
			Name   string
			Load   float64
			Needed *struct {
				Fleet, Profile string
				Price          float64 `json:"price_per_hour"`
			}
			Not string `json:"not_simulated"`
		} `json:"what_if"`
		Saved float64 `json:"saved_per_month"`
		Nodes int     `json:"saved_nodes"`
		Steps []struct{ Text, Command, Kubernetes string }
		Up    string
		Plan  struct {
			Meets bool `json:"meets_objectives"`
		}
	}
	var out bytes.Buffer
	if err := Advise(o, now, &out); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	if got.Agrees != nil || got.Notes == nil || got.Now.Fleet != "1D" || got.Now.Load != 1 || got.Now.Meets || got.Saved >= 0 || got.Nodes >= 0 || !got.Plan.Meets || !strings.HasPrefix(got.Up, "tandem up ") {
		t.Errorf("%s", text)
	}
	if len(got.Steps) == 0 || !strings.HasPrefix(got.Steps[0].Text, "Start ") || !strings.HasPrefix(got.Steps[0].Kubernetes, "helm upgrade") {
		t.Errorf("%+v", got.Steps)
	}
	names := []string{}
	for _, w := range got.WhatIf {
		names = append(names, w.Name)
	}
	if !slices.Equal(names, []string{"load × 0.1", "h200:llama-8b", "fleet 2P2D", "upgrade, 1 node at a time", "one of 3 zones fails"}) {
		t.Errorf("%q", names)
	}
	if w := got.WhatIf; w[0].Load != .1 || w[0].Needed != nil || w[1].Needed == nil || w[1].Needed.Profile != "h200:llama-8b" || w[1].Needed.Price < 3.8 || !strings.Contains(w[4].Not, "nothing would be left to serve") {
		t.Errorf("%+v", got.WhatIf)
	}
	if values, err := os.ReadFile(o.Helm); err != nil || !strings.Contains(string(values), "pools:") || !strings.Contains(string(values), "#   tandem advise\n") {
		t.Errorf("%v\n%s", err, values)
	}
}

// The tour of wrong inputs: each ends in one sentence that says what to do.
func TestAdviseRefuses(t *testing.T) {
	for want, change := range map[string]func(o *Options, now *Present){
		"--what-if luck=1: write one of load=": func(_ *Options, now *Present) { now.WhatIf = []string{"luck=1"} },
		"nodes fit in the memory":              func(_ *Options, now *Present) { now.WhatIf = []string{"fleet=999999D"} },
		"--what-if load=0: write a number":     func(_ *Options, now *Present) { now.WhatIf = []string{"load=0"} },
		"no GPU is called \"h1\"":              func(_ *Options, now *Present) { now.WhatIf = []string{"gpu=h1"} },
		"a model of 80 layers":                 func(_ *Options, now *Present) { now.WhatIf = []string{"gpu=4xh200:llama-70b"} },
		"add --compare-estimates": func(_ *Options, now *Present) {
			now.Profile.Step.Source, now.WhatIf = profile.Measured, []string{"gpu=h200"}
		},
		"a request alone on a node takes":       func(o *Options, _ *Present) { o.TPOT = "p90=1ms" },
		"of the prompts take longer on an idle": func(o *Options, _ *Present) { o.TTFT = "p90=10ms" },
		"too few for percentiles":               func(_ *Options, now *Present) { now.Load = now.Load[:3] },
		"add --drop-too-long":                   func(_ *Options, now *Present) { now.Load[7].Tokens = 1 << 20 },
		"--ttft soon: write a percentile":       func(o *Options, _ *Present) { o.TTFT = "soon" },
	} {
		o, now := present(t)
		change(o, now)
		err := o.Check(now.Profile, now.WhatIf)
		if err == nil {
			err = Advise(o, now, &bytes.Buffer{})
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "planner: ") || strings.Contains(err.Error(), "profile: ") {
			t.Errorf("%q: %v", want, err)
		}
	}
}

// An error counts only as far as a histogram shows it, and tiny differences do not count.
func TestDisagreement(t *testing.T) {
	for _, c := range []struct {
		c    compared
		sure float64
		want bool
	}{
		{compared{Predicted: 1, Measured: 1.2, Low: 1.2, Up: 1.2, Counts: true}, -.1667, false},
		{compared{Predicted: 1, Measured: 1.5, Low: 1.5, Up: 1.5, Counts: true}, -.3333, true},
		{compared{Predicted: 1, Measured: 1.5, Low: 1.5, Up: 1.5}, -.3333, false},
		{compared{Predicted: 1, Measured: 1.5, Low: .5, Up: 2, Counts: true}, 0, false},
		{compared{Predicted: 3, Measured: 1.5, Low: .5, Up: 2, Counts: true}, .5, true},
		{compared{Predicted: .0015, Measured: .001, Low: .001, Up: .001, Counts: true}, .5, false},
		{compared{Predicted: math.Inf(1), Measured: 1, Low: 1, Up: 1, Counts: true}, math.Inf(1), true},
		{compared{Predicted: 1, Measured: math.Inf(1), Low: math.Inf(1), Up: math.Inf(1), Counts: true}, -1, true},
		{compared{Predicted: math.Inf(1), Measured: math.Inf(1), Low: math.Inf(1), Up: math.Inf(1), Counts: true}, 0, false},
		{compared{Predicted: .0001, Measured: .0002, Low: .0002, Up: .0002, Rate: true, Counts: true}, -.5, true},
	} {
		if got := c.c.Sure(); math.Abs(got-c.sure) > 1e-3 || c.c.Disagrees() != c.want {
			t.Errorf("%+v: sure %g, disagrees %v", c.c, got, c.c.Disagrees())
		}
	}
}

// The recorded load of one of several gateways counts for each.
func TestAdviseGateways(t *testing.T) {
	o, now := present(t)
	now.Measured = &Measured{Window: time.Minute, Output: 7}
	one := &advice{run: &run{Options: o}, now: now}
	two := *o
	two.Gateways = 2
	both := &advice{run: &run{Options: &two}, now: now}
	for _, a := range []*advice{one, both} {
		if err := a.prepare(); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := one.trace[len(one.trace)-1].At, both.trace[len(both.trace)-1].At; (a - 2*b).Abs() > 2 {
		t.Errorf("%v and %v", a, b)
	}
	if one.now.Measured.Output != 7 || both.now.Measured.Output != 14 || both.now.Measured.Window != 30*time.Second || now.Measured.Output != 7 {
		t.Errorf("%+v and %+v", one.now.Measured, both.now.Measured)
	}
}

// Failed requests are the slowest ones.
func TestExact(t *testing.T) {
	list := []time.Duration{}
	for i := range 90 {
		list = append(list, time.Duration(90-i)*time.Millisecond)
	}
	k := Exact(list, 10)
	if k[0] != Exactly(51*time.Millisecond) || k[1].Value != planner.Failing || k[2].Low != planner.Failing {
		t.Errorf("%v", k)
	}
	if k := Exact(nil, 3); k != [3]Known{} {
		t.Errorf("%v", k)
	}
}

// A profile of another model is refused, one of other kernels is noted.
func TestModelOf(t *testing.T) {
	p := &profile.Profile{Node: profile.Node{Name: "n"}, Model: profile.Model{Name: "m", Layers: 4, Fingerprint: "0x00c54841c7ad84dc", Class: "00c54841c7ad84dc/cpu-a"}}
	for _, c := range []struct{ class, note, err string }{
		{"00c54841c7ad84dc/cpu-a", "", ""},
		{"c54841c7ad84dc/cpu-b", "other kernels (cpu-a) than the fleet has (cpu-b)", ""},
		{"1111/cpu-a", "", "is of model m with 4 layers and weights 0x00c54841c7ad84dc, and the fleet serves x with weights 0x1111"},
		{"", "", ""},
	} {
		note, err := ModelOf(p, c.class, "x")
		if !strings.Contains(note, c.note) || (note == "") != (c.note == "") || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %q, %v", c.class, note, err)
		}
	}
	p.Model.Fingerprint = ""
	if note, err := ModelOf(p, "1/c", "x"); err != nil || !strings.Contains(note, "whether these are the same model is not known") {
		t.Errorf("%q, %v", note, err)
	}
}
