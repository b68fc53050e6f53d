package rpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A frame on the wire, little-endian:
//
//	offset 0  length u32   bytes of payload
//	       4  type   u8    Type
//	       5  stream u64   0: about the connection itself
//	      13  payload
const headerBytes = 4 + 1 + 8

const (
	readBufBytes = 64 << 10 // one Read's worth; larger frames get their own memory
	bigStepBytes = 1 << 20  // memory for a large frame grows as its bytes arrive
)

func putHeader(b []byte, nPayload int, t Type, stream uint64) {
	_ = b[headerBytes-1]
	binary.LittleEndian.PutUint32(b, uint32(nPayload))
	b[4] = byte(t)
	binary.LittleEndian.PutUint64(b[5:], stream)
}

// parseHeader reads a header and refuses unknown types and payloads past their bound.
func parseHeader(b []byte) (nPayload int, t Type, stream uint64, err error) {
	_ = b[headerBytes-1]
	n := binary.LittleEndian.Uint32(b)
	t = Type(b[4])
	stream = binary.LittleEndian.Uint64(b[5:])
	if !t.known() {
		return 0, t, stream, fmt.Errorf("%w: %d (length %d); is this a tandem node?", ErrUnknownFrame, uint8(t), n)
	}
	if n > uint32(frameTypes[t].max) {
		return 0, t, stream, fmt.Errorf("%w: %v of %d bytes, at most %d", ErrFrameTooBig, t, n, frameTypes[t].max)
	}
	return int(n), t, stream, nil
}

// frameReader cuts a byte stream into frames. A payload that fits the buffer is
// a slice of it; only a larger one is allocated.
type frameReader struct {
	r          io.Reader
	received   func(n int) // called with the bytes of each read
	buf        []byte      // [readBufBytes]
	start, end int         // unread part of buf
}

func newFrameReader(r io.Reader, received func(n int)) *frameReader {
	return &frameReader{r: r, received: received, buf: make([]byte, readBufBytes)}
}

// next returns the next frame; payload is valid until the following call. The
// error is io.EOF only between two frames.
func (f *frameReader) next() (t Type, stream uint64, payload []byte, err error) {
	if err := f.fill(headerBytes); err != nil {
		return 0, 0, nil, err
	}
	n, t, stream, err := parseHeader(f.buf[f.start:f.end])
	if err != nil {
		return t, stream, nil, err
	}
	if n <= len(f.buf)-headerBytes {
		if err := f.fill(headerBytes + n); err != nil {
			return t, stream, nil, noEOF(err)
		}
		payload = f.buf[f.start+headerBytes : f.start+headerBytes+n]
		f.start += headerBytes + n
		return t, stream, payload, nil
	}
	f.start += headerBytes
	payload, err = f.big(n)
	return t, stream, payload, err
}

// fill makes at least n bytes available at start.
func (f *frameReader) fill(n int) error {
	if f.start == f.end {
		f.start, f.end = 0, 0
	}
	if len(f.buf)-f.start < n {
		f.end = copy(f.buf, f.buf[f.start:f.end])
		f.start = 0
	}
	for f.end-f.start < n {
		m, err := f.read(f.buf[f.end:])
		f.end += m
		if err != nil && f.end-f.start < n {
			if f.end > f.start {
				return noEOF(err)
			}
			return err
		}
	}
	return nil
}

// big reads a payload larger than the buffer. Its memory grows with the bytes that
// arrive, so that a header alone cannot make a node allocate.
func (f *frameReader) big(n int) ([]byte, error) {
	p := append(make([]byte, 0, min(n, bigStepBytes)), f.buf[f.start:min(f.end, f.start+n)]...)
	f.start += len(p)
	for len(p) < n {
		if len(p) == cap(p) {
			p = append(make([]byte, 0, min(n, 2*cap(p))), p...)
		}
		m, err := f.read(p[len(p):cap(p)])
		p = p[:len(p)+m]
		if err != nil && len(p) < n {
			return nil, noEOF(err)
		}
	}
	return p, nil
}

func (f *frameReader) read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if n > 0 {
		f.received(n)
	}
	if n == 0 && err == nil {
		err = io.ErrNoProgress // a Reader that keeps doing this would make the loop spin
	}
	return n, err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
