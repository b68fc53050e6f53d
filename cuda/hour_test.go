package cuda

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fakes are the programs that gpu_hour.py runs, by folder and name. A run of bench latency takes
// 10 ms and 2 ms a token, in the folder other 4 ms.
var fakes = map[string]string{
	"bin/tandem": `
		[ "$1" = version ] && { echo '{"commit": "unknown"}'; exit; }
		step=.002; case $0 in */other/*) step=.004 ;; esac
		while [ $# -gt 0 ]; do [ "$1" = --output-len ] && n=$2; [ "$1" = --cublaslt ] && [ "$2" = none ] && { echo no cuBLASLt here; exit 3; }; shift; done
		awk "BEGIN { print \"Avg latency: \" .01 + $n * $step \" seconds\" }"`,
	"bin/cuda.test": `
		case "$*" in
		*-test.list*) for t in $TESTS; do echo ${t}Bits; done; printf 'TestAdaptersRefused\nok\n' ;;
		*TestAdaptersRefused*) echo '--- FAIL: TestAdaptersRefused'; exit 1 ;;
		*BenchmarkDecodeAttention*) echo 'BenchmarkDecodeAttention 5 2e+08 ns/op 2205 GB/s' ;;
		*BenchmarkPush*) exit 1 ;;
		*) echo 'ops_test.go:1: worst difference 4.4e-05' ;;
		esac`,
	"path/nvidia-smi": `echo NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB`,
	"path/compute-sanitizer": `
		case $2 in
		memcheck) echo '========= ERROR SUMMARY: 0 errors'; [ "${5##*/}" = cuda.test ] ;;
		racecheck) [ -z "$HANG" ] || { sleep 1000 & echo $! >"$HANG"; echo waits; wait; }; echo '========= RACECHECK SUMMARY: 0 hazards displayed' ;;
		synccheck) echo '========= Barrier error'; exit 9 ;;
		esac`,
	"path/ncu": `
		while [ "$1" != --log-file ]; do shift; done
		{ echo '"ID","Process ID","Process Name","Kernel Name","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum"'; echo '"","","","","","us","Mbyte"'
		echo '"0","1","tandem","gemv<1>(int)","(8, 1, 1)","2","6"'; echo '"1","1","tandem","norms(int)","(1, 1, 1)","9","0"'; echo '"2","1","tandem","gemv<1>(int)","(8, 1, 1)","2","6"'; } >"$2"`,
}

// hour returns the command of gpu_hour.py with fakes of all that it runs, and the folder of its report.
func hour(t *testing.T, args ...string) (*exec.Cmd, string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range fakes {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(dir, "other"), os.DirFS(filepath.Join(dir, "bin"))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bin", "commit"), []byte("c0ffee\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", append([]string{"gpu_hour.py", "--rehearse", "--bin", filepath.Join(dir, "bin")}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OUT="+filepath.Join(dir, "out"), "PATH="+filepath.Join(dir, "path")+":"+os.Getenv("PATH"), "TESTS="+strings.Join(parityTests(t), " "))
	return cmd, dir
}

// parityTests returns the names of gpu_hour.py's list of tests.
func parityTests(t *testing.T) []string {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip(err)
	}
	src, err := os.ReadFile("gpu_hour.py")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(src), "\nTESTS = \"\"\"")
	list, _, _ = strings.Cut(list, `"""`)
	return strings.Fields(list)
}

// report returns the report of a run, which must end with status 1.
func report(t *testing.T, cmd *exec.Cmd, dir string) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	text, _ := os.ReadFile(filepath.Join(dir, "out", "gpu-hour.md"))
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 1 || string(text) != string(out) {
		t.Fatalf("%v, printed\n%s\nreported\n%s", err, out, text)
	}
	return string(text)
}

func lacks(t *testing.T, text string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile("(?m)" + p).MatchString(text) {
			t.Errorf("the report lacks %s:\n%s", p, text)
		}
	}
}

// Each result is in the report, next to the prediction and the other build's, and what fails stops nothing.
func TestHour(t *testing.T) {
	t.Parallel()
	cmd, dir := hour(t, "--only", "tests,sanitizers,speed,no-cublaslt,attention,push,kernels")
	cmd.Args = append(cmd.Args, "--other", filepath.Join(dir, "other"))
	text := report(t, cmd, dir)
	page, err := os.ReadFile("model.md")
	if err != nil {
		t.Fatal(err)
	}
	_, h100, _ := strings.Cut(string(page), "\n## An H100")
	aim := regexp.MustCompile(`(?m)^\| Llama 8B, one row \| (\d+ tok/s) \|`).FindStringSubmatch(h100)
	if aim == nil {
		t.Fatal("model.md predicts nothing of an H100")
	}
	lacks(t, text, `^- \*\*commit\*\*: [\d.]+ s, c0ffee$`, `^- \*\*other\*\*: [\d.]+ s, unknown in .*/other$`, `^- \*\*GPU\*\*: .*H100 80GB HBM3, 580.159.04`,
		`^- \*\*TestOverlapBitsBits\*\*: [\d.]+ s, passed\n +ops_test.go:1: worst`, `^- \*\*TestAdaptersRefused\*\*: failed: status 1\n +--- FAIL`,
		`^- \*\*memcheck\*\*: [\d.]+ s, ERROR SUMMARY: 0 errors`, `^- \*\*racecheck\*\*: [\d.]+ s, RACECHECK SUMMARY: 0 hazards`,
		`^- \*\*synccheck\*\*: failed: status 9\n +=+ Barrier error`, `^- \*\*initcheck\*\*: failed: it printed no summary`,
		`^\| Llama 8B, one row \| 500 tok/s \| 2\.000 ms \| `+aim[1]+` \| \d+% \| 250 tok/s \| 500 tok/s \| 2\.000 \|$`,
		`^\| Llama 8B, 64 rows of 1,024 positions \| 1,000 tok/s \| 2\.000 ms \| [\d,]+ tok/s \|`,
		`^\| Llama 8B, a prompt of 2,000 tokens \| 4,000 tok/s \| 12\.000 ms \| [\d,]+ tok/s \|`,
		`^\| Llama 1B int4, one row \| 500 tok/s \| 2\.000 ms \|  \|  \|`, `^\| .*without cuBLASLt \| failed: status 3 no cuBLASLt here \|$`,
		`^- \*\*BenchmarkDecodeAttention\*\*: [\d.]+ s, 2205 GB/s$`, `^- \*\*BenchmarkPush\*\*: failed: status 1`,
		`^\| norms \| \(1, 1, 1\) \| 1 \| 9\.00 \| 0 \| 9 \|\n\| gemv<1> \| \(8, 1, 1\) \| 2 \| 2\.00 \| 3000 \| 4 \|`, `^- end after \d+ s, status 1$`)
	if logs, _ := filepath.Glob(filepath.Join(dir, "out", "*-memcheck.log")); len(logs) != 1 {
		t.Errorf("%d logs of memcheck", len(logs))
	}
}

// alive reports whether a process exists that has not ended.
func alive(pid string) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	return err == nil && !regexp.MustCompile(`\) [ZX] `).Match(stat)
}

// A process that hangs is killed with its children, after its time or when the program is ended.
func TestHourHangs(t *testing.T) {
	t.Parallel()
	hangs := func(t *testing.T, ended bool, each string) {
		t.Parallel()
		cmd, dir := hour(t, "--only", "sanitizers,attention", "--each", each)
		pid := filepath.Join(dir, "pid")
		cmd.Env = append(cmd.Env, "HANG="+pid)
		child := func() string {
			data, _ := os.ReadFile(pid)
			return strings.TrimSpace(string(data))
		}
		if ended {
			var out strings.Builder
			cmd.Stderr = &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			for until := time.Now().Add(time.Minute); child() == "" && time.Now().Before(until); {
				time.Sleep(10 * time.Millisecond)
			}
			err, signalled := cmd.Process.Signal(syscall.SIGTERM), time.Now()
			if err := errors.Join(err, cmd.Wait()); time.Since(signalled) > 30*time.Second || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(out.String(), "ended by a signal") {
				t.Errorf("%v: %s", err, out.String())
			}
		} else {
			lacks(t, report(t, cmd, dir), `^- \*\*racecheck\*\*: failed: killed after 6 s\n +waits`, `^- \*\*BenchmarkDecodeAttention\*\*: [\d.]+ s, 2205`)
		}
		if p := child(); p == "" || alive(p) {
			t.Errorf("the process %q of the hanging tool runs", p)
		}
	}
	t.Run("limit", func(t *testing.T) { hangs(t, false, "6") })
	t.Run("signal", func(t *testing.T) { hangs(t, true, "50") })
}

// What does not fit into the time left is left out and is a failure, what is not installed is left out
// and is none, a GPU has the predictions of its own table, and each name of the list is that of a test.
func TestHourLists(t *testing.T) {
	t.Parallel()
	tests := parityTests(t)
	cmd := exec.Command("python3", "-c", `
import argparse, gpu_hour, json, sys
args = argparse.Namespace(limit=10, each=9, only=[], rehearse=False, other=None)
r = gpu_hour.Runner(args, ".")
r.measure("sum", 1, lambda: r.tool("no-such-tool"))
assert not r.failed
r.measure("long", 20, lambda: sys.exit("it ran"))
assert r.failed
print(json.dumps([gpu_hour.predictions(gpu) for gpu in ("NVIDIA H200, 143771 MiB", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "")]))
`)
	dir := t.TempDir()
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OUT="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lacks(t, string(out), `^- \*\*sum\*\*: left out, no-such-tool is not installed$`, `^- \*\*long\*\*: failed: left out, \d+ s are left of about 20$`)
	var found []map[string]float64
	if err := json.Unmarshal(out[strings.LastIndex(strings.TrimSpace(string(out)), "\n")+1:], &found); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{"Llama 1B, one row", "Llama 8B, one row", "Llama 8B, 64 rows of 1,024 positions", "Llama 8B, a prompt of tokens", "GPT-OSS 20B, one row"} {
		if h200, h100 := found[0][row], found[1][row]; h100 < 100 || h200 <= h100 {
			t.Errorf("%s: %g tok/s predicted of an H200, %g of an H100", row, h200, h100)
		}
	}
	page, err := os.ReadFile("model.md")
	if err != nil {
		t.Fatal(err)
	}
	if all := regexp.MustCompile(`(?m)^\| Llama 1B, one row \|.* (\d+) tok/s \|`).FindSubmatch(page); all == nil || string(all[1]) != fmt.Sprint(found[0]["Llama 1B, one row"]) {
		t.Errorf("%g tok/s predicted of an H200; want the last of %q", found[0]["Llama 1B, one row"], all)
	}
	if len(found[2])+len(found[3]) > 0 {
		t.Errorf("predictions of other GPUs: %v", found[2:])
	}
	var sources []byte
	paths, _ := filepath.Glob("../engine/backend/cuda/*_test.go")
	for _, path := range paths {
		src, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		sources = append(sources, src...)
	}
	for _, name := range tests {
		if !regexp.MustCompile(`(?m)^func ` + name + `\w*\(t \*testing\.T\)`).Match(sources) {
			t.Errorf("engine/backend/cuda has no %s", name)
		}
	}
	if !slices.Contains(tests, "TestKernels") || len(tests) < 15 {
		t.Errorf("gpu_hour.py lists %q", tests)
	}
}
