package pools

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/limits"
)

// checkSchema holds a value against a JSON schema of types, properties, bounds and lists of values.
func checkSchema(path string, schema map[string]any, v any) (bad []string) {
	kinds, _ := schema["type"].([]any)
	if one, ok := schema["type"].(string); ok {
		kinds = []any{one}
	}
	kind := fmt.Sprintf("%T", v)
	is := map[string]bool{
		"object": strings.HasPrefix(kind, "map["), "integer": kind == "int", "number": kind == "int" || kind == "float64", "string": kind == "string", "boolean": kind == "bool", "array": strings.HasPrefix(kind, "[]"),
	}
	if len(kinds) > 0 && !slices.ContainsFunc(kinds, func(k any) bool { return is[k.(string)] }) {
		return []string{fmt.Sprintf("%s is %v, want %v", path, v, kinds)}
	}
	if least, ok := schema["minimum"].(float64); ok && is["integer"] && float64(v.(int)) < least {
		bad = append(bad, fmt.Sprintf("%s is %v, want at least %g", path, v, least))
	}
	if list, ok := schema["enum"].([]any); ok && !slices.Contains(list, v) {
		bad = append(bad, fmt.Sprintf("%s is %v, want one of %v", path, v, list))
	}
	object, _ := v.(map[string]any)
	properties, _ := schema["properties"].(map[string]any)
	for key, value := range object {
		inner, known := properties[key].(map[string]any)
		if !known {
			if inner, known = schema["additionalProperties"].(map[string]any); !known {
				if schema["additionalProperties"] == false {
					bad = append(bad, path+" has no "+key)
				}
				continue
			}
		}
		bad = append(bad, checkSchema(path+"."+key, inner, value)...)
	}
	return bad
}

// helmValues returns the values of a file, which fit the chart's schema.
func helmValues(t *testing.T, name string) map[string]any {
	t.Helper()
	text, err := os.ReadFile("../../helm/tandem/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema, values map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(name)
	if err == nil {
		err = yaml.Unmarshal(data, &values)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range checkSchema("values", schema, values) {
		t.Errorf("%s\n%s", bad, data)
	}
	if bad := checkSchema("values", schema, map[string]any{"pools": map[string]any{"decode": map[string]any{"replica": 1, "replicas": -1}}}); len(bad) != 2 {
		t.Errorf("wrong values have the faults %q, want two", bad)
	}
	return values
}

// One plan in every form: a page that needs no other file, values of the chart, and derivations.
func TestForms(t *testing.T) {
	dir := t.TempDir()
	o := options()
	o.Shape, o.Profiles, o.Loads = "pools", []string{"2xh100:llama-8b"}, []string{"rps=30,n=200,in=lognormal(7.5,0.9),out=20-120,prefix=0.3"}
	o.Explain, o.HTML, o.Helm, o.Command = true, filepath.Join(dir, "p.html"), filepath.Join(dir, "v.yaml"), "tandem plan pools <&>"
	text := planned(t, o)
	for _, want := range []string{"How the numbers came about\n  Rate: 200 requests / ", "seconds a second", "Floor: the first token of", "Price by pool: $", "Wrote " + o.HTML, "Wrote " + o.Helm, "--tensor-parallel-size 2"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	data, err := os.ReadFile(o.HTML)
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	for _, want := range []string{
		"<h1>Plan of a fleet: ", "It meets every objective for ", "Goodput by load", "Goodput by the numbers of nodes", "Time to first token by prefill nodes", "Time between tokens by decode nodes", "Goodput by the duration of steps",
		"Goodput by shared beginnings of prompts", "If a node dies", "<h2>Cost</h2>", "<h2>Words</h2>", "TTFT: time to first token", "estimate ±25 %", "tandem plan pools &lt;&amp;&gt;", `class="marked"`, "tandem up --prefill ",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if strings.Contains(page, "NaN") || strings.Contains(page, "%!") || regexp.MustCompile(`(src|href)=`).MatchString(page) {
		t.Error("the page has NaN, a wrong format, or needs another file")
	}
	values := helmValues(t, o.Helm)
	pools := values["pools"].(map[string]any)
	prefill, decode := pools["prefill"].(map[string]any)["replicas"], pools["decode"].(map[string]any)["replicas"]
	if size := fmt.Sprintf("<td>%vP%vD</td>", prefill, decode); !strings.Contains(page, "<tr class=\"marked\"><th>→ chosen</th>"+size) {
		t.Errorf("the values have %s", size)
	}
	if nodes := values["nodes"].(map[string]any); nodes["gpus"] != 2 || nodes["shm"] != "16Gi" || nodes["config"].(map[string]any)["tensor-parallel-size"] != 2 || nodes["config"].(map[string]any)["price-per-hour"] != 5.9 {
		t.Errorf("%v", nodes)
	}
}

// As JSON, and as the command that starts the fleet. Colocated nodes have no prefill pool.
func TestJSON(t *testing.T) {
	o := options()
	o.Shape, o.JSON, o.Helm = "colocated", true, filepath.Join(t.TempDir(), "v.yaml")
	var plan struct {
		Fleet struct {
			Prefill, Decode int
			Estimate        bool
			Price           float64 `json:"price_per_hour"`
			Goodput         float64
			TTFT            []float64 `json:"ttft_ms"`
		}
		Meets      bool `json:"meets_objectives"`
		Objectives []struct {
			Metric       string
			Value, Limit float64
		}
		Neighbours, Growth, Losses, Slower, Alternatives []map[string]any
		Holds                                            float64 `json:"holds_at_load"`
		Cost                                             map[string]float64
		Spent                                            int `json:"simulated_requests"`
		Finished                                         bool
	}
	text := planned(t, o)
	if err := json.Unmarshal([]byte(text), &plan); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if f := plan.Fleet; f.Prefill != 0 || f.Decode < 1 || !f.Estimate || f.Price != 2.95*float64(f.Decode) || len(f.TTFT) != 3 || !plan.Meets || !plan.Finished || len(plan.Objectives) != 2 || plan.Objectives[0].Metric != string(planner.TTFT) {
		t.Errorf("%+v", plan)
	}
	if len(plan.Neighbours) == 0 || len(plan.Growth) < 3 || len(plan.Slower) == 0 || len(plan.Alternatives) != 1 || plan.Holds < 1 || plan.Cost["per_million_tokens"] <= 0 || plan.Spent > o.Budget {
		t.Errorf("%+v", plan)
	}
	values := helmValues(t, o.Helm)
	if pools := values["pools"].(map[string]any); pools["prefill"].(map[string]any)["enabled"] != false || pools["decode"].(map[string]any)["replicas"] != plan.Fleet.Decode {
		t.Errorf("%v", pools)
	}
	o.JSON, o.Up, o.Helm = false, true, ""
	if text, want := planned(t, o), fmt.Sprintf("tandem up --prefill 0 --decode %d --model MODEL --max-num-batched-tokens 2048 --max-num-seqs 256\n", plan.Fleet.Decode); text != want {
		t.Errorf("%q, want %q", text, want)
	}
}

// The figures of a plan are those of tandem sim.
func TestAsSimulated(t *testing.T) {
	o := options()
	r := &run{Options: &o}
	if err := r.prepare(); err != nil {
		t.Fatal(err)
	}
	c := planner.Case{Fleet: planner.Fleet{Prefill: 1, Decode: 2, Settings: r.problem.Settings[0]}, Load: 1, Slow: 1}
	got, err := r.one(c)
	if err != nil {
		t.Fatal(err)
	}
	s := simulate.Options{
		Fleet: "1P2D", Profile: o.Profiles[0], Load: o.Loads[0], Seed: o.Seed, Speedup: 1, Price: -1, Gateways: 1, Policy: "prefix", MinRemote: 16, Limits: limits.Default(), BlockTokens: r.block,
		BatchedTokens: 2048, MaxSeqs: 256, RoundTrip: fleet.DefaultRoundTrip, GrantTimeout: grantTimeout, Goodput: []string{"ttft:1000", "tpot:40"}, Metrics: []string{"ttft", "tpot", "itl"}, Percentiles: []float64{90, 99}, Save: true, File: filepath.Join(t.TempDir(), "r.json"),
	}
	if err := simulate.Run(&s, new(bytes.Buffer)); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(s.File)
	var figures map[string]any
	if err == nil {
		err = json.Unmarshal(data, &figures)
	}
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]float64{
		"p90_ttft_ms": got.TTFT.P90.Seconds() * 1e3, "p90_tpot_ms": got.TPOT.P90.Seconds() * 1e3, "p99_itl_ms": got.ITL.P99.Seconds() * 1e3,
		"request_goodput": got.Goodput * got.RequestRate, "output_throughput": got.Output, "decode_busy": got.DecodeBusy,
	} {
		if v, _ := figures[key].(float64); math.Abs(v-want) > .02*want {
			t.Errorf("%s: %g by the plan, %v by tandem sim", key, want, figures[key])
		}
	}
}
