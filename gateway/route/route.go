// Package route decides where a request goes: the decode node that owns it and
// the prefill nodes that may compute its prompt, best first.
//
// A request's key is the hash of its leading token blocks. Nodes sit on a ring
// at positions that follow from their own names alone; the first node at or
// after the key that is usable and not loaded beyond the bound takes the
// request (consistent hashing with bounded loads). So prompts that begin alike
// meet the same node's cache, a node's loss moves only the keys it had, and a
// popular prefix spreads to the next nodes of the ring instead of drowning one.
//
// Invariant: the choice depends on the names of the nodes, the request and the
// view given, never on the order in which nodes are listed nor on earlier
// choices; gateways with equal views choose alike. No node is given more than
// LoadBound times the mean load of the usable ones, rounded up.
//
// The package does not know what is cached where, does not measure load, keeps
// no state between picks, and does not send anything.
package route

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

const (
	// LoadBound is how far above the mean a node's load may be. 1.25 keeps
	// queues short while most requests still meet their prefix; see smaller
	// values as round robin, larger ones as pure hashing.
	LoadBound = 1.25

	// MaxPrefill is how many prefill nodes a decision ranks: the best, and two
	// to fall back to before decode computes the prompt itself.
	MaxPrefill = 3

	// virtualNodes is how often each node stands on the ring. Shares of the key
	// space then vary by about 1/sqrt(128), 9 %, which the load bound evens out.
	virtualNodes = 128
)

// keyBlocks are the numbers of leading blocks that may key the ring: the
// largest that the prompt fills is used. The last (16 blocks of 16 tokens) looks
// past a short shared system prompt, so that conversations spread. The smaller
// ones let a short conversation keep its key as it grows: it changes twice at
// most, while there is little in the cache to leave behind.
var keyBlocks = [...]int{16, 4, 1}

// Reason says why a decision is as it is.
type Reason string

// Reasons. The first four are about the decode node, the others about prefill.
const (
	ReasonPrefix    Reason = "prefix"     // the ring's first choice for the key
	ReasonLoad      Reason = "load"       // that one is above the load bound
	ReasonHealth    Reason = "health"     // that one is not usable
	ReasonNoDecode  Reason = "no_decode"  // nobody is usable
	ReasonRemote    Reason = "remote"     // prefill elsewhere
	ReasonShort     Reason = "short"      // too few uncached tokens to be worth a transfer
	ReasonNoPrefill Reason = "no_prefill" // no usable prefill node of the decode node's class
)

// Node is a member of the fleet as the ring knows it.
type Node struct {
	Name  string // stable over restarts, such as the rpc address; unique in its list
	Class string // numerics class: KV moves only between equal ones
}

// State is what is known of a node when a request comes.
type State struct {
	Usable bool
	Load   int // requests it has in hand; negative counts as none
}

// View is the fleet at one moment, by index into the lists given to New.
type View struct {
	Decode  []State
	Prefill []State
}

// Request is what routing knows of a request.
type Request struct {
	Key kvcache.Hash // of Key
	// Uncached is the number of prompt tokens to compute where nothing is cached.
	Uncached int
	// Held is how many leading tokens of the prompt a decode node, by index, is
	// known to hold; nil: nothing is known of any.
	Held func(decode int) int
	// MinRemote is the number of uncached tokens from which prefill elsewhere is
	// worth the transfer.
	MinRemote int
}

// Decision is a choice of nodes, as indices into the lists given to New.
type Decision struct {
	Decode        int   // -1: nobody is usable
	Prefill       []int // best first; empty: decode computes the prompt
	Reason        Reason
	PrefillReason Reason
}

// Key is the ring key of a prompt: of its block hashes, or of the tokens
// themselves when they do not fill a block.
func Key(root kvcache.Hash, hashes []kvcache.Hash, tokens []int32) kvcache.Hash {
	for _, n := range keyBlocks {
		if len(hashes) >= n {
			return hashes[n-1]
		}
	}
	var d xxhash.Digest
	d.ResetWithSeed(uint64(root))
	var b [4]byte
	for _, t := range tokens {
		binary.LittleEndian.PutUint32(b[:], uint32(t))
		d.Write(b[:])
	}
	return kvcache.Hash(d.Sum64())
}

// Table is a fleet's rings. It is immutable.
type Table struct {
	decode, prefill ring
}

// New builds the rings of a fleet.
func New(decode, prefill []Node) *Table {
	return &Table{decode: newRing(decode), prefill: newRing(prefill)}
}

// Decode is the list given to New.
func (t *Table) Decode() []Node { return t.decode.nodes }

// Prefill is the list given to New.
func (t *Table) Prefill() []Node { return t.prefill.nodes }

// Pick decides. The decision's Prefill is appended to dst, which may be nil. v
// must have an entry for every node of the table.
func (t *Table) Pick(r Request, v View, dst []int) Decision {
	d := Decision{Decode: -1, Reason: ReasonNoDecode, PrefillReason: ReasonNoPrefill}
	d.Decode, d.Reason = t.pickDecode(r.Key, v.Decode)
	if d.Decode < 0 {
		return d
	}
	uncached := r.Uncached
	if r.Held != nil {
		uncached -= r.Held(d.Decode)
	}
	if uncached < r.MinRemote {
		d.PrefillReason = ReasonShort
		return d
	}
	d.Prefill = t.rankPrefill(r.Key, v.Prefill, t.decode.nodes[d.Decode].Class, dst)
	if len(d.Prefill) > 0 {
		d.PrefillReason = ReasonRemote
	}
	return d
}

func (t *Table) pickDecode(key kvcache.Hash, states []State) (int, Reason) {
	bound := loadBound(states, nil, "")
	if bound == 0 {
		return -1, ReasonNoDecode
	}
	reason := ReasonPrefix
	at := t.decode.search(key)
	for i := range t.decode.points {
		n := int(t.decode.at(at + i).node)
		switch {
		case !states[n].Usable:
			if reason == ReasonPrefix {
				reason = ReasonHealth
			}
		case states[n].Load >= bound:
			reason = ReasonLoad
		default:
			return n, reason
		}
	}
	return -1, ReasonNoDecode
}

// rankPrefill appends up to MaxPrefill usable nodes of the class in ring order,
// those within the load bound first.
func (t *Table) rankPrefill(key kvcache.Hash, states []State, class string, dst []int) []int {
	bound := loadBound(states, t.prefill.nodes, class)
	if bound == 0 {
		return dst
	}
	start, at := len(dst), t.prefill.search(key)
	for _, within := range [...]bool{true, false} {
		for i := range t.prefill.points {
			if len(dst)-start == MaxPrefill {
				return dst
			}
			n := int(t.prefill.at(at + i).node)
			s := states[n]
			if s.Usable && t.prefill.nodes[n].Class == class && (s.Load < bound) == within && !slices.Contains(dst[start:], n) {
				dst = append(dst, n)
			}
		}
	}
	return dst
}

// loadBound is the load that no usable node may exceed once it has taken the
// request, 0 when nobody is usable. With nodes given, only those of the class
// count. Some usable node is always below it: it is above the mean.
func loadBound(states []State, nodes []Node, class string) int {
	usable, load := 0, 0
	for i, s := range states {
		if s.Usable && (nodes == nil || nodes[i].Class == class) {
			usable++
			load += max(s.Load, 0)
		}
	}
	if usable == 0 {
		return 0
	}
	return int(math.Ceil(LoadBound * float64(load+1) / float64(usable)))
}

// point is one virtual node.
type point struct {
	hash uint64
	node int32
}

type ring struct {
	nodes  []Node
	points []point // by hash, then by the node's name
}

func newRing(nodes []Node) ring {
	r := ring{nodes: slices.Clone(nodes), points: make([]point, 0, len(nodes)*virtualNodes)}
	var b []byte
	for i, n := range nodes {
		for v := range uint32(virtualNodes) {
			b = binary.LittleEndian.AppendUint32(append(b[:0], n.Name...), v)
			r.points = append(r.points, point{hash: xxhash.Sum64(b), node: int32(i)})
		}
	}
	slices.SortFunc(r.points, func(a, b point) int {
		switch {
		case a.hash < b.hash:
			return -1
		case a.hash > b.hash:
			return 1
		case nodes[a.node].Name < nodes[b.node].Name:
			return -1
		case nodes[a.node].Name > nodes[b.node].Name:
			return 1
		}
		return 0
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
