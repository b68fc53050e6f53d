package rpc

import (
	"encoding/binary"
	"fmt"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A token frame's payload is a row of records, one for each stream that got a
// token in this step; the frame's own stream is 0. A record, little-endian:
//
//	offset 0  stream   u64  names the Generate on this connection
//	       8  attempt  u32  of the request
//	      12  position u32  of the token in prompt + output
//	      16  id       i32  token id; -1: no token, just the end
//	      20  finish   u8   nodepb.FinishReason; 0: the stream continues
//	      21  zero     [3]u8
const tokenBytes = 24

// MaxTokens is the most tokens of one frame.
const MaxTokens = maxTokens / tokenBytes

// Token is one generated token, or the end of a stream, or both.
type Token struct {
	Stream   uint64
	Attempt  uint32
	Position uint32 // index in prompt + output; the first generated token has len(prompt)
	ID       int32  // -1 with a Finish: no token
	Finish   uint8  // nodepb.FinishReason; 0: the stream continues
}

func putToken(b []byte, t Token) {
	_ = b[tokenBytes-1]
	binary.LittleEndian.PutUint64(b, t.Stream)
	binary.LittleEndian.PutUint32(b[8:], t.Attempt)
	binary.LittleEndian.PutUint32(b[12:], t.Position)
	binary.LittleEndian.PutUint32(b[16:], uint32(t.ID))
	b[20], b[21], b[22], b[23] = t.Finish, 0, 0, 0
}

// DecodeTokens calls f for each token of a FrameTokens payload, in the order of
// SendTokens. It calls f for none where the payload is malformed.
func DecodeTokens(payload []byte, f func(Token)) error {
	if len(payload)%tokenBytes != 0 {
		return fmt.Errorf("%w: Tokens of %d bytes, records have %d", ErrBadPayload, len(payload), tokenBytes)
	}
	for b := payload; len(b) > 0; b = b[tokenBytes:] {
		if err := checkToken(b); err != nil {
			return err
		}
	}
	for b := payload; len(b) > 0; b = b[tokenBytes:] {
		f(Token{
			Stream:   binary.LittleEndian.Uint64(b),
			Attempt:  binary.LittleEndian.Uint32(b[8:]),
			Position: binary.LittleEndian.Uint32(b[12:]),
			ID:       int32(binary.LittleEndian.Uint32(b[16:])),
			Finish:   b[20],
		})
	}
	return nil
}

// checkToken refuses a record that no version-1 node writes.
func checkToken(b []byte) error {
	id, finish := int32(binary.LittleEndian.Uint32(b[16:])), b[20]
	if b[21]|b[22]|b[23] != 0 {
		return fmt.Errorf("%w: token record with trailing bytes %x", ErrBadPayload, b[21:24])
	}
	if finish > uint8(nodepb.FinishReason_FINISH_REASON_ABORT) {
		return fmt.Errorf("%w: token record with finish reason %d", ErrBadPayload, finish)
	}
	if id < -1 || id == -1 && finish == 0 {
		return fmt.Errorf("%w: token record with id %d and finish reason %d", ErrBadPayload, id, finish)
	}
	return nil
}
