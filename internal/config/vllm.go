package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// Users have command lines of `vllm serve`. One table has each of its flags with its class:
// it is a flag of tandem with the same meaning, or it is accepted with a warning that it has
// no effect, or it is refused with an alternative. No flag that would change an answer is
// ignored.

// Class is the treatment of a flag of vllm serve.
type Class uint8

const (
	// Supported flags are declared by a command, under the same name.
	Supported Class = iota
	// NoEffect flags request what is always done, or tune a part that does not exist.
	NoEffect
	// Refused flags request what is not supported.
	Refused
)

// String returns the word in docs/flags.md.
func (c Class) String() string { return [...]string{"supported", "no effect", "refused"}[c] }

// kind is the syntax of a flag.
type kind uint8

const (
	single  kind = iota // --name VALUE
	onOff               // --name, --no-name
	numbers             // --name 1 2 4
	pairs               // --name A=B C=D
	words               // --name A B C
)

// VLLMFlag is one flag of vllm serve.
type VLLMFlag struct {
	Name, Short string
	kind        kind
	Class       Class
	// Fine are the values without effect, separated by spaces. Empty: all values of a
	// NoEffect flag, and only false of a Refused switch.
	Fine string
	Why  string // why it has no effect, or why other values are refused, with an alternative
	// Only describes the values of a Supported flag that are not refused; empty: all of vLLM's.
	Only string
}

// Switch reports whether the flag takes no value.
func (f *VLLMFlag) Switch() bool { return f.kind == onOff }

// fine reports whether the value is accepted without effect.
func (f *VLLMFlag) fine(v string) bool {
	if f.Fine == "" {
		return f.Class == NoEffect || f.kind == onOff && v == "false"
	}
	return slices.Contains(strings.Fields(f.Fine), v)
}

// side is the processes that a flag configures: nodes, which run models, or gateways, which
// serve clients. A command may be both.
type side uint8

const (
	nodes side = 1 << iota
	gateways
)

// ForNodes makes the set accept the flags of vllm serve, as a command that runs models.
func (s *Set) ForNodes() { s.sides |= nodes }

// ForGateways makes the set accept the flags of vllm serve, as a command that serves clients.
func (s *Set) ForGateways() { s.sides |= gateways }

// commands names the commands with the flags of a side.
func (s side) commands() string {
	if s == gateways {
		return "a flag of `tandem gateway`, which serves the clients"
	}
	return "a flag of `tandem prefill` and `tandem decode`, which run the model"
}

// VLLMGroup is a part of the table.
type VLLMGroup struct {
	Name  string
	side  side // that its supported flags configure
	Flags []VLLMFlag
}

// flags joins the rows of a group.
func flags(rows ...[]VLLMFlag) []VLLMFlag { return slices.Concat(rows...) }

// supported, noEffect and refused return the rows of flags of a class. A flag is its name, then ?
// for a switch, # for numbers, = for pairs or * for words, then a comma and its short name, then a
// colon and the values without effect, separated by |: "enable-expert-parallel?,ep" or
// "nnodes,n:1".
func supported(names string) []VLLMFlag     { return rows(names, Supported, "") }
func noEffect(names, why string) []VLLMFlag { return rows(names, NoEffect, why) }
func refused(names, why string) []VLLMFlag  { return rows(names, Refused, why) }

// partly returns the rows of supported flags of which some values are refused.
func partly(names, only, why string) []VLLMFlag {
	out := rows(names, Supported, why)
	for i := range out {
		out[i].Only = only
	}
	return out
}

func rows(names string, class Class, why string) (out []VLLMFlag) {
	for _, s := range strings.Fields(names) {
		s, fine, _ := strings.Cut(s, ":")
		s, short, _ := strings.Cut(s, ",")
		kind := kind(max(0, strings.IndexByte(" ?#=*", s[len(s)-1])))
		out = append(out, VLLMFlag{Name: strings.TrimRight(s, "?#=*"), Short: short, kind: kind, Class: class, Fine: strings.ReplaceAll(fine, "|", " "), Why: why})
	}
	return out
}

// refusal is an error that is printed without the parser's prefix.
type refusal struct{ text string }

func (r *refusal) Error() string { return r.text }

// foreign is a flag of vllm serve that the command does not have. It implements
// pflag.Value.
type foreign struct {
	set  *Set
	flag *VLLMFlag
	side side
	was  string
}

func (f *foreign) String() string { return f.was }
func (f *foreign) Type() string   { return "" }

// Set accepts a value without effect and refuses all others.
func (f *foreign) Set(v string) error {
	name := "--" + f.flag.Name
	if f.flag.kind == onOff {
		b, err := strconv.ParseBool(v)
		if err != nil {
			return &refusal{fmt.Sprintf("%s: %q is neither true nor false", name, v)}
		}
		v = strconv.FormatBool(b)
		if !b {
			name = "--no-" + f.flag.Name
		}
	}
	if f.flag.Class == Supported {
		return &refusal{fmt.Sprintf("%s is %s, not of `tandem %s`", name, f.side.commands(), f.set.Name())}
	}
	if !f.flag.fine(v) {
		if f.flag.kind != onOff && v != missing {
			name += " " + v
		}
		return &refusal{fmt.Sprintf("%s is not supported: %s", name, f.flag.Why)}
	}
	f.was = v
	f.set.Warn(f.flag.Name, fmt.Sprintf("%s has no effect: %s", name, f.flag.Why))
	return nil
}

// missing is the value of a flag that is refused with every value, so that the error is not
// that a value is missing.
const missing = "…"

// declareForeign declares the flags of vllm serve that the command lacks, and --no- forms of
// switches, all hidden from its help. It does nothing for commands of neither side.
func (s *Set) declareForeign() {
	if s.sides == 0 {
		return
	}
	for g := range VLLM {
		for i := range VLLM[g].Flags {
			f := &VLLM[g].Flags[i]
			if s.Lookup(f.Name) == nil {
				p := s.VarPF(&foreign{set: s, flag: f, side: VLLM[g].side}, f.Name, "", "")
				p.Hidden = true
				switch {
				case f.kind == onOff:
					p.NoOptDefVal = "true"
				case f.Class == Refused && f.Fine == "", f.Class == Supported:
					p.NoOptDefVal = missing
				}
			}
			if f.kind == onOff {
				name := "no-" + f.Name
				s.BoolFunc(name, "", func(v string) error {
					b, err := strconv.ParseBool(v)
					if err != nil {
						return &refusal{fmt.Sprintf("--%s: %q is neither true nor false", name, v)}
					}
					return s.Set(f.Name, strconv.FormatBool(!b))
				})
				s.Lookup(name).Hidden = true
			}
		}
	}
}

// elsewhere reports whether the flag is one of another command. Its value in the environment
// is meant for that command.
func elsewhere(f *pflag.Flag) bool {
	v, ok := f.Value.(*foreign)
	return ok && v.flag.Class == Supported
}

// own reports whether the command itself declares the flag.
func own(f *pflag.Flag) bool { return !f.Hidden }

// Warn records a line for the user, once per subject.
func (s *Set) Warn(subject, text string) {
	if !s.warned[subject] {
		s.warned[subject] = true
		s.warnings = append(s.warnings, text)
	}
}

// Warnings returns the warnings about accepted values: one line each, in the order in which
// they were met.
func (s *Set) Warnings() []string { return s.warnings }

// translate rewrites vllm serve's other forms of a flag as --name=value: short names of several
// letters (-tp 2), several values behind one name, paths into a JSON value (--hf-overrides.a 1), a
// switch with true or false behind it, and -O3. A flag that does not exist is a problem of the set.
func (s *Set) translate(args []string) (out []string) {
	if s.sides == 0 {
		return args
	}
	known := map[string]*VLLMFlag{}
	short := map[string]string{"O": "optimization-level"}
	for g := range VLLM {
		for i := range VLLM[g].Flags {
			f := &VLLM[g].Flags[i]
			if known[f.Name] = f; f.Short != "" {
				short[f.Short] = f.Name
			}
		}
	}
	model := slices.ContainsFunc(args, func(a string) bool { return a == "--model" || strings.HasPrefix(a, "--model=") })
	objects := map[string]any{} // values of flags that were given by paths
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			out = append(out, args[i:]...)
			break
		}
		if a == "-" || !strings.HasPrefix(a, "-") {
			out, model = append(out, a), true
			continue
		}
		name, v, has := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(a, "-"), "-"), "=")
		name, path, _ := strings.Cut(name, ".")
		if !strings.HasPrefix(a, "--") {
			if level, ok := strings.CutPrefix(name, "O"); ok && level != "" && !has {
				name, v, has = "O", level, true
			}
			if own := s.own(name); own != "" {
				name = own
			} else {
				name = short[name]
			}
		}
		f := s.Lookup(name)
		if f == nil {
			if a == "-h" || a == "--help" || strings.HasPrefix(a, "--help=") {
				return append(out, a)
			}
			s.problem(a, fmt.Errorf("%w: %s", ErrValue, s.unknown(a)))
			if !has && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
				i++
			}
			continue
		}
		var values []string
		if has {
			values = append(values, v)
		}
		kind := single
		if theirs := known[f.Name]; theirs != nil {
			kind = theirs.kind
		} else if f.NoOptDefVal == "true" {
			kind = onOff
		}
		for i+1 < len(args) && follows(kind, f, values, args[i+1], model) {
			i++
			values = append(values, args[i])
		}
		if len(values) == 0 && f.NoOptDefVal == "" {
			s.problem(f.Name, fmt.Errorf("%w: --%s needs a value", ErrValue, f.Name))
			continue
		}
		if path != "" && own(f) && f.Value.Type() == jsonType {
			into(objects, f.Name+"."+path, strings.Join(values, " "))
			continue
		}
		out = append(out, written(kind, f, values)...)
	}
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		text, err := json.Marshal(objects[name])
		if err != nil {
			panic(err) // objects, texts and what was read from JSON
		}
		out = slices.Insert(out, 0, "--"+name+"="+string(text))
	}
	return out
}

// own returns the command's flag with a short name of one letter; empty: it has none.
func (s *Set) own(short string) string {
	if len(short) == 1 {
		if f := s.ShorthandLookup(short); f != nil {
			return f.Name
		}
	}
	return ""
}

// follows reports whether the argument next is a value of the flag, which has values already.
// model is whether the model was given before: otherwise a further word is the model.
func follows(kind kind, f *pflag.Flag, values []string, next string, model bool) bool {
	first := len(values) == 0
	flag := strings.HasPrefix(next, "-") && !number(next[1:])
	switch kind {
	case onOff:
		b := strings.ToLower(next)
		return first && (b == "true" || b == "false")
	case numbers:
		return number(next)
	case pairs:
		return !flag && (first || strings.Contains(next, "=") || strings.HasPrefix(next, "{"))
	case words:
		return !flag && (first || model)
	}
	// Without a value, --name is one that needs none, or its value is missing.
	return first && !strings.HasPrefix(next, "--") && (f.NoOptDefVal == "" || !flag)
}

// written returns a flag with its values as arguments. One that is declared as a list gets each
// value by itself.
func written(kind kind, f *pflag.Flag, values []string) (args []string) {
	_, list := f.Value.(pflag.SliceValue)
	switch {
	case len(values) == 0:
		return []string{"--" + f.Name}
	case !list && kind != pairs:
		values = []string{strings.Join(values, ",")}
	}
	for _, v := range values {
		args = append(args, "--"+f.Name+"="+v)
	}
	return args
}

// into sets the member of an object at a path such as a.b.c. A value that is JSON is
// decoded, any other is text.
func into(object map[string]any, path, text string) {
	name, rest, deeper := strings.Cut(path, ".")
	if deeper {
		inner, ok := object[name].(map[string]any)
		if !ok {
			inner = map[string]any{}
			object[name] = inner
		}
		into(inner, rest, text)
		return
	}
	var v any
	if json.Unmarshal([]byte(text), &v) != nil {
		v = text
	}
	object[name] = v
}

// unknown returns the error of an argument that names no flag.
func (s *Set) unknown(arg string) string {
	given, _, _ := strings.Cut(arg, "=")
	name := strings.ReplaceAll(strings.TrimLeft(given, "-"), "_", "-")
	hint := ""
	switch starts := s.starting(name); {
	case name == "":
	case s.Lookup(name) != nil: // -port
		hint = fmt.Sprintf(" (did you mean --%s?)", name)
	case len(starts) == 1:
		hint = fmt.Sprintf(" (did you mean --%s?)", starts[0])
	default:
		hint = s.suggest(name, "--")
	}
	return fmt.Sprintf("unknown flag %s%s; `tandem %s --help` lists them", given, hint, s.Name())
}

// starting returns the flags that begin with a name. Of one letter, only the flags that are first
// in the help count.
func (s *Set) starting(name string) (names []string) {
	s.VisitAll(func(f *pflag.Flag) {
		if strings.HasPrefix(f.Name, name) && (len(name) > 1 || slices.Contains(s.first, f.Name)) {
			names = append(names, f.Name)
		}
	})
	return names
}

func number(s string) bool {
	_, err := strconv.ParseUint(s, 10, 32)
	return err == nil
}

// explain returns the error of a flag's value with the flag's name, the value and the
// values that are accepted.
func explain(err error) error {
	var r *refusal
	if errors.As(err, &r) {
		return fmt.Errorf("%w: %w", ErrValue, r)
	}
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return fmt.Errorf("%w: %w", ErrValue, err)
	}
	want := map[string]string{
		"int": "a whole number", "int64": "a whole number", "float64": "a number", "bool": "true or false",
		"uint64": "a whole number", "duration": "a duration such as 2s, 1m30s or 720h",
		"int32Slice": "a list of whole numbers such as 1,2,3", "intSlice": "a list of whole numbers such as 1,2,3", "float64Slice": "a list of numbers such as 1,2.5",
	}[invalid.GetFlag().Value.Type()]
	if _, own := invalid.GetFlag().Value.(value[int]); own || want == "" {
		return fmt.Errorf("%w: --%s: %w", ErrValue, invalid.GetFlag().Name, invalid.Unwrap())
	}
	return fmt.Errorf("%w: --%s: %q is not %s", ErrValue, invalid.GetFlag().Name, invalid.GetValue(), want)
}
