package model

import (
	"encoding/binary"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// A checkpoint up to wholeBytes is hashed whole, in a fraction of a second per
// GB. Of a larger one each tensor gives sampledPages pages of pageBytes, spread
// evenly from its first to its last byte: reading everything would cost a cold
// start minutes, and training, merging and quantizing change every page of a
// matrix. The hash does not detect damage on disk.
const (
	wholeBytes   = 1 << 30
	sampledPages = 16
	pageBytes    = 4096
)

// Fingerprint returns a hash of weights and settings, the model's part of the numerics class. It
// is equal on every machine, and depends neither on the names of files nor on the spelling of the
// config.
func (s *Source) Fingerprint() (uint64, error) {
	checkpoint, err := s.weights()
	if err != nil {
		return 0, err
	}
	h := xxhash.New()
	_, _ = io.WriteString(h, settings(s.Config)) // a hash takes every write
	whole := checkpoint.Bytes() <= wholeBytes
	for _, name := range checkpoint.Names() {
		t, _ := checkpoint.Tensor(name)
		_, _ = fmt.Fprintf(h, "%q %s %v %x\n", t.Name, t.DType, t.Shape, digest(t.Data, whole))
	}
	return h.Sum64(), nil
}

// settings returns the part of the config that decides which bits are computed. Version 0.1.0
// hashed this text, and nodes of both versions have to serve one model while a fleet is upgraded.
// So the text of a config that 0.1.0 could read never changes: a new field has the tag
// fingerprint:"new" and appears only where it is not zero.
func settings(c Config) string {
	c.Features.drop(always[c.Architecture])
	latent := ""
	switch {
	case c.Latent != nil && c.Architecture == deepseekName: // 0.1.0 had its experts here
		l, m := c.Latent, &c.MoE
		latent = fmt.Sprintf("{QueryRank:%d Latent:%d Rope:%d Nope:%d Value:%d Interleaved:%t Dense:%d Shared:%d Groups:%d KeepGroups:%d Factor:%v Scale:%v}\n",
			l.QueryRank, l.Latent, l.Rope, l.Nope, l.Value, l.Interleaved, m.FirstDense, m.Shared/m.FFN, m.Groups, m.KeepGroups, m.Factor, l.Scale)
		m.FirstDense, m.Shared, m.Groups, m.KeepGroups, m.Factor, m.Sigmoid = 0, 0, 0, 0, 0, false
	case c.Latent != nil:
		latent = text(*c.Latent) + "\n"
	case c.Architecture == gptOSSName:
		c.MoE.RouterBias, c.MoE.Clamped, c.MoE.Biases = false, false, false
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %d %d %d %d %d %d %d %b %t %s\n", c.Architecture, c.Vocab, c.Hidden, c.Layers,
		c.Heads, c.KVHeads, c.HeadDim, c.FFN, c.Eps, c.TieEmbedding, text(c.Rope))
	if c.Window != 0 || c.MoE.Experts != 0 {
		fmt.Fprintf(&b, "window %d, %s\n", c.Window, text(c.MoE))
	}
	if c.Gemma4 != nil {
		b.WriteString(text(*c.Gemma4) + "\n")
	}
	b.WriteString(latent)
	if c.Delta != nil {
		b.WriteString(text(*c.Delta) + "\n")
	}
	if !c.Features.zero() {
		b.WriteString(text(c.Features) + "\n")
	}
	if c.Headless {
		b.WriteString("headless\n")
	}
	if c.Paired {
		b.WriteString("paired\n")
	}
	if c.Integers != nil {
		b.WriteString(text(*c.Integers) + "\n")
	}
	if c.FullLayers != nil {
		fmt.Fprintf(&b, "without a window %v\n", c.FullLayers)
	}
	return b.String()
}

// always lists the features that architectures of version 0.1.0 have whatever their config.
var always = map[string]Features{
	"Qwen3ForCausalLM":    {HeadNorms: eachHeadNorm},
	"Qwen3MoeForCausalLM": {HeadNorms: eachHeadNorm},
	gptOSSName:            {QKVBias: true, OutputBias: true, Sinks: true},
}

// drop sets each feature to zero that equals that of another set.
func (f *Features) drop(other Features) {
	v, o := reflect.ValueOf(f).Elem(), reflect.ValueOf(other)
	for i := range v.NumField() {
		if reflect.DeepEqual(v.Field(i).Interface(), o.Field(i).Interface()) {
			v.Field(i).SetZero()
		}
	}
}

// text returns a struct as fmt's %+v does, without new fields that are zero. All fields of Features
// are new.
func text(v any) string {
	s := reflect.ValueOf(v)
	if s.Kind() != reflect.Struct {
		return fmt.Sprint(v)
	}
	_, features := v.(Features)
	var fields []string
	for i := range s.NumField() {
		f := s.Type().Field(i)
		if (features || f.Tag.Get("fingerprint") == "new") && s.Field(i).IsZero() {
			continue
		}
		fields = append(fields, f.Name+":"+text(s.Field(i).Interface()))
	}
	return "{" + strings.Join(fields, " ") + "}"
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
