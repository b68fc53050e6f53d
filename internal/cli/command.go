// Package cli is the frame around tandem's subcommands: the table of them,
// help, errors and exit statuses, and those commands that need no role: chat,
// status, logits, ca, completion and version.
//
// Invariant: exit status 0 means that what was asked for happened, 2 that the
// user can put it right, 1 anything else; and an error is one line that says
// what was wrong, with which value, and what to do.
//
// The package knows no role. Besides main it is the only one that imports
// internal/config.
package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// Command is one subcommand.
type Command struct {
	Name, Args, Summary, Example string
	Run                          func(*Invocation) error
}

// New is a Command of these parts.
func New(name, args, summary, example string, run func(*Invocation) error) Command {
	return Command{Name: name, Args: args, Summary: summary, Example: example, Run: run}
}

// Flags makes the command's flag set.
func (c *Command) Flags(out io.Writer) *config.Set {
	return config.New(strings.TrimSpace(c.Name+" "+c.Args), c.Summary, c.Example, out)
}

// Invocation is one call of a command.
type Invocation struct {
	*config.Set
	Arguments []string // after the command's name
	Environ   []string
	Version   string
	Out       io.Writer // results
	ErrOut    io.Writer // logs
	Table     Table     // of which the command is one

	declared bool // stop when the flags are declared
}

// errDeclared ends a command that was run to learn its flags.
var errDeclared = errors.New("cli: flags are declared")

// Declared is the command's flags with all that it declares. Every command
// declares its flags first and then parses, which is where this stops it.
func (c *Command) Declared(t Table) *config.Set {
	v := &Invocation{Set: c.Flags(io.Discard), Out: io.Discard, ErrOut: io.Discard, Table: t, declared: true}
	if err := c.Run(v); !errors.Is(err, errDeclared) {
		panic(fmt.Sprintf("cli: %s does not parse its flags first: %v", c.Name, err))
	}
	return v.Set
}

// flagNames is the name of every flag of every command.
func (t Table) flagNames() (names []string) {
	for i := range t {
		t[i].Declared(t).VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	}
	return names
}

// Parse resolves flags and returns the positional arguments, at most max.
func (v *Invocation) Parse(maxArgs int) ([]string, error) {
	if v.declared {
		return nil, errDeclared
	}
	v.Siblings(v.Table.flagNames())
	err := v.Resolve(v.Arguments, v.Environ)
	for _, w := range v.Warnings() {
		fmt.Fprintf(v.ErrOut, "tandem %s: warning: %s\n", v.Name(), w)
	}
	if err != nil {
		return nil, err
	}
	if v.NArg() > maxArgs {
		return nil, fmt.Errorf("%w: unexpected argument %q; `tandem %s --help` shows the usage", config.ErrValue, v.Args()[maxArgs], v.Name())
	}
	return v.Args(), nil
}

// Table is all subcommands in the order that help shows.
type Table []Command

// Main finds the command in args, runs it and returns the exit status.
func (t Table) Main(version string, args, environ []string, out, errOut io.Writer) int {
	if len(args) == 0 {
		t.usage(errOut)
		return 2
	}
	switch args[0] {
	case "help", "--help", "-h":
		t.usage(out)
		return 0
	case "--version":
		args = append([]string{"version"}, args[1:]...)
	}
	for i := range t {
		if c := &t[i]; c.Name == args[0] {
			return status(c.Name, errOut, c.Run(&Invocation{
				Set: c.Flags(out), Arguments: args[1:], Environ: environ, Version: version, Out: out, ErrOut: errOut, Table: t,
			}))
		}
	}
	names := make([]string, len(t))
	for i, c := range t {
		names[i] = c.Name
	}
	if near := config.Nearest(args[0], names); near != "" {
		fmt.Fprintf(errOut, "tandem: unknown command %q (did you mean %s?); `tandem help` lists them\n", args[0], near)
		return 2
	}
	fmt.Fprintf(errOut, "tandem: unknown command %q\n\n", args[0])
	t.usage(errOut)
	return 2
}

// Find returns the command of that name, which must be there.
func (t Table) Find(name string) *Command {
	for i := range t {
		if t[i].Name == name {
			return &t[i]
		}
	}
	panic("cli: no command " + name)
}

// status says an error in words and chooses the exit status.
func status(name string, errOut io.Writer, err error) int {
	if err == nil || errors.Is(err, config.ErrHelp) || errors.Is(err, config.ErrDryRun) {
		return 0
	}
	// The sentinel's own words name a package; the user has no use for them.
	text := err.Error()
	// memberlist drops what it wraps, so that the words are all there is.
	if strings.Contains(text, syscall.EADDRINUSE.Error()) {
		text += "; another program listens there: end it, or choose another port"
	}
	for _, sentinel := range []error{config.ErrValue, engine.ErrOption, engine.ErrModel, process.ErrOption, errModel} {
		if errors.Is(err, sentinel) {
			words := strings.TrimPrefix(text, sentinel.Error()+": ")
			if pkg, _, ok := strings.Cut(sentinel.Error(), ": "); ok {
				words = strings.TrimPrefix(words, pkg+": ")
			}
			fmt.Fprintf(errOut, "tandem %s: %s\n", name, words)
			return 2
		}
	}
	fmt.Fprintf(errOut, "tandem %s: %s\n", name, text)
	return 1
}

func (t Table) usage(w io.Writer) {
	fmt.Fprint(w, "tandem serves large language models on a fleet.\n\nCommands:\n")
	for _, c := range t {
		fmt.Fprintf(w, "  %-10s %s\n", c.Name, c.Summary)
	}
	fmt.Fprint(w, "\n`tandem COMMAND --help` shows flags and an example. Start with: tandem up\n")
}
