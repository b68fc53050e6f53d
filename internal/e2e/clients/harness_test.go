package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// key opens the servers.
const key = "sk-clients"

// older are the scripts whose packages are those of requirements-openai2.txt.
var older = []string{"python/run_llama_index.py", "python/run_instructor.py"}

// scripts are the clients, in the order of the page.
var scripts = []string{
	"python/run_openai.py", "node/run_openai.cjs",
	"python/run_anthropic.py", "node/run_anthropic.cjs",
	"python/run_litellm.py", "python/run_langchain.py", "python/run_agents.py", "python/run_pydantic_ai.py", "python/run_llama_index.py", "node/run_vercel.cjs",
	"python/run_instructor.py", "python/run_outlines.py", "python/run_guidance.py", "python/run_dspy.py",
}

// scriptBound bounds one script.
const scriptBound = 15 * time.Minute

// setup is what a script reads.
type setup struct {
	Key     string   `json:"key"`
	Formats []served `json:"formats"`
	Models  []served `json:"models"`
}

// environment is how scripts are run.
type environment struct {
	python, olderPython string // programs
	node                string // program whose packages are below ../node_modules
	setup               string // file
}

// write writes the servers to a file for scripts.
func (e *environment) write(s setup, folder string) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	e.setup = filepath.Join(folder, "setup.json")
	return os.WriteFile(e.setup, text, 0o600)
}

// report is what a script printed.
type report struct {
	Client, Package, Version, Config string
	Configs                          map[string]string // by surface
	Checks                           []check           `json:"-"`
}

// check is what a surface did with all servers.
type check struct {
	Kind          string // "formats" or "models"
	Surface, Mode string
	Ran           string
	Of, OK        int
	Refused       []outcome
	Failed        []outcome
}

// outcome is why a server's answer did not pass.
type outcome struct{ Name, Why string }

// run runs a script and reads its report.
func (e *environment) run(ctx context.Context, script string) (r report, err error) {
	ctx, cancel := context.WithTimeout(ctx, scriptBound)
	defer cancel()
	program := e.python
	switch {
	case strings.HasSuffix(script, ".cjs"):
		program = e.node
	case slices.Contains(older, script):
		program = e.olderPython
	}
	cmd := exec.CommandContext(ctx, program, script, e.setup)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "NO_PROXY=127.0.0.1", "NODE_PATH="+filepath.Join(filepath.Dir(filepath.Dir(e.node)), "node_modules"))
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("%s: %w\n%s%s", script, err, out, errOut.String())
	}
	for line := range strings.Lines(string(out)) {
		var c check
		switch {
		case !strings.HasPrefix(line, "{"): // clients print lines of their own
			continue
		case r.Client == "":
			err = json.Unmarshal([]byte(line), &r)
		default:
			err = json.Unmarshal([]byte(line), &c)
			r.Checks = append(r.Checks, c)
		}
		if err != nil {
			return r, fmt.Errorf("%s printed %q: %w", script, line, err)
		}
	}
	if len(r.Checks) == 0 {
		return r, fmt.Errorf("%s ran no check:\n%s", script, out)
	}
	return r, nil
}
