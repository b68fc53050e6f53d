package explainlog

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// start is what a record shows of a server's start.
type start int

const (
	noStart     start = iota
	commandLine       // a shell's line that starts a server
	banner            // the drawing, or the version of the API server
	benchBlock        // the head of a benchmark's results
)

var serveCommand = regexp.MustCompile(`^(?:[A-Z][A-Z_0-9]*=\S+ )*(?:\S*/)?(?:vllm serve|tandem (?:up|serve|gateway|prefill|decode)|python3? -m vllm\.)\b`)

// startsRun returns what a record shows of a server's start.
func startsRun(r record) start {
	switch {
	case serveCommand.MatchString(r.msg) && r.level == "":
		return commandLine
	case strings.HasPrefix(strings.TrimLeft(r.msg, "="), " Serving Benchmark Result"):
		return benchBlock
	case strings.Contains(r.msg, "API server version"), r.module == "utils" && strings.Contains(r.msg, "█▄█▀"):
		return banner
	}
	return noStart
}

// deviceMemory collects the sizes that the lines of a run give, in GiB; 0: unknown.
type deviceMemory struct{ weights, kv, graphs, total float64 }

// state is what the lines of one run have given so far.
type state struct {
	number              int
	bench               bool
	own                 bool // has lines of Tandem
	gpu                 bool // Tandem computes on a GPU
	work                bool // it has lines that are no command
	first, last         time.Duration
	firstWhen, lastWhen string
	levels              [3]int // lines: warnings, errors, others
	lines               int
	line                int // of the input, now

	version, model, arch, dtype, quantization, kvType string
	maxLen, batched, maxSeqs, tp                      int
	utilization                                       float64
	eager                                             bool
	sizes                                             []int // of graphs, as the configuration lists them
	full, piecewise                                   int   // graphs captured
	captured                                          bool
	engine, served                                    bool // the engine is initialized, the server serves
	servedAt                                          time.Duration
	mem                                               deviceMemory
	kvTokens, kvBlocks, blockTokens                   int
	concurrency, derived                              float64
	download, load, model2, dynamo, compiled, compile float64 // seconds
	graphsSeconds                                     float64
	estimated                                         float64 // GiB of graphs
	routes                                            int
	results                                           map[string]float64 // of a benchmark
	traceback                                         bool

	planned  *planned
	findings []Finding
	entries  []Entry
	series   []Series
}

func newState(n int, p *planned) *state {
	return &state{number: n + 1, planned: p, blockTokens: 16, results: map[string]float64{}}
}

// ended reports whether a new start of that kind belongs to another run.
func (s *state) ended(by start) bool {
	switch by {
	case commandLine:
		return s.work
	case benchBlock:
		return s.work || s.bench
	case banner:
		return s.bench || s.version != "" && s.engine || s.served
	}
	return false
}

func (s *state) mark(by start) {
	if by == benchBlock {
		s.bench = true
	}
}

// seen counts a record and takes its prefix. Records after the first one of a line count no line.
func (s *state) seen(r record, e *Entry, first bool) {
	if first {
		s.lines++
	}
	if r.level != "" || e.Rule != "blank" && e.Rule != "command" && e.Rule != "fence" {
		s.work = true
	}
	switch r.level {
	case "WARNING":
		s.levels[0]++
	case "ERROR", "CRITICAL":
		s.levels[1]++
	default:
		s.levels[2]++
	}
	if r.at > 0 {
		if s.first == 0 {
			s.first, s.firstWhen = r.at, r.when
		}
		s.last, s.lastWhen = r.at, r.when
	}
}

// find adds a finding.
func (s *state) find(f Finding) {
	for _, old := range s.findings {
		if old.Text == f.Text {
			return
		}
	}
	s.findings = append(s.findings, f)
}

// number parses a figure with separators.
func number(s string) float64 {
	f, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
	if err != nil {
		return 0
	}
	return f
}

// whole parses a whole number with separators, 0 for what is none or is absurdly large.
func whole(s string) int {
	n, err := strconv.Atoi(strings.ReplaceAll(s, ",", ""))
	if err != nil || n < 0 || n > 1<<40 {
		return 0
	}
	return n
}

// dict reads 'key': value and key=value pairs of Python, outermost only.
func dict(s string) map[string]string {
	fields := map[string]string{}
	depth, from := 0, 0
	var quote byte
	add := func(pair string) {
		pair = strings.TrimSpace(pair)
		at := strings.IndexAny(pair, "=:")
		if at <= 0 || len(fields) > 512 {
			return
		}
		fields[strings.Trim(pair[:at], `'" `)] = strings.Trim(strings.TrimSpace(pair[at+1:]), `'"`)
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quote != 0:
			if c == '\\' {
				i++
			} else if c == quote {
				quote = 0
			}
		case c == '\'' || c == '"':
			quote = c
		case c == '(' || c == '[' || c == '{' || c == '<':
			depth++
		case c == ')' || c == ']' || c == '}' || c == '>':
			depth--
		case c == ',' && depth == 0:
			add(s[from:i])
			from = i + 1
		}
	}
	add(s[from:])
	return fields
}

// list reads whole numbers of a Python or JSON list.
func list(s string) (all []int) {
	for part := range strings.SplitSeq(strings.Trim(s, "[]"), ",") {
		if n, err := strconv.Atoi(strings.TrimSpace(part)); err == nil && len(all) < 4096 {
			all = append(all, n)
		}
	}
	return all
}

// run returns what the lines gave.
func (s *state) run() Run {
	s.conclude()
	r := Run{Title: s.title(), Facts: s.facts(), Findings: s.findings, Entries: s.entries, Series: s.series}
	if len(s.series) > 0 {
		r.Fit = s.fit()
	}
	return r
}

func (s *state) title() string {
	switch {
	case s.bench:
		return "Benchmark result"
	case s.version == "" && s.model == "":
		return "Log"
	}
	t := "vLLM"
	if s.own {
		t = "Tandem"
	}
	if s.version != "" {
		t += " " + s.version
	}
	if s.model != "" {
		t += ", " + s.model
	}
	return t
}

// facts returns the run at a glance.
func (s *state) facts() (all []string) {
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if s.bench {
		return s.benchFacts()
	}
	when := ""
	if s.firstWhen != "" {
		when = fmt.Sprintf(", from %s to %s", s.firstWhen, s.lastWhen)
	}
	add("%s lines%s: %d %s, %d %s", thousands(s.lines), when, s.levels[0], plural(s.levels[0], "warning"), s.levels[1], plural(s.levels[1], "error"))
	if s.arch != "" || s.dtype != "" {
		text := "Model: " + strings.Join(nonempty(s.arch, s.dtype, named("quantization", s.quantization), parallel(s.tp)), ", ")
		add("%s", text)
	}
	if m := s.memoryFact(); m != "" {
		add("%s", m)
	}
	if s.kvTokens > 0 {
		text := fmt.Sprintf("KV cache: %s tokens", thousands(s.kvTokens))
		if s.concurrency > 0 && s.maxLen > 0 {
			text += fmt.Sprintf(", %.2f requests of %s tokens at once", s.concurrency, thousands(s.maxLen))
		}
		add("%s", text)
	}
	if s.batched > 0 || s.maxSeqs > 0 {
		var parts []string
		if s.batched > 0 {
			parts = append(parts, fmt.Sprintf("%s tokens a step", thousands(s.batched)))
		}
		if s.maxSeqs > 0 {
			parts = append(parts, fmt.Sprintf("%s sequences at once", thousands(s.maxSeqs)))
		}
		add("Scheduler: %s at most", strings.Join(parts, ", "))
	}
	if t := s.startFact(); t != "" {
		add("%s", t)
	}
	for i := range s.series {
		if t := s.series[i].fact(); t != "" && i < 4 {
			add("%s", t)
		}
	}
	return all
}

func nonempty(all ...string) (out []string) {
	for _, a := range all {
		if a != "" {
			out = append(out, a)
		}
	}
	return out
}

func named(name, value string) string {
	if value == "" || value == "None" {
		return ""
	}
	return name + " " + value
}

func parallel(tp int) string {
	if tp < 2 {
		return ""
	}
	return fmt.Sprintf("tensor parallel over %d GPUs", tp)
}

// memoryFact returns how weights and KV divide the memory of a run. For Tandem the memory is the
// GPU's only if the log has the line of a GPU.
func (s *state) memoryFact() string {
	m := s.mem
	if m.weights == 0 || m.kv == 0 {
		return ""
	}
	of := "Memory"
	if !s.own || s.gpu {
		of = "GPU memory"
	}
	text := fmt.Sprintf("%s: %.2f GiB weights + %.2f KV", of, m.weights, m.kv)
	sum := m.weights + m.kv
	if m.graphs > 0 {
		text += fmt.Sprintf(" + %.2f graphs", m.graphs)
		sum += m.graphs
	}
	text += fmt.Sprintf(" = %.2f GiB", sum)
	if m.total > 0 {
		text += fmt.Sprintf(" of %.1f GiB", m.total)
	}
	return text
}

// startFact returns where the time of a start went.
func (s *state) startFact() string {
	if !s.served || s.servedAt <= s.first || s.first == 0 {
		return ""
	}
	total := s.servedAt - s.first
	var parts []string
	rest := total.Seconds()
	for _, p := range []struct {
		what string
		sec  float64
	}{
		{"download", s.download}, {"weights", s.load}, {"torch.compile", s.compile}, {"graphs", s.graphsSeconds},
	} {
		if p.sec > 0 {
			parts = append(parts, fmt.Sprintf("%s %.0f s", p.what, p.sec))
			rest -= p.sec
		}
	}
	if len(parts) == 0 {
		return ""
	}
	if rest > 0 {
		parts = append(parts, fmt.Sprintf("else %.0f s", rest))
	}
	return fmt.Sprintf("Start: %s until the server listens: %s", seconds(total), strings.Join(parts, ", "))
}

// conclude adds the findings that only the whole run gives.
func (s *state) conclude() {
	if s.bench {
		s.benchFindings()
		return
	}
	if s.engine && len(s.sizes) > 0 && !s.captured && !s.eager {
		s.find(Finding{Severity: Warning, Text: fmt.Sprintf("The configuration lists %d sizes of CUDA graphs, and the log has no line about a capture.", len(s.sizes)),
			Change: "Look for a capture at the first requests, which makes their first tokens late. Compare with a start whose log has \"Graph capturing finished\"."})
	}
	if s.maxSeqs > 0 && s.concurrency > 0 && s.concurrency < float64(s.maxSeqs) && s.maxLen > 0 {
		s.find(Finding{Severity: Note,
			Text:   fmt.Sprintf("Requests of full length do not fit --max-num-seqs: %.2f of %s tokens fit, %d may run.", s.concurrency, thousands(s.maxLen), s.maxSeqs),
			Math:   []string{fmt.Sprintf("KV memory for %d at once: %s tokens each on average at %.2f x %s ÷ %d", s.maxSeqs, thousands(int(s.concurrency*float64(s.maxLen)/float64(s.maxSeqs))), s.concurrency, thousands(s.maxLen), s.maxSeqs)},
			Change: "Nothing, if requests are shorter. Otherwise lower --max-model-len or --max-num-seqs, so that requests wait in the queue instead of being preempted.",
		})
	}
	if total := (s.servedAt - s.first).Seconds(); s.served && s.first > 0 && total > 300 {
		text := fmt.Sprintf("The start took %s.", seconds(s.servedAt-s.first))
		change := "Look at the parts of the start above."
		if s.load > total/2 {
			text += fmt.Sprintf(" Reading weights took %.0f %% of it.", 100*s.load/total)
			change = "Put the weights on a local NVMe disk or into the page cache (`cat *.safetensors > /dev/null`) before the start."
		}
		s.find(Finding{Severity: Warning, Text: text, Change: change})
	}
	s.rateFindings()
}
