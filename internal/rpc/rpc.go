// Package rpc carries frames between Tandem's nodes: one connection for each
// pair of nodes, on it length-prefixed frames of (type, stream, payload).
//
// Algorithm: a connection has one reading and one writing goroutine. Send
// encodes a frame into the connection's outbox, a buffer with a bound in bytes,
// and returns; the writer swaps that buffer for an empty one and writes
// everything that gathered meanwhile at once, so that many small frames cost
// one system call. The reader hands each payload to the Handler in place,
// without a copy. Both sides begin with a Hello, which settles the protocol
// version. A timer then sends a Ping in each idle direction and closes a connection
// from which nothing was read for the Silence bound. A listener with TLS reads the role
// in the peer's certificate and refuses the frames that frameTypes does not allow it.
//
// Invariant: a Handler sees the peer's Hello first, then the frames in the
// order in which the peer sent them, then Closed exactly once and nothing after
// it. It sees neither a handshake that fails nor a frame that its sender's role forbids.
//
// The package does not know what a request is, does not retry or resend
// anything (a frame that Send accepted may still be lost with its connection),
// and does not choose peers. Nothing in it waits for a slow peer: Send fails while
// the outbox is full.
package rpc

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// The protocol versions that this build speaks. A release that changes the
// meaning of frames raises Protocol by one and keeps ProtocolMin one below, so
// that a fleet can be upgraded node by node.
const (
	Protocol    = 1
	ProtocolMin = 1
)

// Bounds and their defaults; Options changes those that a node may choose.
const (
	// DefaultOutboxBytes: a frame is accepted while fewer bytes than this wait
	// to be written, so that up to this and one frame are held for a peer.
	// 16 MiB is 4,000 steps of 170 tokens, or a few of the longest prompts.
	DefaultOutboxBytes = 16 << 20
	// DefaultHeartbeat: how often an idle direction is filled with a Ping.
	DefaultHeartbeat = time.Second
	// DefaultSilence is how long nothing may arrive from a peer before its connection is
	// closed. A crashed process is noticed at once by its closed socket. The bound is for
	// frozen processes and lost machines, and must be longer than a stall of the scheduler.
	DefaultSilence = 6 * time.Second
	// StreamSilence replaces DefaultSilence between a gateway and a decode node
	// (SetSilence), so that a gateway that was stopped for some seconds keeps its streams.
	// A silent node loses its streams much earlier, see gateway/liveness.
	StreamSilence = 30 * time.Second
	// DefaultHandshakeTimeout bounds dialling, TLS and Hello, each.
	DefaultHandshakeTimeout = 5 * time.Second
	// DefaultCloseLinger is how long Close may take to send the last frames.
	DefaultCloseLinger = time.Second
	// DefaultBackoffMin and DefaultBackoffMax bound the time after a failed dial in which
	// Get repeats the error without dialling. It doubles with each further failure.
	DefaultBackoffMin = 100 * time.Millisecond
	DefaultBackoffMax = 5 * time.Second
	// DefaultMaxConns bounds the connections of one Serve and of one Pool.
	DefaultMaxConns = 4096
)

// VectorVersion identifies how nodes of this build make a vector of a prompt. Nodes of another
// version, or of none, get no Generate with pooling from its gateways.
const VectorVersion = 1

// Errors that callers see wrap one of these or the network's own error.
var (
	ErrClosed       = errors.New("rpc: connection closed by this side")
	ErrPeerClosed   = errors.New("rpc: connection closed by the peer")
	ErrSilent       = errors.New("rpc: peer is silent")
	ErrStalled      = errors.New("rpc: peer does not read")
	ErrOutboxFull   = errors.New("rpc: outbox is full")
	ErrFrameTooBig  = errors.New("rpc: frame exceeds its type's bound")
	ErrUnknownFrame = errors.New("rpc: unknown frame type")
	ErrBadPayload   = errors.New("rpc: payload does not match its frame type")
	ErrHandshake    = errors.New("rpc: handshake failed")
	ErrVersion      = errors.New("rpc: no common protocol version")
	ErrRefused      = errors.New("rpc: refused by the peer")
	ErrBackoff      = errors.New("rpc: not dialling yet after a failure")
	ErrTooManyConns = errors.New("rpc: too many connections")
	ErrForbidden    = errors.New("rpc: only gateways may send this")
)

// Type is the type of a frame's payload.
type Type uint8

// Frame types. The numbers are the wire contract: they are never reused.
const (
	FrameHello         Type = 1
	FrameGenerate      Type = 2
	FrameAccepted      Type = 3
	FrameTokens        Type = 4
	FrameEnd           Type = 5
	FrameCancel        Type = 6
	FramePrefill       Type = 7
	FrameQueued        Type = 8
	FrameGrantRequest  Type = 9
	FrameGrant         Type = 10
	FramePrefillDone   Type = 11
	FrameStats         Type = 12
	FrameBundleRequest Type = 13
	FrameBundle        Type = 14
	FrameDrain         Type = 15
	FramePing          Type = 16
	FramePong          Type = 17
	FrameLogProbs      Type = 18
	FramePromptProbs   Type = 19
	FrameLoadAdapter   Type = 20
	FrameUnloadAdapter Type = 21
	FrameAdapterDone   Type = 22
	FrameVector        Type = 23
)

// MaxFrame is the largest payload of any frame, in bytes: a Bundle, which
// carries a tokenizer (the largest in use have 33 MB).
const MaxFrame = 64 << 20

// The largest payloads of the other types, in bytes.
const (
	maxSmall  = 64 << 10 // fixed fields and short texts
	maxTokens = 1 << 20  // 43,690 tokens of one step
	maxGrant  = 4 << 20  // page lists of a million-token prompt
	maxPrompt = 16 << 20 // three million tokens of five bytes
)

// frameTypes is the table of all frame types.
var frameTypes = [...]struct {
	name string
	from sender               // peers that may send it to a listener
	max  int                  // payload, bytes
	new  func() proto.Message // nil: the payload is no message
}{
	FrameHello:         {"Hello", anyNode, maxSmall, func() proto.Message { return new(nodepb.Hello) }},
	FrameGenerate:      {"Generate", gatewayOnly, maxPrompt, func() proto.Message { return new(nodepb.Generate) }},
	FrameAccepted:      {"Accepted", anyNode, maxSmall, func() proto.Message { return new(nodepb.Accepted) }},
	FrameTokens:        {"Tokens", anyNode, maxTokens, nil},
	FrameEnd:           {"End", anyNode, maxSmall, func() proto.Message { return new(nodepb.End) }},
	FrameCancel:        {"Cancel", anyNode, maxSmall, func() proto.Message { return new(nodepb.Cancel) }},
	FramePrefill:       {"Prefill", anyNode, maxPrompt, func() proto.Message { return new(nodepb.Prefill) }},
	FrameQueued:        {"Queued", anyNode, maxSmall, func() proto.Message { return new(nodepb.Queued) }},
	FrameGrantRequest:  {"GrantRequest", anyNode, maxSmall, func() proto.Message { return new(nodepb.GrantRequest) }},
	FrameGrant:         {"Grant", anyNode, maxGrant, func() proto.Message { return new(nodepb.Grant) }},
	FramePrefillDone:   {"PrefillDone", anyNode, maxSmall, func() proto.Message { return new(nodepb.PrefillDone) }},
	FrameStats:         {"Stats", anyNode, maxSmall, func() proto.Message { return new(nodepb.Stats) }},
	FrameBundleRequest: {"BundleRequest", gatewayOnly, maxSmall, func() proto.Message { return new(nodepb.BundleRequest) }},
	FrameBundle:        {"Bundle", anyNode, MaxFrame, func() proto.Message { return new(nodepb.Bundle) }},
	FrameDrain:         {"Drain", gatewayOnly, maxSmall, func() proto.Message { return new(nodepb.Drain) }},
	FramePing:          {"Ping", anyNode, maxSmall, nil},
	FramePong:          {"Pong", anyNode, maxSmall, nil},
	FrameLogProbs:      {"LogProbs", anyNode, maxGrant, func() proto.Message { return new(nodepb.LogProbs) }},
	FramePromptProbs:   {"PromptLogProbs", anyNode, maxGrant, func() proto.Message { return new(nodepb.PromptLogProbs) }},
	FrameLoadAdapter:   {"LoadAdapter", gatewayOnly, maxSmall, func() proto.Message { return new(nodepb.LoadAdapter) }},
	FrameUnloadAdapter: {"UnloadAdapter", gatewayOnly, maxSmall, func() proto.Message { return new(nodepb.UnloadAdapter) }},
	FrameAdapterDone:   {"AdapterDone", anyNode, maxSmall, func() proto.Message { return new(nodepb.AdapterDone) }},
	FrameVector:        {"Vector", anyNode, maxGrant, func() proto.Message { return new(nodepb.Vector) }},
}

func (t Type) known() bool { return int(t) < len(frameTypes) && frameTypes[t].max > 0 }

func (t Type) String() string {
	if !t.known() {
		return fmt.Sprintf("type %d", uint8(t))
	}
	return frameTypes[t].name
}

// Decode reads a payload as the message of its frame type. FrameTokens, FramePing
// and FramePong carry none: see DecodeTokens.
func Decode(t Type, payload []byte) (proto.Message, error) {
	if !t.known() || frameTypes[t].new == nil {
		return nil, fmt.Errorf("%w: %v is no message", ErrBadPayload, t)
	}
	m := frameTypes[t].new()
	if err := proto.Unmarshal(payload, m); err != nil {
		return nil, fmt.Errorf("%w: %v of %d bytes: %v", ErrBadPayload, t, len(payload), err)
	}
	return m, nil
}

// Handler handles the frames of a connection. Both methods are called on the
// connection's reading goroutine and must not block: while they run, nothing
// more is read from that peer.
type Handler interface {
	// Frame handles one frame; payload is valid during the call only. The first
	// frame of a connection is always FrameHello (its content: c.Peer()), which
	// announces connections that a peer opened. Frame is not called for Ping and Pong.
	Frame(c *Conn, t Type, stream uint64, payload []byte)
	// Closed is the last call for a connection; err is never nil and wraps
	// the argument of Close, or the error that ended the connection.
	Closed(c *Conn, err error)
}

// Options configure Serve and Pool. Zero bounds mean their Default.
type Options struct {
	Hello *nodepb.Hello // of this node; protocol 0 means this build's versions
	// TLS is a server's configuration for Serve and a client's for NewPool; nil
	// sends plainly (in-memory networks, tests).
	TLS *tls.Config
	// Dial opens the transport of a Pool; nil means TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)

	OutboxBytes      int // for each connection
	Heartbeat        time.Duration
	Silence          time.Duration
	HandshakeTimeout time.Duration
	CloseLinger      time.Duration
	BackoffMin       time.Duration
	BackoffMax       time.Duration
	MaxConns         int

	Counters *Counters    // nil: of their own
	Log      *slog.Logger // refused peers; nil: discarded
}

// Counters counts over all connections that share it. Byte counts include
// frame headers and leave out TLS.
type Counters struct {
	FramesIn, FramesOut atomic.Uint64
	BytesIn, BytesOut   atomic.Uint64
	OutboxFull          atomic.Uint64 // frames refused by a full outbox
	Silent              atomic.Uint64 // connections ended by ErrSilent or ErrStalled
	Refused             atomic.Uint64 // connections: foreign certificates, other versions, too many
	Forbidden           atomic.Uint64 // frames refused by the role in the peer's certificate
	DialErrors          atomic.Uint64
	Conns               atomic.Int64 // open now
}

func (o Options) withDefaults() (Options, error) {
	if o.Hello == nil {
		return o, fmt.Errorf("%w: Options.Hello is not set", ErrHandshake)
	}
	o.Hello = proto.CloneOf(o.Hello)
	if o.Hello.Protocol == 0 {
		o.Hello.Protocol, o.Hello.ProtocolMin = Protocol, ProtocolMin
	}
	if o.Dial == nil {
		o.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	if o.Counters == nil {
		o.Counters = new(Counters)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.OutboxBytes = cmp.Or(o.OutboxBytes, DefaultOutboxBytes)
	o.MaxConns = cmp.Or(o.MaxConns, DefaultMaxConns)
	o.Heartbeat = cmp.Or(o.Heartbeat, DefaultHeartbeat)
	o.Silence = cmp.Or(o.Silence, DefaultSilence)
	o.HandshakeTimeout = cmp.Or(o.HandshakeTimeout, DefaultHandshakeTimeout)
	o.CloseLinger = cmp.Or(o.CloseLinger, DefaultCloseLinger)
	o.BackoffMin = cmp.Or(o.BackoffMin, DefaultBackoffMin)
	o.BackoffMax = cmp.Or(o.BackoffMax, DefaultBackoffMax)
	return o, nil
}
