package route

import (
	"cmp"
	"encoding/binary"
	"math"
	"math/bits"
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
	class  []int32 // numerics class of each node, as numbered by classes
	points []point // sorted by hash, then by the node's name
	starts []int32 // index of the first point whose hash has at least the place's leading bits
	shift  int     // of a hash, to its leading bits
	sorted []int32 // indices of nodes, sorted by name
	rank   []int32 // index into sorted, by node
	all    []int32 // indices of nodes
	kinds  int     // number of classes
}

// classes numbers numerics classes from 1. The empty class is anyClass. A decision compares the
// numbers of up to a thousand nodes, which is faster than comparing strings.
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
	r.all, r.rank = slices.Clone(r.sorted), make([]int32, len(nodes))
	slices.Sort(r.all)
	for at, i := range r.sorted {
		r.rank[i] = int32(at)
	}
	kinds := slices.Clone(r.class)
	slices.Sort(kinds)
	r.kinds = len(slices.Compact(kinds))
	slices.SortFunc(r.points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(r.rank[a.node], r.rank[b.node]))
	})
	r.index()
	return r
}

// index fills starts, with a place for each one or two points.
func (r *ring) index() {
	leading := max(0, bits.Len(uint(len(r.points)))-1)
	r.starts, r.shift = make([]int32, 1<<leading), 64-leading
	at := 0
	for b := range r.starts {
		for at < len(r.points) && r.points[at].hash>>r.shift < uint64(b) {
			at++
		}
		r.starts[b] = int32(at)
	}
}

// search returns the index of the first point at or after the key.
func (r *ring) search(key kvcache.Hash) int {
	// The key is hashed again because block hashes and node names use the same hash function.
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(key))
	hash := xxhash.Sum64(b[:])
	at := int(r.starts[hash>>r.shift])
	for at < len(r.points) && r.points[at].hash < hash {
		at++
	}
	return at
}

// point returns the i-th point, modulo their number; i is below twice that.
func (r *ring) point(i int) point {
	if i >= len(r.points) {
		i -= len(r.points)
	}
	return r.points[i]
}

// place returns search of the decision's key.
func (s *side) place(key kvcache.Hash) int {
	if s.found == 0 {
		s.found = 1 + s.search(key)
	}
	return s.found - 1
}

// home returns the first usable node of the class at or after the key whose load is below the
// bound, or -1 if no node is usable. The reason reports why nodes before it were skipped.
func (s *side) home(key kvcache.Hash) (int, Reason) {
	bound := s.bound()
	if bound == 0 {
		return -1, ReasonNoDecode
	}
	reason, at := ReasonPrefix, s.place(key)
	for i := range s.points {
		n := int(s.point(at + i).node)
		switch {
		case !s.fits(n):
			if reason == ReasonPrefix {
				reason = ReasonHealth
			}
		case int(s.states[n].Load) >= bound:
			reason = ReasonLoad
		default:
			return n, reason
		}
	}
	return -1, ReasonNoDecode
}

// follow appends the nodes after the key to dst, as substitutes of those in dst[start:], until
// there are MaxPrefill. Nodes within the load bound come first.
func (s *side) follow(key kvcache.Hash, dst []int, start int) []int {
	bound := s.bound()
	if bound == 0 {
		return dst
	}
	at := s.place(key)
	for _, within := range [...]bool{true, false} {
		for i := range s.points {
			if len(dst)-start == MaxPrefill {
				return dst
			}
			n := int(s.point(at + i).node)
			if s.fits(n) && (int(s.states[n].Load) < bound) == within && !slices.Contains(dst[start:], n) {
				dst = append(dst, n)
			}
		}
	}
	return dst
}

// bound returns the load that no usable node with room may exceed after it got the request, or 0 if
// there is no such node. Because the bound is above the mean, some usable node is always below it.
// It is computed once per decision.
func (s *side) bound() int {
	if s.most >= 0 {
		return s.most
	}
	s.usable, s.load = 0, 0
	for i := range s.states {
		if s.fits(i) {
			s.usable++
			s.load += max(int(s.states[i].Load), 0)
		}
	}
	s.setBound()
	return s.most
}

// setBound sets the result of bound for the nodes of the survey.
func (s *side) setBound() {
	if s.most = 0; s.usable > 0 {
		s.most = int(math.Ceil(LoadBound * float64(s.load+1) / float64(s.usable)))
	}
}
