package jinja

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const specChars = "-+ 0#.123456789"

var (
	conversions = regexp.MustCompile(`(?s)%[-+ 0#.1-9]*.?`)
	fields      = regexp.MustCompile(`\{\{|\}\}|\{[^}]*\}|[{}]`)
)

// percent is Python's format % args for the conversions s, r, d, i and f with
// flags, width and precision.
func (r *run) percent(format string, args []Value) Value {
	s := conversions.ReplaceAllStringFunc(format, func(c string) string {
		verb := strings.TrimLeft(c[1:], specChars)
		spec := c[1 : len(c)-len(verb)]
		switch {
		case verb == "":
			r.fail(ErrRender, "incomplete format")
		case verb == "%":
			return verb
		case !strings.Contains("s r d i f", verb) || strings.Contains(spec, "#") || len(spec) > 6:
			r.fail(ErrUnsupported, "format %q", c)
		case len(args) == 0:
			r.fail(ErrRender, "not enough arguments for format string")
		}
		arg := args[0]
		args = args[1:]
		return r.conversion(spec, verb[0], arg)
	})
	if len(args) > 0 {
		r.fail(ErrRender, "not all arguments converted during string formatting")
	}
	r.fits(len(s))
	return s
}

func (r *run) conversion(spec string, verb byte, v Value) string {
	r.use(v)
	switch verb {
	case 's', 'r':
		s := r.str(v)
		if verb == 'r' {
			s = r.reprOf(v)
		}
		return fmt.Sprintf("%"+strings.Trim(spec, "0+ ")+"s", s)
	case 'f':
		return fmt.Sprintf("%"+spec+"f", want(r, asFloat, v, "must be real number, not %s"))
	}
	if f, ok := v.(float64); ok {
		v = r.truncate(f, int64(0))
	}
	return fmt.Sprintf("%"+spec+"d", want(r, asInt, v, "%d format: a real number is required, not %s"))
}

// formatMethod is str.format for {}, {0} and {name} without a format spec.
func (r *run) formatMethod(s string, a callArgs) Value {
	auto := 0
	s = fields.ReplaceAllStringFunc(s, func(f string) string {
		switch {
		case f == "{{" || f == "}}":
			return f[:1]
		case len(f) == 1:
			r.fail(ErrRender, "single '%s' encountered in format string", f)
		}
		return r.str(r.field(f[1:len(f)-1], a, &auto))
	})
	r.fits(len(s))
	return s
}

// field returns the argument that a replacement field names; auto counts the fields without a name.
func (r *run) field(name string, a callArgs, auto *int) Value {
	if strings.ContainsAny(name, "{:!.[") {
		return r.fail(ErrUnsupported, "format field %q", "{"+name+"}")
	}
	at := *auto
	if name == "" {
		*auto++
	} else if n, err := strconv.ParseUint(name, 10, 16); err == nil {
		at = int(n)
	} else if i := slices.Index(a.names, name); i >= 0 {
		return a.named[i]
	} else {
		r.fail(ErrRender, "'%s'", name)
	}
	if at >= len(a.pos) {
		r.fail(ErrRender, "Replacement index %d out of range for positional args tuple", at)
	}
	return a.pos[at]
}
