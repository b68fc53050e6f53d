//go:build linux

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// TestTensorParallelNodes: a prefill node of two ranks pushes the pages of both to a decode node of two, over every way that KV has, and the
// tokens and logits are those of a node of two ranks alone. Nodes of another number of ranks are refused before anything travels, and
// the decode node computes the prompt.
func TestTensorParallelNodes(t *testing.T) {
	path := binary(t)
	rng := rand.New(rand.NewPCG(12, 1))
	ways := map[string]kvtransfer.Network{"mem": nil, "tcp": kvtransfer.TCP{}, "shm": sharedTCP{}}
	for _, c := range []struct {
		model      string
		decode     int
		prefill    int
		ways       []string
		nRemotes   uint64
		tokens     int
		bytesRanks int // pages of so many ranks travel
	}{
		{"gqa-tied", 2, 2, []string{"mem", "tcp", "shm"}, 1, 100, 2},
		{"gpt-oss", 2, 2, []string{"shm"}, 1, 100, 2}, // groups of layers that differ in number
		{"gqa-tied", 2, 1, []string{"tcp"}, 0, 40, 0},
		{"gqa-tied", 1, 2, []string{"tcp"}, 0, 40, 0},
	} {
		options := func(ranks int) engine.LoadOptions {
			return engine.LoadOptions{
				Model: filepath.Join(checkpoints, c.model), Device: "cpu", Kernels: native(), Threads: 1, KVMemory: 8 << 20, MaxSeqs: 4, MaxBatchedTokens: 32,
				MaxModelLen: 192, KVDType: "float32", SharedKV: true,
				TensorParallel: engine.TensorParallel{Size: ranks, Command: []string{path, "rank"}},
			}
		}
		for _, way := range c.ways {
			t.Run(fmt.Sprintf("%s/%d from %d/%s", c.model, c.decode, c.prefill, way), func(t *testing.T) {
				pre := options(c.prefill)
				f := newFleetOver(t, ways[way], options(c.decode), &pre)
				defer f.close()
				alone := newFleet(t, options(c.decode), nil)
				defer alone.close()
				g := &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: randomTokens(rng, c.tokens, f.loaded[0].Model.VocabSize()), MaxTokens: 12, IgnoreEos: true,
					Sampling: &nodepb.Sampling{Seed: 3}, Prefill: []string{"prefill"}}
				got := f.run(t, g)
				g.Prefill = nil
				if err := compare(got, alone.run(t, g), g); err != nil {
					t.Error(err)
				}
				if n := f.decode.Counters().RemotePrefills; n != c.nRemotes {
					t.Errorf("%d prompts were prefilled elsewhere, want %d", n, c.nRemotes)
				}
				kv := f.loaded[0].KV
				if bytes := f.reader.Stats().PayloadBytes; c.nRemotes == 0 && bytes != 0 ||
					len(kv.Groups) == 1 && bytes != uint64(c.bytesRanks*kv.BlockBytes()*((c.tokens-1+15)/16)) {
					t.Errorf("%d bytes came, of blocks of %d", bytes, kv.BlockBytes())
				}
			})
		}
	}
}

// ranksOf are the processes that pid started to compute its model.
func ranksOf(t *testing.T, pid int) (pids []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// 123 (tandem) S 45 …
		_, rest, _ := strings.Cut(string(text), ") ")
		var state string
		var parent, child int
		if _, err := fmt.Sscan(rest, &state, &parent); err != nil || parent != pid || state == "Z" {
			continue
		}
		if child, err = strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, child)
		}
	}
	return pids
}

// serveParallel starts `tandem serve` with two ranks and waits until it is ready.
func serveParallel(t *testing.T) (c *cluster, ranks []int) {
	t.Helper()
	c = newCluster(t)
	path := binary(t)
	file := filepath.Join(c.state, "serve.yaml")
	if err := os.WriteFile(file, []byte("port: "+strconv.Itoa(c.port)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(path, "serve", "--config", file, "--tensor-parallel-size", "2", "--device", "cpu")
	c.wait(startBound, "serve is ready", func() bool {
		resp, err := http.Get(c.url("/readyz"))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if ranks = ranksOf(t, c.cmd.Process.Pid); len(ranks) != 1 {
		t.Fatalf("%d processes beside the node's, want 1", len(ranks))
	}
	return c, ranks
}

// ended waits until processes are gone.
func (c *cluster) allGone(pids []int) {
	c.t.Helper()
	c.wait(stopBound, "its ranks are gone", func() bool {
		for _, pid := range pids {
			if syscall.Kill(pid, 0) == nil {
				return false
			}
		}
		return true
	})
}

// A node whose model two processes compute answers a chat. When one of them is
// killed, the stream that runs ends with an error that says so, the node ends with
// status 1, and no process is left; nor is when the node is killed, or stopped.
func TestBinaryTensorParallel(t *testing.T) {
	t.Parallel()
	c, ranks := serveParallel(t)
	answer, err := c.complete([]int32{1000, 900, 800, 700}, 30)
	if err != nil || answer.Choices[0].Text == "" {
		t.Fatalf("%+v, %v", answer, err)
	}
	s := c.begin(20 * time.Second)
	if err := syscall.Kill(ranks[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := s.rest(); !strings.Contains(s.failed, "rank 1 of 2: its process has ended: signal: killed") || s.done || s.finish != "" {
		t.Errorf("the stream ended with %q, %v", s.failed, err)
	}
	select {
	case <-c.ended:
	case <-time.After(stopBound):
		t.Fatal("the node outlives its rank")
	}
	if code := c.cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("the node ended with status %d", code)
	}
	c.allGone(ranks)

	for _, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		c, ranks := serveParallel(t)
		c.signal(how)
		c.waitGone(stopBound)
		c.allGone(ranks)
	}
}
