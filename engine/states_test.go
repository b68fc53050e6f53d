package engine

import (
	"errors"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// What a model with states does not do is refused by its name, also without loading the weights.
func TestStatesRefused(t *testing.T) {
	const dir = "model/testdata/"
	lookup := Speculation{Tokens: 2, Lookup: Lookup{Min: 1, Max: 2}}
	for _, c := range []struct {
		says    string
		o       LoadOptions
		checked bool // Check refuses it, too
	}{
		{"--speculative-config: the model " + dir + "qwen3.5 has layers with a state", LoadOptions{Model: dir + "qwen3.5", Speculation: lookup}, true},
		{"the draft model " + dir + "qwen3-next has layers with a state", LoadOptions{Model: dir + "qwen3-moe", Speculation: Speculation{Tokens: 2, Model: dir + "qwen3-next"}}, false},
		{"--tensor-parallel-size 4: model: not supported: 2 key heads of states", LoadOptions{Model: dir + "qwen3-next", TensorParallel: TensorParallel{Size: 4}}, true},
	} {
		c.o.Threads, c.o.KVMemory = 1, 4<<20
		l, err := Load(c.o)
		if err == nil {
			_ = l.Close()
		}
		workers := c.o.TensorParallel.Size > 0 // which a test does not start
		if err == nil || !strings.Contains(err.Error(), c.says) && !workers || !errors.Is(err, ErrOption) {
			t.Errorf("Load: %v, want %q", err, c.says)
		}
		if _, err := Check(c.o); c.checked && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("Check: %v, want %q", err, c.says)
		}
	}
}

// An engine over states has no drafts, because a rejected one would have changed them.
func TestStatesHaveNoDrafts(t *testing.T) {
	kv := backend.KVSpec{Groups: []backend.KVGroup{{BlockTokens: 16, State: 8, Window: 2}}}
	draft := func(tokens []int32, _ int) []int32 { return tokens }
	if _, err := New(Options{KV: kv, Scheduler: scheduler.Config{Draft: draft}}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
}

// Nodes of versions before states exchange pages of other models with this one.
func TestLayoutHashOfOlderVersions(t *testing.T) {
	l := Loaded{Class: "class", KV: backend.UniformKV(2, 8, 16, 2, 4, backend.BF16)}
	const older = "class {Blocks:0 Regions:2 PageBytes:512 Groups:[{BlockTokens:16 KVHeads:2 HeadDim:4 Latent:0 Window:0 Layers:2}] Layers:[{Group:0 Region:0} {Group:0 Region:1}] DType:bfloat16}"
	if got, want := l.LayoutHash(), xxhash.Sum64String(older); got != want {
		t.Errorf("LayoutHash = %x, an older version has %x", got, want)
	}
	states := l
	states.KV.Groups = append(states.KV.Groups, backend.KVGroup{BlockTokens: 16, State: 8, Every: 64, Window: 2, Layers: 2})
	if states.LayoutHash() == l.LayoutHash() {
		t.Error("states change no hash")
	}
}
