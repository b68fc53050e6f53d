package roles

import (
	"bytes"
	"slices"
	"testing"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/internal/config"
)

// reloadable has the flags of the limits, which SetLimits applies, and of the upstreams.
func TestReloadableFlags(t *testing.T) {
	upstreams := []string{"upstream", "upstream-prefill", "upstream-decode", "upstream-bootstrap-port", "kubernetes-api", "kubernetes-token-file", "kubernetes-ca"}
	found := 0
	newGatewayCommand(&bytes.Buffer{}).VisitAll(func(f *pflag.Flag) {
		c := newGatewayCommand(&bytes.Buffer{})
		before, limits := c.g.Limits, false
		for _, v := range []string{"7", "7s", "7MiB", "true"} {
			if c.Set.Set(f.Name, v) == nil && c.g.Limits != before {
				limits = true
			}
		}
		if limits {
			found++
		}
		if want := limits || slices.Contains(upstreams, f.Name); want != slices.Contains(reloadable, f.Name) {
			t.Errorf("--%s: reloadable is %t", f.Name, !want)
		}
	})
	if want := len(reloadable) - len(upstreams); found != want {
		t.Errorf("%d flags of limits, want %d", found, want)
	}
}

// A change is applied once, and one that needs a restart is reported until it is undone.
func TestChanges(t *testing.T) {
	set := func(args ...string) *config.Set {
		t.Helper()
		c := newGatewayCommand(&bytes.Buffer{})
		if err := c.Resolve(args, nil); err != nil {
			t.Fatal(err)
		}
		return c.Set
	}
	current := valuesOf(set("--max-n=4", "--port=1"))
	for _, step := range []struct {
		args          []string
		applied, left []string
	}{
		{[]string{"--max-n=2", "--port=2"}, []string{"max-n: 4 → 2"}, []string{"port: 1 → 2"}},
		{[]string{"--max-n=2", "--port=2"}, nil, []string{"port: 1 → 2"}},
		{[]string{"--max-n=3", "--port=1", "--upstream-api-key=x"}, []string{"max-n: 2 → 3"}, []string{"upstream-api-key"}},
		{[]string{"--max-n=3", "--port=1"}, nil, nil},
	} {
		applied, left := changes(current, set(step.args...))
		if !slices.Equal(applied, step.applied) || !slices.Equal(left, step.left) {
			t.Errorf("%q: %q, %q; want %q, %q", step.args, applied, left, step.applied, step.left)
		}
	}
}
