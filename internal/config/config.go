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
	secrets                   map[string]bool // flags whose values are never printed
	out                       io.Writer
	sides                     side     // of vllm serve whose flags it knows
	siblings                  []string // flags of the other commands
	warned                    map[string]bool
	warnings                  []string
}

// New returns the flags of a command with --config and --dry-run. usage is the
// line after "tandem", example one or more lines that work as printed.
func New(usage, summary, example string, out io.Writer) *Set {
	name, _, _ := strings.Cut(usage, " ")
	s := &Set{
		FlagSet: pflag.NewFlagSet(name, pflag.ContinueOnError),
		command: usage, summary: summary, example: example,
		origin: make(map[string]string), warned: make(map[string]bool), secrets: make(map[string]bool), out: out,
	}
	s.SortFlags = false
	s.SetOutput(out)
	s.Usage = s.usage
	s.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	s.file = s.String("config", "", "YAML file with flags as keys")
	s.dryRun = s.Bool("dry-run", false, "print every value with its origin and exit")
	return s
}

func (s *Set) usage() {
	fmt.Fprintf(s.out, "Usage: tandem %s\n\n%s\n\nExample:\n", s.command, s.summary)
	for line := range strings.SplitSeq(s.example, "\n") {
		fmt.Fprintf(s.out, "  %s\n", line)
	}
	fmt.Fprintf(s.out, "\nFlags (also %sNAME in the environment and name: in --config FILE):\n%s", EnvPrefix, s.FlagUsages())
	if s.sides != 0 {
		fmt.Fprint(s.out, "\nEvery other flag of vllm serve is accepted or refused with the reason.\n")
	}
}

// Resolve parses args and sets the other flags from environ and the file of --config. It
// is called once. It returns ErrHelp or ErrDryRun when nothing is left to run.
func (s *Set) Resolve(args, environ []string) error {
	s.declareForeign()
	if err := s.Parse(s.translate(args)); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return ErrHelp
		}
		return s.parseError(err)
	}
	s.Visit(func(f *pflag.Flag) { s.origin[f.Name] = "flag" })
	if err := s.fromEnv(environ); err != nil {
		return err
	}
	if *s.file != "" {
		if err := s.fromFile(*s.file); err != nil {
			return err
		}
	}
	if *s.dryRun {
		s.print()
		return ErrDryRun
	}
	return nil
}

// parseError adds the nearest name to pflag's error.
func (s *Set) parseError(err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		name := unknown.GetSpecifiedName()
		return fmt.Errorf("%w: unknown flag --%s%s; `tandem %s --help` lists them", ErrValue, name, s.suggest(name), s.Name())
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
func (s *Set) fromEnv(environ []string) error {
	env := make(map[string]string, len(environ))
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok && strings.HasPrefix(k, EnvPrefix) && !serviceLink(k, v) {
			env[k] = v
		}
	}
	var errs []error
	s.VisitAll(func(f *pflag.Flag) {
		name := EnvName(f.Name)
		v, ok := env[name]
		delete(env, name)
		if !ok || s.origin[f.Name] != "" || elsewhere(f) {
			return
		}
		if err := s.Set(f.Name, v); err != nil {
			place := name + "=" + v
			if s.secrets[f.Name] || hasPassword(v) {
				place = name
			}
			errs = append(errs, inPlace(place, err))
			return
		}
		s.origin[f.Name] = "environment " + name
	})
	for _, f := range s.siblings {
		delete(env, EnvName(f))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		flag := strings.ToLower(strings.TrimPrefix(name, EnvPrefix))
		if near := s.nearest(flag); near != "" {
			s.warn(name, fmt.Sprintf("%s is not a variable of tandem and is ignored; did you mean %s?", name, EnvName(near)))
		}
	}
	return errors.Join(errs...)
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
func (s *Set) fromFile(path string) error {
	data, err := regular.ReadFile(path, maxFile)
	if err != nil {
		return fmt.Errorf("%w: --config: %w", ErrValue, err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(data, &root); err != nil {
		return fmt.Errorf("%w: --config %s: %w", ErrValue, path, err)
	}
	if len(root.Content) == 0 {
		return nil
	}
	m := root.Content[0]
	if m.Kind != yaml.MappingNode {
		return fmt.Errorf("%w: --config %s: want a mapping of flag names to values", ErrValue, path)
	}
	lines := map[string]int{} // of each flag
	for i := 0; i+1 < len(m.Content); i += 2 {
		if f := s.Lookup(m.Content[i].Value); f != nil {
			key := m.Content[i]
			if first := lines[f.Name]; first > 0 {
				return fmt.Errorf("%w: %s:%d: %s is set on line %d already; leave one of them out", ErrValue, path, key.Line, key.Value, first)
			}
			lines[f.Name] = key.Line
		}
		if err := s.fromKey(path, m.Content[i], m.Content[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// fromKey sets one key of the file.
func (s *Set) fromKey(path string, key, value *yaml.Node) error {
	f := s.Lookup(key.Value)
	if f == nil {
		return fmt.Errorf("%w: %s:%d: no flag is called %q%s", ErrValue, path, key.Line, key.Value, s.suggest(key.Value))
	}
	if s.origin[f.Name] != "" {
		return nil
	}
	var v string
	switch value.Kind {
	case yaml.ScalarNode:
		v = value.Value
	case yaml.SequenceNode:
		parts := make([]string, len(value.Content))
		for i, c := range value.Content {
			if c.Kind != yaml.ScalarNode {
				return fmt.Errorf("%w: %s:%d: %s: want a list of plain values", ErrValue, path, c.Line, f.Name)
			}
			parts[i] = c.Value
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
		if v != f.DefValue && (s.secrets[f.Name] || withPassword(f.Value)) {
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

// suggest returns a hint at the flag nearest to a mistyped one, if one is near.
func (s *Set) suggest(name string) string {
	if best := s.nearest(name); best != "" {
		return fmt.Sprintf(" (did you mean %s?)", best)
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
