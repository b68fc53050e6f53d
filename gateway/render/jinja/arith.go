package jinja

import (
	"math"
	"slices"
	"strings"
)

// unary is + or - of v.
func (r *run) unary(op string, v Value) Value {
	if f, ok := v.(float64); ok {
		if op == "-" {
			f = -f
		}
		return f
	}
	i := want(r, asInt, v, "bad operand type for unary "+op+": '%s'")
	if op == "-" {
		return r.intOp("-", 0, i)
	}
	return i
}

// infix is the result of an operator of two operands; and and or may leave out the right one.
func (r *run) infix(op token, left, right expr) Value {
	a := left.eval(r)
	if op.kind == tokName && truth(a) == (op.text == "or") {
		return a
	}
	b := right.eval(r)
	if op.kind == tokName {
		return b
	}
	r.at(op.line)
	return r.binary(op.text, a, b)
}

func (r *run) binary(op string, a, b Value) Value {
	r.use(a, b)
	if i, j, ok := both(asInt, a, b); ok {
		return r.intOp(op, i, j)
	}
	if f, g, ok := both(asFloat, a, b); ok {
		return r.floatOp(op, f, g)
	}
	var v Value
	ok := false
	switch op {
	case "+":
		v, ok = r.join(a, b)
	case "*":
		if v, ok = r.repeat(a, b); !ok {
			v, ok = r.repeat(b, a)
		}
	case "%":
		switch s := a.(type) {
		case markup:
			r.fail(ErrUnsupported, "formatting Markup with %%")
		case string:
			switch args := b.(type) {
			case Tuple:
				return r.percent(s, args)
			case *Dict:
				r.fail(ErrUnsupported, "formatting a string with a dict")
			}
			return r.percent(s, []Value{b})
		}
	}
	if !ok {
		r.fail(ErrRender, "unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
	}
	return v
}

// join is + of two sequences; ok is false for a TypeError. Where one string is markup, the result
// is, and the other one is escaped.
func (r *run) join(a, b Value) (v Value, ok bool) {
	if x, y, ok := sequences(a, b); ok {
		r.charge(len(x) + len(y))
		return like(a, append(append(make([]Value, 0, len(x)+len(y)), x...), y...)), true
	}
	s, t, ok := both(asStr, a, b)
	if !ok {
		return nil, false
	}
	if hasMarkup(a, b) {
		x, y := r.escape(a), r.escape(b)
		r.fits(len(x) + len(y))
		return x + y, true
	}
	r.fits(len(s) + len(t))
	return s + t, true
}

// repeat is seq * times; ok is false for a TypeError.
func (r *run) repeat(seq, times Value) (v Value, ok bool) {
	n, ok := asInt(times)
	s, isString := asStr(seq)
	vs, isSequence := sequence(seq)
	size := len(s) + len(vs)
	n = max(n, 0)
	switch {
	case !ok || !isString && !isSequence:
		return nil, false
	case size == 0:
		return seq, true
	case n > int64(maxOutput/size):
		r.fail(ErrLimit, "a sequence of %d elements repeated %d times", size, n)
	case isSequence:
		r.charge(size * int(n))
		return like(seq, slices.Repeat(vs, int(n))), true
	}
	r.fits(size * int(n))
	if v = strings.Repeat(s, int(n)); hasMarkup(seq) {
		v = remark(v)
	}
	return v, true
}

func (r *run) intOrFail(v int64, ok bool) Value {
	if !ok {
		r.fail(ErrUnsupported, "integers beyond 64 bits")
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
		// From 64 factors on, all bases but -1, 0 and 1 have overflowed, and those repeat.
		out, ok := int64(1), true
		for range min(b, 64+b%2) {
			if out, ok = multiply(out, a); !ok {
				break
			}
		}
		return r.intOrFail(out, ok)
	}
	if b == 0 {
		return r.fail(ErrRender, "division by zero")
	}
	m := a % b
	inexact := m != 0 && (m < 0) != (b < 0)
	switch op {
	case "/":
		const exact = 1 << 53 // beyond it Python rounds once, floats here twice
		if max(a, b) > exact || min(a, b) < -exact {
			r.fail(ErrUnsupported, "dividing integers beyond 53 bits")
		}
		return float64(a) / float64(b)
	case "//":
		q := a / b
		if inexact {
			q--
		}
		return r.intOrFail(q, a != math.MinInt64 || b != -1)
	}
	if inexact {
		m += b
	}
	return m
}

// multiply returns a*b; ok is false on overflow.
func multiply(a, b int64) (p int64, ok bool) {
	p = a * b
	return p, a == 0 || p/a == b && (a != -1 || b != math.MinInt64)
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
			r.fail(ErrRender, "0.0 cannot be raised to a negative power")
		case math.IsNaN(v) && !math.IsNaN(a) && !math.IsNaN(b):
			r.fail(ErrUnsupported, "complex numbers")
		case math.IsInf(v, 0) && !math.IsInf(a, 0) && !math.IsInf(b, 0):
			r.fail(ErrRender, "numerical result out of range")
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
