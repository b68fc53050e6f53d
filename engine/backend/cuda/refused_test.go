//go:build cgo && linux

package cuda

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// A graph that is not made, and a call that fails for lack of memory, end nothing else: a plan runs
// without its graph, with one warning, and a step after a failed one draws what it draws anyway.
func TestRefused(t *testing.T) {
	lib, probe := openTwin(t), openGPU(t, Options{Limits: modelLimits})
	twin := probe.info.twin != 0
	probe.Close()
	if !twin {
		t.Skip("a GPU refuses nothing")
	}
	t.Cleanup(func() { lib.refuse("", false, 0, 0) })
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	run := func(refused string, eager bool, graphs int) (drawn [][]int32) {
		var warnings []error
		m := sit(t, src, openGPU(t, Options{Limits: modelLimits, Eager: eager, NoGraph: func(why error) { warnings = append(warnings, why) }}), backend.F32)
		if refused == "graph" {
			lib.refuse(refused, false, 0, 2)
		}
		made, err := m.Capture(4, nil)
		if err != nil || made != graphs {
			t.Fatalf("%s refused: %d graphs, want %d: %v", refused, made, graphs, err)
		}
		if missing := refused == "graph"; missing != (len(warnings) == 1) || missing && !errors.Is(warnings[0], backend.ErrMemory) {
			t.Errorf("%s refused: warnings %v", refused, warnings)
		}
		rows := aheadRows{spec: kvSpec(src, backend.F32), tokens: []int32{1, 2, 3, 4}, params: make([]sample.Params, 4)}
		for i := range 6 {
			s := rows.step([]int32{0, 1, 2, 3}[:4-i/2], nil)
			if refused == "copy" || refused == "launch" {
				lib.refuse(refused, false, 3*i*len(refused)/6, 1) // of launches all over the step
				err := m.Step(s, nil)
				if err != nil && (!errors.Is(err, backend.ErrMemory) || errors.Is(err, backend.ErrDevice)) || err == nil && refused == "launch" {
					t.Fatalf("step %d, %s refused: %v", i, refused, err)
				}
			}
			lib.refuse("", false, 0, 0)
			if err := m.Step(s, nil); err != nil {
				t.Fatalf("step %d after %s was refused: %v", i, refused, err)
			}
			drawn = append(drawn, slices.Clone(s.Sampled))
			for j, token := range s.Sampled {
				rows.drew(int32(j), token)
			}
		}
		return drawn
	}
	want := run("nothing", false, 3)
	for _, c := range []struct {
		refused string
		eager   bool
		graphs  int
	}{{"graph", false, 1}, {"copy", false, 3}, {"launch", true, 0}} {
		if got := run(c.refused, c.eager, c.graphs); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%s refused: drew %v, want %v", c.refused, got, want)
		}
	}
	m := sit(t, src, openGPU(t, Options{Limits: modelLimits}), backend.F32)
	lib.refuse("graph", true, 0, 1)
	if _, err := m.Capture(1, nil); !errors.Is(err, backend.ErrDevice) || !strings.Contains(err.Error(), "illegal memory access") {
		t.Errorf("a device that failed while it made a graph: %v", err)
	}
}
