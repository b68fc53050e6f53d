package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// commands is a small table: one command with a model's flags, one without.
func commands() Table {
	return append(Table{New("serve", "[MODEL] [flags]", "It's a server.", "tandem serve", func(v *Invocation) error {
		var m Model
		m.Register(v.Set)
		_, err := v.Parse(1)
		return err
	})}, Tools()...)
}

// run is a call of the program.
func run(env []string, args ...string) (status int, out, errOut string) {
	var o, e bytes.Buffer
	status = commands().Main("1.2.3", args, env, &o, &e)
	return status, o.String(), e.String()
}

func TestStatusesAndWords(t *testing.T) {
	binaryFile := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(binaryFile, []byte("\x7fELF\x00\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   string
		env    []string
		status int
		want   string // in what goes to standard error
	}{
		{"", nil, 2, "Start with: tandem up"},
		{"help", nil, 0, ""},
		{"version", nil, 0, ""},
		{"--version", nil, 0, ""},
		{"serve --help", nil, 0, ""},
		{"serev", nil, 2, "did you mean serve?"},
		{"xyzzy", nil, 2, "`tandem help` lists the commands"},
		{"hlep", nil, 2, "did you mean help?"},
		{"drain d1", nil, 2, "POST /admin/drain/NODE"},
		{"vllm serve m", nil, 2, "`tandem serve` takes the arguments"},
		{"serve --blok-size 1", nil, 2, "did you mean --block-size?"},
		{"chat --max-tokens -3 hi", nil, 2, "--max-tokens -3: want 0 or more"},
		{"status --watch --interval 5", nil, 2, `--interval: "5" is not a duration such as 2s, 1m30s or 720h`},
		{"bench sweep --request-rates a", nil, 2, `--request-rates: "a" is not a list of numbers`},
		{"bench nope", nil, 2, `no benchmark is called "nope": name the benchmark`},
		{"bench compare a.json b.json", nil, 2, "tandem bench: bad result file: open a.json"},
		{"serve a b", nil, 2, `unexpected argument "b"`},
		{"serve --block-size=x", nil, 2, `--block-size: "x" is not a whole number`},
		{"serve --disable-cascade-attn", nil, 0, "warning: --disable-cascade-attn has no effect"},
		{"serve --disable-cascade-attn --dry-run", nil, 0, "warning: --disable-cascade-attn has no effect"},
		{"serve -pp 8", nil, 2, "--pipeline-parallel-size 8 is not supported"},
		{"serve", []string{"TANDEM_BLOCK_SIZES=1"}, 0, "did you mean TANDEM_BLOCK_SIZE?"},
		{"version", []string{"TANDEM_TEMPERATURE=1", "TANDEM_BLOCK_SIZE=1"}, 0, ""},
		{"completion", nil, 2, "name the shell"},
		{"completion tcsh", nil, 2, `"tcsh" is none of them`},
		{"logits org/none --tokens 1", []string{"HOME=/nowhere"}, 2, "Nothing is downloaded"},
		{"logits ./none --tokens 1", nil, 2, "stat ./none"},
		{"ca", nil, 2, "give the folder"},
		{"ca node/d1", nil, 2, "give the folder of the authority first"},
		{"ca " + t.TempDir(), nil, 0, "has an authority; `tandem ca "},
		{"ca renew " + t.TempDir() + " --within 30d", nil, 2, `--within: "30d" is not a duration`},
		{"ca lst lst/x/y", nil, 2, `"lst/x/y", want gateway/NAME`},
		{"explain-log " + binaryFile, nil, 2, "is no text"},
		{"quantize builtin", nil, 2, "name the model and the folder to write"},
		{"quantize builtin --out .", nil, 2, ". exists"},
		{"quantize builtin --out ./command_test.go/absent", nil, 2, "name one that you may write"},
		{"quantize ./none --out ./absent", nil, 2, "there is no folder ./none; give the one that holds"},
		{"quantize ../../engine/model/testdata/quantized/awq --out ./absent", nil, 2, "already; give the model in float32"},
		{"quantize builtin --out ./absent --int8 (", nil, 2, "--int8"},
		{"quantize builtin --out ./absent --calibration " + os.DevNull, nil, 2, "--calibration"},
		{"quantize builtin --out ./absent --group-size 512", nil, 2, "a --group-size that divides them"},
		{"explain-log " + os.DevNull, nil, 0, "is empty"},
		{"explain-log command_test.go", nil, 0, "are of neither vLLM nor Tandem"},
		{"doctor --role prefil", nil, 2, "want gateway, prefill"},
		{"ca " + t.TempDir() + " router/a", nil, 2, `"router/a", want gateway/NAME, node/NAME or NAME`},
		{"ca " + t.TempDir() + " gateway/g node/d", nil, 0, ""},
		{"ca " + t.TempDir() + " d1", nil, 0, "warning: the certificate of d1 has no role: `tandem ca DIR gateway/NAME`"},
		{"profile --peer 127.0.0.1:1", nil, 2, "--peer 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused: start tandem bench transfer --listen there first"},
		{"plan", nil, 2, "name the kind of plan"},
		{"plan --kv-memory 1GiB pools", nil, 2, "name the kind of plan first"},
		{"plan memori", nil, 2, `no plan is called "memori" (did you mean memory?): name the kind of plan first`},
		{"plan foo bar", nil, 2, `no plan is called "foo": name the kind of plan first`},
		{"plan memory --kv-memori 1GiB", nil, 2, "`tandem plan memory --help` lists them"},
		{"plan memory a b", nil, 2, "`tandem plan memory --help` shows the usage"},
		{"plan memory ./none --kv-memory 1GiB", nil, 2, "no such file"},
		{"plan memory ../../engine/model/testdata/gqa-tied", nil, 2, "--kv-memory 0: give the bytes left"},
		{"plan memory ../../engine/model/testdata/gqa-tied --kv-memory 1GiB --block-size -1", nil, 2, "--block-size -1, want"},
		{"plan memory ../../engine/model/testdata --kv-memory 1GiB", nil, 2, "../../engine/model/testdata: not a checkpoint folder: the folder has no config.json"},
		{"plan memory ../../engine/model/testdata/gqa-tied --kv-memory 1KiB", nil, 2, "--kv-memory 1 KiB: budget too small: a sequence of 256 tokens needs 16 blocks"},
		{"plan memory ../../engine/model/testdata/mistral-window/config.json --kv-memory 1GiB", nil, 0, ""},
		{"plan memory ../../engine/model/testdata/gqa-tied --kv-memory 1GiB --tensor-parallel-size 2", nil, 0, ""},
		{"plan memory ../../engine/model/testdata/gqa-tied --kv-memory 1GiB --tensor-parallel-size 3", nil, 2, "--tensor-parallel-size 3: "},
		{"plan memory ../../engine/model/testdata/gqa-tied --kv-memory 1GiB --tensor-parallel-size -1", nil, 2, "--tensor-parallel-size -1, want"},
	} {
		status, _, errOut := run(c.env, strings.Fields(c.args)...)
		if status != c.status || !strings.Contains(errOut, c.want) || c.want == "" && errOut != "" {
			t.Errorf("tandem %s: status %d, %q; want %d, %q", c.args, status, errOut, c.status, c.want)
		}
		if strings.Contains(errOut, "config: bad value") {
			t.Errorf("tandem %s: the text names a package: %q", c.args, errOut)
		}
	}
}

// Each shell that is on this machine completes commands, flags and arguments by
// its script.
func TestCompletion(t *testing.T) {
	ask := map[string]func(words string) string{
		"bash": func(words string) string {
			return `COMP_WORDS=(` + words + `); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _tandem; printf '%s\n' "${COMPREPLY[@]}"`
		},
		"fish": func(words string) string { return `complete -C '` + strings.ReplaceAll(words, `""`, "") + `'` },
	}
	for _, s := range shells {
		status, script, errOut := run(nil, "completion", s.name)
		if status != 0 {
			t.Fatalf("%s: status %d, %s", s.name, status, errOut)
		}
		for _, want := range []string{"serve", "max-num-seqs", "completion", "served-model-name"} {
			if !strings.Contains(script, want) {
				t.Errorf("%s: no %q in the script", s.name, want)
			}
		}
		if strings.Contains(script, "disable-cascade-attn") {
			t.Errorf("%s: the script has flags without effect", s.name)
		}
		shell, err := exec.LookPath(s.name)
		if err != nil {
			continue
		}
		if s.name == "zsh" { // its completion needs a terminal; the script must at least be read
			if out, err := exec.Command(shell, "-fc", "compdef() { :; }\n"+script+"\nfunctions _tandem > /dev/null && echo ok").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "ok" {
				t.Errorf("zsh does not read the script: %v\n%s", err, out)
			}
			continue
		}
		for words, want := range map[string][]string{
			"tandem se":                        {"serve"},
			"tandem serve --max-n":             {"--max-num-batched-tokens", "--max-num-queued-reqs", "--max-num-seqs"},
			`tandem completion ""`:             {"bash", "fish", "zsh"},
			"tandem bench s":                   {"serve", "sweep"},
			"tandem bench sweep --req":         {"--request-id-prefix", "--request-rate", "--request-rates"},
			"tandem bench compare --req":       nil,
			"tandem plan me":                   {"memory"},
			"tandem serve --quant":             {"--quantization"},
			"tandem serve --quantization int":  {"int4", "int8"},
			`tandem serve --kv-cache-dtype ""`: {"auto", "bfloat16", "float32", "fp8"},
			"tandem status --js":               {"--json"},
			"tandem version --max-num-s":       nil,
			"tandem ca re":                     {"renew"},
			"tandem ca co":                     {"command.go", "command_test.go", "completion.go"},
			"tandem ca lis":                    {"list"},
			"tandem ca list --js":              {"--json"},
			"tandem ca renew --with":           {"--within"},
			"tandem ca renew ca_":              {"ca_test.go"},
			"tandem help explain":              {"explain-log"},
		} {
			out, err := exec.Command(shell, "-c", script+"\n"+ask[s.name](words)).CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v\n%s", s.name, err, out)
			}
			var got []string
			for line := range strings.Lines(string(out)) {
				if f := strings.Fields(line); len(f) > 0 {
					got = append(got, f[0]) // fish adds what it means
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %q completes to %q, want %q", s.name, words, got, want)
			}
		}
	}
}
