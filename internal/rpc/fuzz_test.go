package rpc

import (
	"bytes"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// samples has one filled message of each type.
var samples = map[Type]proto.Message{
	FrameHello:    &nodepb.Hello{Protocol: 1, ProtocolMin: 1, NodeId: "n", Role: "decode", Build: "b", Model: "m", Fingerprint: 1 << 63, NumericsClass: "c"},
	FrameGenerate: &nodepb.Generate{RequestId: "r", Attempt: 2, Prompt: []int32{1, 2, 1 << 30}, Output: []int32{3}, Sampling: &nodepb.Sampling{Seed: 9, Temperature: 0.5}, MaxTokens: 7, Prefill: []string{"a:1"}, Priority: -1, Grammar: &nodepb.Grammar{Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte("a"), Version: 1}},
	FrameAccepted: &nodepb.Accepted{Attempt: 1, CachedTokens: 16},
	FrameEnd:      &nodepb.End{Code: nodepb.Code_CODE_OVERLOADED, Message: "full", Attempt: 1},
	FrameCancel:   &nodepb.Cancel{Reason: "client gone"},
	FramePrefill:  &nodepb.Prefill{RequestId: "r", Tokens: []int32{5, 6}, Have: 16, PrefixRoot: 3, Layout: 4},
	FrameQueued:   &nodepb.Queued{Position: 3}, FrameGrantRequest: &nodepb.GrantRequest{},
	FrameGrant:         &nodepb.Grant{Grant: []byte{0, 255}, From: 1, UpTo: 2, Refused: nodepb.Code_CODE_INTERNAL, Reason: "x"},
	FramePrefillDone:   &nodepb.PrefillDone{ComputedTokens: 1, CachedTokens: 2},
	FrameStats:         &nodepb.Stats{Steps: 1, Running: 2, PrefillTokensPerS: 1.5, Draining: true},
	FrameBundleRequest: &nodepb.BundleRequest{},
	FrameBundle:        &nodepb.Bundle{Model: "m", TokenizerJson: []byte("{}"), EosTokenIds: []int32{2}, Defaults: &nodepb.GenerationDefaults{TopP: proto.Float32(0.9)}, Groups: []*nodepb.CacheGroup{{BlockTokens: 16, Window: 128}}},
	FrameVector:        &nodepb.Vector{Attempt: 1, Values: []float32{-0.5, 2}},
	FrameDrain:         &nodepb.Drain{TimeoutMs: 30000},
	FrameLogProbs:      &nodepb.LogProbs{Tokens: []*nodepb.TokenLogProbs{{Stream: 1, Attempt: 1, Position: 9, Logprob: -0.5, Rank: 1, TopTokens: []int32{3}, TopLogprobs: []float32{-0.5}}}},
	FrameLoadAdapter:   &nodepb.LoadAdapter{Name: "a", Path: "/a", Replace: true},
	FrameUnloadAdapter: &nodepb.UnloadAdapter{Name: "a"},
	FrameAdapterDone:   &nodepb.AdapterDone{Code: nodepb.Code_CODE_NOT_FOUND, Message: "x", Adapter: &nodepb.Adapter{Name: "a", Digest: 1 << 63, Rank: 8}},
	FramePromptProbs:   &nodepb.PromptLogProbs{Attempt: 1, First: 1, Logprobs: []float32{-0.5}, Ranks: []uint32{1}, TopTokens: []int32{3}, TopLogprobs: []float32{-0.5}},
}

func encoded(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEveryMessageHasItsTypeAndASample(t *testing.T) {
	seen := map[string]bool{}
	for i, f := range frameTypes {
		typ := Type(i)
		if !typ.known() {
			if i != 0 {
				t.Errorf("type %d is a hole", i)
			}
			continue
		}
		if seen[f.name] || f.max > MaxFrame {
			t.Errorf("%v: name taken, or bound %d above MaxFrame", typ, f.max)
		}
		seen[f.name] = true
		if f.new == nil {
			if _, err := Decode(typ, nil); !errors.Is(err, ErrBadPayload) {
				t.Errorf("Decode(%v): %v", typ, err)
			}
			continue
		}
		if got := string(f.new().ProtoReflect().Descriptor().Name()); got != f.name {
			t.Errorf("%v carries a %s", typ, got)
		}
		m, err := Decode(typ, encoded(t, samples[typ]))
		if err != nil || !proto.Equal(m, samples[typ]) {
			t.Errorf("%v: got %v, %v", typ, m, err)
		}
	}
	msgs := nodepb.File_node_proto.Messages()
	for i := range msgs.Len() {
		name := string(msgs.Get(i).Name())
		if parts := map[string]bool{"Sampling": true, "GenerationDefaults": true, "LogitBias": true, "TokenSequence": true, "TokenLogProbs": true, "TraceContext": true, "Adapter": true, "CacheGroup": true, "Grammar": true, "Pooling": true, "Vectors": true}; !seen[name] && !parts[name] {
			t.Errorf("message %s has no frame type", name)
		}
	}
}

// FuzzMessages: no payload of any type breaks the decoder, and what was decoded
// survives another trip.
func FuzzMessages(f *testing.F) {
	for typ, m := range samples {
		b := encoded(f, m)
		f.Add(uint8(typ), b)
		f.Add(uint8(typ), b[:len(b)/2])
	}
	f.Fuzz(func(t *testing.T, typ uint8, payload []byte) {
		m, err := Decode(Type(typ), payload)
		if err != nil {
			if !errors.Is(err, ErrBadPayload) {
				t.Fatalf("error of no kind: %v", err)
			}
			return
		}
		again, err := Decode(Type(typ), encoded(t, m))
		if err != nil {
			t.Fatal(err)
		}
		// Not proto.Equal: NaN differs from itself.
		if !bytes.Equal(deterministic(t, m), deterministic(t, again)) {
			t.Fatalf("%v became %v", m, again)
		}
	})
}

func deterministic(t *testing.T, m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzDecodeTokens: what is accepted is exactly what putToken writes.
func FuzzDecodeTokens(f *testing.F) {
	b := make([]byte, 2*tokenBytes)
	putToken(b, Token{Stream: 1, Attempt: 2, Position: 3, ID: 4})
	putToken(b[tokenBytes:], Token{Stream: 1, Attempt: 2, Position: 4, ID: -1, Finish: 2})
	f.Add(b)
	f.Add(b[:30])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, payload []byte) {
		var again []byte
		err := DecodeTokens(payload, func(k Token) {
			again = append(again, make([]byte, tokenBytes)...)
			putToken(again[len(again)-tokenBytes:], k)
		})
		if err != nil && len(again) > 0 {
			t.Fatal("tokens of a malformed frame were delivered")
		}
		if err == nil && !bytes.Equal(payload, again) {
			t.Fatalf("%x became %x", payload, again)
		}
	})
}

// FuzzFrameReader holds the reader against a naive one that has the whole input,
// with reads of any size.
func FuzzFrameReader(f *testing.F) {
	var all []byte
	for typ, m := range samples {
		one, err := appendFrame(nil, typ, 7, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(one, uint8(0))
		all = append(all, one...)
	}
	f.Add(all, uint8(1))
	f.Add(append(all, 0xff), uint8(2))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: node\r\n\r\n"), uint8(0))
	big := make([]byte, headerBytes+readBufBytes+5)
	putHeader(big, len(big)-headerBytes, FrameTokens, 0)
	f.Add(append(big, all...), uint8(2))
	f.Fuzz(func(t *testing.T, in []byte, mode uint8) {
		var r io.Reader = bytes.NewReader(in)
		switch mode % 3 {
		case 1:
			r = iotest.OneByteReader(r)
		case 2:
			r = iotest.DataErrReader(iotest.HalfReader(r))
		}
		var heard atomic.Uint64
		fr := newFrameReader(r, func(n int) { heard.Add(uint64(n)) })
		rest := in
		for {
			typ, stream, payload, err := fr.next()
			wantErr := naive(rest)
			if !errors.Is(err, wantErr) || (err == nil) != (wantErr == nil) {
				t.Fatalf("error %v, want %v", err, wantErr)
			}
			if err != nil {
				return
			}
			n, wantT, wantS, _ := parseHeader(rest)
			if typ != wantT || stream != wantS || !bytes.Equal(payload, rest[headerBytes:headerBytes+n]) {
				t.Fatalf("frame %v of stream %d with %d bytes; want %v, %d, %d", typ, stream, len(payload), wantT, wantS, n)
			}
			rest = rest[headerBytes+n:]
		}
	})
}

// naive is what next must say of an input.
func naive(in []byte) error {
	if len(in) == 0 {
		return io.EOF
	}
	if len(in) < headerBytes {
		return io.ErrUnexpectedEOF
	}
	length := int64(in[0]) | int64(in[1])<<8 | int64(in[2])<<16 | int64(in[3])<<24
	if in[4] < 1 || int(in[4]) >= len(frameTypes) {
		return ErrUnknownFrame
	}
	if length > int64(frameTypes[in[4]].max) {
		return ErrFrameTooBig
	}
	if int64(len(in)-headerBytes) < length {
		return io.ErrUnexpectedEOF
	}
	return nil
}
