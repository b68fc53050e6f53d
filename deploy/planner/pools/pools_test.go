package pools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/cost"
)

// options returns those of the command's defaults with a small load.
func options() Options {
	return Options{
		Profiles: []string{"h100:llama-8b"}, Loads: []string{"rps=25,n=300,in=lognormal(7.5,0.9),out=20-120,prefix=0.3"}, Growth: 1, Seed: 3,
		TTFT: "p90=1s", TPOT: "p90=40ms", Shape: "auto", MaxNodes: 16, Budget: 30_000, BatchedTokens: []int{2048}, MaxSeqs: 256, MinRemote: []int{16}, Gateways: 1, Workers: 2,
		Machine: cost.Machine{Years: 4, Availability: .95, PUE: 1.3, PerKWh: .12},
	}
}

// planned returns the text of a plan.
func planned(t *testing.T, o Options) string {
	t.Helper()
	var out bytes.Buffer
	if err := Run(&o, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// The report begins with the choice in words, and has every part. Equal options give equal text.
func TestReport(t *testing.T) {
	o := options()
	o.APIInput, o.APIOutput, o.Command = .05, .4, "tandem plan pools --x"
	text := planned(t, o)
	if !strings.HasPrefix(text, "Plan: ") {
		t.Error(text)
	}
	at := 0
	for _, want := range []string{
		"of h100:llama-8b (NVIDIA H100 SXM, 1 GPU each)", " an hour.\n", "It meets every objective for ", "TTFT p90 ", "(limit 1.00 s)", "of the requests are within every limit (goodput).",
		"The load may", "the fleet fails: ", "one node fewer", "All figures rest on an estimate of the step times, which may be wrong by 25 %", "Measure such a node before you buy.",
		"Settings of its nodes", "--max-num-batched-tokens 2048, --max-num-seqs 256", "→ chosen", "meets every objective; estimate ±25 %", "Other kinds of fleets", "If the load grows", "times this pace on: ",
		"If a node dies after two fifths of the load, and is ready again 24s later", "a node dies", "If steps take longer", "1.25",
		"Cost", "at $2.95 an hour: $", "a million tokens: $", "a million cached prompt tokens: $", "next to an API at $0.0500 and $0.400", "What the figures rest on", "Step times of h100:llama-8b: estimate ±25 %; $2.95 an hour", "To repeat: tandem plan pools --x",
	} {
		i := strings.Index(text[at:], want)
		if i < 0 {
			t.Fatalf("no %q after byte %d of\n%s", want, at, text)
		}
		at += i
	}
	for _, never := range []string{"NaN", "Inf", "-9223", "%!"} {
		if strings.Contains(text, never) {
			t.Errorf("the text has %q:\n%s", never, text)
		}
	}
	var progress []int
	o.Workers, o.Progress = 1, func(p Progress) {
		progress = append(progress, p.Simulated)
		if p != (Progress{}) && (p.Running == "" || p.Requests == 0 || p.Budget != o.Budget) {
			t.Errorf("%+v", p)
		}
	}
	if again := planned(t, o); again != text {
		t.Errorf("equal options gave another text:\n%s", again)
	}
	if n := len(progress); n < 3 || progress[n-1] != 0 || !slices.IsSorted(progress[:n-1]) || progress[n-2] > o.Budget {
		t.Errorf("progress %v", progress)
	}
}

// With pools each has a price; without a price, one sentence has the remedy. Tenants have shares.
func TestPools(t *testing.T) {
	o := options()
	o.Shape, o.Prices = "pools", []float64{2.99}
	o.Loads = []string{"chat: rps=15,n=200,in=lognormal(7,0.9),out=20-120,prefix=0.3", "batch: rps=5,n=70,in=4000,out=40"}
	o.Spare = 1
	text := planned(t, o)
	for _, want := range []string{"prefill node", "by pool: $", "chat: $", "batch: $", "would be enough; each pool has 1 node to spare", "2 nodes to spare: $5.98 an hour", "a prefill node dies", "--min-remote-prefill-tokens 16", "at $2.99 an hour"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	o.Prices, o.Budget = []float64{0}, 2_000
	text = planned(t, o)
	if !strings.Contains(text, "No price is known: give --price-per-hour, the US dollars for an hour of one node (h100:llama-8b).") || strings.Contains(text, "$0") {
		t.Error(text)
	}
}

// Prefill nodes may be of another kind: each pool has its price, and the outputs name both kinds.
func TestKinds(t *testing.T) {
	o := options()
	o.Profiles, o.PrefillProfiles, o.Prices = []string{"h200:llama-8b"}, []string{"l40s:llama-8b"}, []float64{50, 1}
	o.Shape, o.Explain, o.Spare, o.Helm = "pools", true, 1, filepath.Join(t.TempDir(), "values.yaml")
	o.Budget = 14_000
	text := planned(t, o)
	for _, want := range []string{
		"prefill nodes of l40s:llama-8b (NVIDIA L40S) and ", "of h200:llama-8b (NVIDIA H200 SXM), 1 GPU each", "→ chosen",
		"prefill and decode nodes of h200:llama-8b: ", "by pool: $", "prefill nodes at $1.00 and 2 decode nodes at $50.0 an hour: $", "2 nodes to spare: $51.00 an hour of it",
		"Step times of h200:llama-8b: estimate ±25 %; $50.0 an hour", "Step times of l40s:llama-8b: estimate ±25 %; $1.00 an hour", "+ 2 · $50.0)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	values, err := os.ReadFile(o.Helm)
	if err != nil || !strings.Contains(string(values), "# Prefill nodes are NVIDIA L40S, decode nodes NVIDIA H200 SXM: select") || strings.Contains(string(values), "price-per-hour") {
		t.Errorf("%v\n%s", err, values)
	}
	o.Explain, o.Up, o.Helm, o.Spare, o.Budget = false, true, "", 0, 2_000
	if err := Run(&o, new(bytes.Buffer)); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "--up: tandem up starts nodes on one machine, and the plan has l40s:llama-8b and h200:llama-8b") {
		t.Error(err)
	}
}

// Bought nodes have the price of their purchase, power and place.
func TestBoughtNodes(t *testing.T) {
	o := options()
	o.Machine = cost.Machine{Capex: 33_288, Years: 4, Availability: .95, PUE: 1.3, PerKWh: .12, Ops: .1, Watts: 1000}
	list, err := o.readKinds()
	if err != nil || fmt.Sprintf("%.3f", list[0].Node.Price) != "1.256" { // 1 + .156 + .1
		t.Errorf("%g, %v", list[0].Node.Price, err)
	}
}

// The overhead is part of every price of a fleet.
func TestOverhead(t *testing.T) {
	o := options()
	o.Prices, o.Overhead, o.Spare = []float64{2}, .1, 1
	text := planned(t, o)
	found := regexp.MustCompile(`(\d+) nodes at \$2\.00 an hour and 10 % of it for overhead: \$([\d.]+) an hour`).FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("no price in\n%s", text)
	}
	n, _ := strconv.Atoi(found[1])
	if want := fmt.Sprintf("%.2f", 2.2*float64(n)); found[2] != want || !strings.Contains(text, "GPUs in all, $"+want+" an hour") {
		t.Errorf("want $%s an hour in\n%s", want, text)
	}
	o.JSON = true
	var plan struct {
		Fleet struct {
			Price float64 `json:"price_per_hour"`
		}
		Cost struct {
			Price float64 `json:"per_hour"`
		}
	}
	if err := json.Unmarshal([]byte(planned(t, o)), &plan); err != nil || math.Abs(plan.Fleet.Price-plan.Cost.Price) > 1e-9 {
		t.Errorf("%+v, %v", plan, err)
	}
}

// written writes a file and returns its name.
func written(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// measured returns the file of a profile that was measured.
func measured(t *testing.T, name string) string {
	p, _, err := profile.Named(name)
	if err != nil {
		t.Fatal(err)
	}
	p.Step.Source, p.Step.Error, p.Node.Name = profile.Measured, 0, "measured"
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	return written(t, b.String())
}

// Each wrong input is refused with one sentence that has the value and the remedy.
func TestWrongInput(t *testing.T) {
	line := func(at, in, out int) string {
		return fmt.Sprintf(`{"timestamp": %d, "input_length": %d, "output_length": %d}`+"\n", at, in, out)
	}
	trace := func(change func(o *Options, name string), lines ...string) func(*Options) {
		return func(o *Options) {
			for i := range 30 {
				lines = append(lines, line(1000*(i+1), 100, 10))
			}
			o.Loads, o.Trace = nil, written(t, strings.Join(lines, ""))
			if change != nil {
				change(o, o.Trace)
			}
		}
	}
	for _, c := range []struct {
		change func(*Options)
		want   string
	}{
		{trace(nil, line(90_000, 100, 10)), "line 2: the request arrives before the one above it: sort the lines by time"},
		{func(o *Options) { o.Loads, o.Trace = nil, written(t, "") }, "there is no request"},
		{func(o *Options) { o.Loads, o.Trace = nil, "nothing.jsonl" }, "nothing.jsonl"},
		{func(o *Options) { o.Loads = nil }, "either --trace FILE or --load SPEC"},
		{func(o *Options) { o.Loads = []string{"rps=1"} }, "has no in"},
		{func(o *Options) { o.Loads = []string{"rps=10,n=5,in=10,out=10"} }, "the load has 5 requests, too few for percentiles: give at least 20"},
		{func(o *Options) { o.Loads = []string{"rps=10,in=200000,out=10"} }, "1000 of 1000 requests have more than the 131072 tokens that a node of h100:llama-8b can serve, the longest 200010: add --drop-too-long"},
		{func(o *Options) { o.Loads, o.DropTooLong = []string{"rps=10,in=200000,out=10"}, true }, "without the requests of more than 131072 tokens 0 are left"},
		{func(o *Options) { o.TTFT = "p90=20ms" }, "TTFT p90 cannot be at most 20ms on h100:llama-8b: "},
		{func(o *Options) { o.TPOT = "p90=2ms" }, "TPOT p90 cannot be at most 2ms on h100:llama-8b: a request alone on a node takes"},
		{func(o *Options) { o.Loads, o.Goodput = []string{"rps=2,n=300,in=lognormal(9,0.9),out=50"}, .999 }, "goodput cannot be 0.999 on h100:llama-8b"},
		{func(o *Options) { o.Goodput = 2 }, "--goodput-share 2: want 0 to 1"},
		{func(o *Options) { o.TTFT, o.TPOT = "", "" }, "there is no objective: give at least one, such as --ttft p90=2s"},
		{func(o *Options) { o.TTFT = "p101=2s" }, "--ttft p101=2s: write a percentile and a time"},
		{func(o *Options) { o.TTFT = "2" }, "--ttft 2: write a percentile and a time"},
		{func(o *Options) { o.Profiles = nil }, "--profile is missing: give a file, or an estimate by name such as h200:llama-8b"},
		{func(o *Options) { o.Profiles = []string{"h300:llama-8b"} }, "no GPU is called"},
		{func(o *Options) { o.Profiles = []string{"h100:llama-8b", "h100:qwen3-8b"} }, "profile h100:llama-8b is of model llama-8b with 32 layers, and h100:qwen3-8b of qwen3-8b with 36 layers: give profiles of one model"},
		{func(o *Options) { o.Profiles = []string{measured(t, "h100:llama-8b"), "h200:llama-8b"} }, "profile measured is measured, and h200:llama-8b is estimate ±25 %: measure both, or add --compare-estimates"},
		{func(o *Options) { o.Profiles, o.GPUs = []string{measured(t, "h100:llama-8b")}, []int{1, 2} }, "which has one number of GPUs: give a profile for each number"},
		{func(o *Options) { o.Profiles, o.TPOT = []string{"2xh100:mixtral-8x7b"}, "p90=5ms" }, "a request alone on a node takes 6.1ms a token"},
		{func(o *Options) { o.Profiles, o.GPUs = []string{"h100:llama-70b"}, []int{1} }, "leave no KV memory"},
		{func(o *Options) { o.Prices = []float64{1, 2} }, "--price-per-hour has 2 prices for 1 profiles"},
		{func(o *Options) { o.Prices, o.PrefillProfiles = []float64{1, 2, 3}, []string{"h200:llama-8b"} }, "--price-per-hour has 3 prices for 2 profiles"},
		{func(o *Options) { o.PrefillProfiles = []string{"h300:llama-8b"} }, "no GPU is called"},
		{func(o *Options) { o.PrefillProfiles = []string{"2xh200:llama-8b"} }, "2xh200:llama-8b computes a model with 2 GPUs and h100:llama-8b with 1: KV moves between nodes of one --tensor-parallel-size only"},
		{func(o *Options) { o.PrefillProfiles = []string{"h200:qwen3-8b"} }, "give profiles of one model"},
		{func(o *Options) { o.PrefillProfiles, o.Shape = []string{"h200:llama-8b"}, "colocated" }, "--shape colocated, which has no prefill nodes"},
		{func(o *Options) { o.PrefillProfiles = []string{measured(t, "h100:llama-8b")} }, "measure both, or add --compare-estimates"},
		{func(o *Options) { o.Prices = []float64{-1} }, "--price-per-hour -1"},
		{func(o *Options) { o.Prices, o.Machine.Capex = []float64{1}, 9e3 }, "of --price-per-hour and --capex only one can be the price of a node"},
		{func(o *Options) { o.Loads = []string{"a: rps=1,in=9,out=9", "a: rps=1,in=9,out=9"} }, "two loads are called a: give each a name of its own"},
		{func(o *Options) { o.HTML = filepath.Join(t.TempDir(), "none", "x.html") }, "its folder does not exist"},
		{func(o *Options) { o.JSON, o.Up = true, true }, "--json and --up"},
		{func(o *Options) { o.Growth = 0 }, "--growth 0: want 0.001 to 1000"},
		{func(o *Options) { o.Shape = "best" }, "--shape best: want one of auto, pools, colocated"},
		{func(o *Options) { o.MaxNodes = 1; o.Loads = []string{"rps=400,n=1000,in=2000,out=100"} }, "nodes are needed, and at most 1 are allowed"},
		{func(o *Options) { o.Budget = 100 }, "a budget of 100 simulated requests is less than one simulation"},
		{func(o *Options) { o.BatchedTokens = []int{8} }, "--max-num-batched-tokens 8: want at least the 256 of --max-num-seqs"},
		{trace(func(o *Options, _ string) { o.Requests = 1 }), "the load has 1 request,"},
	} {
		o := options()
		c.change(&o)
		err := Run(&o, new(bytes.Buffer))
		text := fmt.Sprint(err)
		if !errors.Is(err, ErrOption) || !strings.Contains(text, c.want) || strings.Contains(text, "\n") {
			t.Errorf("want %q: %v", c.want, err)
		}
		for _, name := range []string{"planner:", "profile:", "sim:", "fleet:"} {
			if strings.Contains(text, name) {
				t.Errorf("%q names a package: %s", c.want, text)
			}
		}
	}
}

// Requests that are too long are left out on demand, and counted.
func TestDropTooLong(t *testing.T) {
	o := options()
	o.Loads, o.DropTooLong, o.Shape = []string{"rps=5,n=150,in=lognormal(7,0.5),out=50", "rps=.1,n=1,in=200000,out=5"}, true, "colocated"
	if text := planned(t, o); !strings.Contains(text, "Left out: 1 request of more tokens than a node can serve") {
		t.Error(text)
	}
}

// Fleets that would not fit in memory are not simulated, and a plan that meets no objective is
// reported as such.
func TestNoFleet(t *testing.T) {
	o := options()
	o.Loads, o.MaxNodes, o.Shape, o.TTFT = []string{"rps=72,n=600,in=1500,out=60"}, 3, "colocated", "p90=110ms"
	text := planned(t, o)
	for _, want := range []string{"No fleet that was simulated meets every objective. The best one: 3 colocated nodes of h100:llama-8b", "Allow more nodes (--max-nodes)", "fails TTFT p90"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	r := &run{Options: &o, block: 16}
	var err error
	if r.profiles, err = o.readKinds(); err != nil {
		t.Fatal(err)
	}
	if n, each := r.nodesInMemory(), r.profiles[0].Memory.Blocks; n*each*o.Workers > maxBlocks || n < 500 {
		t.Errorf("%d nodes of %d blocks", n, each)
	}
}

// A smaller part of a load has its pace, and consecutive requests.
func TestWindows(t *testing.T) {
	var trace []sim.Request
	for i := range 1000 {
		trace = append(trace, sim.Request{At: time.Duration(i) * time.Second, Tokens: i + 1})
	}
	for n := 20; n < 1000; n += 7 {
		part := windows(trace, n, 8)
		if len(part) != n || part[0].At != 0 || part[n-1].At != time.Duration(n-1)*time.Second {
			t.Fatalf("%d requests of %d, the last at %v", len(part), n, part[len(part)-1].At)
		}
		for i := range part[1:] {
			if part[i+1].Tokens <= part[i].Tokens || part[i+1].At < part[i].At {
				t.Fatalf("%d: request %d is %+v after %+v", n, i+1, part[i+1], part[i])
			}
		}
	}
	if len(windows(trace, 5000, 8)) != 1000 || trace[500].At != 500*time.Second {
		t.Error("the whole trace is not what it was")
	}
}

// Figures of Mooncake's conversation trace at three times its pace, as worked out with other tools:
// the work of its prompts, and the requests that no number of H100s serves in time.
func TestMooncakeFigures(t *testing.T) {
	trace, err := sim.LoadTrace("../../../bench/sim/testdata/mooncake_conversation.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	steps, err := fleet.StepTimesOf("h100")
	if err != nil {
		t.Fatal(err)
	}
	n := planner.Node{Name: "h100", Chunk: func(tokens, start int) float64 {
		return steps.Step(fleet.Shape{Chunk: tokens, Attended: float64(tokens) * (float64(start) + float64(tokens)/2)}, 0).Seconds()
	}}
	list := requests(trace)
	for i := range list {
		list[i].At = time.Duration(float64(list[i].At) / 3)
		list[i].Cached = 0
	}
	d := planner.Describe(&n, list, 8192, 8192)
	floor := planner.FloorOf(&n, list, 8192, 2*time.Second, 90)
	one := planner.FloorOf(&n, list, 8192, time.Second, 90)
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"requests per second", d.Rate, 10.20}, {"seconds of a prompt", d.Service, .412}, {"variation", d.Variation, 4.10}, {"work", d.Work, 4.21},
		{"context", d.Context, 13_126}, {"share above 2 s", floor.Infeasible, .0347}, {"share above 1 s", one.Infeasible, .0808},
	} {
		if c.got < c.want*.99 || c.got > c.want*1.01 {
			t.Errorf("%s: %.4g, want %.4g", c.what, c.got, c.want)
		}
	}
}

// A load of seconds ends before an overloaded fleet shows it. No plan has less time than the work
// of its load takes.
func TestShortLoad(t *testing.T) {
	o := options()
	o.Loads, o.Shape, o.TTFT, o.TPOT, o.MaxNodes, o.Budget, o.JSON = []string{"rps=400,n=400,in=1000,out=200"}, "colocated", "p90=2s", "p90=50ms", 64, 12_000, true
	var plan struct{ Fleet struct{ Decode int } }
	// 400 · (1000 · 20.3 µs + 200 · (11 µs + 42.5 ns · 1100)) = 12.7 seconds a second
	if err := json.Unmarshal([]byte(planned(t, o)), &plan); err != nil || plan.Fleet.Decode < 13 {
		t.Errorf("%+v, %v", plan, err)
	}
	o.JSON = false
	if text := planned(t, o); !strings.Contains(text, "The simulated load takes 0.999 s.") || !strings.Contains(text, "give a load of a minute, with --budget 7") {
		t.Error(text)
	}
}
