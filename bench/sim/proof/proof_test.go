package main

import (
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/prove"
)

// TestMain lets the test's binary be the program, whose processes it starts.
func TestMain(m *testing.M) {
	if os.Getenv(sleeping) != "" || os.Getenv(recording) != "" || len(os.Args) > 1 && (os.Args[1] == "nodes" || os.Args[1] == "wait") {
		main()
		return
	}
	os.Exit(m.Run())
}

// Processes that sleep serve a trace. No answer comes earlier than its steps take, however busy the
// machine is.
func TestProcessesSleep(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes, which take nine seconds")
	}
	o := options{dir: t.TempDir(), port: freePorts(t, 3)}
	n, err := o.sleepNode()
	if err != nil {
		t.Fatal(err)
	}
	trace, err := draw("in=100-400,out=4-8,prefix=0.3", simulated(&sleepProfile, 1, 1), .5, 1)
	if err != nil {
		t.Fatal(err)
	}
	r, err := o.measure(t.Context(), n, 1, 1, trace, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	step, first := sleepProfile.Step.Decode.Fixed, sleepProfile.Step.Prefill.Floor
	for i := range r.record.Outcomes {
		q := &r.record.Outcomes[i]
		if q.Prompt != trace[i].Tokens || q.Output != trace[i].Output {
			t.Errorf("request %d has %d tokens and got %d, want %d and %d", i, q.Prompt, q.Output, trace[i].Tokens, trace[i].Output)
		}
		if got, least := q.Latency().Seconds(), first+step*float64(q.Output-1); got < least {
			t.Errorf("request %d got its %d tokens within %g s, its steps take %g s", i, q.Output, got, least)
		}
	}
	if s := prove.Summarize(r.record, prove.Goals{}); s.Stats["ttft"].Percentiles[0] < 1e3*step {
		t.Errorf("%+v: a step takes %g ms", s.Stats, 1e3*step)
	}
}

// freePorts returns the first of n free ports below the ephemeral ones.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for first := 19_700; first < 30_000; first += n {
		free := true
		for i := range n {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+i))
			if free = free && err == nil; err == nil {
				_ = l.Close()
			}
		}
		if free {
			return first
		}
	}
	t.Fatal("no ports are free")
	return 0
}

// Recorded steps are read, and their means are next to the profile's by their sequences. Kinds of
// few steps are left out.
func TestCompareSteps(t *testing.T) {
	file := filepath.Join(t.TempDir(), "decode-0.steps")
	text := strings.Repeat("2 600 0 0 0.05\n", 9) + "2 600 0 0 0.15\n" + strings.Repeat("0 0 100 5000 0.04\n", 10) + strings.Repeat("1 9 0 0 0.04\n", 9)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	steps, err := readSteps(file)
	if err != nil || len(steps) != 29 {
		t.Fatal(err, len(steps))
	}
	figures := compareSteps(&sleepProfile, steps)
	if len(figures) != 2 || figures[0].Name != "mean of 10 steps of prompts (p10 40.0, p90 40.0), ms" || figures[1].Name != "mean of 10 steps of 2 sequences (p10 50.0, p90 150.0), ms" {
		t.Fatalf("%+v", figures)
	}
	d := &sleepProfile.Step.Decode
	if want := 1e3 * (d.Fixed + 2*d.PerSeq + 600*d.PerCtx); math.Abs(figures[1].Predicted-want) > 1e-9 || math.Abs(figures[1].Measured-60) > 1e-9 {
		t.Errorf("%+v, want %g and 60", figures[1], want)
	}
	if err := os.WriteFile(file, []byte("2 600 0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readSteps(file); err == nil {
		t.Error("a line with three numbers is a step")
	}
}

// A written trace has the lengths and times of the trace, and blocks that are shared in the same way.
func TestWriteTrace(t *testing.T) {
	l, err := sim.ParseLoad("rps=10,n=50,in=20-300,out=5-9,prefix=0.5,prefixes=3")
	if err != nil {
		t.Fatal(err)
	}
	trace, err := l.Trace(1)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := writeTrace(file, trace); err != nil {
		t.Fatal(err)
	}
	read, err := sim.LoadTrace(file)
	if err != nil || len(read) != len(trace) {
		t.Fatal(err, len(read))
	}
	for i := range read {
		a, b := &trace[i], &read[i]
		if a.Tokens != b.Tokens || a.Output != b.Output || math.Abs(a.At.Seconds()-1e3*b.At.Seconds()) > 1e-3 { // the file has seconds, Mooncake's milliseconds
			t.Errorf("request %d: %+v, want %+v", i, b, a)
		}
		for j := range read[:i] {
			if (a.Blocks[0] == trace[j].Blocks[0]) != (b.Blocks[0] == read[j].Blocks[0]) {
				t.Errorf("requests %d and %d share their first block in only one of the traces", i, j)
			}
		}
	}
}

// The profile of the nodes that sleep is complete, and its blocks are those of the nodes' memory.
func TestSleepProfile(t *testing.T) {
	if err := sleepProfile.Check(); err != nil {
		t.Error(err)
	}
	if blocks*16*kvBytes != 64<<20 {
		t.Errorf("%d blocks of 16 tokens of %d bytes are not %s", blocks, kvBytes, kvMemory)
	}
}

// Shapes that were not fitted are found in the report of tandem profile.
func TestHeldOut(t *testing.T) {
	const text = `Decoding: 40 points; coefficients off by 1.2 % on average. Prompts: 20 points, 3.4 %
Shapes that were not fitted                                            predicted ms  measured ms   error
1 sequences of 300 tokens                                                     4.321        4.300   +0.5%
chunk of 40 tokens after 0, and 5 sequences of 350 tokens on average          41.32        43.00   -3.9%
Error of these predictions: 2.2 % on average, 3.9 % at most
`
	m := heldOut.FindAllStringSubmatch(text, -1)
	if len(m) != 2 || m[0][1] != "1 sequences of 300 tokens" || m[1][2] != "41.32" || m[1][3] != "43.00" {
		t.Errorf("%q", m)
	}
}
