package grammar

// counted reports whether the number of members must be counted.
func (o *objectExpr) counted() bool {
	required := 0
	for _, m := range o.members {
		if m.required {
			required++
		}
	}
	return o.max != unlimited || int(o.min) > required
}

// height is heightOf of an object.
func (o *objectExpr) height(rules []int32) int32 {
	n, possible, required := int32(0), 0, 0
	optional := int32(0)
	for _, m := range o.members {
		h := heightOf(m.e, rules)
		if h < infinite {
			possible++
		}
		if m.required {
			n = max(n, h)
			required++
		} else if h < infinite {
			optional = max(optional, h)
		}
	}
	if h := heightOf(o.extra, rules); h < infinite {
		possible = unlimited
		optional = max(optional, h)
	}
	if possible < int(o.min) || required > int(o.max) {
		return infinite
	}
	if required < int(o.min) {
		n = max(n, optional)
	}
	return min(infinite, n+1)
}

// objectBuilder builds the positions of one object. Index k means that the members before k are
// done: entry(k) is where one more member starts, behind(k) where one has ended.
type objectBuilder struct {
	*builder
	o       *objectExpr
	counted bool
	close   int32
	members []objectMember // those that can occur
	extra   bool
}

// object returns the position at which an object followed by next starts.
func (b *builder) object(o *objectExpr, next int32) int32 {
	ob := &objectBuilder{builder: b, o: o, counted: o.counted(), extra: heightOf(o.extra, b.heights) < infinite}
	for _, m := range o.members {
		if heightOf(m.e, b.heights) < infinite {
			ob.members = append(ob.members, m)
		}
	}
	ob.close = b.build(o.close, next)
	if b.err != nil {
		return 0
	}
	if ob.counted {
		ob.close = b.add(position{op: opPop, a: ob.close, height: max(0, b.height(ob.close)-1)})
	}
	n := len(ob.members)
	required := 0
	entry := int32(-1)
	behind := b.add(position{op: opSplit, height: b.height(ob.close)})
	if b.err != nil {
		return 0
	}
	if ob.extra {
		entry = ob.room(n, required, 1, ob.tick(b.build(o.extra, behind)))
	}
	ob.fill(behind, n, required, entry)
	for k := n - 1; k >= 0 && b.err == nil; k-- {
		m := ob.members[k]
		nexts := []int32{ob.tick(b.build(m.e, behind))}
		if m.required {
			required++
		} else if entry >= 0 {
			nexts = append(nexts, entry)
		}
		entry = ob.room(k, required, 1, b.chain(nexts))
		behind = b.add(position{op: opSplit, height: b.height(ob.close)})
		ob.fill(behind, k, required, entry)
	}
	if b.err != nil {
		return 0
	}
	var nexts []int32
	if entry >= 0 {
		nexts = append(nexts, entry)
	}
	if required == 0 {
		nexts = append(nexts, ob.close)
	}
	start := ob.room(0, required, 0, b.split(nexts))
	start = b.build(o.space, start)
	if ob.counted {
		op := opPush
		if n > 0 {
			op = opPushHard
		}
		start = b.add(position{op: op, a: start, val: counter(o.min, o.max), height: max(b.height(next), 1+b.height(start))})
	}
	return b.build(o.open, start)
}

// fill makes the position behind a member: whitespace, then a comma and one more member, or the
// end if none of the members to come is required.
func (ob *objectBuilder) fill(behind int32, k, required int, entry int32) {
	b := ob.builder
	if b.err != nil {
		return
	}
	var nexts []int32
	if entry >= 0 {
		nexts = append(nexts, ob.room(k, required, 1, b.build(ob.o.comma, entry)))
	}
	if required == 0 {
		nexts = append(nexts, ob.close)
	}
	to := b.build(ob.o.space, ob.room(k, required, 0, b.split(nexts)))
	if b.err != nil {
		return
	}
	b.alias(behind, []int32{to})
	b.p.pos[behind].height = b.height(to)
}

// tick counts a member.
func (ob *objectBuilder) tick(member int32) int32 {
	if !ob.counted {
		return member
	}
	return ob.add(position{op: opTick, a: member, height: ob.height(member)})
}

// room checks, before position to, that the members from k on can bring the count to its minimum
// and that those required do not exceed its maximum. At least least members follow.
func (ob *objectBuilder) room(k, required, least int, to int32) int32 {
	if !ob.counted {
		return to
	}
	most := int32(len(ob.members) - k)
	if ob.extra {
		most = unlimited
	}
	return ob.add(position{op: opRoom, a: to, val: counter(most, int32(max(required, least))), height: ob.height(to)})
}
