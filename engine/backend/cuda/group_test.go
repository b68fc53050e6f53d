//go:build cgo && linux

package cuda

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/workers"
)

// stubNCCL is what the tests open in NCCL's place.
func stubNCCL(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), NCCLName)
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, "testdata/nccl.c", "-lpthread").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// together is a model on n devices, of which rank 0's steps are the test's.
func together(t *testing.T, src *model.Source, nccl string, n int, eager bool) (*seat, *workers.Group) {
	t.Helper()
	mailbox := workers.Mailbox(modelLimits, 4)
	f, err := workers.NewFile(n, mailbox)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	id, err := NewGroupID(libraryPath, nccl)
	if err != nil {
		t.Fatal(err)
	}
	var first *seat
	var group *workers.Group
	met := make(chan error, n)
	ended := make(chan struct{}, n)
	for r := range n {
		g, err := workers.Open(f, r, n, mailbox, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		dev := openGPU(t, Options{Limits: modelLimits, Eager: eager, Group: g})
		shard := model.Shard{Rank: r, Ranks: n}
		m, err := model.Load(src, dev, modelLimits, model.Options{Shard: shard})
		if err != nil {
			t.Fatal(err)
		}
		if err := dev.AllocKV(kvOf(t, src, shard)); err != nil {
			t.Fatal(err)
		}
		go func() { met <- dev.JoinGroup(nccl, id) }()
		if r == 0 {
			first, group = &seat{m, dev}, g
			continue
		}
		go func() {
			var step backend.Step
			for g.Next(&step) == nil && m.Step(&step, nil) == nil {
			}
			_, _ = dev.Close(), g.Close()
			ended <- struct{}{}
		}()
	}
	for range n {
		if err := <-met; err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		group.End()
		for range n - 1 {
			<-ended
		}
		_, _ = first.Backend.Close(), group.Close()
	})
	return first, group
}

func kvOf(t *testing.T, src *model.Source, s model.Shard) backend.KVSpec {
	t.Helper()
	c, err := s.Of(&src.Config)
	if err != nil {
		t.Fatal(err)
	}
	spec := memory.Arrange(memory.Need{
		Layers: c.KVLayers(), BlockTokens: blockTokens, DType: backend.F32,
		MaxModelLen: modelLimits.Blocks * blockTokens, MaxBatchedTokens: modelLimits.Tokens,
	})
	spec.Blocks = modelLimits.Seqs * modelLimits.Blocks * len(spec.Groups)
	return spec
}

// over returns a talk with the same tokens over another KV store, of which it is sequence i.
func (k *talk) over(spec backend.KVSpec, i int) *talk {
	c := talk{tokens: slices.Clone(k.tokens), params: k.params}
	for g := range spec.Groups {
		table := make([]int32, modelLimits.Blocks)
		for j := range table {
			table[j] = int32((i*len(spec.Groups)+g)*modelLimits.Blocks + j)
		}
		c.tables = append(c.tables, table)
	}
	return &c
}

// Devices that meet by NCCL give one CPU's logits, with graphs and without.
func TestRanks(t *testing.T) {
	nccl := stubNCCL(t)
	for _, c := range []struct {
		name  string
		ranks int
		eager bool
	}{{"gqa-tied", 2, false}, {"gpt-oss-mxfp4", 2, true}, {"qwen3-next", 2, true}} {
		t.Run(fmt.Sprintf("%s/%d", c.name, c.ranks), func(t *testing.T) {
			src, err := model.OpenDir("../../model/testdata/" + c.name)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { src.Close() })
			gpu, _ := together(t, src, nccl, c.ranks, c.eager)
			dev, err := cpu.New(cpu.Options{Threads: 1, Limits: modelLimits, Mapped: true})
			if err != nil {
				t.Fatal(err)
			}
			one := sit(t, src, dev, backend.F32)
			spec, theirSpec := kvSpec(src, backend.F32), kvOf(t, src, model.Shard{Ranks: c.ranks})
			rng, again := rand.New(rand.NewPCG(5, 6)), rand.New(rand.NewPCG(5, 7))
			talks := newTalks(rng, one.VocabSize(), spec)
			var theirs []*talk
			for i, k := range talks {
				theirs = append(theirs, k.over(theirSpec, i))
			}
			rng = rand.New(rand.NewPCG(5, 7))
			worst, rows := 0.0, 0
			for range min(rounds, 4) {
				step, who := load(rng, talks, spec)
				their, they := load(again, theirs, theirSpec)
				if len(step.Tokens) == 0 {
					continue
				}
				if err := gpu.Step(their, nil); err != nil {
					t.Fatal(err)
				}
				got := gpu.Backend.Download(nil, gpu.Logits())
				if err := one.Step(step, nil); err != nil {
					t.Fatal(err)
				}
				for i, v := range one.Backend.Download(nil, one.Logits()) {
					worst = max(worst, math.Abs(float64(v-got[i])))
				}
				rows += len(step.Outputs)
				for i, k := range who {
					k.tokens, they[i].tokens = append(k.tokens, step.Sampled[i]), append(they[i].tokens, step.Sampled[i])
				}
			}
			t.Logf("%d rows, the worst logit is off by %.2g", rows, worst)
			if worst > tolerance || rows == 0 {
				t.Errorf("%d rows, a logit is off by %g", rows, worst)
			}
		})
	}
}

// Parts of unlike widths are gathered where they belong.
func TestRanksGather(t *testing.T) {
	const n, cols, tokens = 3, 7, 4
	nccl := stubNCCL(t)
	f, err := workers.NewFile(n, workers.Mailbox(modelLimits, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	id, err := NewGroupID(libraryPath, nccl)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, n)
	for r := range n {
		g, err := workers.Open(f, r, n, workers.Mailbox(modelLimits, 1), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		dev := openGPU(t, Options{Limits: modelLimits, Group: g})
		t.Cleanup(func() { _, _ = dev.Close(), g.Close() })
		go func() { got <- gather(dev, nccl, id, r, n, cols, tokens) }()
	}
	for range n {
		if err := <-got; err != nil {
			t.Error(err)
		}
	}
}

// gather has a rank bring its columns of a matrix that counts.
func gather(dev *CUDA, nccl string, id []byte, r, n, cols, tokens int) error {
	if err := dev.JoinGroup(nccl, id); err != nil {
		return err
	}
	from, end := backend.Cut(cols, 1, r, n)
	var numbers []float32
	step := &backend.Step{}
	for row := range tokens {
		step.Tokens, step.Positions = append(step.Tokens, int32(row)), append(step.Positions, int32(row))
		for col := from; col < end; col++ {
			numbers = append(numbers, float32(row*cols+col))
		}
	}
	table, err := dev.Load(backend.Tensor{Name: "table", DType: backend.F32, Shape: []int{tokens, end - from}, Data: float32Bytes(numbers)})
	if err != nil {
		return err
	}
	part, err := dev.Alloc(backend.TokenRows, end-from)
	if err != nil {
		return err
	}
	all, err := dev.Alloc(backend.TokenRows, cols)
	if err != nil {
		return err
	}
	if err := dev.Replay(backend.Key{Tokens: 8}, step, func() {
		dev.Embed(part, table)
		dev.AllGather(all, part)
	}, nil); err != nil {
		return err
	}
	for i, v := range dev.Download(nil, all) {
		if v != float32(i) {
			return fmt.Errorf("rank %d has %v in place %d", r, v, i)
		}
	}
	return nil
}

// A rank that leaves ends the others' step with an error that names it, not a wait.
func TestRanksLost(t *testing.T) {
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	gpu, group := together(t, src, stubNCCL(t), 2, true)
	group.MarkLost(1, "it has ended")
	spec := kvSpec(src, backend.F32)
	rng := rand.New(rand.NewPCG(5, 6))
	step, _ := load(rng, newTalks(rng, gpu.VocabSize(), spec), spec)
	if err := gpu.Step(step, nil); !errors.Is(err, backend.ErrLost) || !strings.Contains(err.Error(), "rank 1 of 2: it has ended") {
		t.Errorf("got %v", err)
	}
}

// Without NCCL the error names the missing file, and with another library that library.
func TestRanksNeedNCCL(t *testing.T) {
	for path, want := range map[string]string{"/does/not/exist.so": "/does/not/exist.so", libraryPath: "lacks functions of NCCL"} {
		if _, err := NewGroupID(libraryPath, path); !errors.Is(err, backend.ErrNoDevice) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
