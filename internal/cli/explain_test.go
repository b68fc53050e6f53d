package cli

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/explainlog"
)

const shortLog = "INFO 02-03 10:00:00 [w.py:1] GPU KV cache size: 8,192 tokens\nINFO 02-03 10:00:00 [w.py:1] Maximum concurrency for 4,096 tokens per request: 2.00x\n"

// explain-log writes text to standard output and a page to the file that --html names.
func TestExplainLog(t *testing.T) {
	dir := t.TempDir()
	log, page := filepath.Join(dir, "log"), filepath.Join(dir, "page.html")
	if err := os.WriteFile(log, []byte(shortLog), 0o600); err != nil {
		t.Fatal(err)
	}
	status, out, errOut := run(nil, "explain-log", log, "--html", page)
	if status != 0 || !strings.Contains(out, "8,192 tokens ÷ 4,096 = 2.00 requests") || !strings.Contains(errOut, "has the page") {
		t.Errorf("status %d, %q, %q", status, out, errOut)
	}
	if b, err := os.ReadFile(page); err != nil || !bytes.HasPrefix(b, []byte("<!doctype html>")) || !bytes.Contains(b, []byte("2.00 requests")) {
		t.Errorf("page: %v, %.200s", err, b)
	}
	if _, out, _ := run(nil, "explain-log", log, "--summary"); strings.Contains(out, "Line by line") {
		t.Errorf("--summary has lines: %q", out)
	}
	for args, want := range map[string]string{"": "give the log's file", log + " " + log: "2 files are given: `cat FILE", dir + "/none": "no such file", dir: "is a directory", log + " --html " + dir: "--html"} {
		if status, _, errOut := run(nil, append([]string{"explain-log"}, strings.Fields(args)...)...); status != 2 || !strings.Contains(errOut, want) {
			t.Errorf("%q: status %d, %q", args, status, errOut)
		}
	}
}

// Lines of any length are read with a bound on what is kept of each.
func TestReadLines(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	var got []int
	cuts := 0
	full, err := readLines(bufio.NewReaderSize(strings.NewReader("a\n\n"+long+"\nlast"), explainlog.MaxLine), 1<<30, func(line []byte, cut bool) {
		got = append(got, len(line))
		if cut {
			cuts++
		}
	})
	if err != nil || full || cuts != 1 || len(got) != 4 || got[0] != 1 || got[1] != 0 || got[2] > 64<<10 || got[3] != 4 {
		t.Errorf("%v, %v, %d cut, %v", got, full, cuts, err)
	}
}
