package route

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Policy is a rule by which nodes are chosen.
type Policy uint8

// Policies. The zero value is the default; the others are for comparison, and for traffic whose
// senders know more than the gateway.
const (
	Prefix         Policy = iota // predicted time to the first token, over consistent hashing
	ConsistentHash               // of the prompt's leading blocks, with bounded loads
	LeastLoad                    // the node with the fewest requests
	PowerOfTwo                   // the lesser loaded of two drawn at random
	RoundRobin                   // one after the other
	Session                      // consistent hashing of the client's session
)

var policies = [...]string{"prefix", "consistent_hash", "least_load", "power_of_two", "round_robin", "session"}

// Policies returns the names of all policies.
func Policies() string { return strings.Join(policies[:], ", ") }

func (p Policy) String() string { return policies[p] }

// ErrPolicy reports a name of no policy.
var ErrPolicy = errors.New("route: no such policy")

// ParsePolicy returns the policy of that name.
func ParsePolicy(name string) (Policy, error) {
	if i := slices.Index(policies[:], name); i >= 0 {
		return Policy(i), nil
	}
	return 0, fmt.Errorf("%w: %q; want one of %s", ErrPolicy, name, Policies())
}

// byPolicy returns the choice of a policy other than Prefix, or -1 if no node is usable.
func (s *side) byPolicy(r *Request) (int, Reason) {
	if r.Policy == ConsistentHash || r.Policy == Session {
		return s.home(r.Key)
	}
	usable := 0
	for i := range s.states {
		if s.fits(i) {
			usable++
		}
	}
	if usable == 0 {
		return -1, ReasonNoDecode
	}
	switch r.Policy {
	case RoundRobin:
		return s.byName(int(r.Turn % uint64(usable))), ReasonPolicy
	case PowerOfTwo:
		a := s.byName(int(uint32(r.Draw) % uint32(usable)))
		b := s.byName(int(uint32(r.Draw>>32) % uint32(usable)))
		if s.states[b].Load < s.states[a].Load {
			a = b
		}
		return a, ReasonPolicy
	}
	best := -1
	for i := range s.states {
		if !s.fits(i) {
			continue
		}
		if best < 0 || s.states[i].Load < s.states[best].Load ||
			s.states[i].Load == s.states[best].Load && s.nodes[i].Name < s.nodes[best].Name {
			best = i
		}
	}
	return best, ReasonPolicy
}

// byName returns the n-th node that fits, in the order of names.
func (s *side) byName(n int) int {
	for _, i := range s.sorted {
		if s.fits(int(i)) {
			if n == 0 {
				return int(i)
			}
			n--
		}
	}
	return -1
}
