package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// result has the measurements of a part.
type result struct {
	Machine  string
	Commit   string
	Command  string
	When     time.Time
	Versions map[string]string
	Order    []string                        // of the names, as they were added
	Samples  map[string]map[string][]float64 // by name and figure, one per round
}

func newResult() *result {
	return &result{Machine: report.Machine(), Commit: commit(), Command: "bench/gateway " + strings.Join(os.Args[1:], " "),
		When: time.Now().UTC().Truncate(time.Second), Samples: map[string]map[string][]float64{}}
}

func (r *result) add(name, figure string, v float64) {
	if r.Samples[name] == nil {
		r.Samples[name] = map[string][]float64{}
		r.Order = append(r.Order, name)
	}
	r.Samples[name][figure] = append(r.Samples[name][figure], v)
}

// median returns the median of a figure, or NaN if it was not measured.
func (r *result) median(name, figure string) float64 {
	if r == nil {
		return math.NaN()
	}
	v := slices.Sorted(slices.Values(r.Samples[name][figure]))
	if len(v) == 0 {
		return math.NaN()
	}
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

const resultsFile = "results.json"

// load returns the parts that were measured so far, by name.
func load(dir string) (map[string]*result, error) {
	all := map[string]*result{}
	data, err := os.ReadFile(filepath.Join(dir, resultsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	return all, json.Unmarshal(data, &all)
}

func save(dir string, all map[string]*result) error {
	data, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, resultsFile), data, 0o644)
}

// column is a figure in a table.
type column struct{ head, figure, format string }

// binarySize is the figure of a binary's size, in MB (10⁶ bytes).
const binarySize = "MB of binary"

// tables has the tables of the parts.
var tables = []struct {
	part, title string
	columns     []column
}{
	{"requests", "CPU µs per request, 64 connections", []column{
		{"tiny", "tiny, " + perRequest, "%.0f"}, {"8 KB", "8 KB, " + perRequest, "%.0f"}, {"100 KB", "100 KB, " + perRequest, "%.0f"},
		{"tiny, requests/s", "tiny, " + perSecond, "%.0f"}}},
	{"streams", "256 streams of 64 tokens, 10 ms apart; first token of streams one after the other", []column{
		{"CPU µs/token", "256 streams, " + perToken, "%.1f"}, {"tokens/s", "256 streams, " + perSecond, "%.0f"},
		{"first token ms p50", first50, "%.3f"}, {"p99", first99, "%.3f"}}},
	{"many", "1,000 such streams", []column{
		{"tokens/s", "1000 streams, " + perSecond, "%.0f"}, {"CPU µs/token", "1000 streams, " + perToken, "%.1f"}, {"MB RssAnon", "1000 streams, " + memory, "%.0f"}}},
	{"flood", fmt.Sprintf("1,000 streams of %d tokens, %v apart: %.0f tokens/s are offered, more than direct receives", nFlood, flood, 1000/flood.Seconds()), []column{
		{"tokens/s", "flood, " + perSecond, "%.0f"}, {"CPU µs/token", "flood, " + perToken, "%.1f"}, {"MB RssAnon", "flood, " + memory, "%.0f"}}},
	{clientsTLS, "Clients over TLS: 256 streams of 64 tokens, 10 ms apart; direct is without TLS", []column{
		{"CPU µs/token", "256 streams, " + perToken, "%.1f"}, {"tokens/s", "256 streams, " + perSecond, "%.0f"}, {"MB RssAnon", "256 streams, " + memory, "%.0f"}}},
	{upstreamsTLS, "Upstreams over TLS: 256 streams of 64 tokens, 10 ms apart; direct is with TLS", []column{
		{"CPU µs/token", "256 streams, " + perToken, "%.1f"}, {"tokens/s", "256 streams, " + perSecond, "%.0f"}, {"MB RssAnon", "256 streams, " + memory, "%.0f"}}},
	{"native", "Native mode: a mock decode node behind TLS instead of the backend", []column{
		{"CPU µs/token, 256 streams", "256 streams, " + perToken, "%.1f"}, {"1,000 streams", "1000 streams, " + perToken, "%.1f"},
		{"tokens/s there", "1000 streams, " + perSecond, "%.0f"}, {"MB RssAnon there", "1000 streams, " + memory, "%.0f"}}},
}

// page returns the page of results.
func page(all map[string]*result) string {
	var b strings.Builder
	b.WriteString("# The gateway compared with nginx, haproxy, vllm-router and smg\n\nAll in turn, on one machine, with the same mock OpenAI backend (two processes). Figures are medians of rounds. " +
		"CPU is the CPU time of the proxy's processes, by the kernel's accounts. Tandem checks an API key, keeps metrics and routes by prefix; the others run with their defaults. " +
		"Direct is the backend itself: its CPU per token is the cost of writing a token to a loopback socket, with the timer.\n\nWritten by `make bench-gateway`; bench/gateway documents the measurements, [gateway-attempts.md](gateway-attempts.md) the attempts for bars that are missed or close.\n")
	if v := verdicts(all); v != "" {
		b.WriteString("\n## The bar\n\n| | ours | nginx | ratio | must | | aim | |\n|---|---|---|---|---|---|---|---|\n" + v)
	}
	for _, t := range tables {
		r := all[t.part]
		if r == nil {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n\n| |", t.title)
		for _, c := range t.columns {
			b.WriteString(" " + c.head + " |")
		}
		b.WriteString("\n|---|" + strings.Repeat("---|", len(t.columns)) + "\n")
		for _, name := range r.Order {
			b.WriteString("| " + name + " |")
			for _, c := range t.columns {
				if v := r.median(name, c.figure); math.IsNaN(v) {
					b.WriteString(" – |")
				} else {
					fmt.Fprintf(&b, " "+c.format+" |", v)
				}
			}
			b.WriteString("\n")
		}
	}
	if r := all["decision"]; r != nil {
		b.WriteString("\n## A routing decision: 10 million cached blocks, a prompt of 2,048 tokens\n\n" +
			"From a prompt's hashes to the choice, and with the view of the nodes, of which a request and four heartbeats have changed some since the decision before.\n\n" +
			"| nodes | CPU µs, the choice | with the view | allocations | with the view | MB of index and ring per million blocks |\n|---|---|---|---|---|---|\n")
		for _, size := range []struct{ nodes, name string }{{"1,000", ""}, {"10,000", "10000"}} {
			choice, view := "Decision"+size.name, "LookAndPick"+size.name
			if us := r.median(view, "cpu-ns/op") / 1e3; !math.IsNaN(us) {
				fmt.Fprintf(&b, "| %s | %.1f | %.1f | %.0f | %.0f | %.1f |\n", size.nodes, r.median(choice, "cpu-ns/op")/1e3, us,
					r.median(choice, "allocs/op"), r.median(view, "allocs/op"), r.median(choice, "B/Mblocks")/1e6)
			}
		}
	}
	b.WriteString("\n## Runs\n\n")
	for _, part := range parts {
		if r := all[part]; r != nil {
			fmt.Fprintf(&b, "- %s: %s, commit %s, `%s`, %s.%s%s\n", part, r.Machine, r.Commit, r.Command, r.When.Format("2006-01-02 15:04"), r.rounds(), r.age(all))
		}
	}
	return b.String()
}

// age notes that other parts were measured later, at another commit.
func (r *result) age(all map[string]*result) string {
	for _, other := range all {
		if other.Commit != r.Commit && other.When.After(r.When) {
			return " Not measured again since."
		}
	}
	return ""
}

// rounds describes the number of rounds and the versions.
func (r *result) rounds() string {
	var s strings.Builder
	for _, figures := range r.Samples {
		for _, v := range figures {
			fmt.Fprintf(&s, " Rounds: %d.", len(v))
			break
		}
		break
	}
	var versions []string
	for _, name := range r.Order {
		if v := r.Versions[name]; v != "" {
			versions = append(versions, name+" "+v)
		}
	}
	if len(versions) > 0 {
		s.WriteString(" Versions: " + strings.Join(versions, ", ") + ".")
	}
	return s.String()
}

// bar is the bound of a figure, relative to a peer's or absolute.
type bar struct {
	name, part, figure string
	unit               string
	must, aim          float64 // times the peer's figure or, with absolute, the figure itself
	absolute           bool
	added              bool   // what comes on top of direct counts
	peer               string // whose figure ours is compared with; empty: nginx
}

var bars = []bar{
	{name: "CPU per request, tiny", part: "requests", figure: "tiny, " + perRequest, unit: "µs", must: 2, aim: 1.5},
	{name: "CPU per request, 8 KB", part: "requests", figure: "8 KB, " + perRequest, unit: "µs", must: 2, aim: 1.5},
	{name: "CPU per request, 100 KB", part: "requests", figure: "100 KB, " + perRequest, unit: "µs", must: 2.5, aim: 1.5},
	{name: "CPU per streamed token, 256 streams", part: "streams", figure: "256 streams, " + perToken, unit: "µs", must: 1.25, aim: 1},
	{name: "added first-token time, p50", part: "streams", figure: first50, unit: "ms", must: 2, aim: 1.5, added: true},
	{name: "added first-token time, p99", part: "streams", figure: first99, unit: "ms", must: 2, aim: 1.5, added: true},
	{name: "CPU per streamed token, 1,000 streams", part: "many", figure: "1000 streams, " + perToken, unit: "µs", must: 0.8, aim: 0.7, peer: "vllm-router consistent_hash"},
	{name: "CPU per streamed token, 256 clients over TLS", part: clientsTLS, figure: "256 streams, " + perToken, unit: "µs", must: 1.3, aim: 1},
	{name: "CPU per streamed token, 256 streams of upstreams over TLS", part: upstreamsTLS, figure: "256 streams, " + perToken, unit: "µs", must: 1.3, aim: 1},
	{name: "size of the binary", part: "many", figure: binarySize, unit: "MB", must: 54, aim: 50, absolute: true},
	{name: "memory at 1,000 streams (RssAnon)", part: "many", figure: "1000 streams, " + memory, unit: "MB", must: 52.4, aim: 50, absolute: true},
	{name: "native, CPU per streamed token, 256 streams", part: "native", figure: "256 streams, " + perToken, unit: "µs", must: 1, aim: 0.8},
}

// verdicts returns the rows of the table of bars. Parts that were not measured have none.
func verdicts(all map[string]*result) string {
	var b strings.Builder
	for _, x := range bars {
		r, ours := all[x.part], "tandem"
		if x.part == "native" {
			ours = "tandem, native"
		}
		name, peer := x.name, "nginx"
		if x.peer != "" {
			name, peer = name+" (against "+x.peer+")", x.peer
		}
		us, theirs := r.median(ours, x.figure), r.median(peer, x.figure)
		if x.added {
			us, theirs = us-r.median("direct", x.figure), theirs-r.median("direct", x.figure)
		}
		value, sign := us/theirs, "×"
		if x.absolute {
			value, sign = us, " "+x.unit
		}
		if math.IsNaN(value) {
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | ≤ %v%s | %s | ≤ %v%s | %s |\n", name, short(us, x.unit), short(theirs, x.unit), ratio(us/theirs),
			x.must, sign, word(value <= x.must), x.aim, sign, word(value <= x.aim))
	}
	// The rate at 1,000 streams is compared with the best router of language models, with more load
	// than any of them can pass on.
	r, best, name := all["flood"], math.NaN(), ""
	if r != nil {
		for _, p := range r.Order {
			v := r.median(p, "flood, "+perSecond)
			if (strings.HasPrefix(p, "vllm-router") || strings.HasPrefix(p, "smg")) && !(v <= best) {
				best, name = v, p
			}
		}
	}
	if us := r.median("tandem", "flood, "+perSecond); !math.IsNaN(us / best) {
		fmt.Fprintf(&b, "| tokens/s at 1,000 streams (against %s) | %.0f | %.0f | %.2f | ≥ 1.6× | %s | ≥ 2× | %s |\n", name, us, best, us/best, word(us >= 1.6*best), word(us >= 2*best))
	}
	if r := all["decision"]; r != nil {
		us, allocs := r.median("LookAndPick", "cpu-ns/op")/1e3, r.median("LookAndPick", "allocs/op")
		fmt.Fprintf(&b, "| CPU per decision over 1,000 nodes and 10 million blocks | %s | – | – | < %v µs | %s | – | – |\n", short(us, "µs"), mostDecision, word(us < mostDecision))
		if us := r.median("LookAndPick10000", "cpu-ns/op") / 1e3; !math.IsNaN(us) {
			fmt.Fprintf(&b, "| CPU per decision over 10,000 nodes and 10 million blocks | %s | – | – | ≤ %v µs | %s | – | – |\n", short(us, "µs"), mostDecision10000, word(us <= mostDecision10000))
		}
		fmt.Fprintf(&b, "| allocations per such decision | %.0f | – | – | 0 | %s | – | – |\n", allocs, word(allocs == 0))
	}
	return b.String()
}

// mostDecision and mostDecision10000 bound the CPU time of a routing decision with the view of
// 1,000 and 10,000 nodes, in µs.
const mostDecision, mostDecision10000 = 20.0, 60.0

func word(ok bool) string {
	if ok {
		return "held"
	}
	return "**missed**"
}

// ratio returns a ratio as text; a dash where the peer has no such figure.
func ratio(v float64) string {
	if math.IsNaN(v) {
		return "–"
	}
	return fmt.Sprintf("%.2f", v)
}

// short returns a figure with about three digits.
func short(v float64, unit string) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v >= 100:
		return fmt.Sprintf("%.0f %s", v, unit)
	case v >= 10:
		return fmt.Sprintf("%.1f %s", v, unit)
	}
	return fmt.Sprintf("%.2f %s", v, unit)
}
