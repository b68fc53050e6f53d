package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/internal/config"
)

// shells are the shells of completion with their scripts.
var shells = []struct {
	name   string
	script func(Table) string
}{{"bash", Table.bash}, {"zsh", Table.zsh}, {"fish", Table.fish}}

func completion(v *Invocation) error {
	args, err := v.Parse(1)
	if err != nil {
		return err
	}
	for _, s := range shells {
		if len(args) == 1 && args[0] == s.name {
			_, err := fmt.Fprint(v.Out, s.script(v.Table))
			return err
		}
	}
	return fmt.Errorf("%w: name the shell, one of bash, zsh and fish, such as in `tandem completion bash`; %q is none of them", config.ErrValue, strings.Join(args, " "))
}

// help is a command that is not in the table.
const help = "help"

// visible calls f for the flags in a command's help.
func (c *Command) visible(t Table, f func(*pflag.Flag)) {
	c.Declared(t).VisitAll(func(flag *pflag.Flag) {
		if !flag.Hidden {
			f(flag)
		}
	})
}

// words returns the words that a command takes as its first argument, or nil, and whether it also
// takes a file there.
func (c *Command) words(t Table) (words []string, orFile bool) {
	switch c.Name {
	case "bench":
		words = benchmarks.lasts()
	case "ca":
		words, orFile = []string{"renew", "list"}, true
	case "plan":
		words = t.kinds(c.Name).lasts()
	case "completion":
		words = []string{"bash", "zsh", "fish"}
	}
	return words, orFile
}

// call is a command, or a benchmark with the words before it.
type call struct {
	path   []string // the words after tandem
	words  []string // that may follow
	orFile bool     // in their place
	flags  []*pflag.Flag
}

// calls returns all commands and benchmarks, and the words that flags take, by flag.
func (t Table) calls() (calls []call, values map[string][]string) {
	values = map[string][]string{}
	add := func(set *config.Set, path, words []string, orFile bool) {
		c := call{path: path, words: words, orFile: orFile}
		set.VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				return
			}
			c.flags = append(c.flags, f)
			if v := set.ValuesOf(f.Name); v != nil && values[f.Name] == nil {
				values[f.Name] = v
			}
		})
		calls = append(calls, c)
	}
	for i := range t {
		c := &t[i]
		words, orFile := c.words(t)
		add(c.Declared(t), strings.Fields(c.Name), words, orFile)
		if c.Name == "bench" {
			for _, name := range words {
				add(c.Declared(t, name), []string{c.Name, name}, nil, false)
			}
		}
	}
	names := t.names()
	return append(calls, call{path: []string{help}, words: names[:len(names)-1]}), values
}

// names returns the flags as words of a command line.
func (c *call) names() (names []string) {
	for _, f := range c.flags {
		names = append(names, "--"+f.Name)
	}
	return append(names, "--help")
}

// bash returns a script that completes commands, then the command's flags and their values, and
// files for all other words.
func (t Table) bash() string {
	calls, values := t.calls()
	var b strings.Builder
	b.WriteString(`# bash completion for tandem
_tandem() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" flags="" words="" files=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
`)
	fmt.Fprintf(&b, "        COMPREPLY=($(compgen -W %q -- \"$cur\"))\n        return\n    fi\n", strings.Join(t.names(), " "))
	b.WriteString(`    if [ "$cur" = "=" ]; then
        cur=""
    elif [ "$prev" = "=" ]; then
        prev="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    case "$prev" in
`)
	for _, flag := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&b, "    --%s)\n        COMPREPLY=($(compgen -W %q -- \"$cur\"))\n        return\n        ;;\n", flag, strings.Join(values[flag], " "))
	}
	b.WriteString("    esac\n    case \"${COMP_WORDS[1]} ${COMP_WORDS[2]}\" in\n")
	for i := len(calls) - 1; i >= 0; i-- { // benchmarks before bench
		c := &calls[i]
		pattern := strings.Join(c.path, " ")
		if len(c.path) == 1 {
			pattern += " *"
		}
		files := ""
		if c.orFile {
			files = "-f"
		}
		fmt.Fprintf(&b, "    %s) flags=%q words=%q files=%q ;;\n", strings.ReplaceAll(pattern, " ", `\ `), strings.Join(c.names(), " "), strings.Join(c.words, " "), files)
	}
	b.WriteString(`    esac
    case "$cur" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$cur")) ;;
    *)
        if [ "$COMP_CWORD" -eq 2 ] && [ -n "$words" ]; then
            COMPREPLY=($(compgen $files -W "$words" -- "$cur"))
        else
            COMPREPLY=($(compgen -f -- "$cur"))
        fi
        ;;
    esac
}
complete -o filenames -F _tandem tandem
`)
	return b.String()
}

// zsh returns a script as bash does, which also shows the help of flags.
func (t Table) zsh() string {
	calls, values := t.calls()
	var b strings.Builder
	b.WriteString("#compdef tandem\n# zsh completion for tandem\n_tandem() {\n    local -a commands flags following\n    local files=\n    local prev=\"$words[CURRENT-1]\"\n    commands=(\n")
	for _, c := range t.first() {
		fmt.Fprintf(&b, "        %s\n", quote(c.Name+":"+c.Summary))
	}
	fmt.Fprintf(&b, "        %s\n    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n", quote(help+":Lists the commands."))
	b.WriteString("    if [[ \"$PREFIX\" == --*=* ]]; then\n        prev=\"${PREFIX%%=*}\"\n        compset -P '*='\n    fi\n    case \"$prev\" in\n")
	for _, flag := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&b, "    --%s) compadd -- %s; return ;;\n", flag, strings.Join(values[flag], " "))
	}
	b.WriteString("    esac\n    case \"$words[2] $words[3]\" in\n")
	for i := len(calls) - 1; i >= 0; i-- {
		c := &calls[i]
		pattern := quote(strings.Join(c.path, " "))
		if len(c.path) == 1 {
			pattern = quote(c.path[0]+" ") + "*"
		}
		fmt.Fprintf(&b, "    %s)\n        following=(%s)\n", pattern, strings.Join(c.words, " "))
		if c.orFile {
			b.WriteString("        files=1\n")
		}
		b.WriteString("        flags=(\n")
		for _, f := range c.flags {
			fmt.Fprintf(&b, "            %s\n", quote("--"+f.Name+":"+strings.ReplaceAll(f.Usage, ":", `\:`)))
		}
		b.WriteString("        )\n        ;;\n")
	}
	b.WriteString(`    esac
    if [[ "$PREFIX" == -* ]]; then
        _describe -o flag flags
    elif (( CURRENT == 3 && $#following )); then
        compadd -a following
        [[ -z "$files" ]] || _files
    else
        _files
    fi
}
compdef _tandem tandem
`)
	return b.String()
}

// fish returns a script with a line for each flag.
func (t Table) fish() string {
	calls, values := t.calls()
	var b strings.Builder
	b.WriteString(`# fish completion for tandem
function __tandem_after
    set -l before (commandline -opc)
    test (count $before) -gt (count $argv); or return 1
    for i in (seq (count $argv))
        test "$before[(math $i + 1)]" = "$argv[$i]"; or return 1
    end
end
function __tandem_next
    __tandem_after $argv; and test (count (commandline -opc)) -eq (math (count $argv) + 1)
end
`)
	for _, c := range t.first() {
		fmt.Fprintf(&b, "complete -c tandem -f -n __tandem_next -a %s -d %s\n", c.Name, quote(c.Summary))
	}
	for i := range calls {
		c := &calls[i]
		if c.words != nil {
			files := "-f "
			if c.orFile {
				files = ""
			}
			fmt.Fprintf(&b, "complete -c tandem %s-n %s -a %s\n", files, quote("__tandem_next "+strings.Join(c.path, " ")), quote(strings.Join(c.words, " ")))
		}
		after := quote("__tandem_after " + strings.Join(c.path, " "))
		for _, f := range c.flags {
			takes := " -r"
			if f.NoOptDefVal != "" {
				takes = ""
			} else if v := values[f.Name]; v != nil {
				takes = " -x -a " + quote(strings.Join(v, " "))
			}
			fmt.Fprintf(&b, "complete -c tandem -n %s -l %s%s -d %s\n", after, f.Name, takes, quote(f.Usage))
		}
	}
	return b.String()
}

// names returns the words that may follow tandem.
func (t Table) names() []string {
	names := make([]string, 0, len(t)+1)
	for _, c := range t.first() {
		names = append(names, c.Name)
	}
	return append(names, help)
}

// quote returns s as one word of a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Quoted returns arguments as a shell reads them.
func Quoted(args []string) string {
	list := make([]string, len(args))
	for i, a := range args {
		if list[i] = a; a == "" || strings.ContainsAny(a, " \t\n'\"\\$`(){}[]*?&|;<>#~!%") {
			list[i] = quote(a)
		}
	}
	return strings.Join(list, " ")
}
