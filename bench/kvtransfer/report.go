package main

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/bench/report"
)

// median returns the median of one program's runs, figure by figure.
func (c *contender) median() (m result) {
	for _, f := range []func(*result) *float64{
		func(r *result) *float64 { return &r.GBps }, func(r *result) *float64 { return &r.PerGB },
		func(r *result) *float64 { return &r.P50 }, func(r *result) *float64 { return &r.P90 },
	} {
		var all []float64
		for i := range c.results {
			all = append(all, *f(&c.results[i]))
		}
		slices.Sort(all)
		if len(all) > 0 {
			*f(&m) = all[len(all)/2]
		}
	}
	return m
}

// why returns the reason for which no run counts.
func (c *contender) why() string {
	if c.err != nil {
		return c.err.Error()
	}
	return fmt.Sprintf("%d runs on a busy machine", c.nNoisy)
}

// bar is a requirement on a figure, relative to another program's.
type bar struct {
	what   string
	ours   string // ids of contenders
	theirs string
	of     func(ours, theirs result) float64
	want   float64
	most   bool // want is the maximum, otherwise the minimum
}

func speed(a, b result) float64   { return a.GBps / b.GBps }
func cost(a, b result) float64    { return a.PerGB / b.PerGB }
func latency(a, b result) float64 { return a.P50 / b.P50 }
func tail(a, _ result) float64    { return a.P90 / a.P50 }

// bars are all requirements.
var bars = []bar{
	{"1 stream against the C program", "tcp", "c", speed, 0.9, false},
	{"1 stream with CRC32C against the C program", "crc", "c", speed, 0.7, false},
	{"2 streams against iperf3 -P2", "tcp2", "iperf2", speed, 0.8, false},
	{"2 streams against NIXL", "tcp2", "nixl", speed, 4, false},
	{"2 streams with CRC32C against NIXL", "crc2", "nixl", speed, 3, false},
	{"their CPU per GB against NIXL's", "crc2", "nixl", cost, 1.0 / 3, true},
	{"2 streams against Mooncake", "tcp2", "mooncake", speed, 4, false},
	{"2 streams with CRC32C against Mooncake", "crc2", "mooncake", speed, 3, false},
	{"their CPU per GB against Mooncake's", "crc2", "mooncake", cost, 1.0 / 3, true},
	{"1 MiB, median against NIXL's", "crc2", "nixl", latency, 1, true},
	{"1 MiB, p90 against its own median", "crc2", "crc2", tail, 2, true},
	{"shared memory against memcpy", "shm", "memcpy", speed, 0.9, false},
	{"rdma by libfabric tcp against the C program", "fabric-tcp", "c-fabric-tcp", speed, 0.9, false},
	{"rdma by libfabric shm against the C program", "fabric-shm", "c-fabric-shm", speed, 0.9, false},
	{"shared memory with CRC32C against memcpy", "shmcrc", "memcpy", speed, 0.9, false},
}

func table(o *options, all []*contender) string {
	var b strings.Builder
	commit, _ := exec.Command("git", "rev-parse", "--short", "HEAD").Output() // outside of a checkout it stays unknown
	fmt.Fprintf(&b, "# KV transfer compared with other programs\n\nMachine: %s. Commit %s.\n\n    make bench-kvtransfer\n\n", report.Machine(), strings.TrimSpace(string(commit)))
	fmt.Fprintf(&b, "Over loopback, everything in turn in one run, medians of the runs that the table counts, of %d rounds each (1 MiB: %d). %d MiB as %d pages of %d KiB scattered over both\n", o.rounds, o.smalls, nPages*pageBytes>>20, nPages, pageBytes>>10)
	b.WriteString("sides' memory, timed at the writer until the reader has confirmed the last byte; all but iperf3 compare every byte. CPU is of both ends. 1 GB = 10⁹ bytes.\n")
	fmt.Fprintf(&b, "A run counts only when processes outside of it took at most %.0f %% of the machine meanwhile.\n\n", 100*o.others)
	b.WriteString("| | runs | GB/s | least to most | CPU s/GB | 1 MiB median, ms | p90, ms |\n|---|---|---|---|---|---|---|\n")
	byID := make(map[string]*contender)
	var failures strings.Builder
	for _, c := range all {
		byID[c.id] = c
		if c.nFailed > 0 {
			fmt.Fprintf(&failures, "%s: %d runs more failed, the last one with: %v.\n", c.name, c.nFailed, c.err)
		}
		if len(c.results) == 0 {
			fmt.Fprintf(&b, "| %s | no run counts: %v | | | | | |\n", c.name, c.why())
			continue
		}
		m := c.median()
		least, most := m.GBps, m.GBps
		for _, r := range c.results {
			least, most = min(least, r.GBps), max(most, r.GBps)
		}
		fmt.Fprintf(&b, "| %s | %d | %.2f | %.2f–%.2f | %s | %s | %s |\n", c.name, len(c.results), m.GBps, least, most, figure(m.PerGB), figure(m.P50), figure(m.P90))
	}
	if failures.Len() > 0 {
		b.WriteString("\n" + failures.String())
	}
	b.WriteString("\n## What has to hold\n\n| | want | is | |\n|---|---|---|---|\n")
	for _, x := range bars {
		ours, theirs := byID[x.ours], byID[x.theirs]
		if ours == nil || theirs == nil {
			continue // not selected
		}
		if len(ours.results) == 0 || len(theirs.results) == 0 {
			fmt.Fprintf(&b, "| %s | | | not measured |\n", x.what)
			continue
		}
		is, sign := x.of(ours.median(), theirs.median()), "≥"
		holds := is >= x.want
		if x.most {
			sign, holds = "≤", is <= x.want
		}
		verdict := "**does not hold**"
		if holds {
			verdict = "holds"
		}
		fmt.Fprintf(&b, "| %s | %s %.2f | %.2f | %s |\n", x.what, sign, x.want, is, verdict)
	}
	return b.String()
}

// notesBegin is the heading of the part of a report that people write. A new report keeps it.
const notesBegin = "\n## What does not hold, and why\n"

// notes returns that part of a report.
func notes(text string) string {
	at := strings.Index(text, notesBegin)
	if at < 0 {
		return ""
	}
	return text[at:]
}

// figure formats a figure; a missing one is empty.
func figure(v float64) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf("%.3f", v)
}
