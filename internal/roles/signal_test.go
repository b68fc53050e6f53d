package roles

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// interrupter sends the process a signal at the first write, when signals are handled already, and
// then blocks all writes if block is set.
type interrupter struct {
	once  sync.Once
	block bool
}

// Write implements io.Writer.
func (w *interrupter) Write(p []byte) (int, error) {
	w.once.Do(func() { _ = syscall.Kill(os.Getpid(), syscall.SIGINT) })
	if w.block {
		select {}
	}
	return len(p), nil
}

// A signal ends a command that computes or serves with its status and its name.
func TestSignal(t *testing.T) {
	trace := writeFile(t, strings.Repeat(`{"timestamp": 0, "input_length": 6, "output_length": 5}`+"\n", 29)+`{"timestamp": 9000, "input_length": 6, "output_length": 5}`)
	for _, args := range []string{
		"advise --profile h100:llama-8b --fleet 1P1D --trace " + trace,
		"sim --profile h100:llama-8b --load rps=10,n=10,in=64,out=4",
		"sim --profile h100:llama-8b --print-profile",
		"plan pools --profile h100:llama-8b --load rps=1,n=20,in=64,out=4",
		"logits builtin --tokens 1",
		"explain-log " + writeFile(t, "INFO 11-04 12:00:00 [kv_cache_utils.py:1087] GPU KV cache size: 1,024 tokens\n"),
		"status --watch --url 127.0.0.1:1",
		"bench mock --port 0",
		"bench transfer --listen 127.0.0.1:0",
	} {
		words := strings.Fields(args)
		w := &interrupter{block: slices.Contains([]string{"advise", "sim", "plan", "logits", "explain-log"}, words[0])} // as of long work
		var errOut bytes.Buffer
		status := Main("1.2.3", words, nil, w, &errOut)
		if want := fmt.Sprintf("tandem %s: stopped: interrupt\n", words[0]); status != 130 || errOut.String() != want {
			t.Errorf("%s: status %d, %q, want %q", args, status, errOut.String(), want)
		}
	}
}
