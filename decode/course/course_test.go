package course

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

// did is a step of a course: the node that is asked, or one of these.
const (
	computes = -1
	stops    = -2
)

// follow plays a course whose asks come out as given, and returns its steps up to and
// with the first Stop.
func follow(t testing.TB, c Course, outcomes ...Outcome) (did []int) {
	t.Helper()
	for len(did) < 100 {
		step, node := c.Next()
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
		switch step {
		case Stop:
			return append(did, stops)
		case Compute:
			did = append(did, computes)
		case Ask:
			did = append(did, node)
			if len(outcomes) == 0 {
				t.Fatalf("asks node %d, one more than expected", node)
			}
			c.Report(outcomes[0])
			outcomes = outcomes[1:]
		}
	}
	t.Fatal("the course never ends")
	return nil
}

func TestCourse(t *testing.T) {
	long := Prompt{UpTo: 100, Block: 16, Nodes: 3}
	for _, c := range []struct {
		name     string
		prompt   Prompt
		outcomes []Outcome
		want     []int
	}{
		{"the first delivers", long, []Outcome{Delivered}, []int{0, stops}},
		{"the next after a failure", long, []Outcome{Failed, Delivered}, []int{0, 1, stops}},
		{"the next after one that is skipped", long, []Outcome{Skipped, Failed, Delivered}, []int{0, 1, 2, stops}},
		{"all fail", long, []Outcome{Failed, Skipped, Failed}, []int{0, 1, 2, computes, stops}},
		{"no node can help", long, []Outcome{Failed, Useless}, []int{0, 1, computes, stops}},
		{"the request ends", long, []Outcome{Over}, []int{0, stops}},
		{"no nodes", Prompt{UpTo: 100, Block: 16}, nil, []int{computes, stops}},
		{"all cached", Prompt{UpTo: 96, Cached: 96, Block: 16, Nodes: 3}, nil, []int{computes, stops}},
		{"less than a block left", Prompt{UpTo: 111, Cached: 96, Block: 16, Nodes: 3}, nil, []int{computes, stops}},
		{"a block left", Prompt{UpTo: 112, Cached: 96, Block: 16, Nodes: 3}, []Outcome{Delivered}, []int{0, stops}},
		{"short, for the first time", Prompt{UpTo: 15, Block: 16, Nodes: 1}, []Outcome{Failed}, []int{0, computes, stops}},
		{"short, moved before", Prompt{UpTo: 15, Block: 16, Moved: true, Nodes: 1}, nil, []int{computes, stops}},
		{"a block, moved before", Prompt{UpTo: 16, Block: 16, Moved: true, Nodes: 1}, []Outcome{Delivered}, []int{0, stops}},
	} {
		if got := follow(t, New(c.prompt), c.outcomes...); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// Whatever comes of the asks, nodes are asked in order and once, the decode node computes
// where no node delivered and the request goes on, and the course ends.
func TestAnyCourseEnds(t *testing.T) {
	for seed := range uint64(2000) {
		draw := rand.New(rand.NewPCG(seed, 3))
		p := Prompt{UpTo: draw.IntN(60), Cached: draw.IntN(30), Block: 1 + draw.IntN(20), Moved: draw.IntN(2) == 0, Nodes: draw.IntN(5)}
		outcomes := make([]Outcome, p.Nodes)
		last := Failed
		asked := 0
		for i := range outcomes {
			outcomes[i] = []Outcome{Failed, Failed, Skipped, Delivered, Useless, Over}[draw.IntN(6)]
		}
		did := follow(t, New(p), outcomes...)
		for i, d := range did {
			if d >= 0 {
				if d != i {
					t.Fatalf("seed %d: %v asks out of order", seed, did)
				}
				last, asked = outcomes[i], asked+1
			}
		}
		want := last != Delivered && last != Over
		if got := slices.Contains(did, computes); got != want || len(did) > asked+2 {
			t.Fatalf("seed %d: %+v, %v: %v", seed, p, outcomes, did)
		}
	}
}

// Check finds what it says it verifies.
func TestCheckFindsDamage(t *testing.T) {
	for _, c := range []Course{{next: 1}, {next: -1}, {last: Stop + 1}} {
		if err := c.Check(); !errors.Is(err, ErrBroken) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
