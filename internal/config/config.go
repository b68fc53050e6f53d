// Package config is the one way to configure a command: flags, environment and
// a YAML file, resolved flag > environment > file > default, with the origin of
// each value on record.
//
// A flag --max-num-seqs is also TANDEM_MAX_NUM_SEQS and the key max-num-seqs (or
// max_num_seqs) of the file named by --config.
//
// Invariant: after Resolve each flag has exactly one value, and Origin returns where it came
// from. An unknown key is an error, never ignored.
//
// The package knows no command and no option of any other package: internal/cli and
// internal/roles declare the flags.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ErrHelp is returned by Resolve after it printed help.
var ErrHelp = errors.New("config: help was printed")

// ErrDryRun is returned by Resolve after --dry-run printed the values.
var ErrDryRun = errors.New("config: dry run")

// ErrValue is wrapped by every refusal of a value or key.
var ErrValue = errors.New("config: bad value")

// EnvPrefix starts the names of environment variables.
const EnvPrefix = "TANDEM_"

// maxFile bounds a configuration file.
const maxFile = 1 << 20

// Set is a command's flags.
type Set struct {
	*pflag.FlagSet
	command, summary, example string
	origin                    map[string]string
	file                      *string
	dryRun                    *bool
	ownDryRun                 bool            // the command implements --dry-run
	secrets                   map[string]bool // flags whose values are never printed
	out                       io.Writer
	sides                     side     // of vllm serve whose flags it knows
	siblings                  []string // flags of the other commands
	warned                    map[string]bool
	warnings                  []string
	first                     []string // flags that come first in the help
	sections                  []section
	values                    map[string][]string // of flags that take one of some words
	topic                     string              // of --help=TOPIC
	checks                    []func() error
	problems                  []error
	bad                       map[string]bool // flags and arguments with a problem
	blank                     map[string]bool // flags that were given an empty text
	renamed                   map[string]RetiredFlag
}

// New returns the flags of a command with --config and --dry-run. usage is the
// line after "tandem", example one or more lines that work as printed.
func New(usage, summary, example string, out io.Writer) *Set {
	name, _, _ := strings.Cut(usage, " ")
	s := &Set{
		FlagSet: pflag.NewFlagSet(name, pflag.ContinueOnError),
		command: usage, summary: summary, example: example,
		origin: make(map[string]string), warned: make(map[string]bool), secrets: make(map[string]bool), bad: make(map[string]bool), blank: make(map[string]bool), values: make(map[string][]string), out: out,
	}
	s.SortFlags = false
	s.SetOutput(out)
	s.Usage = s.usage
	s.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(s.newName(strings.ReplaceAll(name, "_", "-")))
	})
	s.file = s.String("config", "", "YAML file with flags as keys")
	s.dryRun = s.Bool("dry-run", false, "check the settings as a start does, except that ports are free, print every value with its origin and exit")
	return s
}

// Problems are all settings of a command line that are refused, at least two.
type Problems []error

// Error returns a line for each.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, err := range p {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the errors.
func (p Problems) Unwrap() []error { return p }

// Check makes Resolve call f after all flags are set. Its error is returned with the other
// refusals; a joined error counts as several.
func (s *Set) Check(f func() error) { s.checks = append(s.checks, f) }

// Values names words that a flag takes, for the completion in shells.
func (s *Set) Values(flag string, words ...string) { s.values[flag] = words }

// ValuesOf returns the words that Values has set.
func (s *Set) ValuesOf(flag string) []string { return s.values[flag] }

// SkipChecks removes the checks, for a view of settings that may be incomplete.
func (s *Set) SkipChecks() { s.checks = nil }

// DryRun reports whether the command ends after the checks.
func (s *Set) DryRun() bool { return *s.dryRun }

// OwnDryRun leaves --dry-run to the command, for which usage describes it. Resolve then prints no
// values.
func (s *Set) OwnDryRun(usage string) {
	s.ownDryRun = true
	s.Lookup("dry-run").Usage = usage
}

// problem records a refusal, one for each subject.
func (s *Set) problem(subject string, err error) {
	if s.bad[subject] {
		return
	}
	s.bad[subject] = true
	s.addProblem(err)
}

func (s *Set) addProblem(err error) {
	// Errors of fmt.Errorf have this method, too.
	if several, ok := err.(interface{ Unwrap() []error }); ok && err.Error() == Problems(several.Unwrap()).Error() {
		for _, e := range several.Unwrap() {
			s.addProblem(e)
		}
		return
	}
	s.problems = append(s.problems, err)
}

// Resolve parses args, sets the other flags from environ and the file of --config, and calls the
// checks. It is called once. It returns ErrHelp or ErrDryRun when nothing is left to run, and all
// refusals at once.
func (s *Set) Resolve(args, environ []string) error {
	if s.renamed == nil {
		s.declareRetired(Retired)
	}
	s.declareForeign()
	s.topic = topicOf(args)
	err := s.ParseAll(s.translate(args), func(f *pflag.Flag, v string) error {
		s.noteBlank(f.Name, v)
		if err := s.Set(f.Name, v); err != nil {
			s.origin[f.Name] = "flag"
			s.problem(f.Name, explain(err))
		}
		return nil
	})
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return ErrHelp
	case err != nil:
		s.problems = append(s.problems, s.parseError(err))
	}
	s.Visit(func(f *pflag.Flag) { s.origin[f.Name] = "flag" })
	s.fromEnv(environ)
	if *s.file != "" {
		s.fromFile(*s.file)
	}
	for _, check := range s.checks {
		if err := check(); err != nil {
			s.addProblem(err)
		}
	}
	switch {
	case len(s.problems) == 1:
		return s.problems[0]
	case len(s.problems) > 1:
		return Problems(s.problems)
	case *s.dryRun && !s.ownDryRun:
		s.print()
		return ErrDryRun
	}
	return nil
}

// parseError adds the nearest name to pflag's error.
func (s *Set) parseError(err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		arg := "--" + unknown.GetSpecifiedName()
		if group := unknown.GetSpecifiedShortnames(); group != "" {
			arg = "-" + group
		}
		return fmt.Errorf("%w: %s", ErrValue, s.unknown(arg))
	}
	return explain(err)
}

// EnvName returns the environment variable of a flag.
func EnvName(flag string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Siblings sets the flags of the other commands, so that a variable for one of
// them causes no warning.
func (s *Set) Siblings(names []string) { s.siblings = names }

// fromEnv sets flags that args did not set. The environment is shared by all commands: a
// variable of another command's flag is ignored, and one of no flag causes a warning only
// if a flag has nearly its name.
func (s *Set) fromEnv(environ []string) {
	env := make(map[string]string, len(environ))
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok && strings.HasPrefix(k, EnvPrefix) && !serviceLink(k, v) {
			env[k] = v
		}
	}
	s.renameEnv(env)
	s.VisitAll(func(f *pflag.Flag) {
		name := EnvName(f.Name)
		v, ok := env[name]
		delete(env, name)
		if !ok || s.origin[f.Name] != "" || elsewhere(f) {
			return
		}
		s.noteBlank(f.Name, v)
		if err := s.Set(f.Name, v); err != nil {
			place := name + "=" + v
			if s.secrets[f.Name] || hasPassword(v) {
				place = name
			}
			s.problem(f.Name, inPlace(place, err))
		}
		s.origin[f.Name] = "environment " + name
	})
	for _, f := range s.siblings {
		delete(env, EnvName(f))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		flag := strings.ToLower(strings.TrimPrefix(name, EnvPrefix))
		if near := s.nearest(flag); near != "" {
			s.Warn(name, fmt.Sprintf("%s is not a variable of tandem and is ignored; did you mean %s?", name, EnvName(near)))
		}
	}
}

// serviceLink reports whether Kubernetes set the variable, for a service whose
// name begins with tandem: TANDEM_SERVICE_HOST, TANDEM_GATEWAY_PORT_8000_TCP_ADDR,
// and TANDEM_PORT=tcp://10.0.0.1:8000, which has the name of --port's variable.
func serviceLink(name, v string) bool {
	for _, scheme := range []string{"tcp://", "udp://", "sctp://"} {
		if strings.HasPrefix(v, scheme) {
			return true
		}
	}
	return strings.HasSuffix(name, "_SERVICE_HOST") || strings.HasSuffix(name, "_SERVICE_PORT") ||
		strings.Contains(name, "_SERVICE_PORT_") || linkParts.MatchString(name)
}

// linkParts matches the variables of one port of a service.
var linkParts = regexp.MustCompile(`_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$`)

// inPlace adds the place of the value to an error.
func inPlace(place string, err error) error {
	text := strings.TrimPrefix(explain(err).Error(), ErrValue.Error()+": ")
	return fmt.Errorf("%w: %s: %s", ErrValue, place, text)
}

// fromFile sets the flags that neither args nor the environment have set.
func (s *Set) fromFile(path string) {
	m, err := mapping(path)
	if err != nil {
		s.problem("config", err)
		return
	}
	if m == nil {
		return
	}
	lines := map[string]int{} // of each flag
	for i := 0; i+1 < len(m.Content); i += 2 {
		if f := s.Lookup(m.Content[i].Value); f != nil {
			key := m.Content[i]
			if first := lines[f.Name]; first > 0 {
				s.problem(fmt.Sprintf("%s:%d", path, key.Line),
					fmt.Errorf("%w: %s:%d: %s is set on line %d already; leave one of them out", ErrValue, path, key.Line, key.Value, first))
				continue
			}
			lines[f.Name] = key.Line
		}
		if err := s.fromKey(path, m.Content[i], m.Content[i+1]); err != nil {
			s.problem(fmt.Sprintf("%s:%d", path, m.Content[i].Line), err)
		}
	}
}

// mapping returns the keys and values of a configuration file; nil: it has none.
func mapping(path string) (*yaml.Node, error) {
	data, err := regular.ReadFile(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("%w: --config: %w", ErrValue, err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(data, &root); err != nil {
		return nil, fmt.Errorf("%w: --config %s: %w", ErrValue, path, err)
	}
	if len(root.Content) == 0 {
		return nil, nil
	}
	m := root.Content[0]
	if m.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%w: --config %s: want a mapping of flag names to values", ErrValue, path)
	}
	return m, nil
}

// fromKey sets one key of the file.
func (s *Set) fromKey(path string, key, value *yaml.Node) error {
	f := s.Lookup(key.Value)
	if f == nil {
		return fmt.Errorf("%w: %s:%d: no flag is called %q%s", ErrValue, path, key.Line, key.Value, s.suggest(key.Value, ""))
	}
	if s.origin[f.Name] != "" {
		return nil
	}
	var v string
	switch value.Kind {
	case yaml.ScalarNode:
		v = value.Value
		s.noteBlank(f.Name, v)
	case yaml.SequenceNode:
		if !takesList(f) {
			return fmt.Errorf("%w: %s:%d: %s: want one value, not a list", ErrValue, path, value.Line, f.Name)
		}
		parts := make([]string, len(value.Content))
		for i, c := range value.Content {
			if c.Kind != yaml.ScalarNode {
				return fmt.Errorf("%w: %s:%d: %s: want a list of plain values", ErrValue, path, c.Line, f.Name)
			}
			parts[i] = c.Value
			s.noteBlank(f.Name, c.Value)
		}
		v = strings.Join(parts, ",")
	case yaml.MappingNode:
		if f.Value.Type() == jsonType {
			var err error
			if v, err = asJSON(value); err != nil {
				return fmt.Errorf("%w: %s:%d: %s: %w", ErrValue, path, value.Line, f.Name, err)
			}
			break
		}
		if own(f) {
			return fmt.Errorf("%w: %s:%d: %s: want a value or a list", ErrValue, path, value.Line, f.Name)
		}
		v = "{…}" // a JSON value of a flag of vllm serve
	default:
		return fmt.Errorf("%w: %s:%d: %s: want a value or a list", ErrValue, path, value.Line, f.Name)
	}
	if err := s.Set(f.Name, v); err != nil {
		return inPlace(fmt.Sprintf("%s:%d", path, value.Line), err)
	}
	s.origin[f.Name] = fmt.Sprintf("file %s:%d", path, key.Line)
	return nil
}

// noteBlank records an empty value of a flag, because an empty text sets a list without entries.
func (s *Set) noteBlank(name, v string) {
	if strings.TrimSpace(v) == "" {
		s.blank[name] = true
	}
}

// Blank reports whether a flag has been given an empty text, or a list in a file with an empty
// entry. A list without entries, as --dry-run prints it, is not blank.
func (s *Set) Blank(name string) bool { return s.blank[name] }

// takesList reports whether a flag has several values.
func takesList(f *pflag.Flag) bool {
	_, list := f.Value.(pflag.SliceValue)
	return list || !own(f) || f.Value.Type() == jsonType || f.Name == "served-model-name"
}

// asJSON returns a mapping of the file as JSON.
func asJSON(n *yaml.Node) (string, error) {
	var v map[string]any
	if err := n.Decode(&v); err != nil {
		return "", err
	}
	text, err := json.Marshal(v)
	return string(text), err
}

// Origin returns where a flag's value came from: "flag", "environment NAME",
// "file PATH:LINE" or "default".
func (s *Set) Origin(name string) string {
	if o := s.origin[name]; o != "" {
		return o
	}
	return "default"
}

// print writes all values as YAML with their origins as comments, so that the
// output is itself a configuration file.
func (s *Set) print() {
	s.VisitAll(func(f *pflag.Flag) {
		if f.Name == "dry-run" || f.Name == "config" || !own(f) {
			return
		}
		v := f.Value.String()
		if v != f.DefValue && s.Hides(f) {
			// A comment, because a placeholder would become a key with a known value.
			fmt.Fprintf(s.out, "%-42s # %s\n", "# "+f.Name+": set, not shown", s.Origin(f.Name))
			return
		}
		if kind := f.Value.Type(); kind == "string" || kind == jsonType || v == "" {
			v = fmt.Sprintf("%q", v)
		}
		fmt.Fprintf(s.out, "%-42s # %s\n", f.Name+": "+v, s.Origin(f.Name))
	})
}

// Hides reports whether the value of a flag is never printed: it is a secret, or has a password.
func (s *Set) Hides(f *pflag.Flag) bool { return s.secrets[f.Name] || withPassword(f.Value) }

// Secret marks flags whose values --dry-run does not show.
func (s *Set) Secret(names ...string) {
	for _, name := range names {
		s.secrets[name] = true
	}
}

// IsSecret reports whether Secret has marked a flag.
func (s *Set) IsSecret(name string) bool { return s.secrets[name] }

// withPassword reports whether a value, or one of several, is a URL with a password.
func withPassword(v pflag.Value) bool {
	all := []string{v.String()}
	if several, ok := v.(pflag.SliceValue); ok {
		all = several.GetSlice()
	}
	return slices.ContainsFunc(all, hasPassword)
}

// hasPassword reports whether s is a URL with a password, or a list with one in it.
func hasPassword(s string) bool {
	for rest, ok := s, true; ok; {
		if _, rest, ok = strings.Cut(rest, "://"); ok {
			authority, _, _ := strings.Cut(rest, "/")
			if at := strings.LastIndex(authority, "@"); at >= 0 && strings.Contains(authority[:at], ":") {
				return true
			}
		}
	}
	return false
}

// suggest returns a hint at the flag nearest to a mistyped one, if one is near, with a prefix.
func (s *Set) suggest(name, prefix string) string {
	if best := s.nearest(name); best != "" {
		return fmt.Sprintf(" (did you mean %s%s?)", prefix, best)
	}
	return ""
}

// nearest returns the flag whose name differs least, the command's own first.
func (s *Set) nearest(name string) string {
	var names []string
	s.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return Nearest(strings.ReplaceAll(name, "_", "-"), names)
}

// Nearest returns the first of the names that differ least from a mistyped one, or "" if
// none is near.
func Nearest(mistyped string, names []string) string {
	best, bestDist := "", 2+len(mistyped)/4
	for _, name := range names {
		// The distance is at least the difference in length.
		if max(len(name)-len(mistyped), len(mistyped)-len(name)) >= bestDist {
			continue
		}
		if d := distance(mistyped, name); d < bestDist {
			best, bestDist = name, d
		}
	}
	return best
}

// distance returns the Levenshtein distance, over bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// Forward returns the values that were set here of flags that another command has too, as
// arguments for that command.
func (s *Set) Forward(to *Set) []string {
	var args []string
	s.VisitAll(func(f *pflag.Flag) {
		if s.origin[f.Name] == "" || !own(f) || f.Name == "config" || f.Name == "dry-run" || to.Lookup(f.Name) == nil {
			return
		}
		v := f.Value.String()
		if l, ok := f.Value.(pflag.SliceValue); ok {
			v = strings.Join(l.GetSlice(), ",")
		}
		args = append(args, "--"+f.Name+"="+v)
	})
	return args
}
