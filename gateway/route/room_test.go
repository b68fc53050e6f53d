package route

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

func TestMemoryFits(t *testing.T) {
	for _, c := range []struct {
		name   string
		m      Memory
		d      Demand
		cached int
		want   bool
	}{
		{"unknown memory", Memory{}, Demand{1000, 1000}, 0, true},
		{"no demand", Memory{Total: 100}, Demand{}, 0, true},
		{"free blocks", Memory{Total: 100, Free: 50}, Demand{30, 10}, 0, true},
		{"evictable blocks", Memory{Total: 100, Free: 10, Cached: 40}, Demand{30, 10}, 0, true},
		{"the answer counts", Memory{Total: 100, Free: 35}, Demand{30, 10}, 0, false},
		{"reserved blocks", Memory{Total: 100, Free: 50, Reserved: 20}, Demand{30, 10}, 0, false},
		{"the margin stays", Memory{Total: 100, Free: 42}, Demand{30, 10}, 0, false},
		{"an idle pool takes a long answer", Memory{Total: 100, Free: 90, Cached: 10}, Demand{90, 500}, 0, true},
		{"a prompt larger than the pool", Memory{Total: 100, Free: 100}, Demand{101, 0}, 0, false},
		{"a prompt in use is shared", Memory{Total: 100, Free: 10}, Demand{30, 1}, 28, true},
		{"an evictable prompt is taken", Memory{Total: 100, Free: 10, Cached: 28}, Demand{60, 1}, 28, false},
	} {
		if got := c.m.Fits(c.d, c.cached); got != c.want {
			t.Errorf("%s: %+v, %+v, %d cached: %t", c.name, c.m, c.d, c.cached, got)
		}
	}
}

// The roomiest node lacks the fewest blocks for the request: cached blocks of its prompt
// count, and a node that could never hold it does not.
func TestRoomiest(t *testing.T) {
	r := Request{Uncached: 999, Demand: Demand{Prompt: 60, Answer: 10}}
	node := func(total, free, held int32) State {
		return State{Usable: true, Held: held, Memory: Memory{Total: total, Free: free}}
	}
	gone := node(100, 90, 0)
	gone.Usable = false
	for _, c := range []struct {
		name   string
		states []State
		want   int
	}{
		{"nobody", nil, -1},
		{"the most free blocks", []State{node(100, 10, 0), node(100, 30, 0), node(100, 20, 0)}, 1},
		{"the first of equal ones", []State{node(100, 30, 0), node(100, 30, 0)}, 0},
		{"cached blocks", []State{node(100, 30, 0), node(100, 20, 500)}, 1},
		{"too small a node", []State{node(50, 50, 0), node(100, 0, 0)}, 1},
		{"not usable", []State{gone, node(100, 0, 0)}, 1},
		{"memory not known", []State{{Usable: true}}, -1},
	} {
		if got := Roomiest(c.states, &r); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// No policy sends a new request to a node without room, a request without a
// demand goes to any, and where no node has room the decision says so.
func TestFullNodesAreNotChosen(t *testing.T) {
	nodes := []Node{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	table := New(nodes, nil)
	states := func(free ...int32) []State {
		s := make([]State, len(nodes))
		for i := range s {
			s[i] = State{Usable: true, Load: 5 * free[i], Rate: 1000, Memory: Memory{Total: 100, Free: free[i]}}
		}
		return s
	}
	for p := Prefix; p <= Session; p++ {
		for key := range 50 {
			r := Request{Policy: p, Key: kvcache.Hash(key) * 0x9e3779b97f4a7c15, Uncached: 100, MinRemote: 64, Turn: uint64(key), Draw: uint64(key) * 0x9e3779b97f4a7c15, Demand: Demand{20, 5}}
			if d := table.Pick(r, View{Decode: states(20, 90, 10)}, nil); d.Decode != 1 {
				t.Fatalf("%v: node %d has no room (%s)", p, d.Decode, d.Reason)
			}
			if d := table.Pick(r, View{Decode: states(20, 20, 10)}, nil); d.Decode != -1 || d.Reason != ReasonNoRoom {
				t.Fatalf("%v: %d, %s where no node has room", p, d.Decode, d.Reason)
			}
			r.Demand = Demand{}
			if d := table.Pick(r, View{Decode: states(20, 20, 10)}, nil); d.Decode < 0 {
				t.Fatalf("%v: no node for a request without a demand: %s", p, d.Reason)
			}
		}
	}
	if d := table.Pick(Request{Demand: Demand{20, 5}}, View{Decode: make([]State, 3)}, nil); d.Reason != ReasonNoDecode {
		t.Errorf("without usable nodes: %s", d.Reason)
	}
	gone := states(20, 20, 10)
	for i := range gone {
		gone[i].Usable = false
	}
	if d := table.Pick(Request{Demand: Demand{20, 5}}, View{Decode: gone}, nil); d.Reason != ReasonNoDecode {
		t.Errorf("no node is usable, and none had room: %s, want %s", d.Reason, ReasonNoDecode)
	}
}

// Room is what is free and evictable without what is reserved, what running
// answers will grow by, and what was sent since the heartbeat.
func TestMergeCountsMemory(t *testing.T) {
	var s State
	r := Report{Running: 4, Waiting: 1, Held: 2, Memory: Memory{Total: 100, Free: 20, Cached: 30, Reserved: 5}}
	s.Merge(&r, Sent{Blocks: 7}, 3)
	if want := (Memory{Total: 100, Free: 20, Cached: 30, Reserved: 5 + 4*3/2 + 3*3 + 7}); s.Memory != want {
		t.Errorf("%+v, want %+v", s.Memory, want)
	}
	r.Memory = Memory{}
	if s.Merge(&r, Sent{Blocks: 7}, 3); s.Memory != (Memory{}) {
		t.Errorf("of a node that does not report its memory: %+v", s.Memory)
	}
}

func TestAnswers(t *testing.T) {
	var a Answers
	if got := a.Expect(10_000); got != FirstAnswer {
		t.Errorf("%d tokens before any answer", got)
	}
	var all []int
	for i := range 400 {
		n := 1 + i*7919%1000
		all = append(all, n)
		a.Add(n)
	}
	recent := slices.Sorted(slices.Values(all[len(all)-answerWindow:]))
	if got, want := a.Expect(10_000), recent[len(recent)*3/4]; got != want {
		t.Errorf("%d tokens, want %d", got, want)
	}
	if got := a.Expect(12); got != 12 {
		t.Errorf("%d tokens of at most 12", got)
	}
}

// Three of four of the last 256 answers decide: a model that turns to short answers is
// expected to give long ones until more than three quarters of those are short.
func TestAnswersLooksBack256(t *testing.T) {
	var a Answers
	for range 300 {
		a.Add(1000)
	}
	for a.n%256 != 0 {
		a.Add(1000)
	}
	for range 192 {
		a.Add(1)
	}
	if got := a.Expect(10_000); got != 1000 {
		t.Errorf("192 of 256 answers had one token: %d tokens are expected, want 1000", got)
	}
	for range 16 {
		a.Add(1)
	}
	if got := a.Expect(10_000); got != 1 {
		t.Errorf("208 of 256 answers had one token: %d tokens are expected, want 1", got)
	}
}

func TestLoadBoundOfNobodyIsZero(t *testing.T) {
	for name, states := range map[string][]State{
		"no nodes": nil, "not usable": {{Load: 3}}, "full": {{Usable: true, Full: true, Load: 3}},
	} {
		s := side{ring: &ring{class: make([]int32, len(states))}, states: states, class: anyClass, most: -1}
		if got := s.bound(); got != 0 {
			t.Errorf("%s: %d", name, got)
		}
	}
}

// Expect is a percentile of the last 256 answers, as of the last one whose number is below 16 or a
// multiple of 16.
func TestAnswersAreThoseOfTheWindow(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 2))
	var a Answers
	var all []int
	want := FirstAnswer
	for range 2000 {
		n := draw.IntN(1 + draw.IntN(400))
		a.Add(n)
		all = append(all, n)
		if len(all) < 16 || len(all)%16 == 0 {
			recent := slices.Sorted(slices.Values(all[max(0, len(all)-256):]))
			want = recent[len(recent)*3/4]
		}
		if got := a.Expect(math.MaxInt); got != want {
			t.Fatalf("after %d answers %d are expected, want %d", len(all), got, want)
		}
	}
}
