//go:build deploy

package test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Two releases of a namespace whose names begin alike have no object in common, and long names leave
// room for every suffix.
func TestLongNames(t *testing.T) {
	seen := map[string]string{}
	long := strings.Repeat("a", 30) + "-" + strings.Repeat("b", 12)
	for _, release := range []string{long + "-tandem-1", long + "-tandem-2", long + "-1", long + "-2"} {
		objects, _, err := renderAs(release, namespace, parse(t, `certificates: {mode: job}`))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			if bad := validation.IsDNS1123Label(o.Name); len(bad) > 0 {
				t.Errorf("%s of %s: %v", &o, release, bad)
			}
			if other := seen[o.String()]; other != "" {
				t.Errorf("%s is of %s and %s", &o, other, release)
			}
			seen[o.String()] = release
		}
	}
}
