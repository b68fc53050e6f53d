package roles

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

var update = flag.Bool("update", false, "write docs/flags.md")

// declared is each visible flag with the commands that have it, in the order of
// the first.
type declared struct {
	flag     *pflag.Flag
	commands []string
	others   []string // defaults of commands that have another, as "command: default"
}

func allFlags() (flags []*declared) {
	byName := map[string]*declared{}
	t := table()
	for i := range t {
		t[i].Declared(t).VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				return
			}
			name := f.Name + " " + f.Value.Type() // of another type it is another flag
			d := byName[name]
			if d == nil {
				d = &declared{flag: f}
				byName[name] = d
				flags = append(flags, d)
			}
			d.commands = append(d.commands, t[i].Name)
			if f.DefValue != d.flag.DefValue {
				d.others = append(d.others, fmt.Sprintf("%s: `%s`", t[i].Name, f.DefValue))
			}
		})
	}
	return flags
}

// cell is text in a table of Markdown.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// flagsPage is docs/flags.md.
func flagsPage() []byte {
	var b bytes.Buffer
	b.WriteString(`# Flags

This page is made from the flags' own table: ` + "`go test -run TestFlagsPage ./internal/roles -update`" + `
writes it.

Every flag is also an environment variable (` + "`--max-num-seqs` is `TANDEM_MAX_NUM_SEQS`" + `) and a key of
the YAML file of ` + "`--config`" + `. A flag wins over the environment, the environment over the file, the
file over the default. ` + "`--dry-run`" + ` prints each value with its origin. Names may be written with
underscores. Variables that Kubernetes makes for services (` + "`TANDEM_PORT=tcp://…`" + `,
` + "`TANDEM_…_SERVICE_HOST`" + `) are ignored.

| flag | commands | value | default | meaning |
|---|---|---|---|---|
`)
	for _, d := range allFlags() {
		commands := strings.Join(d.commands, ", ")
		if len(d.commands) == len(table()) {
			commands = "all"
		}
		def := d.flag.DefValue
		if def != "" {
			def = "`" + def + "`"
		}
		if len(d.others) > 0 {
			def += "; " + strings.Join(d.others, ", ")
		}
		fmt.Fprintf(&b, "| `--%s` | %s | %s | %s | %s |\n", d.flag.Name, commands, d.flag.Value.Type(), cell(def), cell(d.flag.Usage))
	}
	b.WriteString(`
## Flags of vllm serve

Tandem reads the command line of ` + "`vllm serve`" + `. Each of its flags (0.33.0, and those that earlier
versions had) is one of:

- **supported**: a flag of the table above, with the same meaning. Where values are named, all
  others are refused;
- **no effect**: accepted with a line on standard error, because it asks for what is always done or
  tunes what does not exist here;
- **refused**: it would change what is computed or who has access. Values that are named have no
  effect.

A start with refused flags ends with exit status 2. It names all of them, each with its alternative;
` + "`tandem serve … --dry-run`" + ` does that without starting.

These forms of vllm serve are accepted: short names (` + "`-tp 1`" + `), ` + "`--no-…`" + ` of switches, ` + "`true`" + ` and
` + "`false`" + ` behind them, several values behind one name (` + "`--served-model-name a b`" + `), paths into JSON
(` + "`-sc.method ngram`" + `), and numbers such as ` + "`32k`" + ` (32000), ` + "`32K`" + ` (32768), ` + "`auto`" + ` and ` + "`-1`" + `.
`)
	for _, g := range config.VLLM {
		fmt.Fprintf(&b, "\n### %s\n\n| flag | here | why, or what to do instead |\n|---|---|---|\n", strings.ToUpper(g.Name[:1])+g.Name[1:])
		for _, f := range g.Flags {
			name := "`--" + f.Name + "`"
			if f.Short != "" {
				name += ", `-" + f.Short + "`"
			}
			class := f.Class.String()
			switch {
			case f.Only != "":
				class += ": " + f.Only
			case f.Fine != "":
				class = "refused; no effect: `" + strings.Join(strings.Fields(f.Fine), "`, `") + "`"
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, class, cell(f.Why))
		}
	}
	return b.Bytes()
}

// The page says what the program does.
func TestFlagsPage(t *testing.T) {
	want := flagsPage()
	if *update {
		if err := os.WriteFile("../../docs/flags.md", want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile("../../docs/flags.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		gl, wl := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
		i := 0
		for i < len(gl) && i < len(wl) && gl[i] == wl[i] {
			i++
		}
		t.Errorf("docs/flags.md is not current from line %d on; `go test -run TestFlagsPage ./internal/roles -update` writes it", i+1)
	}
}

// The help of a command has no block without flags.
func TestHelpHasNoEmptyBlock(t *testing.T) {
	commands := []string{"plan memory", "bench serve", "bench compare", "bench sweep", "bench throughput", "bench latency", "bench transfer", "bench mock", "bench truth"}
	for _, c := range table() {
		commands = append(commands, c.Name)
	}
	for _, name := range commands {
		var out strings.Builder
		status := Main("0", append(strings.Fields(name), "--help"), nil, &out, io.Discard)
		if status != 0 || strings.Contains(out.String(), ":\n\n") {
			t.Errorf("%s --help: status %d\n%s", name, status, out.String())
		}
	}
}

// What the table of vllm serve's flags calls supported is declared by a command
// and nothing else is, so that a flag that is added is moved to its new class.
func TestSupportedFlagsAreDeclared(t *testing.T) {
	here := map[string][]string{}
	for _, d := range allFlags() {
		here[d.flag.Name] = append(here[d.flag.Name], d.commands...)
	}
	servers := []string{"up", "gateway", "prefill", "decode", "serve"}
	for _, g := range config.VLLM {
		for _, f := range g.Flags {
			served := slices.ContainsFunc(here[f.Name], func(c string) bool { return slices.Contains(servers, c) })
			switch {
			case f.Class == config.Supported && !served:
				t.Errorf("--%s is called supported and no command has it", f.Name)
			case f.Class == config.Supported && !slices.Contains(here[f.Name], "serve"):
				t.Errorf("--%s of vllm serve is no flag of tandem serve, but of %q", f.Name, here[f.Name])
			case f.Class != config.Supported && served && f.Name != "tokenizer": // a gateway's, for models of other servers
				t.Errorf("--%s is declared by %q and called %q in the table of vllm serve's flags", f.Name, here[f.Name], f.Class)
			}
		}
	}
}

// Every command that serves knows vllm serve's flags.
func TestServersKnowVLLM(t *testing.T) {
	dir := t.TempDir()
	if err := tlsconf.CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	certs, err := tlsconf.IssueNode(dir, "gateway/local", nil)
	if err != nil {
		t.Fatal(err)
	}
	env := []string{"TANDEM_TLS_DIR=" + certs}
	for _, name := range []string{"up", "gateway", "prefill", "decode", "serve"} {
		var errOut bytes.Buffer
		status := table().Main("test", []string{name, "--dry-run", "--enable-flashinfer-autotune", "-pp", "1"}, env, io.Discard, &errOut)
		if status != 0 || strings.Count(errOut.String(), "has no effect") != 2 {
			t.Errorf("tandem %s: status %d, %q", name, status, &errOut)
		}
		errOut.Reset()
		if status := table().Main("test", []string{name, "--dry-run", "-pp", "2"}, env, io.Discard, &errOut); status != 2 || !strings.Contains(errOut.String(), "--pipeline-parallel-size 2") {
			t.Errorf("tandem %s -pp 2: status %d, %q", name, status, &errOut)
		}
	}
}

// What the gateway would refuse, up refuses before it starts anything: here
// it would fail at its folder next.
func TestUpRefusesFirst(t *testing.T) {
	for want, args := range map[string][]string{
		"--host 0.0.0.0 is reachable from other machines": {"--host", "0.0.0.0"},
		`--policy "best": want one of prefix,`:            {"--policy", "best"},
	} {
		var errOut bytes.Buffer
		status := table().Main("test", append([]string{"up", "--state-dir", "/dev/null/none"}, args...), nil, io.Discard, &errOut)
		if status != 2 || !strings.Contains(errOut.String(), want) {
			t.Errorf("status %d, %q", status, &errOut)
		}
	}
}

// A --tokenizer that is none, or has no upstream to be for, is refused by name before
// anything is started.
func TestTokenizerFlag(t *testing.T) {
	dir := t.TempDir()
	torn := filepath.Join(dir, "torn")
	if err := os.Mkdir(torn, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(torn, "tokenizer.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ given, want string }{
		{"builtin", "give --upstream"},
		{"/no/x", "no such file"},
		{dir, "it has no tokenizer.json"},
		{filepath.Join(torn, "tokenizer.json"), "is a file"},
		{"m=" + torn, "tokenizer"},
		{"builtin,builtin", "there is one for that model already"},
	} {
		args := []string{"gateway", "--port", "0", "--tokenizer", c.given}
		if c.given != "builtin" {
			args = append(args, "--upstream", "http://127.0.0.1:1")
		}
		var errOut bytes.Buffer
		status := table().Main("test", args, nil, io.Discard, &errOut)
		one, _, _ := strings.Cut(c.given, ",")
		if status != 2 || !strings.Contains(errOut.String(), "--tokenizer "+one) || !strings.Contains(errOut.String(), c.want) {
			t.Errorf("%s: status %d, %q; want %q", c.given, status, &errOut, c.want)
		}
	}
	u := upstreamFlags{urls: []string{"http://127.0.0.1:1"}, tokenizers: []string{"builtin", "m=builtin"}}
	if got, err := upstreamTokenizers(&u, ""); err != nil || got[""] == nil || got["m"] == nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
}

// Every flag whose name says that its value is a secret is marked as one.
func TestSecretFlags(t *testing.T) {
	public := []string{"api-key-file", "response-key-file", "ssl-keyfile", "ssl-keyfile-password", "kubernetes-token-file", "kubernetes-secret"} // names of files, and of an object
	table := table()
	for i := range table {
		set := table[i].Declared(table)
		set.VisitAll(func(f *pflag.Flag) {
			for _, word := range strings.Split(f.Name, "-") {
				if slices.Contains([]string{"key", "secret", "password", "token", "keyfile"}, word) && !slices.Contains(public, f.Name) && f.Value.Type() != "int" && f.Value.Type() != "bool" && !set.IsSecret(f.Name) {
					t.Errorf("tandem %s: --%s is not marked as a secret", table[i].Name, f.Name)
				}
			}
		})
	}
}

// A gateway that lets every web page in needs keys.
func TestAllowedOriginsNeedKeys(t *testing.T) {
	for _, c := range []struct {
		g    gateway.Options
		want string
	}{
		{gateway.Options{AllowedOrigins: []string{"*"}}, "give --api-key"},
		{gateway.Options{AllowedOrigins: []string{"https://a.example", "*"}}, "give --api-key"},
		{gateway.Options{AllowedOrigins: []string{"a.example"}}, "SCHEME://HOST"},
		{gateway.Options{AllowedOrigins: []string{"*"}, APIKeys: []string{"k"}}, ""},
		{gateway.Options{AllowedOrigins: []string{"*"}, APIKeyFile: "keys"}, ""},
		{gateway.Options{AllowedOrigins: []string{"https://a.example"}}, ""},
	} {
		if err := checkOrigins(&c.g); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.g.AllowedOrigins, err, c.want)
		}
	}
}
