// Package route chooses the decode node of a request, and the prefill nodes that may compute its
// prompt, best first.
//
// A request's key is the hash of its leading token blocks. Nodes are on a ring, at positions that
// depend on their names only. A request's home is the first node at or after the key that is usable
// and not loaded beyond the bound (consistent hashing with bounded loads). So prompts with the same
// beginning use the same node's cache, the loss of a node moves only its own keys, and a popular
// prefix spreads to the next nodes of the ring instead of overloading one. Known caches, queues and
// speeds refine this: each node's time to the first token is predicted from its queue, the tokens
// to compute, the transfer that computing does not hide, and its load. A node that is faster than
// the home by more than a margin gets the request. A decode node without room for the request's KV
// does not get it.
//
// Invariant: the choice depends on the names of the nodes, the request and the view only, not on
// the order of nodes or on earlier choices, so that gateways with equal views choose alike. If only
// loads are known, no node gets more than LoadBound times the mean of the usable nodes, rounded up.
//
// The package does not measure, and sends nothing. An Index is its only state between picks.
package route

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/lengths"
)

const (
	// LoadBound is the ratio of a node's load to the mean that is allowed. 1.25 keeps queues short
	// while most requests still go to their prefix. Smaller values approach round robin, larger ones
	// pure hashing.
	LoadBound = 1.25

	// MaxPrefill is the number of prefill nodes in a decision: the best, and two substitutes that are
	// tried before the decode node computes the prompt itself.
	MaxPrefill = 3

	// virtualNodes is the number of points of each node on the ring. Shares of the key space then vary
	// by about 1/sqrt(128), or 9 %, which the load bound evens out.
	virtualNodes = 128
)

// keyBlocks are the numbers of leading blocks that may be the key; the largest that the prompt
// fills is used. 16 blocks of 16 tokens reach past a short shared system prompt, so that
// conversations spread. The smaller numbers let a short conversation keep its key as it grows. The
// key changes at most twice, while the cache has little of the conversation.
var keyBlocks = [...]int{16, 4, 1}

// Reason is the reason of a decision.
type Reason string

// Reasons. The first seven are about the decode node, the others about prefill.
const (
	ReasonPrefix    Reason = "prefix"     // it is the ring's first choice for the key
	ReasonLoad      Reason = "load"       // the first choice is above the load bound, or has a longer queue
	ReasonHealth    Reason = "health"     // the first choice is not usable
	ReasonCached    Reason = "cached"     // it holds more of the prompt than the first choice
	ReasonPolicy    Reason = "policy"     // the policy uses neither prefixes nor queues
	ReasonNoDecode  Reason = "no_decode"  // no node is usable
	ReasonNoRoom    Reason = "no_room"    // no usable node has KV memory for the request
	ReasonRemote    Reason = "remote"     // a prefill node computes the prompt
	ReasonLocal     Reason = "local"      // the decode node is predicted to be faster
	ReasonShort     Reason = "short"      // too few uncached tokens to be worth a transfer
	ReasonNoPrefill Reason = "no_prefill" // no usable prefill node of the decode node's class
)

// Node is a node on a ring.
type Node struct {
	Name  string // stable over restarts, such as the rpc address; unique in its list
	Class string // numerics class: KV moves only between equal ones
	Shown string // name for people, in explanations only; empty: Name
}

// State is the known state of a node. It has 56 bytes, because a decision reads those of up to ten
// thousand nodes.
type State struct {
	Usable     bool
	Local      bool    // decode: its last prompt of a size worth a transfer was computed there
	ShortFirst bool    // prefill: prompts with the least work left are computed first
	Full       bool    // decode: Pick found no room for the request
	Load       int32   // its requests; negative counts as none
	Held       int32   // leading tokens of the prompt in its cache
	Queued     int32   // prompt tokens that wait to be computed
	Rate       float64 // prompt tokens it computes per second; 0: not known
	Memory     Memory  // decode: less the blocks of the gateway's own decisions since the heartbeat
	Lengths    Lengths // where ShortFirst, Queued by length
	StepTokens int32   // most tokens of a step; 0: not known
}

// Lengths has the tokens of queued prompts of at most each length, as lengths.Queue has.
type Lengths [lengths.N]int32

// View has the states of all nodes, by index into the lists given to New.
type View struct {
	Decode  []State
	Prefill []State

	// Outline, if not nil, makes Pick read few states. Then Held of the states is set by Pick, from
	// DecodeHeld and PrefillHeld.
	Outline                 *Outline
	DecodeHeld, PrefillHeld Holdings
}

// Request is a request to be routed.
type Request struct {
	Policy Policy
	Key    kvcache.Hash // of Key
	Demand Demand       // for KV memory; zero: a full node may get the request
	// Uncached is the number of prompt tokens to compute if nothing is cached.
	Uncached int
	// MinRemote is the number of uncached tokens from which remote prefill is worth the transfer; 1 or
	// less: it always is, whatever is predicted.
	MinRemote int
	Turn      uint64 // RoundRobin: grows by one with each request
	Draw      uint64 // PowerOfTwo, and Prefix with Shared: random bits
	// Shared reports that other gateways choose by the same views. Then a random one of about equally
	// good nodes is chosen, because otherwise all gateways would choose the same node until its next
	// heartbeat.
	Shared bool
}

// Decision is a choice of nodes, as indices into the lists given to New.
type Decision struct {
	Decode        int   // -1: no node is usable, or none has room
	Prefill       []int // best first; empty: the decode node computes the prompt
	Reason        Reason
	PrefillReason Reason
	// Local and Remote are the predicted times until the prompt is computed by the decode node and by
	// the first prefill node, with transfer and queues; 0: not known.
	Local, Remote time.Duration
	// First is the predicted time to the first token, which is Local or Remote; negative: not known.
	First time.Duration
}

// Key returns the ring key of a prompt, from its block hashes or, if it does not fill a block, from
// its tokens.
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

// Table has the rings of a fleet. It is immutable.
type Table struct {
	decode, prefill ring
}

// New builds the rings of a fleet.
func New(decode, prefill []Node) *Table {
	known := classes{}
	return &Table{decode: newRing(decode, known), prefill: newRing(prefill, known)}
}

// Pick returns the decision for a request. Its Prefill is appended to dst, which may be nil. v must
// have an entry for every node of the table.
func (t *Table) Pick(r Request, v View, dst []int) Decision {
	d := Decision{Decode: -1, Reason: ReasonNoDecode, PrefillReason: ReasonNoPrefill, First: -1}
	var far remotes
	decode := side{ring: &t.decode, states: v.Decode, most: -1, far: &far}
	prefill := side{ring: &t.prefill, states: v.Prefill, most: -1}
	switch o := v.Outline; {
	case o == nil:
	case r.Policy != Prefix || t.prefill.kinds > len(far.best):
		v.Fill()
		o.unmarked()
	default:
		decode.outline, decode.held, prefill.outline, prefill.held = &o.decode, &v.DecodeHeld, &o.prefill, &v.PrefillHeld
	}
	if r.Policy == Prefix {
		far.predict(&prefill, &r)
		decode.surveyDecode(&r)
		d.Decode, d.Reason = decode.nearest(&r)
	} else {
		full(v.Decode, &r)
		d.Decode, d.Reason = decode.byPolicy(&r)
	}
	if d.Decode < 0 {
		if slices.ContainsFunc(v.Decode, func(s State) bool { return s.Usable && s.Full }) {
			d.Reason = ReasonNoRoom
		}
		return d
	}
	decode.hold(d.Decode)
	state := &v.Decode[d.Decode]
	if state.Rate > 0 {
		d.First = seconds(decode.local(&r, d.Decode))
	}
	need := r.Uncached - int(state.Held)
	if need < r.MinRemote {
		d.PrefillReason = ReasonShort
		return d
	}
	prefill.class = t.decode.class[d.Decode]
	var best int
	if r.Policy == Prefix {
		prefill.surveyPrefill(&r, &far)
		best, _ = prefill.nearest(&r)
	} else {
		best, _ = prefill.byPolicy(&r)
	}
	if best < 0 {
		return d
	}
	prefill.hold(best)
	known := v.Prefill[best].Rate > 0
	remote := prefill.compute(&r, best) + transfer(need, v.Prefill[best].Rate)
	if state.Rate > 0 && known { // both are known: choose the faster one
		local := decode.local(&r, d.Decode)
		d.Local, d.Remote = seconds(local), seconds(remote)
		if r.Policy == Prefix && r.MinRemote > 1 && !decode.forbidden(&r, d.Decode) && staysLocal(state.delays(local), remote, state.Local) {
			d.PrefillReason = ReasonLocal
			return d
		}
	}
	if d.PrefillReason, d.First = ReasonRemote, -1; known {
		d.First = seconds(remote)
	}
	start := len(dst)
	d.Prefill = prefill.follow(r.Key, append(dst, best), start)
	return d
}
