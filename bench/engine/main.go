// Command engine measures the engine and llama.cpp on one machine, with the same number of
// threads and random weights in the shape of Llama-3.2-1B, in turn. It prints a table and
// writes it to a file.
//
// It compares steps of one sequence and of eight, 64 tokens into their context, and a
// prompt of 512 tokens in one step. Ours are engine/model's steps, greedy sampling
// included; theirs are the times of llama-bench and llama-batched-bench. A round runs both
// sides once, and a figure is the median of the rounds. The bandwidth of reading memory is
// measured between our steps of one sequence, with as many threads.
//
// With -models it compares decode steps of 1, 4 and 16 sequences and a prompt on GGUF files, which
// both sides load, in the shapes of small published models. Both processes stay for all rounds.
//
// Invariant: only figures of the same call are compared, and no figure is written that was
// not measured.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// row is a pair of weight types that are compared.
type row struct {
	Ours, Theirs string // names of --quantization, and of a GGUF's file type
}

var rows = []row{{Ours: "int8", Theirs: "Q8_0"}, {Ours: "int4", Theirs: "Q4_0"}, {Ours: "none", Theirs: "BF16"}}

// figures are one side's tokens per second.
type figures struct{ Decode1, Decode8, Prefill float64 }

// result is a row with its rounds.
type result struct {
	Row          row
	Kernels      string // of our engine
	Peer         string // build of llama.cpp's kernels
	Threads      int
	Ours, Theirs []figures // one per round
	Bandwidth    []float64 // one per round: bytes per second that the machine reads
	WeightBytes  int64     // that our engine reads for a token
	Machine      string
	Commit       string
}

type options struct {
	dir, peer, kernels, out, only, models string
	threads, rounds                       int
	more                                  bool
}

func main() {
	var o options
	flag.StringVar(&o.dir, "dir", ".cache/bench-engine", "folder for the random models, some 8 GB, and for results")
	flag.StringVar(&o.peer, "peer", ".cache/bench-engine/llama.cpp/avx512vnni", "folder with llama-bench and llama-batched-bench; empty: only our engine")
	flag.StringVar(&o.kernels, "kernels", "avx512vnni", "our kernels, as --cpu-kernels")
	flag.StringVar(&o.only, "only", "", "only one row: int8, int4 or none (as stored, bf16)")
	flag.StringVar(&o.out, "out", "bench/results/engine.md", "the table's file; empty: none")
	flag.IntVar(&o.threads, "threads", runtime.NumCPU(), "threads of each side")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds, whose median counts")
	flag.StringVar(&o.models, "models", "", "instead, compare GGUF files in the shapes of Qwen2.5-0.5B and Gemma-3-1B, of the types "+strings.Join(fileTypes, ", ")+" or the one of -only, and write this page; -peer is the folder with peer")
	flag.BoolVar(&o.more, "more", false, "add rounds to those of an earlier call with the same code and machine")
	flag.Parse()
	do := run
	if o.models != "" {
		do = compareModels
	}
	if err := do(&o); err != nil {
		fmt.Fprintln(os.Stderr, "bench/engine:", err)
		os.Exit(1)
	}
}

func run(o *options) error {
	if o.rounds < 1 || o.threads < 1 {
		return fmt.Errorf("-rounds %d, -threads %d: want at least 1", o.rounds, o.threads)
	}
	if err := models(o.dir); err != nil {
		return err
	}
	for _, r := range rows {
		if o.only != "" && o.only != r.Ours {
			continue
		}
		res, err := compare(o, r)
		if err != nil {
			return fmt.Errorf("%s and %s: %w", r.Ours, r.Theirs, err)
		}
		fmt.Print(table([]result{*res}))
	}
	if o.out == "" {
		return nil
	}
	all, err := loadResults(o.dir)
	if err != nil {
		return err
	}
	return os.WriteFile(o.out, []byte(page(all)), 0o644)
}

// compare runs the rounds of a row.
func compare(o *options, r row) (*result, error) {
	ours, err := newOurs(filepath.Join(o.dir, "bf16"), r.Ours, o.kernels, o.threads, batch)
	if err != nil {
		return nil, err
	}
	defer ours.close()
	res := &result{Row: r, Kernels: o.kernels, Peer: filepath.Base(o.peer), Threads: o.threads,
		WeightBytes: ours.weights, Machine: machine(), Commit: commit()}
	if o.more {
		if err := joinRounds(o.dir, res); err != nil {
			return nil, err
		}
	}
	memory := newReader(o.threads, passWords)
	for i := range o.rounds {
		f, read, err := ours.measure(memory)
		if err != nil {
			return nil, err
		}
		line := fmt.Sprintf("round %d: read %.1f GB/s, %s %.1f %.1f %.0f", i+1, read/1e9, r.Ours, f.Decode1, f.Decode8, f.Prefill)
		if o.peer != "" {
			p, err := peer(o.peer, filepath.Join(o.dir, r.Theirs+".gguf"), o.threads)
			if err != nil {
				return nil, err
			}
			res.Theirs = append(res.Theirs, p)
			line += fmt.Sprintf(", %s %.1f %.1f %.0f", r.Theirs, p.Decode1, p.Decode8, p.Prefill)
		}
		fmt.Fprintln(os.Stderr, line)
		res.Bandwidth, res.Ours = append(res.Bandwidth, read), append(res.Ours, f)
		if err := saveResult(o.dir, res); err != nil { // later rounds may be interrupted
			return nil, err
		}
	}
	return res, nil
}

func medians(all []figures) figures {
	of := func(get func(figures) float64) float64 {
		var v []float64
		for _, f := range all {
			v = append(v, get(f))
		}
		return median(v)
	}
	return figures{
		Decode1: of(func(f figures) float64 { return f.Decode1 }),
		Decode8: of(func(f figures) float64 { return f.Decode8 }),
		Prefill: of(func(f figures) float64 { return f.Prefill }),
	}
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// peer runs llama.cpp once.
func peer(dir, gguf string, threads int) (f figures, err error) {
	t := fmt.Sprint(threads)
	out, err := exec.Command(filepath.Join(dir, "llama-bench"), "-m", gguf, "-t", t, "-p", "512", "-n", "24", "-d", "64", "-r", "1", "--no-warmup", "-o", "json").Output()
	if err != nil {
		return f, fmt.Errorf("llama-bench: %w", failure(err))
	}
	var runs []struct {
		Prompt int     `json:"n_prompt"`
		Gen    int     `json:"n_gen"`
		Speed  float64 `json:"avg_ts"`
	}
	if err := json.Unmarshal(out, &runs); err != nil {
		return f, fmt.Errorf("llama-bench: %w", err)
	}
	for _, r := range runs {
		if r.Prompt > 0 {
			f.Prefill = r.Speed
		} else {
			f.Decode1 = r.Speed
		}
	}
	out, err = exec.Command(filepath.Join(dir, "llama-batched-bench"), "-m", gguf, "-t", t, "-c", "1024", "-npp", "64", "-ntg", "12", "-npl", "8", "--output-format", "jsonl").Output()
	if err != nil {
		return f, fmt.Errorf("llama-batched-bench: %w", failure(err))
	}
	for line := range strings.Lines(string(out)) {
		var b struct {
			Batch int     `json:"pl"`
			Speed float64 `json:"speed_tg"`
		}
		if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &b) == nil && b.Batch == 8 {
			f.Decode8 = b.Speed
		}
	}
	if f.Decode1 == 0 || f.Decode8 == 0 || f.Prefill == 0 {
		return f, fmt.Errorf("llama.cpp printed no figure: %+v", f)
	}
	return f, nil
}

func failure(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, exit.Stderr[max(0, len(exit.Stderr)-500):])
	}
	return err
}
