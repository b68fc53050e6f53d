package route

import (
	"errors"
	"fmt"
	"strings"
)

// Policy is a way to choose nodes.
type Policy uint8

// Policies. The zero value is the one to use; the others are for comparison, and
// for traffic that knows better.
const (
	Prefix         Policy = iota // predicted time to the first token, over consistent hashing
	ConsistentHash               // of the prompt's leading blocks, with bounded loads
	LeastLoad                    // the node with the fewest requests
	PowerOfTwo                   // the lesser loaded of two drawn at random
	RoundRobin                   // one after the other
	Session                      // consistent hashing of the client's session
)

var policies = [...]string{"prefix", "consistent_hash", "least_load", "power_of_two", "round_robin", "session"}

// Policies are the names that ParsePolicy knows.
func Policies() string { return strings.Join(policies[:], ", ") }

func (p Policy) String() string { return policies[p] }

// ErrPolicy says that a name is no policy's.
var ErrPolicy = errors.New("route: no such policy")

// ParsePolicy finds a policy by its name.
func ParsePolicy(name string) (Policy, error) {
	for i, n := range policies {
		if n == name {
			return Policy(i), nil
		}
	}
	return 0, fmt.Errorf("%w: %q; want one of %s", ErrPolicy, name, Policies())
}

// byPolicy is the choice of the policies that do not predict; -1: nobody is
// usable.
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

// byName is the n-th fitting node in the order of names.
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
