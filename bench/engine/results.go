package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// saveResult stores a row's result and replaces that of an earlier run.
func saveResult(dir string, r *result) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(r.file(dir), data, 0o644)
}

func (r *result) file(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("result-%s-%s.json", r.Kernels, r.Row.Ours))
}

// joinRounds puts the rounds of an earlier result before those of r, if both have the same
// code, machine, threads and peer.
func joinRounds(dir string, r *result) error {
	data, err := os.ReadFile(r.file(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var old result
	if err == nil {
		err = json.Unmarshal(data, &old)
	}
	if err != nil {
		return err
	}
	if old.Commit != r.Commit || old.Machine != r.Machine || old.Threads != r.Threads || old.Peer != r.Peer {
		return nil
	}
	r.Ours, r.Theirs = append(old.Ours, r.Ours...), append(old.Theirs, r.Theirs...)
	r.Bandwidth = append(old.Bandwidth, r.Bandwidth...)
	return nil
}

// loadResults returns the results so far, by kernels and in the order of rows.
func loadResults(dir string) (all []result, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "result-*.json"))
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var r result
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		all = append(all, r)
	}
	place := func(r result) int {
		return slices.IndexFunc(rows, func(x row) bool { return x.Ours == r.Row.Ours })
	}
	slices.SortStableFunc(all, func(a, b result) int {
		if c := -strings.Compare(a.Kernels, b.Kernels); c != 0 {
			return c
		}
		return place(a) - place(b)
	})
	return all, nil
}

// table returns the results as a Markdown table.
func table(all []result) string {
	var b strings.Builder
	b.WriteString("| weights | kernels | decode 1 | decode 8 | prefill 512 | reads of memory at decode 1 |\n|---|---|---|---|---|---|\n")
	for _, r := range all {
		name := r.Row.Ours
		if name == "none" {
			name = "bf16"
		}
		cell := func(ours, theirs float64) string {
			if theirs == 0 {
				return fmt.Sprintf("%.1f", ours)
			}
			return fmt.Sprintf("%.1f, %.1f: **%.2f×**", ours, theirs, ours/theirs)
		}
		ours, theirs, bandwidth := medians(r.Ours), medians(r.Theirs), median(r.Bandwidth)
		read := ours.Decode1 * float64(r.WeightBytes)
		fmt.Fprintf(&b, "| %s, %s | %s, %s | %s | %s | %s | %.1f of %.1f GB/s, %.0f %% |\n", name, r.Row.Theirs, r.Kernels, r.Peer,
			cell(ours.Decode1, theirs.Decode1), cell(ours.Decode8, theirs.Decode8), cell(ours.Prefill, theirs.Prefill),
			read/1e9, bandwidth/1e9, 100*read/bandwidth)
	}
	return b.String()
}

// page returns the file of results.
func page(all []result) string {
	var b strings.Builder
	b.WriteString("# The engine and llama.cpp\n\nTokens per second: ours, theirs and the ratio; random weights in the shape of Llama-3.2-1B, both sides in turn.\n" +
		"Written by `make bench-engine`; bench/engine documents what is timed.\n\n")
	b.WriteString(table(all))
	b.WriteString("\n")
	seen := map[string]bool{}
	for _, r := range all {
		line := fmt.Sprintf("%s, %d threads, medians of %d rounds, commit %s: %s.", r.Machine, r.Threads, len(r.Ours), r.Commit, strings.Join(names(all, r), ", "))
		if !seen[line] {
			b.WriteString("- " + line + "\n")
		}
		seen[line] = true
	}
	return b.String()
}

// names returns the rows that were measured with the same settings as r.
func names(all []result, r result) (out []string) {
	for _, x := range all {
		if x.Machine == r.Machine && x.Threads == r.Threads && len(x.Ours) == len(r.Ours) && x.Commit == r.Commit {
			out = append(out, x.Row.Ours+" on "+x.Kernels)
		}
	}
	return out
}

// machine returns the processor's name on Linux.
func machine() string {
	data, _ := os.ReadFile("/proc/cpuinfo") // does not exist elsewhere; the name stays empty
	for line := range strings.Lines(string(data)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return "unknown processor"
}

func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
