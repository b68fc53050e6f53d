package cluster

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestIdentity(t *testing.T) {
	now := time.UnixMilli(1_790_000_000_123)
	a, b := NewID("d1", now), NewID("d1", now)
	later := NewID("d1", now.Add(time.Millisecond))
	if a == b || a >= later || b >= later || !strings.HasPrefix(a, "d1/") || len(a) != len("d1/")+suffixDigits {
		t.Errorf("%q, %q, later %q", a, b, later)
	}
	for id, want := range map[string]string{
		a: "d1", "d1": "d1", "decode-1ee4ffc8": "decode-1ee4ffc8", "": "", "/0123456789abcdef": "/0123456789abcdef",
		"a/b/0123456789abcdef": "a/b", "d1/0123456789abcdeX": "d1/0123456789abcdeX", "d1/123": "d1/123",
	} {
		if got := NameOf(id); got != want {
			t.Errorf("NameOf(%q) is %q, want %q", id, got, want)
		}
	}
}

// Names do not depend on the order of the list, are unique, and are those that were given where
// only one node has them.
func TestShownNames(t *testing.T) {
	at := func(name string, ms int64) string { return fmt.Sprintf("%s/%011x00000", name, ms) }
	want := map[string]string{
		"old":          "old", // of version 0.1.0
		"d1":           "d1",  // which is first because it has no start
		at("d1", 7):    "d1-2",
		at("d1", 9):    "d1-4", // because d1-3 has been given
		at("d1-3", 1):  "d1-3",
		at("p1", 5):    "p1",
		at("p1", 6):    "p1-2",
		at("p1-2", 10): "p1-2-2",
		at("gpu-7", 3): "gpu-7",
	}
	delete(want, at("p1", 6))
	delete(want, at("p1-2", 10))
	want[at("p1", 6)] = "p1-3"
	want[at("p1-2", 10)] = "p1-2"
	ids := slices.Collect(maps.Keys(want))
	for range 20 {
		rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		if got := ShownNames(ids); !maps.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	var replicas []string
	for i := range 100 {
		replicas = append(replicas, at("pod", int64(i)))
	}
	shown := ShownNames(replicas)
	if names := slices.Compact(slices.Sorted(maps.Values(shown))); len(names) != 100 || shown[replicas[0]] != "pod" || shown[replicas[99]] != "pod-100" {
		t.Errorf("%d names: %v", len(names), shown)
	}
}

// A process at the address of another has replaced it.
func TestSuperseded(t *testing.T) {
	first, second := NewID("d1", time.UnixMilli(1)), NewID("other", time.UnixMilli(2))
	for _, c := range []struct {
		at   map[string]string
		want string
	}{
		{map[string]string{first: "a:1", second: "a:1"}, first},
		{map[string]string{first: "a:1", second: "b:1"}, ""},
		{map[string]string{first: "", second: ""}, ""},
		{map[string]string{"d1": "a:1", first: "a:1"}, "d1"},
		{map[string]string{"d1": "a:1", "d2": "a:1"}, ""}, // of version 0.1.0, which does not say who came later
	} {
		ms := map[string]Member{}
		for id := range c.at {
			ms[id] = Member{ID: id}
		}
		got := superseded(ms, func(id string) string { return c.at[id] })
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !got[c.want]) {
			t.Errorf("%v: %v, want %q", c.at, got, c.want)
		}
	}
}
