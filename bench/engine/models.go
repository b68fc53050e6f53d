package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// batches are the numbers of sequences of the decode steps of -models, and steps the number of
// steps of each that a round times.
var (
	batches = []int{1, 4, 16}
	steps   = []int{decodeSteps, 12, 8}
)

// idle is the pause between both sides, in which llama.cpp's threads stop waiting for work.
const idle = 50 * time.Millisecond

// rates are one side's tokens per second in a round: by batches, then of the prompt.
type rates [4]float64

// measured is a file with its rounds.
type measured struct {
	model, fileType string
	bytes           int64 // of the weights as our engine has them
	ours, theirs    []rates
	read            []float64 // bytes per second that the machine reads, between our steps of one sequence
}

// compareModels measures every file, and writes the page after each.
func compareModels(o *options) error {
	if o.rounds < 1 || o.threads < 1 {
		return fmt.Errorf("-rounds %d, -threads %d: want at least 1", o.rounds, o.threads)
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	began := time.Now()
	memory := newReader(o.threads, passWords)
	var all []measured
	for i := range publishedShapes {
		for _, fileType := range fileTypes {
			if o.only != "" && o.only != fileType {
				continue
			}
			file, err := publishedShapes[i].file(o.dir, fileType)
			if err != nil {
				return err
			}
			m := measured{model: publishedShapes[i].Name, fileType: fileType}
			if err := m.measure(o, file, memory); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			all = append(all, m)
			fmt.Print(modelsTable([]measured{m}))
			// Later files may be interrupted.
			if err := os.WriteFile(o.models, []byte(modelsPage(o, all, time.Since(began))), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure runs the rounds of a file.
func (m *measured) measure(o *options, file string, memory *reader) (err error) {
	ours, err := newOurs(file, "none", o.kernels, o.threads, batches[len(batches)-1])
	if err != nil {
		return err
	}
	defer ours.close()
	m.bytes = ours.weights
	theirs, err := newLlamaCpp(filepath.Join(o.peer, "peer"), file, o.threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.close()) }()
	for i := range ours.seqs { // which also records plans
		if err := ours.step(context, ours.seqs[i:i+1]); err != nil {
			return err
		}
	}
	for round := range o.rounds + 1 {
		var us, them rates
		var read float64
		for i, n := range batches {
			ours.rewind(context)
			if n == 1 {
				us[i], read, err = ours.decodeOne(memory)
			} else {
				us[i], err = ours.rate(1, ours.seqs[:n], steps[i], nothing)
			}
			if err != nil {
				return err
			}
			if them[i], err = theirs.rate(fmt.Sprintf("decode %d %d", n, steps[i]), n*steps[i]); err != nil {
				return err
			}
			time.Sleep(idle)
		}
		ours.rewind(0)
		if us[3], err = ours.rate(promptTokens, ours.seqs[:1], 1, nothing); err != nil {
			return err
		}
		if them[3], err = theirs.rate("prefill", promptTokens); err != nil {
			return err
		}
		time.Sleep(idle)
		if round == 0 {
			continue // touches memory for the first time
		}
		m.ours, m.theirs, m.read = append(m.ours, us), append(m.theirs, them), append(m.read, read)
		fmt.Fprintf(os.Stderr, "%s %s, round %d: read %.1f GB/s, ours %.1f, theirs %.1f\n", m.model, m.fileType, round, read/1e9, us, them)
	}
	return nil
}

// medianRates returns the median of each rate.
func medianRates(all []rates) (r rates) {
	for i := range r {
		var v []float64
		for _, one := range all {
			v = append(v, one[i])
		}
		r[i] = median(v)
	}
	return r
}

// modelsTable returns the results as a Markdown table.
func modelsTable(all []measured) string {
	var b strings.Builder
	b.WriteString("| model | file | decode 1 | decode 4 | decode 16 | prefill 512 | reads of memory at decode 1 |\n|---|---|---|---|---|---|---|\n")
	for _, m := range all {
		fmt.Fprintf(&b, "| %s | %s, %.2f GB ", m.model, m.fileType, float64(m.bytes)/1e9)
		ours, theirs, bandwidth := medianRates(m.ours), medianRates(m.theirs), median(m.read)
		for i := range ours {
			fmt.Fprintf(&b, "| %.1f, %.1f: **%.2f×** ", ours[i], theirs[i], ours[i]/theirs[i])
		}
		read := ours[0] * float64(m.bytes)
		fmt.Fprintf(&b, "| %.1f of %.1f GB/s, %.0f %% |\n", read/1e9, bandwidth/1e9, 100*read/bandwidth)
	}
	return b.String()
}

// modelsPage returns the page of -models.
func modelsPage(o *options, all []measured, took time.Duration) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# Small published models next to llama.cpp

Tokens per second: ours, theirs and the ratio. Both sides compute the same GGUF file, in turn, with
%d threads. Written by `+"`make bench-models`"+` in %.0f minutes; medians of %d rounds.

- Machine: %s, %d cores. Commit %s. Our kernels: %s. Peer: llama.cpp of
  llama-cpp-python 0.3.36, built for this processor.
- Files have the shapes, the vocabularies' sizes (151,936 and 262,144 tokens) and the types of the
  published models, with random weights. Matrices whose rows are no multiple of 256 are Q5_0 and
  Q8_0 in Q4_K_M, as llama.cpp's quantizer has them: in both models all but ffn_down and Gemma's
  attn_output.
- Decode is a step of 1, 4 or 16 sequences of %d tokens; prefill is a step of %d tokens. Our steps
  sample greedily, llama.cpp's sample nothing, as in llama-bench.
- The last column is the weights times our tokens per second, next to what as many threads read
  between our steps.

`, o.threads, took.Minutes(), o.rounds, machine(), runtime.NumCPU(), commit(), o.kernels, context, promptTokens)
	b.WriteString(modelsTable(all))
	b.WriteString("\n| model, file, round | read, GB/s | ours: decode 1, 4, 16, prefill | theirs |\n|---|---|---|---|\n")
	row := func(r rates) string { return fmt.Sprintf("%.1f, %.1f, %.1f, %.0f", r[0], r[1], r[2], r[3]) }
	for _, m := range all {
		for i := range m.ours {
			fmt.Fprintf(&b, "| %s, %s, %d | %.1f | %s | %s |\n", m.model, m.fileType, i+1, m.read[i]/1e9, row(m.ours[i]), row(m.theirs[i]))
		}
	}
	return b.String()
}
