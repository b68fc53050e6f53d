package config

import (
	"fmt"
	"strconv"
	"time"
)

// none is stored for a flag of 0 that turns a bound off, because zero means the default.
const none = -1

// seconds is a flag value of a duration. With off, 0 turns the bound off.
type seconds struct {
	d   *time.Duration
	off bool
}

// String returns the duration in Go's form.
func (v seconds) String() string { return max(0, *v.d).String() }

// Set parses a duration as Seconds does.
func (v seconds) Set(text string) error {
	var s Seconds
	if err := s.Set(text); err != nil {
		return err
	}
	if *v.d = time.Duration(s); s == 0 && v.off {
		*v.d = none
	}
	return nil
}

// Type names the value in help texts.
func (v seconds) Type() string { return "duration" }

// SecondsVar declares a flag for a duration, with the default *p. With off, 0 turns the bound off,
// which is stored as a negative duration.
func (s *Set) SecondsVar(p *time.Duration, name string, off bool, usage string) {
	s.Var(seconds{p, off}, name, usage)
}

// size is a flag value in bytes. With off, 0 turns the bound off; else it is refused.
type size struct {
	n   *int
	off bool
}

// String returns the value as Bytes does.
func (v size) String() string {
	b := Bytes(max(0, *v.n))
	return b.String()
}

// Set parses a size as Bytes does.
func (v size) Set(text string) error {
	var b Bytes
	if err := b.Set(text); err != nil {
		return err
	}
	if b < 1 && !v.off {
		return fmt.Errorf("%q leaves room for nothing; write a size such as 32MiB, or leave it out for the default", text)
	}
	if *v.n = int(b); b == 0 {
		*v.n = none
	}
	return nil
}

// Type names the value in help texts.
func (v size) Type() string { return "size" }

// SizeVar declares a flag for a number of bytes, with the default *p. With off, 0 turns the bound
// off, which is stored as a negative number; else a size is at least one byte.
func (s *Set) SizeVar(p *int, name string, off bool, usage string) {
	s.Var(size{p, off}, name, usage)
}

// perSecond is a flag value of a whole number a second, at least one.
type perSecond struct{ n *float64 }

// String returns the number.
func (v perSecond) String() string { return strconv.FormatFloat(*v.n, 'f', -1, 64) }

// Set parses a number.
func (v perSecond) Set(text string) error {
	n := 0
	err := count{&n, 1, false}.Set(text)
	if err == nil {
		*v.n = float64(n)
	}
	return err
}

// Type names the value in help texts.
func (v perSecond) Type() string { return "int" }

// RateVar declares a flag for a whole number a second, at least one, with the default *p.
func (s *Set) RateVar(p *float64, name string, usage string) {
	s.Var(perSecond{p}, name, usage)
}
