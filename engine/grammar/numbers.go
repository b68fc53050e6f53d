package grammar

import (
	"fmt"
	"math/big"
	"strings"
)

// Numbers as JSON spells them.
var (
	naturalExpr = alt(lit("0"), seq(bytesOf(runeRange{'1', '9'}), digits(0, unlimited)))
	integerExpr = seq(opt(lit("-")), naturalExpr)
	fracExpr    = seq(lit("."), digits(1, unlimited))
	expExpr     = seq(bytesOf(runeRange{'E', 'E'}, runeRange{'e', 'e'}), opt(bytesOf(runeRange{'+', '+'}, runeRange{'-', '-'})), digits(1, unlimited))
	numberExpr  = seq(integerExpr, opt(fracExpr), opt(expExpr))
)

// bound is one end of a range of numbers.
type bound struct {
	at        decimal
	exclusive bool
}

// numberRange returns the numbers between two bounds, either of which may be nil. Numbers in a
// range have no exponent. Integers have no fraction.
func numberRange(lo, hi *bound, integer bool, limits *Limits) (*graph, error) {
	parts := []*expr{}
	if lo != nil {
		parts = append(parts, atLeast(*lo, integer))
	}
	if hi != nil {
		parts = append(parts, mirrored(*hi, integer))
	}
	var g *graph
	for _, e := range parts {
		x, err := determinize(e, limits)
		if err != nil {
			return nil, err
		}
		if g != nil {
			if x, err = combine(g, x, both, limits); err != nil {
				return nil, err
			}
		}
		g = x
	}
	return g.finish(limits)
}

// atLeast returns the numbers from b upwards.
func atLeast(b bound, integer bool) *expr {
	if !b.at.neg {
		return notBelow(b, integer)
	}
	b.at.neg = false
	return alt(magnitudes(integer), seq(lit("-"), notAbove(b, integer)))
}

// mirrored returns the numbers from b downwards.
func mirrored(b bound, integer bool) *expr {
	if b.at.neg {
		b.at.neg = false
		return seq(lit("-"), notBelow(b, integer))
	}
	zero := b.at.int == "" && b.at.frac == ""
	if zero && b.exclusive {
		return seq(lit("-"), notBelow(b, integer))
	}
	return alt(notAbove(b, integer), seq(lit("-"), magnitudes(integer)))
}

func magnitudes(integer bool) *expr {
	if integer {
		return naturalExpr
	}
	return seq(naturalExpr, opt(fracExpr))
}

func digitRange(lo, hi byte) *expr {
	if lo > hi {
		return noString
	}
	return bytesOf(runeRange{rune(lo), rune(hi)})
}

func intDigits(d decimal) string {
	if d.int == "" {
		return "0"
	}
	return d.int
}

// notBelow returns the spellings without a sign of the magnitudes from b upwards.
func notBelow(b bound, integer bool) *expr {
	at := intDigits(b.at)
	frac := opt(fracExpr)
	if integer {
		frac = emptyString
	}
	var same *expr // the numbers with the integer part of b
	switch {
	case b.at.frac == "" && !b.exclusive:
		same = frac
	case integer:
		same = noString
	default:
		same = seq(lit("."), fracAbove(b.at.frac, b.exclusive))
	}
	return alt(seq(above(at), frac), seq(lit(at), same))
}

// above returns the integers above at.
func above(at string) *expr {
	if at == "0" {
		return seq(digitRange('1', '9'), digits(0, unlimited))
	}
	longer := seq(digitRange('1', '9'), digits(int32(len(at)), unlimited))
	return alt(longer, sameLengthAbove(at))
}

func sameLengthAbove(at string) *expr {
	if at == "" {
		return noString
	}
	rest := at[1:]
	return alt(seq(digitRange(at[0]+1, '9'), digits(int32(len(rest)), int32(len(rest)))), seq(lit(at[:1]), sameLengthAbove(rest)))
}

// fracAbove returns the digits of a fraction that are at least at, or above it.
func fracAbove(at string, exclusive bool) *expr {
	any := digits(0, unlimited)
	if at == "" {
		if exclusive {
			return seq(star(lit("0")), digitRange('1', '9'), any)
		}
		return any
	}
	return alt(seq(digitRange(at[0]+1, '9'), any), seq(lit(at[:1]), fracAbove(at[1:], exclusive)))
}

// notAbove returns the spellings without a sign of the magnitudes from zero up to b.
func notAbove(b bound, integer bool) *expr {
	at := intDigits(b.at)
	frac := opt(fracExpr)
	if integer {
		frac = emptyString
	}
	below := seq(sameLengthBelow(at, true), frac)
	if len(at) > 1 {
		shorter := seq(digitRange('1', '9'), digits(0, int32(len(at)-2)))
		below = alt(below, seq(alt(lit("0"), shorter), frac))
	}
	var same *expr
	switch {
	case b.at.frac == "" && b.exclusive:
		same = noString
	case integer:
		same = emptyString
	default:
		same = opt(seq(lit("."), fracBelow(b.at.frac, b.exclusive, true)))
	}
	return alt(below, seq(lit(at), same))
}

// sameLengthBelow returns the integers below at with as many digits.
func sameLengthBelow(at string, first bool) *expr {
	if at == "" {
		return noString
	}
	from := byte('0')
	if first && len(at) > 1 {
		from = '1'
	}
	rest := at[1:]
	lower := noString
	if at[0] > '0' {
		lower = seq(digitRange(from, at[0]-1), digits(int32(len(rest)), int32(len(rest))))
	}
	return alt(lower, seq(lit(at[:1]), sameLengthBelow(rest, false)))
}

// fracBelow returns the digits of a fraction that are at most at, or below it.
func fracBelow(at string, exclusive, first bool) *expr {
	if at == "" {
		if exclusive {
			return noString
		}
		if first {
			return plus(lit("0"))
		}
		return star(lit("0"))
	}
	lower := noString
	if at[0] > '0' {
		lower = seq(digitRange('0', at[0]-1), digits(0, unlimited))
	}
	// A fraction that ends here is below at, whose last digit is not 0.
	end := fracBelow(at[1:], exclusive, false)
	if at[1:] != "" {
		end = opt(end)
	}
	return alt(lower, seq(lit(at[:1]), end))
}

// multiplesOf returns the integers, or numbers without an exponent, that are multiples of m.
func multiplesOf(m decimal, integer bool, limits *Limits) (*graph, error) {
	n, ok := new(big.Int).SetString(m.int+m.frac, 10)
	places := len(m.frac)
	if !ok || m.neg || n.Sign() <= 0 {
		return nil, fmt.Errorf("%s is not above 0", m)
	}
	for places > 0 && new(big.Int).Mod(n, big.NewInt(10)).Sign() == 0 {
		n.Div(n, big.NewInt(10))
		places--
	}
	if !n.IsInt64() || n.Int64()*int64(places+2)+4 > int64(limits.DFAStates) {
		return nil, fmt.Errorf("%w: multiples of %s need more than %d states", ErrBudget, m, limits.DFAStates)
	}
	if err := limits.spend(4 * int(n.Int64()) * (places + 3)); err != nil { // 256 transitions of each
		return nil, err
	}
	return multipleGraph(int(n.Int64()), places, integer).finish(limits)
}

// multipleGraph has a state for the start, for a sign, for a leading zero and for each remainder
// at each place of the fraction.
func multipleGraph(n, places int, integer bool) *graph {
	g := &graph{classes: 256}
	for c := range 256 {
		g.class[c] = uint8(c)
	}
	const begin, sign, zero, whole = 0, 1, 2, 3
	point := whole + n // behind the point, then behind each digit of the fraction
	states := point + n*(places+1)
	g.accept = make([]bool, states+n)
	g.next = make([]int32, (states+n)*256)
	for i := range g.next {
		g.next[i] = -1
	}
	power := 1 % n
	for range places {
		power = power * 10 % n
	}
	edge := func(s int, c byte, t int) { g.next[s*256+int(c)] = int32(t) }
	edge(begin, '-', sign)
	for _, s := range []int{begin, sign} {
		edge(s, '0', zero)
		for d := 1; d <= 9; d++ {
			edge(s, byte('0'+d), whole+d%n)
		}
	}
	g.accept[zero] = true
	for r := range n {
		s := whole + r
		g.accept[s] = r*power%n == 0
		for d := range 10 {
			edge(s, byte('0'+d), whole+(r*10+d)%n)
		}
		if !integer {
			edge(s, '.', point+r)
		}
		fractionStates(g, r, n, places, point, edge)
	}
	if !integer {
		edge(zero, '.', point)
	}
	return g
}

// fractionStates fills the states of remainder r behind the point.
func fractionStates(g *graph, r, n, places, point int, edge func(int, byte, int)) {
	tail := point + n*(places+1) // only zeros may follow
	for k := 0; k <= places; k++ {
		s := point + k*n + r
		left := 1 % n
		for range places - k {
			left = left * 10 % n
		}
		g.accept[s] = k > 0 && r*left%n == 0
		if k < places {
			for d := range 10 {
				edge(s, byte('0'+d), point+(k+1)*n+(r*10+d)%n)
			}
		} else if r == 0 {
			edge(s, '0', tail)
		}
	}
	if r == 0 {
		g.accept[tail] = true
		edge(tail, '0', tail)
	}
}

// integerFormats are the ranges of formats of integers.
var integerFormats = map[string][2]string{
	"int32":  {"-2147483648", "2147483647"},
	"int64":  {"-9223372036854775808", "9223372036854775807"},
	"uint32": {"0", "4294967295"},
	"uint64": {"0", "18446744073709551615"},
	"int8":   {"-128", "127"},
	"uint8":  {"0", "255"},
	"int16":  {"-32768", "32767"},
	"uint16": {"0", "65535"},
}

// isInteger reports whether a number has no fraction.
func isInteger(d decimal) bool { return strings.Trim(d.frac, "0") == "" }

// multiple reports whether d is a multiple of m.
func multiple(d, m decimal) bool {
	places := max(len(d.frac), len(m.frac))
	scaled := func(x decimal) *big.Int {
		n, _ := new(big.Int).SetString("0"+x.int+x.frac+strings.Repeat("0", places-len(x.frac)), 10)
		return n
	}
	by := scaled(m)
	return by.Sign() > 0 && new(big.Int).Mod(scaled(d), by).Sign() == 0
}
