package cli

import (
	"bytes"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// interrupter sends the process a signal at the first write, when signals are handled already.
type interrupter struct {
	bytes.Buffer
	once sync.Once
}

// Write implements io.Writer.
func (w *interrupter) Write(p []byte) (int, error) {
	w.once.Do(func() { _ = syscall.Kill(os.Getpid(), syscall.SIGINT) })
	return w.Buffer.Write(p)
}

// A signal ends a benchmark with its status and its name, not with the error of a cut request.
func TestBenchSignal(t *testing.T) {
	var out interrupter
	var errOut bytes.Buffer
	args := strings.Fields("bench latency --input-len 8 --output-len 8 --batch-size 1 --num-iters 1000000")
	status := withGateway().Main("1.2.3", args, nil, &out, &errOut)
	if status != 130 || errOut.String() != "tandem bench: stopped: interrupt\n" {
		t.Errorf("status %d: %q %q", status, out.String(), errOut.String())
	}
}
