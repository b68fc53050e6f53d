package jinja

import (
	"math"
	"math/bits"
	"strings"
)

func (x *unaryExpr) eval(r *run) Value {
	v := x.x.eval(r)
	if !r.charge(1) {
		return nil
	}
	r.line = x.line
	if !r.use(v) {
		return nil
	}
	if f, ok := v.(float64); ok {
		if x.op == "-" {
			f = -f
		}
		return f
	}
	i, ok := asInt(v)
	if !ok {
		return r.fail(ErrRender, "bad operand type for unary %s: '%s'", x.op, typeName(v))
	}
	if x.op == "-" {
		return r.intOrFail(-i, i != math.MinInt64)
	}
	return i
}

func (x *binaryExpr) eval(r *run) Value {
	a, b := x.l.eval(r), x.r.eval(r)
	if !r.charge(1) {
		return nil
	}
	r.line = x.line
	return r.binary(x.op, a, b)
}

func (r *run) binary(op string, a, b Value) Value {
	if !r.use(a) || !r.use(b) {
		return nil
	}
	i, ok1 := asInt(a)
	j, ok2 := asInt(b)
	if ok1 && ok2 {
		return r.intOp(op, i, j)
	}
	f, ok1 := asFloat(a)
	g, ok2 := asFloat(b)
	if ok1 && ok2 {
		return r.floatOp(op, f, g)
	}
	_, left := a.(markup)
	_, right := b.(markup)
	switch op {
	case "+":
		if left || right {
			if v, ok := r.joinMarkup(a, b); ok {
				return v
			}
		}
		if v, ok := r.join(a, b); ok {
			return v
		}
	case "*":
		if v, ok := r.repeat(a, b); ok {
			return v
		}
		if v, ok := r.repeat(b, a); ok {
			return v
		}
	case "%":
		if left {
			return r.fail(ErrUnsupported, "formatting Markup with %%")
		}
		if s, ok := a.(string); ok {
			if args, ok := b.(Tuple); ok {
				return r.percent(s, args)
			}
			if _, ok := b.(*Dict); ok {
				return r.fail(ErrUnsupported, "formatting a string with a dict")
			}
			return r.percent(s, []Value{b})
		}
	}
	return r.fail(ErrRender, "unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
}

// join is + of two sequences.
func (r *run) join(a, b Value) (Value, bool) {
	switch a := a.(type) {
	case string:
		if b, ok := b.(string); ok {
			if !r.fits(len(a) + len(b)) {
				return nil, true
			}
			return a + b, true
		}
	case List:
		if b, ok := b.(List); ok && r.charge(len(a)+len(b)) {
			return append(append(make(List, 0, len(a)+len(b)), a...), b...), true
		}
	case Tuple:
		if b, ok := b.(Tuple); ok && r.charge(len(a)+len(b)) {
			return append(append(make(Tuple, 0, len(a)+len(b)), a...), b...), true
		}
	}
	return nil, r.err != nil
}

// repeat is seq * times.
func (r *run) repeat(seq, times Value) (Value, bool) {
	n, ok := asInt(times)
	if !ok {
		return nil, false
	}
	if m, ok := seq.(markup); ok {
		v, ok := r.repeat(string(m), times)
		return remark(v), ok
	}
	n = max(n, 0)
	size, isSeq := length(seq)
	if s, ok := seq.(string); ok {
		size = len(s)
	}
	if isSeq && size > 0 && n > int64(maxOutput/size) {
		r.fail(ErrLimit, "a sequence of %d elements repeated %d times", size, n)
		return nil, true
	}
	many := func(vs []Value) []Value {
		var out []Value
		if r.charge(size * int(n)) {
			for range n {
				out = append(out, vs...)
			}
		}
		return out
	}
	switch seq := seq.(type) {
	case string:
		if size == 0 || !r.fits(size*int(n)) {
			return "", true
		}
		return strings.Repeat(seq, int(n)), true
	case List:
		if size == 0 {
			return List{}, true
		}
		return List(many(seq)), true
	case Tuple:
		if size == 0 {
			return Tuple{}, true
		}
		return Tuple(many(seq)), true
	}
	return nil, false
}

func (r *run) intOrFail(v int64, ok bool) Value {
	if !ok {
		return r.fail(ErrUnsupported, "integers beyond 64 bits")
	}
	return v
}

func (r *run) intOp(op string, a, b int64) Value {
	switch op {
	case "+":
		s := a + b
		return r.intOrFail(s, (s > a) == (b > 0))
	case "-":
		s := a - b
		return r.intOrFail(s, (s < a) == (b > 0))
	case "*":
		return r.intOrFail(multiply(a, b))
	case "**":
		if b < 0 {
			return r.floatOp(op, float64(a), float64(b))
		}
		return r.power(a, b)
	}
	if b == 0 {
		return r.fail(ErrRender, "division by zero")
	}
	switch op {
	case "/":
		const exact = 1 << 53 // beyond it Python rounds once, floats here twice
		if a > exact || a < -exact || b > exact || b < -exact {
			return r.fail(ErrUnsupported, "dividing integers beyond 53 bits")
		}
		return float64(a) / float64(b)
	case "//":
		q := a / b
		if a%b != 0 && (a < 0) != (b < 0) {
			q--
		}
		return r.intOrFail(q, a != math.MinInt64 || b != -1)
	}
	m := a % b
	if m != 0 && (m < 0) != (b < 0) {
		m += b
	}
	return m
}

func multiply(a, b int64) (int64, bool) {
	hi, lo := bits.Mul64(magnitude(a), magnitude(b))
	p := a * b
	negative := (a < 0) != (b < 0)
	fits := hi == 0 && (lo <= math.MaxInt64 || negative && lo == 1<<63)
	return p, fits
}

func magnitude(a int64) uint64 {
	if a < 0 {
		return -uint64(a)
	}
	return uint64(a)
}

func (r *run) power(base, exponent int64) Value {
	if base >= -1 && base <= 1 { // the only ones for which the exponent may be large
		if base == -1 && exponent%2 == 0 || exponent == 0 {
			return int64(1)
		}
		return base
	}
	out, ok := int64(1), true
	for ; exponent > 0 && ok; exponent-- {
		out, ok = multiply(out, base)
	}
	return r.intOrFail(out, ok)
}

func (r *run) floatOp(op string, a, b float64) Value {
	switch op {
	case "+":
		return a + b
	case "-":
		return a - b
	case "*":
		return a * b
	case "**":
		v := math.Pow(a, b)
		switch {
		case a == 0 && b < 0:
			return r.fail(ErrRender, "0.0 cannot be raised to a negative power")
		case math.IsNaN(v) && !math.IsNaN(a) && !math.IsNaN(b):
			return r.fail(ErrUnsupported, "complex numbers")
		case math.IsInf(v, 0) && !math.IsInf(a, 0) && !math.IsInf(b, 0):
			return r.fail(ErrRender, "numerical result out of range")
		}
		return v
	}
	if b == 0 {
		return r.fail(ErrRender, "float division by zero")
	}
	if op == "/" {
		return a / b
	}
	// Python's floor division and remainder of floats.
	mod := math.Mod(a, b)
	div := (a - mod) / b
	if mod != 0 && (b < 0) != (mod < 0) {
		mod += b
		div--
	} else if mod == 0 {
		mod = math.Copysign(0, b)
	}
	if op == "%" {
		return mod
	}
	if div == 0 {
		return math.Copysign(0, a/b)
	}
	floor := math.Floor(div)
	if div-floor > 0.5 {
		floor++
	}
	return floor
}
