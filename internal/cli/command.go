// Package cli runs tandem's subcommands: their table, help, errors and exit statuses, and the
// commands that need no role: chat, status, pull, logits, ca, completion, bench and version.
//
// Invariant: exit status 0 means success, 2 an error that the user can correct, 1 any other
// error, and 128 plus its number a signal that ended a command. An error is one line with the value
// that was wrong and what to do; of several settings that are wrong, each has a line.
//
// The package knows no role. Only it and internal/roles import internal/config.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/hub"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/process"
)

// Command is one subcommand.
type Command struct {
	Name, Args, Summary, Example string
	Run                          func(*Invocation) error
}

// New returns a Command.
func New(name, args, summary, example string, run func(*Invocation) error) Command {
	return Command{Name: name, Args: args, Summary: summary, Example: example, Run: run}
}

// Flags returns a new flag set of the command.
func (c *Command) Flags(out io.Writer) *config.Set {
	s := config.New(strings.TrimSpace(c.Name+" "+c.Args), c.Summary, c.Example, out)
	s.Init(c.Name, pflag.ContinueOnError) // such as "plan pools", for errors that name the help
	return s
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

	declared  bool // Parse returns errDeclared
	unchecked bool // Parse makes no checks
}

// errDeclared ends a command that was run to declare its flags only.
var errDeclared = errors.New("cli: flags are declared")

// Declared returns the flag set with all flags of the command when it is called with args. Every
// command declares its flags before it calls Parse, which ends it here.
func (c *Command) Declared(t Table, args ...string) *config.Set {
	v := &Invocation{Set: c.Flags(io.Discard), Arguments: args, Out: io.Discard, ErrOut: io.Discard, Table: t, declared: true}
	if err := c.Run(v); !errors.Is(err, errDeclared) {
		panic(fmt.Sprintf("cli: %s does not parse its flags first: %v", c.Name, err))
	}
	return v.Set
}

// flagNames returns the name of every flag of every command.
func (t Table) flagNames() (names []string) {
	for i := range t {
		t[i].Declared(t).VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	}
	return names
}

// Parse resolves flags and returns the positional arguments, at most maxArgs.
func (v *Invocation) Parse(maxArgs int) ([]string, error) {
	if v.declared {
		return nil, errDeclared
	}
	v.Siblings(v.Table.flagNames())
	v.Check(func() error {
		if v.NArg() > maxArgs {
			return fmt.Errorf("%w: unexpected argument %q; `tandem %s --help` shows the usage", config.ErrValue, v.Set.Args()[maxArgs], v.Name())
		}
		return nil
	})
	if v.unchecked {
		v.SkipChecks()
	}
	err := v.Resolve(v.Arguments, v.Environ)
	for _, w := range v.Warnings() {
		fmt.Fprintf(v.ErrOut, "tandem %s: warning: %s\n", v.Name(), w)
	}
	if err != nil {
		return nil, err
	}
	return v.Args(), nil
}

// Table has all subcommands in the order of help.
type Table []Command

// Main finds the command in args, runs it and returns the exit status.
func (t Table) Main(version string, args, environ []string, out, errOut io.Writer) int {
	if len(args) == 0 {
		t.usage(errOut)
		return 2
	}
	switch args[0] {
	case "help", "--help", "-h":
		if len(args) == 1 {
			t.usage(out)
			return 0
		}
		args = append(args[1:len(args):len(args)], "--help")
	case "--version", "-v":
		args = append([]string{"version"}, args[1:]...)
	}
	for i := range t {
		if c := &t[i]; c.Name == args[0] {
			return status(c.Name, errOut, c.Run(&Invocation{
				Set: c.Flags(out), Arguments: args[1:], Environ: environ, Version: version, Out: out, ErrOut: errOut, Table: t,
			}))
		}
	}
	if instead := elsewhere[args[0]]; instead != "" {
		fmt.Fprintf(errOut, "tandem: there is no command %q: %s\n", args[0], instead)
		return 2
	}
	if near := config.Nearest(args[0], t.names()); near != "" {
		fmt.Fprintf(errOut, "tandem: unknown command %q (did you mean %s?); `tandem help` lists them\n", args[0], near)
		return 2
	}
	fmt.Fprintf(errOut, "tandem: unknown command %q; `tandem help` lists the commands\n", args[0])
	return 2
}

// elsewhere has the commands of other programs that users try, with what to do instead.
var elsewhere = map[string]string{
	"run":  "`tandem serve MODEL_DIR` serves a model, or `tandem serve --download ORG/NAME` one of the Hugging Face hub, and `tandem chat` talks to it",
	"ps":   "`tandem status` shows the nodes and their models",
	"list": "`tandem models` lists the models of the Hugging Face cache, and `tandem status` shows those that are served",
	"ls":   "`tandem models` lists the models of the Hugging Face cache, and `tandem status` shows those that are served",
	"stop": "Ctrl-C or SIGTERM ends a process; POST /admin/drain/NODE at a gateway drains a node first",
	"show": "`tandem plan memory MODEL_DIR` shows what a model needs, and `tandem status` what is served",

	"start":    "`tandem up` starts a cluster on this machine, and `tandem serve MODEL` one process",
	"vllm":     "`tandem serve` takes the arguments of `vllm serve`, and `tandem bench serve` those of `vllm bench serve`",
	"download": "`tandem pull ORG/NAME` downloads a model of the Hugging Face hub",
	"drain":    "POST /admin/drain/NODE at a gateway drains a node, as in `curl -X POST http://127.0.0.1:8000/admin/drain/NODE`",
	"logs":     "each process writes its log to standard error; `tandem explain-log FILE` explains one",
}

// first returns the commands that are one word.
func (t Table) first() (first Table) {
	for _, c := range t {
		if !strings.Contains(c.Name, " ") {
			first = append(first, c)
		}
	}
	return first
}

// kinds returns the commands that are the name of another command and one more word.
func (t Table) kinds(name string) (kinds Table) {
	for _, c := range t {
		if strings.HasPrefix(c.Name, name+" ") {
			kinds = append(kinds, c)
		}
	}
	return kinds
}

// last returns the last word of the command's name.
func (c *Command) last() string { return c.Name[strings.LastIndexByte(c.Name, ' ')+1:] }

// listed returns the last words of the names with the summaries, a line for each.
func (t Table) listed() string {
	var b strings.Builder
	for i := range t {
		fmt.Fprintf(&b, "\n  %-11s %s", t[i].last(), t[i].Summary)
	}
	return b.String()
}

// lasts returns the last words of the names.
func (t Table) lasts() (words []string) {
	for i := range t {
		words = append(words, t[i].last())
	}
	return words
}

// Find returns the command of that name and panics if there is none.
func (t Table) Find(name string) *Command {
	for i := range t {
		if t[i].Name == name {
			return &t[i]
		}
	}
	panic("cli: no command " + name)
}

// status prints an error and returns the exit status.
func status(name string, errOut io.Writer, err error) int {
	if err == nil || errors.Is(err, config.ErrHelp) || errors.Is(err, config.ErrDryRun) {
		return 0
	}
	var signal process.Stopped
	if errors.As(err, &signal) {
		fmt.Fprintf(errOut, "tandem %s: %s\n", name, err)
		return signal.Status()
	}
	var problems config.Problems
	if !errors.As(err, &problems) {
		text, status := explain(err)
		prefix := "tandem " + name + ": "
		fmt.Fprintf(errOut, "%s%s\n", prefix, strings.ReplaceAll(text, "\n", "\n"+prefix))
		return status
	}
	fmt.Fprintf(errOut, "tandem %s: %d settings cannot be used:\n", name, len(problems))
	code := 2
	for _, p := range problems {
		text, status := explain(p)
		fmt.Fprintf(errOut, "tandem %s: %s\n", name, text)
		code = min(code, status)
	}
	return code
}

// explain returns an error's text without names of packages, and the exit status for it.
func explain(err error) (text string, status int) {
	text = logs.WithoutPackages(err.Error())
	// memberlist does not wrap the error, so that only its text is left.
	if strings.Contains(text, syscall.EADDRINUSE.Error()) {
		text += "; another program listens there: end it, or choose another port"
	}
	if strings.Contains(text, syscall.EADDRNOTAVAIL.Error()) {
		text += "; no network interface of this machine has that address"
	}
	if strings.Contains(text, "KV region ") { // of either backend
		text += "; lower --kv-cache-memory-bytes, or end what else uses memory"
	}
	for _, sentinel := range []error{config.ErrValue, engine.ErrOption, engine.ErrModel, process.ErrOption, hub.ErrModel} {
		if errors.Is(err, sentinel) {
			_, kind, _ := strings.Cut(sentinel.Error(), ": ")
			return strings.TrimPrefix(text, kind+": "), 2
		}
	}
	return text, 1
}

// UntilSignal calls f and returns its error, or the signal that came first. It is for work that
// takes no context and that may be cut anywhere: f continues until the process ends.
func UntilSignal(f func() error) error {
	ctx, _, stop := process.Signals()
	defer stop()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// untilSignal returns run under UntilSignal.
func untilSignal(run func(*Invocation) error) func(*Invocation) error {
	return func(v *Invocation) error {
		if v.declared {
			return run(v)
		}
		return UntilSignal(func() error { return run(v) })
	}
}

func (t Table) usage(w io.Writer) {
	fmt.Fprint(w, "tandem serves large language models on a fleet.\n\nCommands:\n")
	for _, c := range t.first() {
		fmt.Fprintf(w, "  %-11s %s\n", c.Name, c.Summary)
	}
	fmt.Fprint(w, "\n`tandem COMMAND --help` shows flags and an example. Start with: tandem up\n")
}
