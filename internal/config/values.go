package config

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// value is a flag's value of any type.
type value[T any] struct {
	p     *T
	kind  string // names the value in help texts
	text  func(T) string
	parse func(string) (T, error)
}

// Value returns a flag's value that is stored in *p, which holds the default. kind names the value
// in help texts, text returns it as parse accepts it.
func Value[T any](p *T, kind string, text func(T) string, parse func(string) (T, error)) pflag.Value {
	return value[T]{p, kind, text, parse}
}

// String returns the text of the value.
func (v value[T]) String() string { return v.text(*v.p) }

// Set parses a value. On an error the old one stays.
func (v value[T]) Set(given string) error {
	x, err := v.parse(given)
	if err == nil {
		*v.p = x
	}
	return err
}

// Type names the value in help texts.
func (v value[T]) Type() string { return v.kind }

// PortVar declares a flag for a port, a number from 0 to 65535.
func (s *Set) PortVar(p *int, name string, port int, usage string) {
	*p = port
	s.Var(Value(p, "port", strconv.Itoa, func(v string) (int, error) {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil {
			err = fmt.Errorf("%q is not a port; write a number from 0 to 65535", v)
		}
		return int(n), err
	}), name, usage)
}

// atLeast returns a parser of whole numbers that are not below a minimum.
func atLeast(least int) func(string) (int, error) {
	return func(v string) (int, error) {
		n, ok := wholeNumber(v)
		if !ok {
			return 0, fmt.Errorf("%q is not a whole number", v)
		}
		if n < least {
			return 0, fmt.Errorf("%d is too few; want at least %d, or leave it out for the default", n, least)
		}
		return n, nil
	}
}

// CountVar declares a flag for a whole number with a minimum.
func (s *Set) CountVar(p *int, name string, n, least int, usage string) {
	*p = n
	s.Var(Value(p, "int", strconv.Itoa, atLeast(least)), name, usage)
}

// AutoVar declares a flag for a whole number that is 0 where it is not given, auto or -1.
func (s *Set) AutoVar(p *int, name, usage string) {
	*p = 0
	s.Var(Value(p, "int", strconv.Itoa, func(v string) (int, error) {
		if v == "auto" || v == "-1" {
			return 0, nil
		}
		return atLeast(0)(v)
	}), name, usage)
}

// RateVar declares a flag for a whole number a second, at least one, with the default *p.
func (s *Set) RateVar(p *float64, name string, usage string) {
	text := func(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }
	s.Var(Value(p, "int", text, func(v string) (float64, error) {
		n, err := atLeast(1)(v)
		return float64(n), err
	}), name, usage)
}

// magnitudes are the factors of vllm serve's whole numbers: 1k is 1000, 1K is 1024.
var magnitudes = map[byte]float64{'k': 1e3, 'm': 1e6, 'g': 1e9, 't': 1e12, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}

// wholeNumber parses a whole number, or a number with a magnitude such as 32k or 1.5k. As in
// vllm serve, a binary magnitude takes no fraction.
func wholeNumber(v string) (n int, ok bool) {
	n, err := strconv.Atoi(v)
	if err == nil || v == "" {
		return n, err == nil
	}
	factor := magnitudes[v[len(v)-1]]
	digits := v[:len(v)-1]
	if factor == 0 || strings.Trim(digits, "0123456789.") != "" || v[len(v)-1] < 'a' && strings.Contains(digits, ".") {
		return 0, false
	}
	x, err := strconv.ParseFloat(digits, 64)
	x = math.Round(x*factor*1e3) / 1e3 // 1.001k is 1001, in spite of binary fractions
	return int(x), err == nil && x == math.Trunc(x) && x < 1<<53
}

// Bytes is the flag value of a size: a number of bytes, or with KiB, MiB, GiB, KB, MB, GB, or as
// wholeNumber reads it.
type Bytes int64

// units are tried in order, longest suffix first.
var units = []struct {
	suffix string
	factor float64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

// String returns the value in the largest unit that divides it.
func (b *Bytes) String() string {
	for _, i := range []int{3, 2, 1, 0} {
		if f := int64(units[i].factor); int64(*b) >= f && int64(*b)%f == 0 {
			return fmt.Sprintf("%d%s", int64(*b)/f, units[i].suffix)
		}
	}
	return fmt.Sprint(int64(*b))
}

// Set parses a value.
func (b *Bytes) Set(v string) error {
	if n, ok := wholeNumber(v); ok && n >= 0 { // 4G, as vllm serve has it
		*b = Bytes(n)
		return nil
	}
	num, factor := v, 1.0
	for _, u := range units {
		if rest, ok := strings.CutSuffix(v, u.suffix); ok {
			num, factor = strings.TrimSpace(rest), u.factor
			break
		}
	}
	f, err := strconv.ParseFloat(num, 64)
	if err != nil || !(f >= 0 && f*factor < math.MaxInt64) {
		return fmt.Errorf("%q is not a size; write 1073741824, 1GiB or 1.5GB", v)
	}
	*b = Bytes(f * factor)
	return nil
}

// Type names the value in help texts.
func (b *Bytes) Type() string { return "size" }

// none is stored for a flag of 0 that turns a bound off, because zero means the default.
const none = -1

// SizeVar declares a flag for a number of bytes, with the default *p. With off, 0 turns the bound
// off, which is stored as a negative number; else a size is at least one byte.
func (s *Set) SizeVar(p *int, name string, off bool, usage string) {
	text := func(n int) string {
		b := Bytes(max(0, n))
		return b.String()
	}
	s.Var(Value(p, "size", text, func(v string) (int, error) {
		var b Bytes
		switch err := b.Set(v); {
		case err != nil:
			return 0, err
		case b > 0:
			return int(b), nil
		case !off:
			return 0, fmt.Errorf("%q leaves room for nothing; write a size such as 32MiB, or leave it out for the default", v)
		}
		return none, nil
	}), name, usage)
}

// SecondsVar declares a flag for a duration such as 30, 30s or 1m30s, with the default *p. A number
// without a unit is in seconds, as in vLLM's flags. With off, 0 turns the bound off, which is
// stored as a negative duration.
func (s *Set) SecondsVar(p *time.Duration, name string, off bool, usage string) {
	text := func(d time.Duration) string { return max(0, d).String() }
	s.Var(Value(p, "duration", text, func(v string) (time.Duration, error) {
		if v != "" && strings.Trim(v, "0123456789.") == "" {
			v += "s"
		}
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			return 0, fmt.Errorf("%q is not a duration; write 30, 30s or 1m30s", v)
		}
		if d == 0 && off {
			return none, nil
		}
		return d, nil
	}), name, usage)
}

// HostVar declares a flag for the host's part of an address, with the default *p. The brackets of
// an IPv6 address are dropped.
func (s *Set) HostVar(p *string, name, usage string) {
	s.Var(Value(p, "string", func(a string) string { return a }, func(v string) (string, error) {
		v = withoutBrackets(v)
		if _, err := netip.ParseAddr(v); err != nil && strings.ContainsAny(v, ":/[] ") {
			return "", fmt.Errorf("%q is not a host, such as 127.0.0.1, ::1 or a name; the port has a flag of its own", v)
		}
		return v, nil
	}), name, usage)
}

func withoutBrackets(host string) string {
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		return host[1 : len(host)-1]
	}
	return host
}

// AddressVar declares a flag for an IP address, or localhost; empty: none. Other names are refused,
// because gossip resolves none.
func (s *Set) AddressVar(p *string, name, usage string) {
	s.Var(Value(p, "string", func(a string) string { return a }, func(v string) (string, error) {
		v = withoutBrackets(v)
		if v != "" && v != "localhost" && net.ParseIP(v) == nil {
			return "", fmt.Errorf("%q is not an IP address, such as 10.0.0.1", v)
		}
		return v, nil
	}), name, usage)
}

// ChoiceVar declares a flag with two words, which set *p to false and to true. off is the default.
func (s *Set) ChoiceVar(p *bool, name, off, on, usage string) {
	words := map[bool]string{false: off, true: on}
	s.Var(Value(p, "string", func(b bool) string { return words[b] }, func(v string) (bool, error) {
		if v != off && v != on {
			return false, fmt.Errorf("%q: want %s or %s", v, off, on)
		}
		return v == on, nil
	}), name, usage)
	s.Values(name, off, on)
}

// OriginsVar declares a flag for origins of web pages. As with vllm serve, a value is a JSON list;
// a list with commas is accepted too.
func (s *Set) OriginsVar(p *[]string, name, usage string) {
	text := func(origins []string) string {
		if len(origins) == 0 {
			return ""
		}
		text, err := json.Marshal(origins)
		if err != nil {
			panic(err) // strings only
		}
		return string(text)
	}
	s.Var(Value(p, jsonType, text, func(v string) (origins []string, err error) {
		if strings.HasPrefix(strings.TrimSpace(v), "[") {
			if err := json.Unmarshal([]byte(v), &origins); err != nil {
				return nil, fmt.Errorf("%s: want a JSON list of origins", v)
			}
			return origins, nil
		}
		for part := range strings.SplitSeq(v, ",") {
			origins = append(origins, strings.TrimSpace(part))
		}
		return slices.DeleteFunc(origins, func(o string) bool { return o == "" }), nil
	}), name, usage)
}
