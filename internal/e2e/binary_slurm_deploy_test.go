//go:build deploy

package e2e

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// srun starts the tasks of a step on this machine. Each has an address of its own, which is also the
// name of its machine.
const srun = `#!/bin/bash
while [[ $1 == --* ]]; do
	[[ $1 != --ntasks=* ]] || tasks=${1#--ntasks=}
	shift
done
trap 'kill $(jobs -p); wait; exit 0' TERM
for ((i = 0; i < tasks; i++)); do
	SLURM_PROCID=$i SLURMD_NODENAME=127.0.7.$((i + 1)) "$@" &
done
wait
`

// slurmJob is the script of deploy/slurm with an srun of this test.
func slurmJob(t *testing.T, env ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	program := os.Getenv("TANDEM_BINARY")
	if program == "" {
		t.Skip("TANDEM_BINARY names no program")
	}
	script, err := filepath.Abs("../../deploy/slurm/tandem.sbatch")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "srun"), []byte(srun), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd, out := exec.Command("bash", script), new(bytes.Buffer)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "TANDEM="+program, "SLURM_JOB_ID=7", "SLURM_JOB_NUM_NODES=3", "SLURMD_NODENAME=127.0.7.1", "PORT=18763")
	cmd.Env = append(cmd.Env, env...)
	return cmd, out
}

// The script of a Slurm job makes a fleet that answers a chat, and ends it at TERM.
func TestBinarySlurm(t *testing.T) {
	cmd, out := slurmJob(t)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	const url = "http://127.0.7.1:18763"
	wait := time.After(2 * time.Minute)
	for usable := false; !usable; {
		select {
		case err := <-ended:
			t.Fatalf("the job ended: %v\n%s", err, out)
		case <-wait:
			_ = cmd.Process.Kill()
			t.Fatalf("two decode nodes are not usable after two minutes\n%s", out)
		case <-time.After(200 * time.Millisecond):
		}
		if resp, err := http.Get("http://127.0.0.1:18764/metrics"); err == nil {
			var body bytes.Buffer
			_, _ = body.ReadFrom(resp.Body)
			resp.Body.Close()
			usable = strings.Contains(body.String(), "tandem:gateway_usable_decode_nodes 2")
		}
	}
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"What is prefill?"}],"max_tokens":20}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("a chat gets %s", resp.Status)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("after TERM: %v\n%s", err, out)
		}
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		t.Fatalf("the job runs a minute after TERM\n%s", out)
	}
	if strings.Contains(out.String(), "level=ERROR") {
		t.Errorf("errors in the log:\n%s", out)
	}
}

// A job without a machine that decodes is refused.
func TestBinarySlurmPrefillOnly(t *testing.T) {
	cmd, out := slurmJob(t, "PREFILL=3")
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 2 || !strings.Contains(out.String(), "give 0 to 2") {
		t.Errorf("%v\n%s", err, out)
	}
}
