package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/workers"
)

// sharded is a model on as many backends as there are ranks, each on a goroutine
// of its own but for rank 0, which the test steps.
type sharded struct {
	*Model
	kv []backend.KVSpec
}

// loadSharded loads a checkpoint in parts.
func loadSharded(t testing.TB, src *Source, n int, kernels string, q Quantization) *sharded {
	t.Helper()
	return loadShardedWithin(t, src, n, kernels, q, testLimits)
}

func loadShardedWithin(t testing.TB, src *Source, n int, kernels string, q Quantization, limits backend.Limits) *sharded {
	t.Helper()
	mailbox := workers.Mailbox(limits, 4)
	f, err := workers.NewFile(n, mailbox)
	if err != nil {
		t.Skip(err) // only Linux has such memory
	}
	s := &sharded{}
	ended := make(chan error, n)
	for r := range n {
		g, err := workers.Open(f, r, n, mailbox, 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		dev, err := cpu.New(cpu.Options{Threads: 1, Limits: limits, Kernels: kernels, Mapped: true, Group: g})
		if err != nil {
			t.Fatal(err)
		}
		m, err := Load(src, dev, limits, Options{Quantization: q, Shard: Shard{r, n}})
		if err != nil {
			t.Fatal(err)
		}
		s.kv = append(s.kv, kvWithin(&m.config, limits))
		if err := dev.AllocKV(s.kv[r]); err != nil {
			t.Fatal(err)
		}
		if r == 0 {
			s.Model = m
			t.Cleanup(func() {
				g.End()
				for range n - 1 {
					if err := <-ended; err != workers.ErrClosed {
						t.Error(err)
					}
				}
				closeAll(t, dev, g, f)
			})
			continue
		}
		go func() {
			var step backend.Step
			err := g.Next(&step)
			for ; err == nil; err = g.Next(&step) {
				if err := m.Step(&step, nil); err != nil {
					g.MarkLost(r, err.Error())
				}
			}
			closeAll(t, dev, g)
			ended <- err
		}()
	}
	return s
}

func closeAll(t testing.TB, all ...interface{ Close() error }) {
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Several ranks compute what one does: the goldens' logits, and the greedy tokens
// wherever the two best are further apart than the error may be.
func TestShardsGoldens(t *testing.T) {
	for _, name := range checkpoints {
		src, want := openCheckpoint(t, name), readGoldens(t, name)
		for _, n := range []int{2, 4} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				if _, err := (Shard{0, n}).Of(&src.Config); err != nil {
					if why, ok := unshared[fmt.Sprintf("%s/%d", name, n)]; !ok || !strings.Contains(err.Error(), why) {
						t.Fatal(err)
					}
					return
				}
				m := loadSharded(t, src, n, cpu.Auto, AsStored)
				chunks := chunkings(uint64(n))["random"]
				worst, compared := 0.0, 0
				for i := range want.Cases {
					g := &want.Cases[i]
					s := newSequence(m.Model, g.Prompt, uint64(i))
					off, next := s.compare(t, g, chunks)
					worst = max(worst, off)
					compared += s.greedy(t, g, next)
				}
				t.Logf("worst error of a logit %.2g, %d greedy tokens compared", worst, compared)
				if worst > tolerance {
					t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
				}
				if all := len(want.Cases) * len(want.Cases[0].Greedy); compared < all*9/10 {
					t.Errorf("only %d of %d greedy tokens were far enough apart to compare", compared, all)
				}
			})
		}
	}
}

// unshared are the checkpoints that so many ranks cannot share, and why.
var unshared = map[string]string{
	"gpt-oss-mxfp4/4": "intermediate_size 96 in pieces of 32 cannot be shared by 4 ranks",
}

// However a prompt is cut, ranks give the same bits.
func TestShardsChunks(t *testing.T) {
	for _, name := range []string{"gqa-tied", "qwen3-moe", "gemma4-ple", "deepseek"} {
		src, want := openCheckpoint(t, name), readGoldens(t, name)
		m := loadSharded(t, src, 2, cpu.Auto, AsStored)
		sums := map[uint64]string{}
		for how, chunks := range chunkings(5) {
			sum := xxhash.New()
			for i := range want.Cases {
				s := newSequence(m.Model, want.Cases[i].Prompt, uint64(i))
				s.sum = sum
				s.compare(t, &want.Cases[i], chunks)
			}
			sums[sum.Sum64()] = how
		}
		if len(sums) != 1 {
			t.Errorf("%s: the bits of the logits depend on how prompts are cut: %v", name, sums)
		}
	}
}

// A rank reads of a matrix its own part alone, holds no more, and the parts of all
// are the whole.
func TestShardsAreParts(t *testing.T) {
	for _, name := range checkpoints {
		src := openCheckpoint(t, name)
		for _, n := range []int{2, 4} {
			var locals []Config
			for r := range n {
				c, err := Shard{r, n}.Of(&src.Config)
				if err != nil {
					break
				}
				locals = append(locals, c)
			}
			if len(locals) < n {
				continue
			}
			full := src.Config.network().weights()
			var parts [][]binding
			for r := range locals {
				parts = append(parts, locals[r].network().weights())
			}
			for i, b := range full {
				seen := make([]int, b.shape[0]*b.parts[len(b.parts)-1].of)
				for r := range parts {
					p := parts[r][i]
					if p.name != b.name || !slices.Equal(p.shape, b.shape) {
						t.Fatalf("%s: %s of %v for %s of %v", name, p.name, p.shape, b.name, b.shape)
					}
					rows, cols := p.parts[0], p.in()
					for row := rows.from; row < rows.from+rows.n; row++ {
						for col := cols.from; col < cols.from+cols.n; col++ {
							if at := row*cols.of + col; at < len(seen) {
								seen[at]++
							}
						}
					}
				}
				most := slices.Max(seen)
				if least := slices.Min(seen[:b.shape[0]*b.in().of]); least < 1 || least != most {
					t.Errorf("%s over %d ranks: a number of %s is on %d to %d of them", name, n, b.name, least, most)
				}
			}
			all := src.Config.WeightBytes(AsStored)
			for r := range locals {
				if part := locals[r].WeightBytes(AsStored); part*10 > all*9 {
					t.Errorf("%s: rank %d of %d holds %d bytes of %d", name, r, n, part, all)
				}
			}
		}
	}
}

// What ranks cannot share is refused by its name and numbers.
func TestShardsRefused(t *testing.T) {
	base := openCheckpoint(t, "qwen3").Config
	with := func(change func(c *Config)) Config {
		c := base
		change(&c)
		return c
	}
	for want, c := range map[string]struct {
		config Config
		shard  Shard
	}{
		"4 attention heads (num_attention_heads) cannot be shared by 3 ranks":      {base, Shard{0, 3}},
		"3 key and value heads (num_key_value_heads) cannot be shared by 2 ranks":  {with(func(c *Config) { c.Heads, c.KVHeads = 6, 3 }), Shard{1, 2}},
		"intermediate_size 1 in pieces of 1 cannot be shared by 2 ranks":           {with(func(c *Config) { c.FFN = 1 }), Shard{1, 2}},
		"vocab_size 3 in pieces of 1 cannot be shared by 4 ranks":                  {with(func(c *Config) { c.Vocab = 3 }), Shard{1, 4}},
		"2 key heads of states (linear_num_key_heads) cannot be shared by 4 ranks": {openCheckpoint(t, "qwen3-next").Config, Shard{0, 4}},
		"rank 2 of 2": {base, Shard{2, 2}},
	} {
		if _, err := c.shard.Of(&c.config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// Weights in 8 bits are cut between groups, where they have so many: then ranks
// are as near to the goldens as one is.
func TestShardsQuantized(t *testing.T) {
	for _, name := range []string{"gqa-tied", "qwen3", "gpt-oss-mxfp4"} {
		src, want := openCheckpoint(t, name), readGoldens(t, name)
		one, two := loadQuantized(t, src, cpu.Auto, INT8, func(b backend.Backend) backend.Backend { return b }), loadSharded(t, src, 2, cpu.Auto, INT8)
		var off [2]float64
		for i, m := range []*Model{one, two.Model} {
			for j := range want.Cases {
				worst, _ := newSequence(m, want.Cases[j].Prompt, 1).compare(t, &want.Cases[j], func() int { return testLimits.Tokens })
				off[i] = max(off[i], worst)
			}
		}
		t.Logf("%s in int8: a logit is off by %.2g with one rank, by %.2g with two", name, off[0], off[1])
		if off[1] > 1.5*off[0] {
			t.Errorf("%s in int8: a logit is off by %g with one rank, by %g with two", name, off[0], off[1])
		}
	}
}

// What RankBytes says is what loading a rank takes, to the byte, of folders with several
// types too; but for copies of scales of fp8 matrices that are cut within a block.
func TestRankBytes(t *testing.T) {
	for _, name := range checkpoints {
		src := openCheckpoint(t, name)
		for r := range 2 {
			shard := Shard{Rank: r, Ranks: 2}
			want, err := src.RankBytes(AsStored, shard)
			if errors.Is(err, ErrUnsupported) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			host, err := cpu.New(cpu.Options{Limits: testLimits, Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			held := &weighing{Backend: host}
			if _, err := Load(src, held, testLimits, Options{Shard: shard}); err != nil {
				t.Fatal(err)
			}
			host.Close()
			slack := int64(0)
			if strings.HasSuffix(name, "fp8") {
				slack = want / 20
			}
			if max(held.bytes-want, want-held.bytes) > slack {
				t.Errorf("rank %d of %s takes %d bytes, said %d", r, name, held.bytes, want)
			}
		}
	}
}
