package model

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// A checkpoint up to wholeBytes is hashed whole, in a fraction of a second per
// GB. Of a larger one each tensor gives sampledPages pages of pageBytes, spread
// evenly from its first to its last byte: reading everything would cost a cold
// start minutes, and training, merging and quantizing change every page of a
// matrix. Damage on disk is not what this looks for.
const (
	wholeBytes   = 1 << 30
	sampledPages = 16
	pageBytes    = 4096
)

// Fingerprint names what this checkpoint computes: equal on every machine for
// equal weights and settings, whatever the files are called and however the
// config is spelled. It is the model's part of the numerics class.
func (s *Source) Fingerprint() (uint64, error) {
	checkpoint, err := s.weights()
	if err != nil {
		return 0, err
	}
	h := xxhash.New()
	c := s.Config
	_, _ = fmt.Fprintf(h, "%s %d %d %d %d %d %d %d %b %t %+v\n", c.Architecture, c.Vocab, c.Hidden, c.Layers,
		c.Heads, c.KVHeads, c.HeadDim, c.FFN, c.Eps, c.TieEmbedding, c.Rope) // a hash takes every write
	if c.Window != 0 || c.MoE.Experts != 0 {
		_, _ = fmt.Fprintf(h, "window %d, %+v\n", c.Window, c.MoE)
	}
	if c.Gemma4 != nil {
		_, _ = fmt.Fprintf(h, "%+v\n", *c.Gemma4)
	}
	if c.Latent != nil {
		_, _ = fmt.Fprintf(h, "%+v\n", *c.Latent)
	}
	if !c.Features.zero() {
		_, _ = fmt.Fprintf(h, "%+v\n", c.Features)
	}
	if c.FullLayers != nil {
		_, _ = fmt.Fprintf(h, "without a window %v\n", c.FullLayers)
	}
	whole := checkpoint.Bytes() <= wholeBytes
	for _, name := range checkpoint.Names() {
		t, _ := checkpoint.Tensor(name)
		_, _ = fmt.Fprintf(h, "%q %s %v %x\n", t.Name, t.DType, t.Shape, digest(t.Data, whole))
	}
	return h.Sum64(), nil
}

// digest hashes all of data, or a sample of its pages and its length.
func digest(data []byte, whole bool) uint64 {
	if whole || len(data) <= sampledPages*pageBytes {
		return xxhash.Sum64(data)
	}
	h := xxhash.New()
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(data))))
	last := len(data) - pageBytes
	for i := range sampledPages {
		at := last / (sampledPages - 1) * i
		if i == sampledPages-1 {
			at = last
		}
		_, _ = h.Write(data[at : at+pageBytes])
	}
	return h.Sum64()
}
