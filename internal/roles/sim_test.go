package roles

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tandem runs the program and returns its exit status and its two outputs.
func tandem(args ...string) (status int, out, errOut string) {
	var o, e bytes.Buffer
	status = Main("0.0.0", args, nil, &o, &e)
	return status, o.String(), e.String()
}

// The command line of the help works as printed, with every kind of output.
func TestSimCommand(t *testing.T) {
	dir := t.TempDir()
	page := filepath.Join(dir, "a b.html")
	args := []string{
		"sim", "--fleet", "2P2D", "--profile", "h200:llama-8b", "--load", "rps=20,n=100,in=lognormal(7,0.9),out=43,prefix=0.3", "--goodput", "ttft:2000", "tpot:50",
		"--event", "1s kill decode-0,2s start decode-0", "--event", "3s cancel 10%", "--start-time", "1s", "--html", page, "--save-result", "--result-filename", filepath.Join(dir, "r.json"),
	}
	status, out, errOut := tandem(args...)
	if status != 0 || errOut != "" || !strings.Contains(out, "Serving Benchmark Result") || !strings.Contains(out, "Nodes that died: 1, started: 1") || !strings.Contains(out, "Wrote "+page) {
		t.Fatalf("status %d\n%s%s", status, out, errOut)
	}
	html, err := os.ReadFile(page)
	if err != nil || !bytes.Contains(html, []byte("To repeat: tandem sim --fleet 2P2D --profile h200:llama-8b --load &#39;rps=20,n=100,in=lognormal(7,0.9),out=43,prefix=0.3&#39; --goodput=ttft:2000")) {
		t.Errorf("%v: %s", err, html[:min(len(html), 3000)])
	}
	if again, second, _ := tandem(args...); again != 0 || second != out {
		t.Error("a second run printed something else")
	}
	profile := filepath.Join(dir, "p.yaml")
	_, out, _ = tandem("sim", "--profile", "4xh100:llama-70b", "--print-profile")
	if err := os.WriteFile(profile, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, out, errOut := tandem("sim", "--profile", profile, "--load", "rps=1,n=5,in=100,out=5"); status != 0 || !strings.Contains(out, "1P1D of 4xh100:llama-70b") {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
}

// A wrong setting ends with status 2 and one line without names of packages.
func TestSimRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"--profile is missing":     {"--load", "rps=1,in=5,out=5"},
		"no GPU is called":         {"--profile", "h1:llama-8b", "--load", "rps=1,in=5,out=5"},
		"has no decode-7":          {"--profile", "h200:llama-8b", "--load", "rps=1,in=5,out=5", "--event", "1s kill decode-7"},
		"nothing.jsonl":            {"--profile", "h200:llama-8b", "--trace", "nothing.jsonl"},
		"has no rps":               {"--profile", "h200:llama-8b", "--load", "in=5,out=5"},
		"unexpected argument":      {"more"},
		"nothing.yaml":             {"--profile", "nothing.yaml", "--print-profile"},
		"--policy \"x\": want one": {"--profile", "h200:llama-8b", "--load", "rps=1,in=5,out=5", "--policy", "x"},
	} {
		status, out, errOut := tandem(append([]string{"sim"}, args...)...)
		if status != 2 || out != "" || !strings.HasPrefix(errOut, "tandem sim: ") || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, want) {
			t.Errorf("%q: status %d\n%s%s", want, status, out, errOut)
		}
		for _, name := range []string{"profile: ", "sim: bad", "sim: unreadable", "fleet: ", "simulate: "} {
			if strings.Contains(strings.TrimPrefix(errOut, "tandem sim: "), name) {
				t.Errorf("%q names a package: %s", want, errOut)
			}
		}
	}
}
