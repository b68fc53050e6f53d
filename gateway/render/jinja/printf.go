package jinja

import (
	"fmt"
	"strconv"
	"strings"
)

// percent is Python's format % args for the conversions s, r, d, i and f with
// flags, width and precision.
func (r *run) percent(format string, args []Value) Value {
	var b strings.Builder
	for {
		i := strings.IndexByte(format, '%')
		if i < 0 {
			b.WriteString(format)
			break
		}
		b.WriteString(format[:i])
		format = format[i+1:]
		end := strings.IndexFunc(format, func(c rune) bool { return !strings.ContainsRune("-+ 0#.123456789", c) })
		if end < 0 {
			return r.fail(ErrRender, "incomplete format")
		}
		verb, spec := format[end], format[:end]
		format = format[end+1:]
		if verb == '%' {
			b.WriteByte('%')
			continue
		}
		if !strings.ContainsRune("srdif", rune(verb)) || strings.Contains(spec, "#") || len(spec) > 6 {
			return r.fail(ErrUnsupported, "format %q", "%"+spec+string(rune(verb)))
		}
		if len(args) == 0 {
			return r.fail(ErrRender, "not enough arguments for format string")
		}
		b.WriteString(r.conversion(spec, verb, args[0]))
		args = args[1:]
		if r.err != nil {
			return nil
		}
	}
	if len(args) > 0 {
		return r.fail(ErrRender, "not all arguments converted during string formatting")
	}
	r.fits(b.Len())
	return b.String()
}

func (r *run) conversion(spec string, verb byte, v Value) string {
	if !r.use(v) && verb != 's' {
		return ""
	}
	switch verb {
	case 's', 'r':
		s := r.str(v)
		if verb == 'r' {
			var b strings.Builder
			r.repr(&b, v, 0)
			s = b.String()
		}
		return fmt.Sprintf("%"+strings.Trim(spec, "0+ ")+"s", s)
	case 'f':
		f, ok := asFloat(v)
		if !ok {
			r.fail(ErrRender, "must be real number, not %s", typeName(v))
		}
		return fmt.Sprintf("%"+spec+"f", f)
	}
	i, ok := asInt(v)
	if f, isFloat := v.(float64); isFloat {
		n, _ := r.truncate(f, nil).(int64)
		i, ok = n, true
	}
	if !ok {
		r.fail(ErrRender, "%%d format: a real number is required, not %s", typeName(v))
	}
	return fmt.Sprintf("%"+spec+"d", i)
}

// formatMethod is str.format for {}, {0} and {name} without a format spec.
func (r *run) formatMethod(s string, a callArgs) Value {
	var b strings.Builder
	auto := 0
	for s != "" {
		i := strings.IndexAny(s, "{}")
		if i < 0 {
			b.WriteString(s)
			break
		}
		b.WriteString(s[:i])
		brace := s[i]
		s = s[i+1:]
		if s != "" && s[0] == brace {
			b.WriteByte(brace)
			s = s[1:]
			continue
		}
		end := strings.IndexByte(s, '}')
		if brace == '}' || end < 0 {
			return r.fail(ErrRender, "single '%c' encountered in format string", brace)
		}
		v := r.field(s[:end], a, &auto)
		if r.err != nil {
			return nil
		}
		b.WriteString(r.str(v))
		s = s[end+1:]
	}
	r.fits(b.Len())
	return b.String()
}

// field returns the argument that a replacement field names; auto counts the
// fields without a name.
func (r *run) field(name string, a callArgs, auto *int) Value {
	if strings.ContainsAny(name, "{:!.[") {
		return r.fail(ErrUnsupported, "format field %q", "{"+name+"}")
	}
	at := *auto
	if name == "" {
		*auto++
	} else if n, err := strconv.ParseUint(name, 10, 16); err == nil {
		at = int(n)
	} else {
		for i, have := range a.names {
			if have == name {
				return a.named[i]
			}
		}
		return r.fail(ErrRender, "'%s'", name)
	}
	if at >= len(a.pos) {
		return r.fail(ErrRender, "Replacement index %d out of range for positional args tuple", at)
	}
	return a.pos[at]
}
