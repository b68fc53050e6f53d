package route

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// point is one virtual node.
type point struct {
	hash uint64
	node int32
}

type ring struct {
	nodes  []Node
	class  []int32 // of nodes, as classes number them
	points []point // by hash, then by the node's name
	sorted []int32 // the nodes' indices by name
}

// classes numbers numerics classes, from 1, in the order in which they are met; the
// empty one is anyClass. Decisions compare numbers, a thousand nodes' at a time.
type classes map[string]int32

const anyClass = 0

func (c classes) number(class string) int32 {
	if class == "" {
		return anyClass
	}
	n, ok := c[class]
	if !ok {
		n = int32(len(c) + 1)
		c[class] = n
	}
	return n
}

func newRing(nodes []Node, known classes) ring {
	r := ring{nodes: slices.Clone(nodes), points: make([]point, 0, len(nodes)*virtualNodes)}
	var b []byte
	for i, n := range nodes {
		r.class = append(r.class, known.number(n.Class))
		for v := range uint32(virtualNodes) {
			b = binary.LittleEndian.AppendUint32(append(b[:0], n.Name...), v)
			r.points = append(r.points, point{hash: xxhash.Sum64(b), node: int32(i)})
		}
	}
	r.sorted = make([]int32, len(nodes))
	for i := range r.sorted {
		r.sorted[i] = int32(i)
	}
	slices.SortFunc(r.sorted, func(a, b int32) int { return strings.Compare(nodes[a].Name, nodes[b].Name) })
	slices.SortFunc(r.points, func(a, b point) int {
		if c := cmp.Compare(a.hash, b.hash); c != 0 {
			return c
		}
		return strings.Compare(nodes[a.node].Name, nodes[b.node].Name)
	})
	return r
}

// search is the first point at or after the key.
func (r *ring) search(key kvcache.Hash) int {
	// Mixed once more: block hashes and node names share one hash function.
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(key))
	want := xxhash.Sum64(b[:])
	lo, hi := 0, len(r.points)
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); r.points[mid].hash < want {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// at wraps around.
func (r *ring) at(i int) point {
	if i >= len(r.points) {
		i -= len(r.points)
	}
	return r.points[i]
}

// home is the first usable node of the class at or after the key that is below
// the bound on load; -1: nobody is usable. It says why it is not the first.
func (s *side) home(key kvcache.Hash) (int, Reason) {
	bound := s.bound()
	if bound == 0 {
		return -1, ReasonNoDecode
	}
	reason, at := ReasonPrefix, s.search(key)
	for i := range s.points {
		n := int(s.at(at + i).node)
		switch {
		case !s.fits(n):
			if reason == ReasonPrefix {
				reason = ReasonHealth
			}
		case s.states[n].Load >= bound:
			reason = ReasonLoad
		default:
			return n, reason
		}
	}
	return -1, ReasonNoDecode
}

// follow appends to dst the nodes after the key that may stand in for those in
// it, within the load bound first, until there are MaxPrefill since start.
func (s *side) follow(key kvcache.Hash, dst []int, start int) []int {
	bound := s.bound()
	if bound == 0 {
		return dst
	}
	at := s.search(key)
	for _, within := range [...]bool{true, false} {
		for i := range s.points {
			if len(dst)-start == MaxPrefill {
				return dst
			}
			n := int(s.at(at + i).node)
			if s.fits(n) && (s.states[n].Load < bound) == within && !slices.Contains(dst[start:], n) {
				dst = append(dst, n)
			}
		}
	}
	return dst
}

// bound is loadBound of the side, counted once a decision.
func (s *side) bound() int {
	if s.most < 0 {
		s.most = loadBound(s.states, s.ring.class, s.class)
	}
	return s.most
}

// loadBound is the load that no usable node with room may exceed once it has taken
// the request, 0 when there is none. Only nodes of the class
// count, where one is given. Some usable node is always below it: it is above the mean.
func loadBound(states []State, of []int32, class int32) int {
	usable, load := 0, 0
	for i := range states {
		if s := &states[i]; s.Usable && !s.Full && (class == anyClass || of[i] == class) {
			usable++
			load += max(s.Load, 0)
		}
	}
	if usable == 0 {
		return 0
	}
	return int(math.Ceil(LoadBound * float64(load+1) / float64(usable)))
}
