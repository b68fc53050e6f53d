package cli

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// man prints the manual page of all commands in the language of man(7).
func man(v *Invocation) error {
	if _, err := v.Parse(0); err != nil {
		return err
	}
	date := time.Now()
	if s, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil { // for reproducible packages
		date = time.Unix(s, 0)
	}
	_, err := fmt.Fprint(v.Out, v.Table.man(v.Version, date.UTC()))
	return err
}

// man returns the manual page: each command with its flags, defaults and example.
func (t Table) man(version string, date time.Time) string {
	var p manPage
	fmt.Fprintf(&p, ".TH TANDEM 1 %q %q\n.ad l\n", date.Format(time.DateOnly), "tandem "+version)
	p.section("NAME")
	p.text("tandem - serves large language models on a fleet")
	p.section("SYNOPSIS")
	p.text("tandem COMMAND [ARGUMENT ...] [--FLAG VALUE ...]")
	p.section("DESCRIPTION")
	p.text("A gateway speaks the OpenAI API and routes by prompt prefix, prefill nodes turn prompts into KV blocks, and decode nodes own requests and stream tokens. " +
		"Every flag is also an environment variable (--max-num-seqs is TANDEM_MAX_NUM_SEQS) and a key of the YAML file that --config names. " +
		"A flag wins over the environment, the environment over the file, and the file over the default.")
	p.section("COMMANDS")
	for i := range t {
		c := &t[i]
		fmt.Fprintf(&p, ".SS %s\n", manEscape(strings.TrimSpace("tandem "+c.Name+" "+c.Args)))
		p.text(c.Summary)
		p.WriteString(".PP\nExample:\n.PP\n.RS 4\n.nf\n")
		p.text(c.Example)
		p.WriteString(".fi\n.RE\n")
		c.visible(t, func(f *pflag.Flag) {
			p.WriteString(".TP\n")
			name, usage := pflag.UnquoteUsage(f)
			p.text(strings.TrimSpace("--" + f.Name + " " + name))
			if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "[]" {
				usage += " (default " + f.DefValue + ")"
			}
			p.text(usage)
		})
	}
	p.section("EXIT STATUS")
	p.text("0: the command did what was asked for. 1: it failed. 2: an argument or a setting is wrong.")
	p.section("SEE ALSO")
	p.text("https://github.com/tandem-serving/tandem has the guides.")
	return p.String()
}

// manPage is a page in the macros of man(7).
type manPage struct{ strings.Builder }

func (p *manPage) section(name string) { fmt.Fprintf(p, ".SH %s\n", name) }

// text writes lines of text. None of them is read as a macro.
func (p *manPage) text(s string) {
	for l := range strings.SplitSeq(s, "\n") {
		if l = manEscape(l); strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			l = `\&` + l
		}
		p.WriteString(l + "\n")
	}
}

// manEscape escapes what man(7) interprets. A plain - would become a hyphen, which a shell does not
// take for a flag.
func manEscape(s string) string {
	return strings.NewReplacer(`\`, `\e`, `-`, `\-`).Replace(s)
}
