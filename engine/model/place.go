package model

import (
	"strings"
)

// A checkpoint may have other names than the decoder's tags, several matrices in one tensor, and
// the rows of a head in another order. The backend rotates the last columns of a head, by halves;
// where a checkpoint rotates the first ones, or neighbours, the rows of queries and keys are
// reordered as they are loaded: their products are the same.

// fusion is a tensor that holds several matrices, the rows of one behind those of another.
type fusion struct {
	name  string   // in the files, below a layer's prefix, such as self_attn.qkv_proj
	parts []string // in the decoder's tags
}

// place gives bindings the names and the rows that their weights have in the files.
func (a *architecture) place(all []binding) []binding {
	for _, f := range a.fused {
		sizes := map[string]int{} // rows of each fused tensor
		var fused []*binding
		for i := range all {
			b := &all[i]
			for _, part := range f.parts {
				at := strings.Index(b.name, "."+part+".")
				if at < 0 {
					continue
				}
				b.name = b.name[:at+1] + f.name + b.name[at+1+len(part):]
				b.shift(sizes[b.name])
				sizes[b.name] += b.shape[0]
				fused = append(fused, b)
			}
		}
		for _, b := range fused {
			b.shape[0] = sizes[b.name]
			b.parts[0].of = b.shape[0]
		}
	}
	if a.rename != nil {
		for i := range all {
			all[i].name = a.rename.Replace(all[i].name)
		}
	}
	return all
}

// shift moves the rows of a binding behind so many others.
func (b *binding) shift(by int) {
	b.parts[0].from += by
	for i := range b.rows {
		b.rows[i] += by
	}
}

// reorder has the rows of queries and keys loaded so that the columns that rotate are a head's
// last ones, by halves; and norms as what they multiply by.
func (b *binding) reorder(c *Config) {
	if c.Features.OnePlus && strings.HasSuffix(b.name, "norm.weight") && !strings.Contains(b.name, ".linear_attn.") {
		b.plus = 1
	}
	f := &c.Features
	const gate = ".q_proj.gate."
	stride := c.HeadDim // rows of a head in the tensor
	if f.OutputGate && strings.Contains(b.name, ".q_proj.") {
		stride *= 2
		b.shape[0] *= 2
		b.parts[0].of, b.parts[0].from = 2*b.parts[0].of, 2*b.parts[0].from
	}
	if name, ok := strings.CutSuffix(b.name, gate+"weight"); ok {
		b.name = name + ".q_proj.weight"
		for at := 0; at < b.parts[0].n; at += c.HeadDim {
			b.rows = append(b.rows, span(b.parts[0].from+2*at+c.HeadDim, c.HeadDim)...)
		}
		return
	}
	if c.Latent != nil || f.RotaryDim == 0 && !f.Interleaved && stride == c.HeadDim {
		return
	}
	for _, name := range []string{".q_proj.", ".k_proj.", ".q_norm.", ".k_norm."} {
		if !strings.Contains(b.name, name) {
			continue
		}
		for at := 0; at < b.parts[0].n; at += c.HeadDim {
			first := b.parts[0].from + at/c.HeadDim*stride
			b.rows = append(b.rows, span(first+c.rotary(), c.HeadDim-c.rotary())...)
			if f.Interleaved {
				b.rows = append(b.rows, neighbours(first, c.rotary())...)
			} else {
				b.rows = append(b.rows, span(first, c.rotary())...)
			}
		}
	}
}

// span returns n rows from from on.
func span(from, n int) []int {
	rows := make([]int, n)
	for i := range rows {
		rows[i] = from + i
	}
	return rows
}

// neighbours returns n rows from from on: every second one, then the others.
func neighbours(from, n int) []int {
	rows := make([]int, n)
	for i := range n / 2 {
		rows[i], rows[i+n/2] = from+2*i, from+2*i+1
	}
	return rows
}
