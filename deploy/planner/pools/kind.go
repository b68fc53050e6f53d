package pools

import (
	"cmp"
	"fmt"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// kind is a kind of fleets: the profile of its nodes, and that of its prefill nodes if those are of
// another kind.
type kind struct {
	*profile.Profile
	prefill *profile.Profile // nil: as the others
}

// ofPrefill returns the profile of prefill nodes.
func (k kind) ofPrefill() *profile.Profile { return cmp.Or(k.prefill, k.Profile) }

// profiles returns the profiles of the kind.
func (k kind) profiles() []*profile.Profile {
	if k.prefill == nil {
		return []*profile.Profile{k.Profile}
	}
	return []*profile.Profile{k.prefill, k.Profile}
}

// title returns the names of the nodes.
func (k kind) title() string {
	if k.prefill == nil {
		return k.Node.Name
	}
	return fmt.Sprintf("%s (prefill) and %s (decode)", k.prefill.Node.Name, k.Node.Name)
}

// sources returns the sources of the step times, with their likely errors.
func (k kind) sources() string {
	first, second := k.ofPrefill().Basis(), k.Basis()
	if first == second {
		return first
	}
	return fmt.Sprintf("%s for prefill nodes, %s for decode nodes", first, second)
}

// estimated reports whether step times are an estimate.
func (k kind) estimated() bool {
	return k.Step.Source == profile.Estimate || k.ofPrefill().Step.Source == profile.Estimate
}

// likelyError returns the larger error of the step times.
func (k kind) likelyError() float64 { return max(k.Step.Error, k.ofPrefill().Step.Error) }

// unpriced returns the name of a kind of nodes whose price is not known; empty: there is none.
func (k kind) unpriced() string {
	for _, p := range k.profiles() {
		if p.Node.Price == 0 {
			return p.Node.Name
		}
	}
	return ""
}

// hourly returns the price of an hour of a fleet, without overhead.
func (k kind) hourly(f planner.Fleet) float64 {
	if k.prefill == nil {
		return float64(f.Nodes()) * k.Node.Price
	}
	return float64(f.Prefill)*k.prefill.Node.Price + float64(f.Decode)*k.Node.Price
}

// node returns the kind as the planner's formulas need it. overhead is the share that is added to
// prices.
func (k kind) node(overhead float64) planner.Node {
	n := node(k.Profile)
	n.Price *= 1 + overhead
	if k.prefill != nil {
		other := node(k.prefill)
		other.Price *= 1 + overhead
		n.Name, n.Prefill = k.title(), &other
	}
	return n
}
