//go:build linux

package e2e

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Every command explains itself with an example of itself.
func TestBinaryHelp(t *testing.T) {
	out, errOut, err := tandem(t, nil, "help")
	if err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	var names []string
	_, list, _ := strings.Cut(out, "Commands:\n")
	for line := range strings.Lines(list) {
		f := strings.Fields(line)
		if len(f) == 0 {
			break
		}
		names = append(names, f[0])
	}
	for _, want := range []string{"up", "gateway", "prefill", "decode", "serve", "chat", "status", "logits", "version"} {
		if !strings.Contains(" "+strings.Join(names, " ")+" ", " "+want+" ") {
			t.Errorf("`tandem help` does not list %s: %q", want, names)
		}
	}
	for _, name := range names {
		out, errOut, err := tandem(t, nil, name, "--help")
		_, example, ok := strings.Cut(out, "Example:\n")
		if err != nil || !ok || !strings.HasPrefix(example, "  tandem "+name) {
			t.Errorf("tandem %s --help: %v, no example of it in:\n%s%s", name, err, out, errOut)
		}
	}
	for _, bad := range [][]string{{}, {"luck"}, {"up", "--luck"}, {"up", "--port", "x"}, {"up", "--decode", "0"}, {"logits"}, {"version", "x"}} {
		if _, errOut, err := tandem(t, nil, bad...); err == nil || strings.TrimSpace(errOut) == "" {
			t.Errorf("tandem %q: %v, %q", bad, err, errOut)
		}
	}
}

// --dry-run says where each value comes from, and flags win over variables over
// the file over defaults.
func TestBinaryDryRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(file, []byte("port: 1\nmax-num-seqs: 2\ndecode: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errOut, err := tandem(t, []string{"TANDEM_PORT=4", "TANDEM_MAX_NUM_SEQS=5"}, "up", "--dry-run", "--port", "6", "--config", file)
	if err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	got := map[string]string{}
	for line := range strings.Lines(out) {
		setting, origin, _ := strings.Cut(line, "#")
		name, value, _ := strings.Cut(setting, ":")
		got[name] = strings.TrimSpace(value) + " " + strings.TrimSpace(origin)
	}
	for name, want := range map[string]string{
		"port": "6 flag", "max-num-seqs": "5 environment TANDEM_MAX_NUM_SEQS", "decode": "3 file " + file + ":3", "prefill": "1 default",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	// What it prints is itself a configuration file.
	if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	again, errOut, err := tandem(t, nil, "up", "--dry-run", "--config", file)
	if err != nil || !strings.Contains(again, "port: 6 ") {
		t.Errorf("the printed configuration, read back: %v %s\n%s", err, errOut, again)
	}
	if _, errOut, err := tandem(t, nil, "up", "--config", file, "--dry-run", "--max_num_seqs", "none"); err == nil || !strings.Contains(errOut, "none") {
		t.Errorf("a bad value: %v, %q", err, errOut)
	}
}

func TestBinaryVersion(t *testing.T) {
	out, errOut, err := tandem(t, nil, "version", "--json")
	var v struct {
		Version, Go, OS, Arch string
		Kernels               []string
		Protocol              int
	}
	if err != nil || json.Unmarshal([]byte(out), &v) != nil {
		t.Fatalf("%v: %s%s", err, out, errOut)
	}
	if v.Version == "" || v.Go == "" || v.OS == "" || v.Arch == "" || len(v.Kernels) == 0 || v.Protocol < 1 {
		t.Errorf("incomplete: %s", out)
	}
	plain, _, err := tandem(t, nil, "version")
	if err != nil || !strings.Contains(plain, v.Version) {
		t.Errorf("%v: %s", err, plain)
	}
}

// What `tandem logits` prints are the logits of transformers, for whoever wants
// to hold them against another engine's.
func TestBinaryLogits(t *testing.T) {
	for _, name := range []string{"mha", "gqa-tied", "headdim"} {
		dir := filepath.Join("../../engine/model/testdata", name)
		for _, g := range readTransformers(t, filepath.Join(dir, "goldens.json.gz")) {
			ids := make([]string, len(g.Prompt))
			for i, id := range g.Prompt {
				ids[i] = strconv.Itoa(int(id))
			}
			out, errOut, err := tandem(t, nil, "logits", dir, "--tokens", strings.Join(ids, ","))
			if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, errOut)
			}
			rows := readRows(t, out)
			if len(rows) != len(g.Prompt) {
				t.Fatalf("%s: %d rows for %d tokens", name, len(rows), len(g.Prompt))
			}
			for i, p := range g.Positions {
				if len(rows[p].Logits) != len(g.Logits[i]) || rows[p].Position != p {
					t.Fatalf("%s: row %d is of position %d and has %d logits", name, p, rows[p].Position, len(rows[p].Logits))
				}
				for j, want := range g.Logits[i] {
					if d := math.Abs(float64(rows[p].Logits[j] - want)); !(d <= 1e-4) {
						t.Fatalf("%s, prompt of %d, position %d, token %d: %g, transformers says %g", name, len(g.Prompt), p, j, rows[p].Logits[j], want)
					}
				}
			}
		}
	}
	out, errOut, err := tandem(t, nil, "logits", "../../engine/model/testdata/mha", "--tokens", "1,2,3,4,5", "--last", "2", "--device", "cpu")
	if rows := readRows(t, out); err != nil || len(rows) != 2 || rows[0].Position != 3 || rows[1].Position != 4 {
		t.Errorf("--last 2: %v, %d rows\n%s", err, len(rows), errOut)
	}
	if _, errOut, err := tandem(t, nil, "logits", "../../engine/model/testdata/mha", "--tokens", "1,100000"); err == nil || !strings.Contains(errOut, "100000") {
		t.Errorf("a token that the model does not have: %v, %q", err, errOut)
	}
	if _, errOut, err := tandem(t, nil, "logits", "testdata/nowhere", "--tokens", "1"); err == nil || !strings.Contains(errOut, "nowhere") {
		t.Errorf("a folder that is not there: %v, %q", err, errOut)
	}
}

// row is one line of `tandem logits`.
type row struct {
	Position int
	Logits   []float32
}

func readRows(t *testing.T, out string) []row {
	t.Helper()
	var rows []row
	lines := bufio.NewScanner(strings.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		rows = append(rows, r)
	}
	if lines.Err() != nil {
		t.Fatal(lines.Err())
	}
	return rows
}

// transformersCase is one prompt of engine/model's goldens.
type transformersCase struct {
	Prompt    []int32
	Positions []int
	Logits    [][]float32
}

func readTransformers(t *testing.T, path string) []transformersCase {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g struct{ Cases []transformersCase }
	if err := json.NewDecoder(z).Decode(&g); err != nil || len(g.Cases) < 9 {
		t.Fatalf("%s: %d cases, %v", path, len(g.Cases), err)
	}
	return g.Cases
}
