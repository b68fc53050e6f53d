package route

import "testing"

// The larger of a heartbeat's counts and the gateway's own counts.
func TestMerge(t *testing.T) {
	s := State{Usable: true, Held: 7, Load: 99}
	s.Merge(&Report{Running: 2, Waiting: 3, Held: 1, Queued: 10, Rate: 5}, Sent{Requests: 4, Queued: 30}, 0)
	if want := (State{Usable: true, Held: 7, Load: 6, Queued: 30, Rate: 5}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	s.Merge(&Report{}, Sent{Requests: 4}, 0)
	if s.Load != 4 || s.Queued != 0 || s.Rate != 0 {
		t.Errorf("without a heartbeat: %+v", s)
	}
}
