package rpc

import (
	"bufio"
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
	r     *bufio.Reader
	taken int // bytes of the last frame, which next discards
}

// newFrameReader returns a reader of r's frames, which calls received with the bytes of each read.
func newFrameReader(r io.Reader, received func(n int)) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(countedReader{r, received}, readBufBytes)}
}

type countedReader struct {
	io.Reader
	received func(n int)
}

func (r countedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n > 0 {
		r.received(n)
	}
	return n, err
}

// next returns the next frame; payload is valid until the following call. The
// error is io.EOF only between two frames.
func (f *frameReader) next() (t Type, stream uint64, payload []byte, err error) {
	_, _ = f.r.Discard(f.taken) // never fails, because the buffer has them
	f.taken = 0
	header, err := f.r.Peek(headerBytes)
	if err != nil {
		if len(header) > 0 {
			err = noEOF(err)
		}
		return 0, 0, nil, err
	}
	n, t, stream, err := parseHeader(header)
	if err != nil {
		return t, stream, nil, err
	}
	if headerBytes+n <= readBufBytes {
		whole, err := f.r.Peek(headerBytes + n)
		if err != nil {
			return t, stream, nil, noEOF(err)
		}
		f.taken = len(whole)
		return t, stream, whole[headerBytes:], nil
	}
	_, _ = f.r.Discard(headerBytes)
	payload, err = f.big(n)
	return t, stream, payload, err
}

// big reads a payload larger than the buffer. Its memory grows with the bytes that
// arrive, so that a header alone cannot make a node allocate.
func (f *frameReader) big(n int) ([]byte, error) {
	p := make([]byte, 0, min(n, bigStepBytes))
	for len(p) < n {
		if len(p) == cap(p) {
			p = append(make([]byte, 0, min(n, 2*cap(p))), p...)
		}
		m, err := io.ReadFull(f.r, p[len(p):cap(p)])
		if err != nil {
			return nil, noEOF(err)
		}
		p = p[:len(p)+m]
	}
	return p, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
