package line

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/lengths"
)

// check fails the test where the line is inconsistent.
func check(t testing.TB, l *Line) {
	t.Helper()
	if err := l.Check(); err != nil {
		t.Fatal(err)
	}
}

// place is the ids of the line, in order.
func place(l *Line) (ids []ID) {
	for _, j := range l.order {
		ids = append(ids, j.id)
	}
	return ids
}

// A newcomer passes longer jobs of its priority from the end of the line, as far as
// their allowances reach, and all jobs of worse priorities.
func TestPlaces(t *testing.T) {
	type add struct {
		id               ID
		tokens, priority int
	}
	repeat := func(first ID, n, tokens int) (adds []add) {
		for i := range n {
			adds = append(adds, add{first + ID(i), tokens, 0})
		}
		return adds
	}
	ids := func(first ID, n int) (ids []ID) {
		for i := range n {
			ids = append(ids, first+ID(i))
		}
		return ids
	}
	for _, c := range []struct {
		name string
		adds []add
		want []ID
	}{
		{"arrival among equals", []add{{1, 9, 0}, {2, 9, 0}, {3, 9, 0}}, []ID{1, 2, 3}},
		{"least work first", []add{{1, 1024, 0}, {2, 64, 0}, {3, 500, 0}, {4, 64, 0}, {5, 1, 0}}, []ID{5, 2, 4, 3, 1}},
		{"priorities first", []add{{1, 64, 1}, {2, 9000, 0}, {3, 9000, -1}, {4, 1, 1}, {5, 64, 0}}, []ID{3, 5, 2, 4, 1}},
		{"a priority costs no allowance", slices.Concat([]add{{1, 64, 1}}, repeat(2, 3, 2000), []add{{9, 63, 1}}), []ID{2, 3, 4, 9, 1}},
		{"up to the bound", slices.Concat([]add{{100, 1024, 0}}, repeat(1, 49, 64)), append(ids(1, 48), 100, 49)},
		{"a newcomer that the allowance does not cover", slices.Concat([]add{{100, 1024, 0}}, repeat(1, 3, 1000), []add{{4, 73, 0}, {5, 72, 0}}), []ID{5, 1, 2, 3, 100, 4}},
	} {
		l := New(1)
		for _, a := range c.adds {
			l.Add(a.id, a.tokens, a.priority)
			check(t, l)
		}
		if got := place(l); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// What is told by length is what is computed before a newcomer of that length: with those
// that are as short, all before a job that was passed often enough.
func TestLengths(t *testing.T) {
	l := New(1)
	for id, tokens := range []int{5000, 64, 1000, 65, 1024} {
		l.Add(ID(id+1), tokens, 0)
	}
	if got, want := l.Lengths(), (lengths.Queue{64, 64 + 65, 64 + 65 + 1000 + 1024}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
	l.Add(6, 3000, 1)
	l.Add(7, 10, -1)
	if got, want := l.Lengths(), (lengths.Queue{10 + 64, 10 + 64 + 65, 10 + 64 + 65 + 1000 + 1024}); got != want {
		t.Errorf("with other priorities: %v, want %v", got, want)
	}
	l = New(1)
	l.Add(100, 1024, 0)
	for id := range 47 {
		l.Add(ID(id), 64, 0)
	}
	if got, want := l.Lengths(), (lengths.Queue{47 * 64, 47*64 + 1024, 47*64 + 1024}); got != want {
		t.Errorf("47 passed: %v, want %v: 64 tokens may still pass", got, want)
	}
	l.Add(47, 64, 0)
	if got, want := l.Lengths()[0], 48*64+1024; got != want {
		t.Errorf("48 passed: %d tokens before the next, want all %d", got, want)
	}
	check(t, l)
}

// What is computed of a job counts no more: a newcomer passes what is left.
func TestWorkLeftCounts(t *testing.T) {
	l := New(1 << 20)
	for id := range ID(3) {
		l.Add(id+1, 1000, 0)
		l.Next(0)
	}
	work := []scheduler.Work{{Ticket: 7, Left: 3}, {Ticket: 3, Left: 1000}, {Ticket: 1, Left: 50}, {Ticket: 2, Left: 1000}}
	l.Order(work)
	var got []ID
	for _, w := range work {
		got = append(got, w.Ticket)
	}
	if !slices.Equal(got, []ID{1, 2, 3, 7}) {
		t.Errorf("order %v, want that of the line and strangers last", got)
	}
	l.Cached(2, 960)
	l.Order([]scheduler.Work{{Ticket: 2, Left: 1000}}) // which has not looked yet
	l.Add(4, 64, 0)
	check(t, l)
	if got := place(l); !slices.Equal(got, []ID{1, 2, 4, 3}) {
		t.Errorf("places %v: 64 tokens pass 1000, and neither 50 nor 40", got)
	}
	if l.Waiting() != 1 || l.WaitingTokens() != 64 || l.Asking() != 3 || !slices.Equal(l.AppendWaiting(nil), []ID{4}) || l.Len() != 4 {
		t.Errorf("%d wait with %d tokens, %d ask", l.Waiting(), l.WaitingTokens(), l.Asking())
	}
}

// asks is the jobs that ask at a time.
func asks(l *Line, now time.Duration) (ids []ID) {
	for {
		id, ok := l.Next(now)
		if !ok {
			return ids
		}
		ids = append(ids, id)
	}
}

// As many jobs ask as runAhead covers, beside the longest one: a long prompt neither
// waits for an empty engine nor keeps short ones from asking.
func TestRunAhead(t *testing.T) {
	l := New(100)
	want := func(what string, ids ...ID) {
		t.Helper()
		check(t, l)
		if got := asks(l, 0); !slices.Equal(got, ids) {
			t.Errorf("%s: %v ask, want %v", what, got, ids)
		}
	}
	l.Add(1, 5000, 0)
	want("a job beyond the bound, alone", 1)
	l.Add(2, 4000, 0)
	want("another one")
	l.Add(3, 60, 0)
	want("a short one beside it", 3)
	l.Add(4, 60, 0)
	want("a second one")
	l.Remove(3)
	want("which asks when the first is computed", 4)
	l.Order([]scheduler.Work{{Ticket: 1, Left: 101}})
	want("work left beyond the bound")
	l.Remove(4)
	l.Order([]scheduler.Work{{Ticket: 1, Left: 100}})
	want("within the bound", 2)
	if l.Next(0); l.Waiting() != 0 {
		t.Error("one waits")
	}
}

// Long jobs that have asked for all of the run-ahead do not keep short ones from asking:
// up to an eighth of it.
func TestShortJobsAskBesideLongOnes(t *testing.T) {
	l := New(4096)
	for id := range 6 {
		l.Add(ID(id), 1024, 0)
	}
	if got := asks(l, 0); len(got) != 5 {
		t.Fatalf("%v ask, want 5: four and the longest", got)
	}
	for id := range 9 {
		l.Add(ID(100+id), 64, 0)
	}
	if got := asks(l, 0); len(got) != 8 || got[0] != 100 {
		t.Errorf("%v ask, want 8 of 64 tokens", got)
	}
	l.Remove(100)
	if got := asks(l, 0); len(got) != 1 || got[0] != 108 {
		t.Errorf("%v ask, want the ninth", got)
	}
	l.Add(200, 513, 0)
	if got := asks(l, 0); got != nil {
		t.Errorf("%v ask, want none: 513 tokens are more than an eighth", got)
	}
	check(t, l)
}

// A job without room steps aside once: its tokens do not count until 2 s have passed, 16
// later jobs have their grants, or it has its own.
func TestStepAside(t *testing.T) {
	begin := func() *Line {
		l := New(100)
		l.Add(1, 150, 0)
		asks(l, 0)
		l.Add(2, 150, 0)
		if got := asks(l, 0); got != nil || !l.StepAside(1, 0) || l.StepAside(1, 0) || l.StepAside(2, 0) || l.StepAside(9, 0) || l.Aside() != 1 {
			t.Fatalf("%v ask, %d are aside", got, l.Aside())
		}
		return l
	}
	t.Run("time", func(t *testing.T) {
		for now, want := range map[time.Duration]bool{MaxAside - 1: true, MaxAside: false} {
			l := begin()
			if got := asks(l, now); (got != nil) != want || (l.Aside() == 1) != want {
				t.Errorf("after %v: %v ask", now, got)
			}
			check(t, l)
			if l.StepAside(1, now) {
				t.Error("it steps aside twice")
			}
			if l.Add(3, 60, 0); !want && slices.Index(place(l), 3) < slices.Index(place(l), 1) {
				t.Error("a newcomer passes a job that has been aside")
			}
		}
	})
	t.Run("jobs", func(t *testing.T) {
		l := begin()
		passed := 0
		for id := ID(2); passed < 40; id++ {
			if got := asks(l, 0); got == nil {
				break
			}
			l.Grant(id)
			check(t, l)
			l.Remove(id)
			l.Add(id+1, 150, 0)
			passed++
		}
		if passed != MaxPassed || l.Aside() != 0 {
			t.Errorf("%d have passed", passed)
		}
		l.Grant(1)
		l.Remove(1)
		if got := asks(l, 0); len(got) != 1 {
			t.Errorf("then %v ask", got)
		}
	})
	t.Run("grant", func(t *testing.T) {
		l := begin()
		l.Grant(1)
		l.Grant(1)
		l.Grant(2) // which has not asked
		if l.Aside() != 0 || l.Asking() != 0 || asks(l, 0) != nil {
			t.Errorf("%d aside, %d asking", l.Aside(), l.Asking())
		}
		check(t, l)
	})
}

// arrived is a prompt of a random load. Times are in tokens of computing.
type arrived struct{ at, tokens int }

// randomLoad is prompts that come for a while faster than they are computed.
func randomLoad(draw *rand.Rand) (load []arrived) {
	mean := 20 + draw.IntN(2000)
	busy := 0.3 + draw.Float64()
	lengths := []func() int{
		func() int { return 1 + draw.IntN(2*mean) },
		func() int { return 1 + int(float64(mean)*draw.ExpFloat64()) },
		func() int { // short ones and some long ones
			if draw.IntN(10) == 0 {
				return 10 * mean
			}
			return 1 + mean/10
		},
	}
	length := lengths[draw.IntN(len(lengths))]
	for at := 0.0; len(load) < 30+draw.IntN(300); at += draw.ExpFloat64() * float64(mean) / busy {
		load = append(load, arrived{int(at), length()})
	}
	return load
}

// compute plays a load on a node whose grants come at once and whose steps take a time of
// a token each, and returns when each prompt was computed.
func compute(t testing.TB, load []arrived, runAhead, step int, byArrival bool) []int {
	l := New(runAhead)
	ended, left := make([]int, len(load)), make([]int, len(load))
	var work []scheduler.Work // granted
	next, now := 0, 0
	for {
		for ; next < len(load) && load[next].at <= now; next++ {
			left[next] = load[next].tokens
			if byArrival {
				work = append(work, scheduler.Work{Ticket: ID(next)})
			} else {
				l.Add(ID(next), left[next], 0)
			}
		}
		for i := range work {
			work[i].Left = left[work[i].Ticket]
		}
		if !byArrival {
			l.Order(work)
			for _, id := range asks(l, 0) {
				l.Grant(id)
				work = append(work, scheduler.Work{Ticket: id, Left: left[id]})
			}
			l.Order(work)
			check(t, l)
		}
		if len(work) == 0 {
			if next == len(load) {
				return ended
			}
			now = load[next].at
			continue
		}
		budget := step
		for _, w := range work {
			n := min(budget, left[w.Ticket])
			left[w.Ticket] -= n
			budget -= n
		}
		now += step - budget
		work = slices.DeleteFunc(work, func(w scheduler.Work) bool {
			if left[w.Ticket] > 0 {
				return false
			}
			ended[w.Ticket] = now
			l.Remove(w.Ticket)
			return true
		})
	}
}

// No job of a random load ends later than by arrival by more than its bound and a step,
// and the mean wait is no longer.
func TestNobodyWaitsMuchLonger(t *testing.T) {
	sum, arrivals, nearest := 0, 0, 0.0
	for seed := range uint64(300) {
		draw := rand.New(rand.NewPCG(seed, 16))
		load := randomLoad(draw)
		step := 1 + draw.IntN(3000)
		runAhead := 1 + draw.IntN(3*step)
		got, want := compute(t, load, runAhead, step, false), compute(t, load, runAhead, step, true)
		for i, a := range load {
			if late := got[i] - want[i]; late > Bound(a.tokens)+step {
				t.Fatalf("seed %d: prompt %d of %d tokens ends %d tokens later than by arrival, the bound is %d and a step of %d", seed, i, a.tokens, late, Bound(a.tokens), step)
			} else {
				nearest = max(nearest, float64(late)/float64(Bound(a.tokens)+step))
			}
			sum, arrivals = sum+got[i]-a.at, arrivals+want[i]-a.at
		}
	}
	t.Logf("note: the mean wait is %.2f of that by arrival; the latest took %.2f of the bound", float64(sum)/float64(arrivals), nearest)
	if sum >= arrivals {
		t.Errorf("prompts wait %d tokens in all, by arrival %d", sum, arrivals)
	}
	if nearest < 0.7 {
		t.Errorf("the latest took %.2f of the bound: the loads press no more", nearest)
	}
}

// A long prompt is computed although shorter ones never cease to come.
func TestLongPromptIsNotStarved(t *testing.T) {
	load := []arrived{{0, 50_000}}
	for i := range 4000 {
		load = append(load, arrived{i * 50, 30})
	}
	ended := compute(t, load, 4096, 2048, false)
	if most := 30 + 50_000 + Bound(50_000) + 2048; ended[0] > most {
		t.Errorf("it ends at %d, want %d at most", ended[0], most)
	}
	if ended[1001] > 50_000+2*2048 {
		t.Errorf("a short prompt that came at 50000 ended at %d, want the rest of a step and its own", ended[1001])
	}
}

// Check finds what it says it verifies.
func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Line){
		"unknown":   func(l *Line) { delete(l.byID, 1) },
		"lost":      func(l *Line) { l.order = l.order[1:] },
		"order":     func(l *Line) { l.order[0].priority = 9 },
		"allowance": func(l *Line) { l.order[1].allowance = -1 },
		"bound":     func(l *Line) { l.order[1].allowance = Bound(10) + 1 },
		"left":      func(l *Line) { l.order[1].left = 11 },
		"aside":     func(l *Line) { l.order[1].aside = true },
		"asked":     func(l *Line) { l.asked = nil },
		"waiting":   func(l *Line) { l.asked[0] = l.order[1] },
	} {
		l := New(5)
		l.Add(1, 10, 0)
		l.Next(0)
		l.Add(2, 10, 0)
		check(t, l)
		if damage(l); !errors.Is(l.Check(), ErrBroken) {
			t.Errorf("%s: not found", name)
		}
	}
}

// FuzzLine has any sequence of calls keep the line consistent, jobs in the order of their
// priorities, and each within its bound. A byte is a call, the next one its argument.
func FuzzLine(f *testing.F) {
	f.Add([]byte{0, 200, 0, 3, 1, 0, 2, 0, 0, 9, 1, 0, 3, 0, 4, 1, 5, 0})
	f.Add([]byte{0, 255, 8, 0, 16, 7, 1, 0, 2, 0, 7, 200, 1, 0, 1, 0, 3, 1, 6, 90, 5, 2})
	f.Fuzz(func(t *testing.T, calls []byte) {
		l := New(300)
		var now time.Duration
		var next ID
		first := map[ID]int{} // tokens of later jobs that were put before it
		tokens, priority := map[ID]int{}, map[ID]int{}
		for len(calls) > 1 && next < 500 {
			call, arg := calls[0], calls[1]
			calls = calls[2:]
			id := ID(arg) % (next + 1)
			switch call % 8 {
			case 0:
				n := 1 + 37*int(arg)
				l.Add(next, n, int(call/8)%3)
				tokens[next], priority[next] = n, int(call/8)%3
				ids := place(l)
				for _, behind := range ids[slices.Index(ids, next)+1:] {
					if priority[behind] == priority[next] {
						first[behind] += n
					}
				}
				next++
			case 1:
				l.Next(now)
			case 2:
				l.StepAside(id, now)
			case 3:
				l.Grant(id)
			case 4:
				l.Cached(id, int(arg))
			case 5:
				l.Remove(id)
			case 6:
				now += time.Duration(arg) * 10 * time.Millisecond
			case 7:
				l.Order([]scheduler.Work{{Ticket: id, Left: int(arg)}, {Ticket: next + 5, Left: 1}})
			}
			check(t, l)
		}
		for id, n := range first {
			if n > Bound(tokens[id]) {
				t.Fatalf("%d tokens of later jobs before one of %d", n, tokens[id])
			}
		}
		for left := l.Len(); left > 0; left-- { // all get their turn
			now += MaxAside
			for _, id := range asks(l, now) {
				l.Grant(id)
			}
			if l.asked == nil {
				t.Fatal(fmt.Errorf("%d wait and none asks", l.Waiting()))
			}
			l.Remove(l.asked[0].id)
			check(t, l)
		}
	})
}
