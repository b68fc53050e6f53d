package config

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Port is the flag value of a port's number.
type Port int

// String returns the number.
func (p *Port) String() string { return strconv.Itoa(int(*p)) }

// Set parses a number from 0 to 65535.
func (p *Port) Set(v string) error {
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil {
		return fmt.Errorf("%q is not a port; write a number from 0 to 65535", v)
	}
	*p = Port(n)
	return nil
}

// Type names the value in help texts.
func (p *Port) Type() string { return "port" }

// PortVar declares a flag for a port.
func (s *Set) PortVar(p *int, name string, value int, usage string) {
	*p = value
	s.Var((*Port)(p), name, usage)
}

// count is the flag value of a whole number with a minimum.
type count struct {
	n     *int
	least int
	auto  bool // auto and -1 are 0
}

// String returns the number.
func (c count) String() string {
	if c.n == nil {
		return "0"
	}
	return strconv.Itoa(*c.n)
}

// Set parses a number that is not below the minimum.
func (c count) Set(v string) error {
	if c.auto && (v == "auto" || v == "-1") {
		v = "0"
	}
	n, ok := wholeNumber(v)
	if !ok {
		return fmt.Errorf("%q is not a whole number", v)
	}
	if n < c.least {
		return fmt.Errorf("%d is too few; want at least %d, or leave it out for the default", n, c.least)
	}
	*c.n = n
	return nil
}

// Type names the value in help texts.
func (c count) Type() string { return "int" }

// CountVar declares a flag for a whole number with a minimum.
func (s *Set) CountVar(p *int, name string, value, least int, usage string) {
	*p = value
	s.Var(count{p, least, false}, name, usage)
}

// AutoVar declares a flag for a whole number that is 0 where it is not given, auto or -1.
func (s *Set) AutoVar(p *int, name, usage string) {
	*p = 0
	s.Var(count{p, 0, true}, name, usage)
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

// Seconds is the flag value of a duration. A number without a unit is in seconds, as in
// vLLM's flags.
type Seconds time.Duration

// String returns the duration in Go's form.
func (d *Seconds) String() string { return time.Duration(*d).String() }

// Set parses "30", "30s" or "1m30s".
func (d *Seconds) Set(v string) error {
	if v != "" && !slices.ContainsFunc([]byte(v), func(c byte) bool { return (c < '0' || c > '9') && c != '.' }) {
		v += "s"
	}
	t, err := time.ParseDuration(v)
	if err != nil || t < 0 {
		return fmt.Errorf("%q is not a duration; write 30, 30s or 1m30s", v)
	}
	*d = Seconds(t)
	return nil
}

// Type names the value in help texts.
func (d *Seconds) Type() string { return "duration" }

// Address is an IP address, or localhost; empty: none. Other names are refused, because
// gossip resolves none.
type Address string

// Set checks an address.
func (a *Address) Set(v string) error {
	if v != "" && v != "localhost" && net.ParseIP(v) == nil {
		return fmt.Errorf("%q is not an IP address, such as 10.0.0.1", v)
	}
	*a = Address(v)
	return nil
}

// Type names the value in help texts.
func (a *Address) Type() string { return "string" }

func (a *Address) String() string { return string(*a) }

// choice is the flag value of one of two words, which set an option to false or true.
type choice struct {
	on    *bool
	words [2]string
}

// String returns the word.
func (c choice) String() string {
	if c.on != nil && *c.on {
		return c.words[1]
	}
	return c.words[0]
}

// Set parses one of the words.
func (c choice) Set(v string) error {
	if v != c.words[0] && v != c.words[1] {
		return fmt.Errorf("%q: want %s or %s", v, c.words[0], c.words[1])
	}
	*c.on = v == c.words[1]
	return nil
}

// Type names the value in help texts.
func (c choice) Type() string { return "string" }

// ChoiceVar declares a flag with the words off, which is the default, and on.
func (s *Set) ChoiceVar(p *bool, name, off, on, usage string) {
	s.Var(choice{p, [2]string{off, on}}, name, usage)
	s.Values(name, off, on)
}

// Origins are origins of web pages. As with vllm serve, a value is a JSON list; a list
// with commas is accepted too. It implements pflag.Value.
type Origins []string

// String returns a JSON list; empty without any.
func (o *Origins) String() string {
	if len(*o) == 0 {
		return ""
	}
	text, err := json.Marshal([]string(*o))
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}

// Type names the value in help texts.
func (o *Origins) Type() string { return jsonType }

// Set replaces the origins.
func (o *Origins) Set(v string) error {
	*o = nil
	if strings.HasPrefix(strings.TrimSpace(v), "[") {
		if err := json.Unmarshal([]byte(v), (*[]string)(o)); err != nil {
			return fmt.Errorf("%s: want a JSON list of origins", v)
		}
		return nil
	}
	for part := range strings.SplitSeq(v, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*o = append(*o, part)
		}
	}
	return nil
}
