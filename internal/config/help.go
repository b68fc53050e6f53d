package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// helpWidth is the number of columns of a help text.
const helpWidth = 100

// section is a part of the help.
type section struct {
	name  string
	flags []string
	after int // flags that were declared before it
}

// Section puts the flags that are declared after it under a heading of the help, until the next
// call. A second section of the same name continues the first.
func (s *Set) Section(name string) {
	n := 0
	s.VisitAll(func(*pflag.Flag) { n++ })
	s.sections = append(s.sections, section{name: name, after: n})
}

// First puts flags at the head of the help, in this order: those that most users set.
func (s *Set) First(names ...string) { s.first = names }

// grouped returns the visible flags in the sections of the help, without those at its head.
func (s *Set) grouped() (groups []section) {
	add := func(group, flag string) {
		at := slices.IndexFunc(groups, func(g section) bool { return g.name == group })
		if at < 0 {
			at, groups = len(groups), append(groups, section{name: group})
		}
		groups[at].flags = append(groups[at].flags, flag)
	}
	n := 0
	s.VisitAll(func(f *pflag.Flag) {
		n++
		if f.Hidden || slices.Contains(s.first, f.Name) {
			return
		}
		group := "General"
		for _, sec := range s.sections {
			if sec.after < n {
				group = sec.name
			}
		}
		add(group, f.Name)
	})
	// The general flags are declared first and matter least.
	if at := slices.IndexFunc(groups, func(g section) bool { return g.name == "General" }); at >= 0 && len(groups) > 1 {
		general := groups[at]
		groups = append(slices.Delete(groups, at, at+1), general)
	}
	return groups
}

// topicOf returns TOPIC of --help=TOPIC, or "".
func topicOf(args []string) string {
	for _, a := range args {
		if a == "--" {
			break
		}
		if topic, ok := strings.CutPrefix(a, "--help="); ok {
			return topic
		}
	}
	return ""
}

// usage prints the help: the flags of a topic, which is a section or a part of flags' names, or
// all.
func (s *Set) usage() {
	groups := s.grouped()
	if s.topic != "" && s.topic != "all" {
		s.usageOf(groups)
		return
	}
	fmt.Fprintf(s.out, "Usage: tandem %s\n\n%s\n\nExample:\n", s.command, s.summary)
	for line := range strings.SplitSeq(s.example, "\n") {
		fmt.Fprintf(s.out, "  %s\n", line)
	}
	fmt.Fprintf(s.out, "\nFlags (also %sNAME in the environment and name: in --config FILE):\n%s", EnvPrefix, s.flagUsages(s.first))
	for _, g := range groups {
		if len(groups) > 1 || len(s.first) > 0 {
			fmt.Fprintf(s.out, "\n%s:\n", g.name)
		}
		fmt.Fprint(s.out, s.flagUsages(g.flags))
	}
	if len(groups) > 1 {
		fmt.Fprintf(s.out, "\n`tandem %s --help=TOPIC` shows one of these groups, or the flags with TOPIC in their names.\n", s.Name())
	}
	if s.sides != 0 {
		fmt.Fprint(s.out, "Every other flag of vllm serve is accepted or refused with the reason; docs/flags.md lists them.\n")
	}
}

// usageOf prints the flags of the topic.
func (s *Set) usageOf(groups []section) {
	var names, flags []string
	for _, g := range groups {
		names = append(names, g.name)
		if strings.EqualFold(g.name, s.topic) {
			flags = append(flags, g.flags...)
		}
	}
	if flags == nil {
		s.VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && strings.Contains(f.Name, strings.ToLower(strings.ReplaceAll(strings.TrimLeft(s.topic, "-"), "_", "-"))) {
				flags = append(flags, f.Name)
			}
		})
	}
	if flags == nil {
		fmt.Fprintf(s.out, "No flag of tandem %s has %q in its name. The groups are: %s.\n", s.Name(), s.topic, strings.Join(names, ", "))
		return
	}
	fmt.Fprint(s.out, s.flagUsages(flags))
}

// flagUsages returns the lines of the flags.
func (s *Set) flagUsages(names []string) string {
	part := pflag.NewFlagSet("", pflag.ContinueOnError)
	part.SortFlags = false
	for _, name := range names {
		if f := s.Lookup(name); f != nil {
			part.AddFlag(f)
		}
	}
	return part.FlagUsagesWrapped(helpWidth)
}
