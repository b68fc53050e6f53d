package cuda

import (
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
)

// fuse replaces neighbouring operations by one where a kernel computes them together,
// which saves launches and memory traffic. Marks keep their places; nothing is fused
// across one.
func fuse(ops []op, marks []stop) ([]op, []stop) {
	ops, marks = anglesFirst(ops, marks)
	adaptsLast(ops, marks)
	fused := make([]op, 0, len(ops))
	moved := make([]stop, 0, len(marks))
	for at := 0; at < len(ops); {
		for len(marks) > 0 && marks[0].at <= at {
			moved, marks = append(moved, stop{len(fused), marks[0].layer}), marks[1:]
		}
		until := len(ops)
		if len(marks) > 0 {
			until = marks[0].at
		}
		o, n := ops[at], 1
		for _, f := range []func(ops, rest []op) (op, int){fusePlace, fuseLinear, fuseAdapts} {
			if one, many := f(ops[at:until], ops[at:]); many > 0 {
				o, n = one, many
				break
			}
		}
		fused, at = append(fused, o), at+n
	}
	for _, m := range marks {
		moved = append(moved, stop{len(fused), m.layer})
	}
	return fused, moved
}

// anglesFirst moves the operations that compute rotation tables to the front. They
// depend on positions only.
func anglesFirst(ops []op, marks []stop) ([]op, []stop) {
	var first, rest []op
	moved := append([]stop(nil), marks...)
	for i, o := range ops {
		if o.kind != opAngles {
			rest = append(rest, o)
			continue
		}
		first = append(first, o)
		for j := range moved {
			if marks[j].at <= i {
				moved[j].at++
			}
		}
	}
	return append(first, rest...), moved
}

// fusePlace fuses the norms of queries' and keys' heads, if any, their rotations and the
// write of keys and values.
func fusePlace(ops, _ []op) (op, int) {
	headNorm := func(o op) bool { return o.kind == opNorm && o.dim < o.n && o.b == 0 && o.dst == o.a }
	n := 0
	if len(ops) >= 5 && headNorm(ops[0]) && headNorm(ops[1]) {
		n = 2
	}
	if len(ops) < n+3 {
		return op{}, 0
	}
	q, k, o := ops[n], ops[n+1], ops[n+2]
	if q.kind != opRope || k.kind != opRope || o.kind != opStoreKV || o.dtype == typeFP8 || o.vAt == 0 || q.b != k.b || q.dim != k.dim || q.k != o.dim || k.k != o.dim ||
		k.dst != o.a || k.n != o.n || q.dst == k.dst || o.b == k.dst || o.b == q.dst {
		return op{}, 0
	}
	p := o
	p.kind, p.heads, p.from, p.dst, p.b, p.extra = opPlace, q.n/q.k, q.dim, q.dst, q.b, o.b
	if n > 0 {
		qn, kn := ops[0], ops[1]
		if qn.dst != q.dst || kn.dst != k.dst || qn.dim != o.dim || kn.dim != o.dim || qn.scale != kn.scale {
			return op{}, 0
		}
		p.normalize, p.scale, p.w, p.bias = 1, qn.scale, qn.w, kn.w
	}
	return p, n + 3
}

// fuseLinear fuses products of the same rows, which one kernel computes one after the other:
// queries, keys and values, or a gate and up. It also fuses the gated activation of both if
// no later operation reads them. rest continues after the next mark.
func fuseLinear(ops, rest []op) (op, int) {
	o := ops[0]
	if o.kind != opLinear {
		return op{}, 0
	}
	n := 1
	for ; n < len(ops) && n <= len(o.more); n++ {
		m := ops[n]
		w := m.w
		if m.table != 0 {
			w = m.table
		}
		like := m // except for fields that may differ
		like.n, like.w, like.bias, like.dst, like.table, like.more = ops[0].n, o.w, o.bias, o.dst, o.table, o.more
		if like != o || (m.table == 0) != (o.table == 0) || m.dst == o.a || m.dst == o.dst || n == 2 && m.dst == o.more[0].dst {
			break
		}
		o.more[n-1] = joined{w: w, bias: m.bias, dst: m.dst, n: m.n}
	}
	if n == 1 {
		return op{}, 0
	}
	if n == 2 && len(ops) > 2 {
		g := ops[2]
		if g.kind == opGatedAct && g.dst == o.dst && g.a == o.dst && g.b == o.more[0].dst && g.n == o.n && o.more[0].n == o.n &&
			g.outputs == o.outputs && g.slots == o.slots && unread(rest[3:], g.b) {
			o.act = g.act + 1
			return o, 3
		}
	}
	return o, n
}

// adaptsLast moves adapters' products after the matrix products that can be fused with
// theirs.
func adaptsLast(ops []op, marks []stop) {
	for end := len(ops); end > 1; end-- {
		moved := false
		for i := 1; i < end; i++ {
			a, l := &ops[i-1], &ops[i]
			if a.kind == opAdapt && l.kind == opLinear && l.a == a.a && l.dst != a.dst && l.dst != a.a &&
				!slices.ContainsFunc(marks, func(m stop) bool { return m.at == i }) {
				*a, *l, moved = *l, *a, true
			}
		}
		if !moved {
			return
		}
	}
}

// fuseAdapts fuses adapters' products for several matrices of the same rows.
func fuseAdapts(ops, _ []op) (op, int) {
	o := ops[0]
	if o.kind != opAdapt {
		return op{}, 0
	}
	n := 1
	for ; n < len(ops) && n <= len(o.more); n++ {
		m := ops[n]
		like := m // except for fields that may differ
		like.n, like.w, like.bias, like.dst = ops[0].n, o.w, o.bias, o.dst
		if like != ops[0] || m.dst == o.dst || n == 2 && m.dst == o.more[0].dst {
			break
		}
		o.more[n-1] = joined{w: m.w, bias: m.bias, dst: m.dst, n: m.n}
	}
	return o, n
}

// fuseRow fuses a residual with the product with an int4 matrix before it, and a norm with such a
// product after it, in a plan of one row. The product then reads what the norm would have read. A
// buffer that no later operation writes keeps its number, because the host may read it after the
// step. With products of bf16 fused likewise, an H100 was slower (Llama 1B).
func fuseRow(ops []op, marks []stop) ([]op, []stop) {
	product := func(o op) bool {
		return o.kind == opLinear && o.table == 0 && o.dtype == typeINT4 && o.k%4 == 0
	}
	for i := 0; i+1 < len(ops); i++ {
		marked := slices.ContainsFunc(marks, func(m stop) bool { return m.at == i+1 })
		o, next := &ops[i], &ops[i+1]
		if marked || o.outputs != next.outputs {
			continue
		}
		if product(*o) && o.act == 0 && o.more[0].n == 0 && next.kind == opNorm && next.dim == next.n && next.b == o.dst && next.a != o.a && nextUse(ops[i+2:], o.dst) == useWrite {
			o.dst, o.from, next.b = next.a, 1, 0
		}
		whole := o.kind == opNorm && o.dim == o.n && o.b == 0 && o.dst != o.a
		if whole && product(*next) && next.a == o.dst && next.normalize == 0 && next.dst != o.a && next.more[0].dst != o.a && next.more[1].dst != o.a && nextUse(ops[i+2:], o.dst) == useWrite {
			next.a, next.normalize, next.extra, next.scale = o.a, 1, o.w, o.scale
			ops = slices.Delete(ops, i, i+1)
			for j := range marks {
				if marks[j].at > i {
					marks[j].at--
				}
			}
		}
	}
	return ops, marks
}

// Bounds of products by few_mxfp4.
const (
	fewColumns    = 4096
	fewExpertRows = 2 // on average
)

// fuseMoE fuses the choice of experts with the order of its slots, for at most moeRows rows. If
// few_mxfp4 computes both products, they read rows instead of slots, and add up the experts of a
// row. The sum goes to the residual stream if a norm adds it next and no later operation reads it.
func fuseMoE(ops []op, marks []stop, key backend.Key, few bool) ([]op, []stop) {
	rows := func(o *op) int {
		if o.outputs != 0 {
			return key.Outputs
		}
		return key.Tokens
	}
	fits := func(o *op) bool {
		return o.kind == opLinear && o.table != 0 && o.dtype == typeMXFP4 && o.k%32 == 0 && o.k <= fewColumns &&
			(rows(o) <= 1 || rows(o)*int(o.topK) <= fewExpertRows*int(o.experts))
	}
	remove := func(i int) {
		ops = slices.Delete(ops, i, i+1)
		for j := range marks {
			if marks[j].at > i {
				marks[j].at--
			}
		}
	}
	for i := 0; i+1 < len(ops); i++ {
		if r := &ops[i]; (r.kind != opRoute && r.kind != opRouteGroups) || rows(r) > moeRows || ops[i+1].kind != opGroup || ops[i+1].list != r.list {
			continue
		}
		ops[i].direct = 1
		remove(i + 1)
		if !few || i+4 >= len(ops) || ops[i+1].kind != opScatter || !fits(&ops[i+2]) || ops[i+2].act == 0 || !fits(&ops[i+3]) || ops[i+4].kind != opCombine {
			continue
		}
		scatter, gate, down, sum := ops[i+1], &ops[i+2], &ops[i+3], ops[i+4]
		if gate.a != scatter.dst || down.a != gate.dst || sum.a != down.dst || gate.dst == scatter.a || sum.dst == down.a {
			continue
		}
		gate.a, gate.direct, down.b = scatter.a, 1, sum.dst
		if i+5 < len(ops) && !slices.ContainsFunc(marks, func(m stop) bool { return m.at == i+5 }) {
			if next := &ops[i+5]; next.kind == opNorm && next.outputs == down.outputs && next.dim == next.n && next.b == sum.dst && next.a != sum.dst && nextUse(ops[i+6:], sum.dst) == useWrite {
				down.b, down.from, next.b = next.a, 1, 0
			}
		}
		remove(i + 4)
		remove(i + 1)
	}
	return ops, marks
}

// use is what later operations do first with a buffer.
type use int

const (
	useNone use = iota
	useRead
	useWrite
)

func nextUse(rest []op, b address) use {
	for _, o := range rest {
		sum := o.kind == opLinear && o.b == b // of experts
		if o.a == b || o.b == b && (!sum || o.from != 0) || o.extra == b || (o.kind != opLinear && o.kind != opNorm || o.from != 0) && o.dst == b {
			return useRead
		}
		if o.dst == b || sum {
			return useWrite
		}
	}
	return useNone
}

// unread reports whether no operation reads a buffer before it is written.
func unread(rest []op, b address) bool { return nextUse(rest, b) != useRead }

// halve sets op.halves of the results that the device may keep in bf16. They share one place. The
// host may read a buffer that no later operation writes, so that such a buffer stays fp32.
func halve(ops []op, marks []stop) {
	last := 0 // of the operations that read the previous such result
	for i := range ops {
		o := &ops[i]
		whole := o.kind == opNorm && o.dim == o.n || o.kind == opAttention || o.kind == opGatedAct || o.kind == opLinear && o.act > 0 && o.table == 0
		if !whole || i < last {
			continue
		}
		n := products(ops[i+1:], o.dst)
		if slices.ContainsFunc(marks, func(m stop) bool { return i < m.at && m.at <= i+n }) {
			continue // the place does not outlive a part of a step
		}
		o.halves, last = int32(n), i+n
	}
}

// products returns the number of operations up to the last one that reads a buffer before it is
// written. It returns 0 if other operations than products read the buffer, if another product is in
// between, or if no operation writes it.
func products(rest []op, b address) int {
	last, other := 0, false
	for i, o := range rest {
		switch product := o.kind == opLinear && o.table == 0; {
		case product && o.a == b && !other:
			last = i + 1
		case o.a == b || o.b == b || o.extra == b || o.more[0].dst == b || o.more[1].dst == b:
			return 0
		case o.dst == b && (product || o.kind == opNorm || o.kind == opAttention || o.kind == opGatedAct):
			return last
		case o.dst == b:
			return 0
		}
		other = other || o.kind == opLinear && o.a != b
	}
	return 0
}
