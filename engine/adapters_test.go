package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

const adapterDir = "model/testdata/lora/"

// adapterBench is an engine of the adapters' model with two places.
func adapterBench(t *testing.T) *bench {
	t.Helper()
	l, err := Load(LoadOptions{
		Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 8 << 20, MaxSeqs: 8, MaxBatchedTokens: 64, MaxModelLen: 128,
		Adapters: Adapters{Places: 2, Rank: 8, Modules: []AdapterModule{{"all", adapterDir + "all"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t}
	if b.Engine, err = New(l.Options()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return b.start()
}

// say returns n tokens computed with an adapter, for a request whose root is its name.
func say(t *testing.T, b *bench, adapter string, n int) []int32 {
	t.Helper()
	var out []int32
	done := make(chan error, 1)
	_, _, err := b.Add(&Request{Root: kvcache.Root("m", adapter, ""), Prompt: tokens(20, 3), MaxTokens: n, Adapter: adapter, Emit: func(tk Token) {
		if tk.Finish == FinishError {
			done <- tk.Err
			return
		}
		if out = append(out, tk.ID); tk.Finish != 0 {
			done <- nil
		}
	}})
	if err == nil {
		err = <-done
	}
	if err != nil {
		t.Fatalf("%q: %v", adapter, err)
	}
	return out
}

// With AdapterRoot an adapter is found by its path in the root, through links that stay
// there, and all paths outside get one answer.
func TestAdapterRoot(t *testing.T) {
	b := adapterBench(t)
	outside, err := filepath.Abs(adapterDir)
	if err != nil {
		t.Fatal(err)
	}
	outside, root := filepath.Join(outside, "attention"), t.TempDir()
	if err := os.CopyFS(filepath.Join(root, "a", "mlp"), os.DirFS(adapterDir+"mlp")); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"inside": "a/mlp", "outside": outside} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	if b.o.AdapterRoot, err = filepath.EvalSymlinks(root); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"a/mlp", "inside", root + "/a/mlp", root + "/a/../inside"} {
		if _, _, err := b.LoadAdapter("x", path, true); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	answer := ""
	for _, path := range []string{"outside", outside, "/etc/shadow", "/etc/passwd", "/dev/zero", "/nowhere", "..", "../../../../../../etc", "a/mlp/adapter_config.json/x"} {
		_, _, err := b.LoadAdapter("y", path, true)
		if !errors.Is(err, ErrAdapter) {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if answer == "" {
			answer = err.Error()
		}
		if err.Error() != answer {
			t.Errorf("%s: %v; the others: %s", path, err, answer)
		}
	}
}

// Without a root, whatever keeps adapter_config.json from being read has one answer.
func TestAdapterPathsTellNothing(t *testing.T) {
	b := adapterBench(t)
	for _, path := range []string{"/etc/shadow", "/dev/zero", "/nowhere", "/etc", "loop"} {
		_, _, err := b.LoadAdapter("y", path, true)
		if !errors.Is(err, ErrAdapter) || !strings.HasSuffix(err.Error(), path+" has no adapter_config.json that can be read; give the folder that PEFT saved: file does not exist") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// Adapters come and go while requests run, and each request is computed with the
// one that it named.
func TestAdaptersComeAndGo(t *testing.T) {
	b := adapterBench(t)
	base, all := say(t, b, "", 12), say(t, b, "all", 12)
	if slices.Equal(base, all) {
		t.Fatalf("the adapter changes nothing: %v", base)
	}
	if _, _, err := b.LoadAdapter("mlp", adapterDir+"mlp", false); err != nil {
		t.Fatal(err)
	}
	mlp := say(t, b, "mlp", 12)
	if slices.Equal(mlp, all) || slices.Equal(mlp, base) {
		t.Fatal("the second adapter computes as the first, or none")
	}
	if again := say(t, b, "all", 12); !slices.Equal(again, all) {
		t.Errorf("%v beside another adapter, %v before", again, all)
	}
	for name, c := range map[string]struct {
		name, path string
		replace    bool
		says       string
	}{
		"no place":       {"third", adapterDir + "attention", false, "all 2 places are in use"},
		"taken":          {"all", adapterDir + "mlp", false, "is the name of another adapter"},
		"no name":        {"", adapterDir + "mlp", false, "1 to 256 bytes"},
		"a name of text": {"a\nb", adapterDir + "mlp", false, "1 to 256 bytes"},
	} {
		if _, _, err := b.LoadAdapter(c.name, c.path, c.replace); !errors.Is(err, ErrAdapterTaken) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := b.LoadAdapter("x", adapterDir+"nowhere", false); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "nowhere has no adapter_config.json that can be read") {
		t.Errorf("no folder: %v", err)
	}
	if _, _, err := b.LoadAdapter("all", adapterDir+"all", false); err != nil {
		t.Errorf("loading again what is loaded: %v", err)
	}
	if _, _, err := b.Add(&Request{Prompt: []int32{1}, MaxTokens: 1, Adapter: "third", Emit: func(Token) {}}); !errors.Is(err, ErrAdapter) {
		t.Errorf("an adapter that is not loaded: %v", err)
	}
	if _, _, err := b.Add(&Request{Prompt: []int32{1}, MaxTokens: 1, Adapter: "mlp", AdapterDigest: 7, Emit: func(Token) {}}); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "the request needs") {
		t.Errorf("another adapter of that name: %v", err)
	}
	if err := b.UnloadAdapter("third"); !errors.Is(err, ErrAdapter) {
		t.Errorf("unloading what is not loaded: %v", err)
	}

	// One that is unloaded while it is used keeps its place until then.
	running, end := make(chan Token, 200), make(chan bool)
	began := false
	id, _, err := b.Add(&Request{Root: 99, Prompt: tokens(20, 3), MaxTokens: 100, Adapter: "all", Emit: func(tk Token) {
		if running <- tk; !began {
			began = true
			<-end
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	<-running
	if use := b.Stats().Adapters; !reflect.DeepEqual(use, AdapterUse{Running: []string{"all"}}) {
		t.Errorf("while a request runs: %+v", use)
	}
	unloaded := make(chan error, 1)
	go func() { unloaded <- b.UnloadAdapter("all") }()
	close(end)
	if err := <-unloaded; err != nil {
		t.Fatal(err)
	}
	if err := b.CheckAdapter("all", 0); !errors.Is(err, ErrAdapter) {
		t.Errorf("an unloaded adapter: %v", err)
	}
	for got := all[:1]; len(got) < len(all); {
		tk := <-running
		if got = append(got, tk.ID); got[len(got)-1] != all[len(got)-1] {
			t.Fatalf("after its adapter's name went: %v, before %v", got, all)
		}
	}
	held, _, err := b.Add(&Request{Root: 98, Prompt: tokens(20, 3), MaxTokens: 1, Hold: true, Adapter: "mlp", Emit: func(Token) {}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // what is told before one is published before the other
		if err := b.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if use := b.Stats().Adapters; !reflect.DeepEqual(use.Waiting, []string{"mlp"}) {
		t.Errorf("while a request waits: %+v", use)
	}
	b.Abort(held)
	b.Abort(id)
	for range 2 {
		if err := b.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if use := b.Stats().Adapters; len(use.Waiting)+len(use.Running) != 0 {
		t.Errorf("when nobody runs: %+v", use)
	}
	for _, name := range []string{"mlp", "attention"} { // in place, and where all was
		if _, _, err := b.LoadAdapter(name, adapterDir+"attention", true); err != nil {
			t.Fatal(err)
		}
	}
	if say(t, b, "mlp", 12); slices.Equal(mlp, say(t, b, "attention", 12)) {
		t.Error("what was loaded in place computes as before")
	}
	var loaded []string
	b.EachAdapter(func(name string, digest uint64, rank int) { loaded = append(loaded, fmt.Sprintf("%s %d", name, rank)) })
	if want := []string{"attention 8", "mlp 8"}; !slices.Equal(loaded, want) {
		t.Errorf("loaded %v, want %v", loaded, want)
	}
	if err := b.Check(); err != nil {
		t.Error(err)
	}
}

func TestAdaptersAreOff(t *testing.T) {
	b := newBench(t, small(), nil).start()
	if _, _, err := b.LoadAdapter("a", adapterDir+"all", false); !errors.Is(err, ErrAdapterTaken) || !strings.Contains(err.Error(), "--enable-lora") {
		t.Errorf("%v", err)
	}
}
