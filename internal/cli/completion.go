package cli

import (
	"fmt"
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

// bash returns a script that completes commands, then the command's flags, and files for
// all other words.
func (t Table) bash() string {
	var b strings.Builder
	b.WriteString(`# bash completion for tandem
_tandem() {
    local cur="${COMP_WORDS[COMP_CWORD]}" flags=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
`)
	fmt.Fprintf(&b, "        COMPREPLY=($(compgen -W %q -- \"$cur\"))\n        return\n    fi\n    case \"${COMP_WORDS[1]}\" in\n", strings.Join(t.names(), " "))
	for i := range t {
		var flags []string
		t[i].visible(t, func(f *pflag.Flag) { flags = append(flags, "--"+f.Name) })
		flags = append(flags, "--help")
		fmt.Fprintf(&b, "    %s) flags=%q ;;\n", t[i].Name, strings.Join(flags, " "))
	}
	b.WriteString(`    esac
    case "$cur" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$cur")) ;;
    *)
        if [ "${COMP_WORDS[1]}" = completion ]; then
            COMPREPLY=($(compgen -W "bash zsh fish" -- "$cur"))
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
	var b strings.Builder
	b.WriteString("#compdef tandem\n# zsh completion for tandem\n_tandem() {\n    local -a commands flags\n    commands=(\n")
	for _, c := range t {
		fmt.Fprintf(&b, "        %s\n", quote(c.Name+":"+c.Summary))
	}
	fmt.Fprintf(&b, "        %s\n    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n    case \"$words[2]\" in\n", quote(help+":Lists the commands."))
	for i := range t {
		fmt.Fprintf(&b, "    %s)\n        flags=(\n", t[i].Name)
		t[i].visible(t, func(f *pflag.Flag) {
			fmt.Fprintf(&b, "            %s\n", quote("--"+f.Name+":"+strings.ReplaceAll(f.Usage, ":", `\:`)))
		})
		b.WriteString("        )\n        ;;\n")
	}
	b.WriteString(`    esac
    if [[ "$PREFIX" == -* ]]; then
        _describe -o flag flags
    elif [[ "$words[2]" == completion ]]; then
        compadd bash zsh fish
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
	var b strings.Builder
	b.WriteString("# fish completion for tandem\n")
	none := "not __fish_seen_subcommand_from " + strings.Join(t.names(), " ")
	for _, c := range t {
		fmt.Fprintf(&b, "complete -c tandem -f -n %s -a %s -d %s\n", quote(none), c.Name, quote(c.Summary))
	}
	for i := range t {
		seen := quote("__fish_seen_subcommand_from " + t[i].Name)
		if t[i].Name == "completion" {
			fmt.Fprintf(&b, "complete -c tandem -f -n %s -a 'bash zsh fish'\n", seen)
		}
		t[i].visible(t, func(f *pflag.Flag) {
			takes := " -r"
			if f.NoOptDefVal != "" {
				takes = ""
			}
			fmt.Fprintf(&b, "complete -c tandem -n %s -l %s%s -d %s\n", seen, f.Name, takes, quote(f.Usage))
		})
	}
	return b.String()
}

// names returns the words that may follow tandem.
func (t Table) names() []string {
	names := make([]string, 0, len(t)+1)
	for _, c := range t {
		names = append(names, c.Name)
	}
	return append(names, help)
}

// quote returns s as one word of a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
