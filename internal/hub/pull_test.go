package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-serving/tandem/internal/hub/hubtest"
)

const model = "org/name"

// files is a model with small files and one in LFS.
func files() map[string][]byte {
	weights := make([]byte, 300_000)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range weights {
		weights[i] = byte(r.Uint32())
	}
	return map[string][]byte{
		"config.json":                 []byte(`{"model_type":"llama"}`),
		"tokenizer.json":              bytes.Repeat([]byte("{}\n"), 3000),
		"original/params.json":        []byte(`{}`),
		"same.json":                   []byte(`{}`),
		"empty.txt":                   {},
		"model.safetensors":           weights,
		"pytorch_model.bin":           []byte("pickle"),
		"modeling.py":                 []byte("import os"),
		"README.md":                   []byte("# name"),
		"tokenizer.model":             []byte("vocabulary"),
		"qwen.tiktoken":               []byte("AA== 0\n"),
		"chat template é & %2F.jinja": []byte("{{ messages }}"),
	}
}

// wanted are the files that are downloaded.
func wanted(files map[string][]byte) map[string][]byte {
	w := maps.Clone(files)
	maps.DeleteFunc(w, func(name string, _ []byte) bool { return !slices.Contains(extensions, filepath.Ext(name)) })
	return w
}

// bed is a hub, a cache and a log.
type bed struct {
	*testing.T
	*hubtest.Hub
	cache   string
	token   string
	logs    bytes.Buffer
	weights int // requests of the last pull for model.safetensors
}

func newBed(t *testing.T) *bed {
	return &bed{T: t, Hub: hubtest.New(t, model, files()), cache: hubtest.Memory(t), token: "hf_secret"}
}

func (b *bed) options() Options {
	return Options{
		Name: model, Log: slog.New(slog.NewTextHandler(&b.logs, nil)), Agent: "test", pause: time.Millisecond,
		Environ: []string{"HF_HUB_CACHE=" + b.cache, "HF_ENDPOINT=" + b.URL, "HF_TOKEN=" + b.token},
	}
}

// pull runs and has no bad file left behind, whatever its error.
func (b *bed) pull(o Options) (string, error) {
	b.Helper()
	show := o.Progress
	o.Progress = func(done, total int64) {
		if done < 0 || done > total {
			b.Errorf("progress: %d of %d bytes", done, total)
		}
		if show != nil {
			show(done, total)
		}
	}
	dir, err := Pull(b.Context(), o)
	b.noBadFile()
	b.weights = 0
	for _, r := range b.Requests() {
		if r.Storage && strings.HasSuffix(r.Path, "/model.safetensors") {
			b.weights++
		}
		if (r.Authorization != "") == r.Storage && b.token != "" {
			b.Errorf("%+v: the token goes to the hub and to no other server", r)
		}
	}
	if err != nil && (strings.Contains(err.Error(), "signature=secret") || strings.Contains(err.Error(), "hf_secret")) || strings.Contains(b.logs.String(), "secret") {
		b.Errorf("a secret in %v, or in %s", err, b.logs.String())
	}
	return dir, err
}

// noBadFile checks that every blob has the content that its name promises, and every link its file.
func (b *bed) noBadFile() {
	b.Helper()
	repo := filepath.Join(b.cache, "models--org--name")
	sums := map[string]bool{}
	for name, text := range b.Files {
		sums[hubtest.Hash(name, text)] = true
	}
	check := func(_, path string) {
		text, err := os.ReadFile(path)
		name := filepath.Base(path)
		if strings.HasSuffix(name, ".incomplete") {
			return
		}
		if f := (File{Size: int64(len(text)), Hash: name}); err != nil || fmt.Sprintf("%x", sum(&f, text)) != name || !sums[name] {
			b.Errorf("blob %s: %d bytes, %v", name, len(text), err)
		}
	}
	if err := walk(filepath.Join(repo, "blobs"), check); err != nil {
		b.Error(err)
	}
	link := func(name, path string) {
		text, err := os.ReadFile(path)
		if _, name, _ = strings.Cut(name, "/"); err != nil || !bytes.Equal(text, b.Files[name]) {
			b.Errorf("link %s: %d bytes, %v", name, len(text), err)
		}
	}
	if err := walk(filepath.Join(repo, "snapshots"), link); err != nil {
		b.Error(err)
	}
	if err := filepath.WalkDir(b.cache, func(path string, _ os.DirEntry, err error) error {
		if strings.HasSuffix(path, ".tmp") {
			b.Errorf("%s is left", path)
		}
		return err
	}); err != nil {
		b.Error(err)
	}
}

func sum(f *File, text []byte) []byte {
	h := f.digest()
	h.Write(text)
	return h.Sum(nil)
}

// whole checks that a snapshot has all files that are wanted, and no other.
func (b *bed) whole(dir string) {
	b.Helper()
	got := map[string]bool{}
	if err := walk(dir, func(name, _ string) { got[name] = true }); err != nil {
		b.Fatal(err)
	}
	want := wanted(b.Files)
	for name := range want {
		if !got[name] {
			b.Errorf("%s is missing", name)
		}
	}
	if len(got) != len(want) || len(want) == 0 {
		b.Errorf("%d files, want %d", len(got), len(want))
	}
	if text, err := os.ReadFile(filepath.Join(b.cache, "models--org--name/refs/main")); err != nil || string(text) != hubtest.Commit {
		b.Errorf("ref main: %q, %v", text, err)
	}
}

// A pull fetches every file once, in the layout that Cache reads, and a second one fetches none.
func TestPull(t *testing.T) {
	b := newBed(t)
	b.Page = 3
	o := b.options()
	var last, total int64
	calls := 0
	o.Progress = func(done, of int64) { last, total, calls = done, of, calls+1 }
	dir, err := b.pull(o)
	if err != nil {
		t.Fatal(err)
	}
	b.whole(dir)
	size := int64(-2) // same.json and params.json share a blob
	for _, text := range wanted(b.Files) {
		size += int64(len(text))
	}
	if last != size || total != size || calls < 3 {
		t.Errorf("progress ended at %d of %d after %d calls, want %d", last, total, calls, size)
	}
	cache := Cache{b.cache}
	if found, err := cache.Find(model, ""); err != nil || found != dir || !cache.Complete(dir) {
		t.Errorf("found %s, %v; want %s", found, err, dir)
	}
	if link, err := os.Readlink(filepath.Join(dir, "original/params.json")); err != nil || !strings.HasPrefix(link, "../../../blobs/") {
		t.Errorf("the link is not relative: %s, %v", link, err)
	}
	if _, err := b.pull(o); err != nil {
		t.Fatal(err)
	}
	o.Revision = "v1"
	if _, err := Pull(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	for _, r := range b.Requests() {
		if strings.Contains(r.Path, "/resolve/") || r.Storage {
			t.Errorf("asked again: %+v", r)
		}
	}
	if found, err := cache.Find(model, "v1"); err != nil || found != dir {
		t.Errorf("v1: %s, %v", found, err)
	}
	// A blob that lost its end is replaced.
	blob := filepath.Join(b.cache, "models--org--name/blobs", hubtest.Hash("model.safetensors", b.Files["model.safetensors"]))
	if err := os.Truncate(blob, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := b.pull(o); err != nil {
		t.Fatal(err)
	}
	o.Environ = append(o.Environ, "HF_HUB_OFFLINE=1")
	if _, err := b.pull(o); !errors.Is(err, ErrModel) || !strings.Contains(err.Error(), "HF_HUB_OFFLINE") {
		t.Errorf("offline: %v", err)
	}
}

// --include downloads a part, and a name that matches none is refused.
func TestPullInclude(t *testing.T) {
	b := newBed(t)
	o := b.options()
	o.Include = []string{"*.safetensors", "original/*"}
	dir, err := b.pull(o)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := walk(dir, func(name, _ string) { got = append(got, name) }); err != nil || !slices.Equal(got, []string{"model.safetensors", "original/params.json"}) {
		t.Errorf("%q, %v", got, err)
	}
	if Complete := (Cache{b.cache}).Complete(dir); Complete {
		t.Error("complete without a config.json")
	}
	for _, bad := range []string{"*.bin", "["} {
		o.Include = []string{bad}
		if _, err := b.pull(o); !errors.Is(err, ErrModel) || !strings.Contains(err.Error(), "--include") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// cut is a ResponseWriter that ends the connection after some bytes of the body.
type cut struct {
	http.ResponseWriter
	left int
}

func (c *cut) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	c.left -= n
	if _, err := c.ResponseWriter.Write(p[:n]); err != nil || n < len(p) {
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	return n, nil
}

// A connection that ends at any byte is continued there, by the same pull and by the next one. No
// byte is asked for twice, and no bad file is left in between.
func TestPullCutAnywhere(t *testing.T) {
	const seed = 21
	r := rand.New(rand.NewPCG(seed, seed))
	for i := range 24 {
		b := newBed(t)
		weights := b.Files["model.safetensors"]
		at := []int{0, 1, len(weights) - 1, len(weights)}[i%4]
		if i >= 4 {
			at = r.IntN(len(weights) + 1)
		}
		for name := range b.Files { // only the weights: the others are tested above
			if name != "config.json" && name != "model.safetensors" {
				delete(b.Files, name)
			}
		}
		var asked atomic.Int32
		stop, cancel := context.WithCancel(t.Context())
		b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
			if !storage {
				return false
			}
			if n := asked.Add(1); n == 1 {
				http.ServeContent(&cut{w, at}, r, "", time.Time{}, bytes.NewReader(weights))
			} else if i%2 == 1 && n == 2 { // the process ends
				cancel()
				<-r.Context().Done()
			} else {
				return false
			}
			return true
		})
		o := b.options()
		dir, err := Pull(stop, o)
		b.noBadFile()
		if i%2 == 1 && at < len(weights) {
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("seed %d, cut at %d: %v, want a cancelled pull", seed, at, err)
			}
			if _, err := os.Stat(filepath.Join(b.cache, "models--org--name/snapshots")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("seed %d, cut at %d: half a snapshot: %v", seed, at, err)
			}
			partial, err := os.Stat(filepath.Join(b.cache, "models--org--name/blobs", hubtest.Hash("model.safetensors", weights)+".incomplete"))
			if err != nil || partial.Size() != int64(at) {
				t.Errorf("seed %d, cut at %d: the partial file: %v, %v", seed, at, partial, err)
			}
			dir, err = b.pull(o)
			if err != nil {
				t.Fatalf("seed %d, cut at %d: %v", seed, at, err)
			}
		} else if err != nil {
			t.Fatalf("seed %d, cut at %d: %v", seed, at, err)
		}
		b.whole(dir)
		for _, r := range b.Requests() {
			if r.Storage && r.Range != "" && r.Range != fmt.Sprintf("bytes=%d-", at) {
				t.Errorf("seed %d, cut at %d: asked for %s", seed, at, r.Range)
			}
		}
		cancel()
	}
}

// Servers that ignore a range, answer with another one or refuse it, and partial files with wrong or
// too many bytes, end in the right file.
func TestPullResumeOdd(t *testing.T) {
	weights := files()["model.safetensors"]
	wrong := slices.Clone(weights)
	wrong[0] ^= 1
	for name, c := range map[string]struct {
		partial []byte
		hook    func(w http.ResponseWriter, r *http.Request) bool
		want    string // in the error; "": none
	}{
		"ignores the range": {weights[:1000], func(w http.ResponseWriter, r *http.Request) bool { r.Header.Del("Range"); return false }, ""},
		"refuses the range": {weights[:1000], func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("Range") == "" {
				return false
			}
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return true
		}, ""},
		"another range": {weights[:1000], func(w http.ResponseWriter, r *http.Request) bool {
			r.Header.Set("Range", "bytes=7-")
			return false
		}, "asked for bytes from 1000 on"},
		"wrong start":  {wrong[:1000], nil, ""},
		"wrong, whole": {wrong, nil, ""},
		"whole":        {weights, nil, ""},
		"too long":     {append(slices.Clone(weights), 1), nil, ""},
		"more than declared": {weights[:1000], func(w http.ResponseWriter, r *http.Request) bool {
			_, _ = w.Write(append(slices.Clone(weights), weights...))
			return true
		}, ""},
	} {
		b := newBed(t)
		if c.hook != nil {
			b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
				return storage && strings.HasSuffix(r.URL.Path, "model.safetensors") && c.hook(w, r)
			})
		}
		dir := filepath.Join(b.cache, "models--org--name/blobs")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, hubtest.Hash("model.safetensors", weights)+".incomplete"), c.partial, 0o600); err != nil {
			t.Fatal(err)
		}
		snapshot, err := b.pull(b.options())
		switch {
		case c.want != "":
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v", name, err)
			}
		case err != nil:
			t.Errorf("%s: %v", name, err)
		default:
			b.whole(snapshot)
			if b.weights > 2 || name == "ignores the range" && b.weights != 1 || name == "whole" && b.weights != 0 {
				t.Errorf("%s: %d requests", name, b.weights)
			}
		}
	}
}

// Content with another hash is not kept, of files in LFS and of others, whatever its length.
func TestPullWrongHash(t *testing.T) {
	for _, name := range []string{"model.safetensors", "tokenizer.json"} {
		for _, change := range []string{"flip", "short", "long"} {
			b := newBed(t)
			b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
				if !strings.HasSuffix(r.URL.Path, name) || storage != hubtest.LFS(name) {
					return false
				}
				text := slices.Clone(b.Files[name])
				switch change {
				case "flip":
					text[len(text)/2] ^= 1
				case "short":
					text = text[:len(text)-1]
				case "long":
					text = append(text[:1], text...)
				}
				_, _ = w.Write(text)
				return true
			})
			_, err := b.pull(b.options())
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s, %s: %v", name, change, err)
			}
			if change != "short" && !strings.Contains(err.Error(), "has the hash") {
				t.Errorf("%s, %s: %v", name, change, err)
			}
			if _, err := (Cache{b.cache}).Find(model, ""); err == nil {
				t.Errorf("%s, %s: a snapshot", name, change)
			}
		}
	}
}

// Pulls of one model at once fetch each blob once.
func TestPullTwoAtOnce(t *testing.T) {
	b := newBed(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			o := b.options()
			o.Log = slog.New(slog.DiscardHandler)
			dir, err := Pull(t.Context(), o)
			if err != nil {
				t.Error(err)
			}
			b.whole(dir)
		})
	}
	wg.Wait()
	b.noBadFile()
	n := map[string]int{}
	for _, r := range b.Requests() {
		if r.Storage {
			n[r.Path]++
		}
	}
	for path, n := range n {
		if n != 1 {
			t.Errorf("%s: %d requests", path, n)
		}
	}
	// The lock is huggingface_hub's, and a pull waits for it until it ends.
	blob := hubtest.Hash("tokenizer.model", b.Files["tokenizer.model"])
	if err := os.Remove(filepath.Join(b.cache, "models--org--name/blobs", blob)); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(b.cache, ".locks/models--org--name", blob+".lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := b.options()
	o.Log = slog.New(slog.NewTextHandler(watch(func(line string) {
		if strings.Contains(line, "waiting for another process") {
			cancel()
		}
	}), nil))
	if _, err := Pull(ctx, o); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r, err := (Cache{b.cache}).PlanRemoval(model, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Run(); err == nil || !strings.Contains(err.Error(), "another process downloads") {
		t.Errorf("removed during a download: %v", err)
	}
}

// watch is a log that a function reads.
type watch func(line string)

func (w watch) Write(p []byte) (int, error) { w(string(p)); return len(p), nil }

// A disk without room is refused before a byte is asked for, and one that fills up meanwhile ends
// the pull at once. The next pull continues.
func TestPullFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to mount a small tmpfs")
	}
	b := newBed(t)
	if err := unix.Mount("tmpfs", b.cache, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs the right to mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(b.cache, 0) })
	if _, err := b.pull(b.options()); err == nil || !strings.Contains(err.Error(), "MiB free") {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", b.cache, "tmpfs", unix.MS_REMOUNT, "size=512k"); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(b.cache, "filler")
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		if storage && strings.HasSuffix(r.URL.Path, "model.safetensors") {
			_ = os.WriteFile(filler, make([]byte, 300<<10), 0o600)
		}
		return false
	})
	_, err := b.pull(b.options())
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "free space in") {
		t.Fatal(err)
	}
	if n := strings.Count(b.logs.String(), "repeated"); n > 0 {
		t.Errorf("%d further attempts on a full disk", n)
	}
	b.SetHook(nil)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	dir, err := b.pull(b.options())
	if err != nil {
		t.Fatal(err)
	}
	b.whole(dir)
}

// Listings with a name that leads elsewhere, that occurs twice, or that is a file and a folder, are
// refused, as are those without usable sizes and hashes or without an end.
func TestPullHostileListing(t *testing.T) {
	entry := func(name string) map[string]any { return hubtest.Entry(name, []byte("x")) }
	with := func(key string, value any) []any {
		e := entry("a.json")
		e[key] = value
		return []any{e}
	}
	for name, c := range map[string]struct {
		page any
		want string
	}{
		"absolute":        {[]any{entry("/etc/passwd.json")}, "which is refused"},
		"parent":          {[]any{entry("../a.json")}, "which is refused"},
		"parent inside":   {[]any{entry("a/../../b.json")}, "which is refused"},
		"dot":             {[]any{entry("./a.json")}, "which is refused"},
		"empty":           {[]any{entry("")}, "which is refused"},
		"empty element":   {[]any{entry("a//b.json")}, "which is refused"},
		"backslash":       {[]any{entry(`..\a.json`)}, "which is refused"},
		"NUL":             {[]any{entry("a\x00.json")}, "which is refused"},
		"escape":          {[]any{entry("a\x1b[2J.json")}, "which is refused"},
		"long":            {[]any{entry(strings.Repeat("a", 600) + ".json")}, "which is refused"},
		"other type":      {[]any{map[string]any{"type": "file", "path": "../run.sh"}}, "which is refused"},
		"twice":           {[]any{entry("a.json"), entry("a.json")}, "twice"},
		"file and folder": {[]any{entry("a.json"), entry("a.json/b.json")}, "which is a file"},
		"negative size":   {with("size", -1), "size and hash"},
		"huge size":       {with("size", 1<<50), "size and hash"},
		"no hash":         {with("oid", ""), "size and hash"},
		"path as hash":    {with("oid", "../../../etc/passwd"), "size and hash"},
		"LFS hash":        {with("lfs", map[string]any{"oid": strings.Repeat("g", 64), "size": 1}), "size and hash"},
		"empty listing":   {[]any{}, "no file that is downloaded"},
		"symlink only":    {[]any{map[string]any{"type": "symlink", "path": "a.json", "oid": strings.Repeat("0", 40)}}, "no file that is downloaded"},
		"not a list":      {map[string]any{"error": "x"}, "not the answer of a hub"},
		"huge":            {nil, "more than 100000 entries"},
	} {
		b := newBed(t)
		pages := 0
		b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
			if !strings.Contains(r.URL.Path, "/tree/") {
				return false
			}
			if name == "huge" { // the next page is at the same address, with other names
				w.Header().Set("Link", `<`+b.URL+r.URL.Path+`>; rel="next"`)
				text := []byte(`[`)
				for i := range 60_000 {
					text = fmt.Appendf(text, `{"type":"file","path":"%d/%d"},`, pages, i)
				}
				pages++
				_, _ = w.Write(append(text[:len(text)-1], ']'))
				return true
			}
			_ = json.NewEncoder(w).Encode(c.page)
			return true
		})
		_, err := b.pull(b.options())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if found, _ := entries(filepath.Join(b.cache, "models--org--name")); slices.Contains(found, "snapshots") {
			t.Errorf("%s: a snapshot", name)
		}
	}
	// An answer without an end is cut off, and one that is no commit is refused.
	b := newBed(t)
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		_, _ = io.Copy(w, io.LimitReader(zeros{}, maxAnswer+2))
		return true
	})
	if _, err := b.pull(b.options()); err == nil || !strings.Contains(err.Error(), "larger than 8 MiB") {
		t.Errorf("endless answer: %v", err)
	}
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		fmt.Fprint(w, `{"sha":"../../../../etc"}`)
		return true
	})
	if _, err := b.pull(b.options()); err == nil || !strings.Contains(err.Error(), "not the hash of a commit") {
		t.Errorf("commit: %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A link in the cache that leads out of the model's folder is not written through.
func TestPullLinksOut(t *testing.T) {
	b := newBed(t)
	outside := t.TempDir()
	snapshots := filepath.Join(b.cache, "models--org--name/snapshots")
	if err := os.MkdirAll(snapshots, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(snapshots, hubtest.Commit)); err != nil {
		t.Fatal(err)
	}
	if _, err := Pull(t.Context(), b.options()); err == nil || !strings.Contains(err.Error(), "escapes") {
		t.Error(err)
	}
	if found, err := entries(outside); err != nil || len(found) > 0 {
		t.Errorf("%q, %v", found, err)
	}
}

// A snapshot whose links cannot all be made has no config.json, without which it is not loaded.
func TestPullLinksConfigLast(t *testing.T) {
	b := newBed(t)
	dir := filepath.Join(b.cache, "models--org--name/snapshots", hubtest.Commit)
	if err := os.MkdirAll(filepath.Join(dir, "tokenizer.json/folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := b.pull(b.options()); err == nil || !strings.Contains(err.Error(), "link of tokenizer.json") {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "config.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("config.json: %v", err)
	}
}

// The token goes to the hub alone: not along a redirect, and not unencrypted beyond loopback.
// Redirects that lose protection are not followed.
func TestPullToken(t *testing.T) {
	var asked atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		for _, v := range r.Header {
			if strings.Contains(strings.Join(v, ""), "hf_secret") {
				t.Errorf("the token arrived at another server: %v", r.Header)
			}
		}
		w.WriteHeader(404)
	}))
	defer other.Close()
	elsewhere := map[string]string{
		"port": other.URL, "name": strings.Replace(other.URL, "127.0.0.1", "localhost", 1), "scheme": strings.Replace(other.URL, "http", "ftp", 1),
	}
	for name, to := range elsewhere {
		for _, part := range []string{"/revision/", "/tree/", "/resolve/"} {
			b := newBed(t)
			b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
				if storage || !strings.Contains(r.URL.Path, part) {
					return false
				}
				http.Redirect(w, r, to+r.URL.Path, http.StatusTemporaryRedirect)
				return true
			})
			if _, err := b.pull(b.options()); err == nil {
				t.Errorf("%s of %s: no error", name, part)
			} else if part != "/resolve/" && !strings.Contains(err.Error(), "not followed for an answer of the API") {
				t.Errorf("%s of %s: %v", name, part, err)
			}
		}
	}
	if asked.Load() == 0 {
		t.Error("no file was asked for along a redirect")
	}
	// Back and forth: the token is sent again at the hub only.
	b := newBed(t)
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		switch {
		case storage && r.URL.Query().Get("back") == "":
			http.Redirect(w, r, b.URL+r.URL.Path+"?back=1", http.StatusFound)
		case strings.HasPrefix(r.URL.Path, "/blob/") && !storage:
			http.Redirect(w, r, b.Storage+r.URL.Path+"?back=1", http.StatusFound)
		default:
			return false
		}
		return true
	})
	if dir, err := b.pull(b.options()); err != nil {
		t.Error(err)
	} else {
		b.whole(dir)
	}
	// A circle ends.
	b = newBed(t)
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		http.Redirect(w, r, r.URL.Path, http.StatusFound)
		return true
	})
	if _, err := b.pull(b.options()); err == nil {
		t.Error("redirects without an end")
	}
	parse := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for _, c := range []struct {
		endpoint string
		sent     bool // the token to the endpoint
	}{
		{"https://hub.example", true}, {"https://hub.example:443/prefix/", true}, {"http://127.0.0.1:80", true}, {"http://[::1]:80", true}, {"http://localhost", true},
		{"https://hub.example:8443", true}, {"http://hub.example", false}, {"http://127.0.0.1.example", false}, {"http://localhost.example", false},
	} {
		var logs bytes.Buffer
		k, err := newClient(c.endpoint, " hf_secret\n", "test", slog.New(slog.NewTextHandler(&logs, nil)))
		if err != nil || (k.token == "hf_secret") != c.sent || c.sent == strings.Contains(logs.String(), "HF_TOKEN is not sent") {
			t.Errorf("%s: %+v, %v, %s", c.endpoint, k, err, logs.String())
		}
		var got string
		seen := &bearer{k, trip(func(r *http.Request) { got = r.Header.Get("Authorization") })}
		for _, to := range []string{"https://hub.example/a", "http://hub.example/a", "https://cdn.hub.example/a", "https://hub.example:8443/a", "http://hub.example:8443/a", "http://127.0.0.1:80/a"} {
			_, _ = seen.RoundTrip(&http.Request{URL: parse(to), Header: http.Header{}})
			if want := c.sent && k.own(parse(to)); (got != "") != want || got != "" && strings.HasPrefix(to, "http://hub") {
				t.Errorf("%s sends %q to %s", c.endpoint, got, to)
			}
		}
		for _, to := range []string{"http://cdn.example", "https://127.0.0.1", "file:///etc/passwd"} {
			err := k.files.CheckRedirect(&http.Request{URL: parse(to)}, []*http.Request{{}})
			if strings.HasPrefix(c.endpoint, "https") && err == nil {
				t.Errorf("%s leads to %s", c.endpoint, to)
			}
		}
	}
	for _, bad := range []string{"hub.example", "ftp://hub.example", "https://user:pass@hub.example", "https://hub.example/?a=b", "https://"} {
		if _, err := newClient(bad, "", "", slog.New(slog.DiscardHandler)); !errors.Is(err, ErrModel) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

type trip func(*http.Request)

func (f trip) RoundTrip(r *http.Request) (*http.Response, error) { f(r); return nil, io.EOF }

// What a hub refuses is worded with the remedy, and only what may pass is asked for again.
func TestPullRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		code   string
		after  string
		token  string
		want   string
		asked  int
		wrong  bool // an error that the user can correct
	}{
		"gated":            {403, "GatedRepo", "", "hf_secret", "accept its licence", 1, true},
		"gated, anonymous": {401, "GatedRepo", "", "", "set HF_TOKEN", 1, true},
		"forbidden":        {403, "", "", "hf_secret", "accept its licence", 1, true},
		"unknown or not":   {401, "RepoNotFound", "", "", "check the name", 1, true},
		"bad token":        {401, "", "", "hf_secret", "HF_TOKEN is not valid", 1, true},
		"no model":         {404, "RepoNotFound", "", "hf_secret", "no such model", 1, true},
		"no revision":      {404, "RevisionNotFound", "", "hf_secret", "no such revision", 1, true},
		"limited, long":    {429, "", "3600", "", "repeat the command in 1h0m0s", 1, false},
		"limited":          {429, "", "0", "", "set HF_TOKEN", maxAttempts, false},
		"broken":           {503, "", "", "", "repeat the command later", maxAttempts, false},
	} {
		b := newBed(t)
		b.token = c.token
		asked := 0
		b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
			asked++
			if c.after != "" {
				w.Header().Set("Retry-After", c.after)
			}
			hubtest.Refuse(w, c.status, c.code)
			return true
		})
		_, err := b.pull(b.options())
		if err == nil || !strings.Contains(err.Error(), c.want) || asked != c.asked || errors.Is(err, ErrModel) != c.wrong {
			t.Errorf("%s: %v after %d requests", name, err, asked)
		}
	}
	// Files are limited and storage fails for a while.
	b := newBed(t)
	var n atomic.Int32
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		if !strings.HasSuffix(r.URL.Path, ".safetensors") || n.Add(1) > 4 {
			return false
		}
		hubtest.Refuse(w, map[bool]int{false: 429, true: 403}[storage], "")
		return true
	})
	if dir, err := b.pull(b.options()); err != nil || !strings.Contains(b.logs.String(), "the request is repeated") {
		t.Errorf("%v: %s", err, b.logs.String())
	} else {
		b.whole(dir)
	}
}

// A hub that cannot be reached is asked several times, and the error says what to check.
func TestPullUnreachable(t *testing.T) {
	b := newBed(t)
	o := b.options()
	o.Environ = append(o.Environ[:0:0], "HF_HUB_CACHE="+b.cache, "HF_ENDPOINT=http://127.0.0.1:1")
	_, err := b.pull(o)
	if err == nil || !strings.HasSuffix(err.Error(), "check the network, HTTPS_PROXY and HF_ENDPOINT, and repeat the command: what is done is kept") {
		t.Error(err)
	}
}

// The error of a storage that closes connections does not have the signature of its URL.
func TestPullStorageCloses(t *testing.T) {
	b := newBed(t)
	b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		if storage {
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if _, err := b.pull(b.options()); err == nil || !strings.Contains(err.Error(), "EOF") {
		t.Error(err)
	}
}

// A server that stops sending, or that sends too slowly, does not hold a pull.
func TestPullStalls(t *testing.T) {
	for name, c := range map[string]struct{ path, want string }{
		"API":    {"/tree/", "no answer within 300ms"},
		"head":   {"/config.json", "no byte within 300ms"},
		"middle": {"/blob/model.safetensors", "no byte within 300ms"},
		"slow":   {"/tokenizer.json", "slower than 65536 bytes per second"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.SetHook(func(w http.ResponseWriter, r *http.Request, storage bool) bool {
				if !strings.Contains(r.URL.Path, c.path) {
					return false
				}
				if name == "middle" {
					_, _ = w.Write(b.Files["model.safetensors"][:1000])
				}
				for name == "slow" && r.Context().Err() == nil {
					_, _ = w.Write([]byte("{"))
					_ = http.NewResponseController(w).Flush()
					time.Sleep(10 * time.Millisecond)
				}
				if name != "head" && name != "API" {
					_ = http.NewResponseController(w).Flush()
				}
				<-r.Context().Done()
				return true
			})
			o := b.options()
			o.answer, o.stall = 300*time.Millisecond, 300*time.Millisecond
			if _, err := b.pull(o); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", name, err, c.want)
			}
		})
	}
}
