package rpc

import (
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"
)

const (
	// inlineBytes is the size above which a message is encoded before the lock is taken
	// and queued by reference, so that a Bundle never delays a step's tokens.
	inlineBytes = 4 << 10
	// keepBytes is the largest buffer that is kept after it was written.
	keepBytes = 1 << 20
)

// outbox gathers encoded frames until the writer takes them all at once.
type outbox struct {
	mu     sync.Mutex
	bound  int
	closed bool
	next   parcel // being filled
	spare  parcel // empty; the next take reuses its memory
	queued int    // bytes in next and in the parcel between take and done
}

// parcel is the frames of one take.
type parcel struct {
	buf   []byte  // small frames, encoded back to back
	large []large // in the order of at
}

// large is an encoded frame that belongs before buf[at:].
type large struct {
	at   int
	data []byte
}

// admit returns an error if no frame may be queued; the caller holds mu.
func (b *outbox) admit(t Type) error {
	if b.closed {
		return ErrClosed
	}
	if b.queued >= b.bound {
		return fmt.Errorf("%w: %v while %d bytes wait (bound %d)", ErrOutboxFull, t, b.queued, b.bound)
	}
	return nil
}

// put queues a message's frame; m may be nil for an empty payload.
func (b *outbox) put(t Type, stream uint64, m proto.Message) error {
	n := 0
	if m != nil {
		n = proto.Size(m)
	}
	if !t.known() {
		return fmt.Errorf("%w: %d", ErrUnknownFrame, uint8(t))
	}
	if n > frameTypes[t].max {
		return fmt.Errorf("%w: %v of %d bytes, at most %d", ErrFrameTooBig, t, n, frameTypes[t].max)
	}
	var own []byte
	if n > inlineBytes {
		var err error
		if own, err = appendFrame(make([]byte, 0, headerBytes+n), t, stream, m); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.admit(t); err != nil {
		return err
	}
	if own != nil {
		b.next.large = append(b.next.large, large{at: len(b.next.buf), data: own})
		b.queued += len(own)
		return nil
	}
	before := len(b.next.buf)
	buf, err := appendFrame(b.next.buf, t, stream, m)
	if err != nil {
		return err
	}
	b.next.buf = buf
	b.queued += len(buf) - before
	return nil
}

// appendFrame encodes one frame behind b, which stays as it was on an error.
func appendFrame(b []byte, t Type, stream uint64, m proto.Message) ([]byte, error) {
	at := len(b)
	var h [headerBytes]byte
	out := append(b, h[:]...)
	if m != nil {
		var err error
		if out, err = (proto.MarshalOptions{}).MarshalAppend(out, m); err != nil {
			return b, fmt.Errorf("%w: encoding %v: %v", ErrBadPayload, t, err)
		}
	}
	putHeader(out[at:], len(out)-at-headerBytes, t, stream)
	return out, nil
}

// putTokens queues one token frame.
func (b *outbox) putTokens(ts []Token) error {
	if len(ts) > MaxTokens {
		return fmt.Errorf("%w: %d tokens, at most %d", ErrFrameTooBig, len(ts), MaxTokens)
	}
	n := len(ts) * tokenBytes
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.admit(FrameTokens); err != nil {
		return err
	}
	at := len(b.next.buf)
	b.next.buf = slices.Grow(b.next.buf, headerBytes+n)[:at+headerBytes+n]
	putHeader(b.next.buf[at:], n, FrameTokens, 0)
	for i, t := range ts {
		putToken(b.next.buf[at+headerBytes+i*tokenBytes:], t)
	}
	b.queued += headerBytes + n
	return nil
}

// take returns all queued frames; ok is false when the outbox is closed and empty.
func (b *outbox) take() (p parcel, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p = b.next
	b.next, b.spare = b.spare, parcel{}
	return p, !b.closed || !p.empty()
}

// done returns a written parcel, whose memory is reused.
func (b *outbox) done(p parcel, nBytes int) {
	if cap(p.buf) > keepBytes {
		p.buf = nil
	}
	clear(p.large)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queued -= nBytes
	b.spare = parcel{buf: p.buf[:0], large: p.large[:0]}
}

// close refuses further frames; without flush it also drops queued ones.
func (b *outbox) close(flush bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if !flush {
		b.next = parcel{}
	}
}

// waiting returns how many bytes are queued or being written.
func (b *outbox) waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queued
}

func (p parcel) empty() bool { return len(p.buf) == 0 && len(p.large) == 0 }
