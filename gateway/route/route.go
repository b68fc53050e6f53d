// Package route decides where a request goes: the decode node that owns it and
// the prefill nodes that may compute its prompt, best first.
//
// A request's key is the hash of its leading token blocks. Nodes sit on a ring
// at positions that follow from their own names alone; the first node at or
// after the key that is usable and not loaded beyond the bound is the request's
// home (consistent hashing with bounded loads). So prompts that begin alike meet
// the same node's cache, a node's loss moves only the keys it had, and a popular
// prefix spreads to the next nodes of the ring instead of drowning one. What is
// known of caches, queues and speeds then sharpens this: each node's time to the
// first token is predicted (queue, tokens to compute, transfer that computing
// does not hide, load), and a node that beats the home by more than a margin
// gets the request. A decode node without room for the request's KV gets no new
// one.
//
// Invariant: the choice depends on the names of the nodes, the request and the
// view given, never on the order in which nodes are listed nor on earlier
// choices; gateways with equal views choose alike. Where nothing is known but
// loads, no node is given more than LoadBound times the mean of the usable ones,
// rounded up.
//
// The package does not measure, keeps no state between picks but what callers
// put into an Index, and does not send anything.
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

// Reasons. The first seven are about the decode node, the others about prefill.
const (
	ReasonPrefix    Reason = "prefix"     // the ring's first choice for the key
	ReasonLoad      Reason = "load"       // that one is above the load bound, or has a longer queue
	ReasonHealth    Reason = "health"     // that one is not usable
	ReasonCached    Reason = "cached"     // another one holds more of the prompt
	ReasonPolicy    Reason = "policy"     // a policy that looks at neither
	ReasonNoDecode  Reason = "no_decode"  // nobody is usable
	ReasonNoRoom    Reason = "no_room"    // no usable node has KV memory for the request
	ReasonRemote    Reason = "remote"     // prefill elsewhere
	ReasonLocal     Reason = "local"      // the decode node is predicted to be faster
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
	Local  bool // decode: its last prompt of a size worth a transfer was computed there
	Load   int  // requests it has in hand; negative counts as none
	Held   int  // leading tokens of the prompt in its cache
	Queued int  // prompt tokens that wait to be computed there
	// Prefill: prompts with the least work left are computed first, and how many of
	// Queued belong to prompts of at most each length.
	ShortFirst bool
	Lengths    lengths.Queue
	Rate       float64 // prompt tokens it computes per second; 0: not known
	StepTokens int     // most tokens of a step; 0: not known
	Memory     Memory  // decode: with what the gateway's own decisions took since the heartbeat
	Full       bool    // decode: Pick found no room for the request
}

// View is the fleet at one moment, by index into the lists given to New.
type View struct {
	Decode  []State
	Prefill []State
}

// Request is what routing knows of a request.
type Request struct {
	Policy Policy
	Key    kvcache.Hash // of Key
	Demand Demand       // of KV memory; zero: of a request that may go to a full node
	// Uncached is the number of prompt tokens to compute where nothing is cached.
	Uncached int
	// MinRemote is the number of uncached tokens from which prefill elsewhere is
	// worth the transfer; 1 or less: it always is, whatever is predicted.
	MinRemote int
	Turn      uint64 // RoundRobin: grows by one with each request
	Draw      uint64 // PowerOfTwo, and Prefix where Shared: random bits
	// Shared says that other gateways choose by the same views: of nodes that are about
	// as good one is drawn, or all gateways would choose the best until they hear of it.
	Shared bool
}

// Decision is a choice of nodes, as indices into the lists given to New.
type Decision struct {
	Decode        int   // -1: nobody is usable, or nobody has room
	Prefill       []int // best first; empty: decode computes the prompt
	Reason        Reason
	PrefillReason Reason
	// What prompt computation is predicted to take on the decode node and on the
	// first prefill node, transfer and queues included; 0: not known.
	Local, Remote time.Duration
	// First is that time for the node that is to compute the prompt: what a client
	// is predicted to wait for the first token. Negative: its speed is not known.
	First time.Duration
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
	known := classes{}
	return &Table{decode: newRing(decode, known), prefill: newRing(prefill, known)}
}

// Decode is the list given to New.
func (t *Table) Decode() []Node { return t.decode.nodes }

// Prefill is the list given to New.
func (t *Table) Prefill() []Node { return t.prefill.nodes }

// Pick decides. The decision's Prefill is appended to dst, which may be nil. v
// must have an entry for every node of the table.
func (t *Table) Pick(r Request, v View, dst []int) Decision {
	d := Decision{Decode: -1, Reason: ReasonNoDecode, PrefillReason: ReasonNoPrefill, First: -1}
	full(v.Decode, &r)
	var far remotes
	decode := side{ring: &t.decode, states: v.Decode, most: -1}
	if r.Policy == Prefix {
		far.predict(&t.prefill, v.Prefill, &r)
		d.Decode, d.Reason = decode.nearest(&r, func(i int) float64 { return decode.first(&r, i, &far) })
	} else {
		d.Decode, d.Reason = decode.byPolicy(&r)
	}
	if d.Decode < 0 {
		if slices.ContainsFunc(v.Decode, func(s State) bool { return s.Usable && s.Full }) {
			d.Reason = ReasonNoRoom
		}
		return d
	}
	state := v.Decode[d.Decode]
	if state.Rate > 0 {
		d.First = seconds(decode.local(&r, d.Decode))
	}
	need := r.Uncached - state.Held
	if need < r.MinRemote {
		d.PrefillReason = ReasonShort
		return d
	}
	prefill := side{ring: &t.prefill, states: v.Prefill, class: t.decode.class[d.Decode], most: -1}
	var best int
	if r.Policy == Prefix {
		best, _ = prefill.nearest(&r, func(i int) float64 { return prefill.price(&r, i) })
	} else {
		best, _ = prefill.byPolicy(&r)
	}
	if best < 0 {
		return d
	}
	known := v.Prefill[best].Rate > 0
	remote := prefill.compute(&r, best) + transfer(need, v.Prefill[best].Rate)
	if state.Rate > 0 && known { // both are known: the faster one
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
