package report

import (
	"strings"
	"testing"
	"time"
)

// nodeOf returns a node with two samples, ten seconds apart.
func nodeOf(s Sample) Node {
	from := time.Unix(1000, 0)
	s.At, s.Generates = from.Add(10*time.Second), true
	return Node{Name: "n", Samples: []Sample{{At: from, Generates: true, Running: s.Running}, s}}
}

// Of two servers the slower one is named, with the part of its wait that is longer by the
// nodes' metrics.
func TestCauses(t *testing.T) {
	alone := func(queue, prompt, step float64) []Node {
		n := nodeOf(Sample{Tokens: 500, CPU: 6, Prompted: 1000, Running: 3, Queue: Total{queue / 2, 1}, Prompt: Total{prompt / 2, 1}, Steps: Total{step * 250, 250}})
		return []Node{{Name: "gateway", Samples: make([]Sample, 2)}, n, n}
	}
	pair := func(queue, prompt, exposed, own, step float64) []Node {
		return []Node{
			nodeOf(Sample{CPU: 3, Prompted: 2000, Queue: Total{queue, 1}, Prompt: Total{prompt, 1}, Exposed: Total{exposed, 1}, Steps: Total{1, 10}}),
			nodeOf(Sample{Tokens: 1000, CPU: 9, Running: 8, Queue: Total{queue + prompt + exposed + own, 1}, Steps: Total{step * 250, 250}}),
		}
	}
	run := func(server string, ttft time.Duration, nodes []Node) repeated {
		p := pointOf(server, 4, ttft)
		p.Nodes = nodes
		return repeated{&p}
	}
	for name, c := range map[string]struct {
		a, b repeated
		want []string
	}{
		"a queue": {run("d", 200*time.Millisecond, pair(0.15, 0.02, 0.005, 0.001, 0.003)), run("a", 100*time.Millisecond, alone(0.05, 0.03, 0.002)),
			[]string{"d is behind of a", "median 200 ms against 100 ms", "The main cause is waiting for a turn, 101 ms of it", "1 prefill node has the prompts that 2 nodes compute", "busy only 30 %"}},
		"a network": {run("d", 200*time.Millisecond, pair(0.01, 0.02, 0.15, 0.001, 0.003)), run("a", 100*time.Millisecond, alone(0.05, 0.03, 0.002)),
			[]string{"The main cause is KV transfers after the prompt is computed, 150 ms of it"}},
		"none": {run("d", 50*time.Millisecond, pair(0.001, 0.02, 0.005, 0.001, 0.003)), run("a", 100*time.Millisecond, alone(0.08, 0.03, 0.002)),
			[]string{"d is ahead of a", "The main cause is waiting for a turn, 78 ms of it: no prompt waits"}},
	} {
		lines := causes(c.a, c.b)
		if len(lines) != 1 {
			t.Fatalf("%s: %q", name, lines)
		}
		for _, want := range c.want {
			if !strings.Contains(lines[0], want) {
				t.Errorf("%s: no %q in %q", name, want, lines[0])
			}
		}
	}
	if lines := causes(run("d", 100*time.Millisecond, pair(0, 0, 0, 0, 1)), run("a", 101*time.Millisecond, alone(0, 0, 1))); len(lines) != 0 {
		t.Errorf("of two that are alike: %q", lines)
	}
	if lines := causes(run("d", 100*time.Millisecond, nil), run("a", time.Second, alone(0, 0, 1))); len(lines) != 0 {
		t.Errorf("of a server that tells nothing: %q", lines)
	}
	// Tokens: more answers in a step, or fewer prompts.
	a, _ := run("d", 1, pair(0, 0, 0, 0, 0.004)).costs()
	b, _ := run("a", 1, alone(0, 0, 0.002)).costs()
	if got := tokenCause(&a, &b, true); !strings.Contains(got, "takes 4 ms against 2 ms and carries 4 tokens of answers against 2 and 0 of prompts against 4") ||
		!strings.Contains(got, "The cause is the number of answers in each step: more, because they are on fewer nodes (1 against 2)") {
		t.Error(got)
	}
	if got := tokenCause(&a, &b, false); !strings.Contains(got, "The cause is chunks of other requests' prompts: fewer in each step") {
		t.Error(got)
	}
}
