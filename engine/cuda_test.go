//go:build cgo && linux

package engine

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	kernels "github.com/tandem-serving/tandem/cuda"
)

// answers runs requests of several kinds at once on a device and returns the tokens
// of each, and what was logged.
func answers(t *testing.T, o LoadOptions) ([][]int32, string) {
	t.Helper()
	var said strings.Builder
	o.Logger = slog.New(slog.NewTextHandler(&said, nil))
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	e, err := New(Options{Model: l.Model, Backend: l.Backend, KV: l.KV, Scheduler: l.Scheduler})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	all := make([][]int32, 7)
	var ended sync.WaitGroup
	for i := range all {
		prompt := make([]int32, 5+i*6)
		for j := range prompt {
			prompt[j] = int32((i*31 + j*7) % 90)
		}
		r := &Request{Prompt: prompt, MaxTokens: 12}
		if i%2 == 1 {
			r.Sampling = Sampling{Seed: uint64(i), Temperature: 0.8, TopP: 0.9, TopK: 20}
		}
		ended.Add(1)
		r.Emit = func(tk Token) {
			if tk.Err != nil {
				t.Error(tk.Err)
			} else {
				all[i] = append(all[i], tk.ID)
			}
			if tk.Finish != 0 {
				ended.Done()
			}
		}
		if _, _, err := e.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	ended.Wait()
	stop()
	running.Wait()
	return all, said.String()
}

// The whole engine over the kernels' host twin gives the tokens of the CPU backend:
// chunked prompts, batches that change with every step, draws on the device.
func TestEngineOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 5, MaxBatchedTokens: 24, MaxModelLen: 96, KVDType: "float32", Device: "cpu"}
	want, _ := answers(t, o)
	o.Device, o.CUDALibrary, o.SharedKV = "cuda:0", twin, true
	for _, o.EnforceEager = range []bool{false, true} {
		got, said := answers(t, o)
		if !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("eager %v: tokens are %v, on the CPU %v", o.EnforceEager, got, want)
		}
		graphs := "graphs=4" // of 8, 4, 2 and 1
		if o.EnforceEager {
			graphs = "graphs=0"
		}
		if !strings.Contains(said, "computing on a GPU") || !strings.Contains(said, graphs) {
			t.Errorf("eager %v: logged %s", o.EnforceEager, said)
		}
	}
}

// A GPU that is not there is named; auto goes on without it and says why.
func TestNoGPU(t *testing.T) {
	o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, CUDALibrary: "testdata/none.so"}
	for device, complaint := range map[string]string{"cuda:0": "none.so", "cuda:x": "use auto, cpu, cuda or cuda:N"} {
		o.Device = device
		if l, err := Load(o); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), complaint) {
			t.Errorf("%s: %v, %v", device, l, err)
		}
	}
	var said strings.Builder
	o.Device, o.Logger = "auto", slog.New(slog.NewTextHandler(&said, nil))
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if !strings.Contains(said.String(), "computing on the CPU") || !strings.Contains(said.String(), "make cuda") {
		t.Errorf("logged %s", &said)
	}
}
