package hub

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// DefaultWorkers is how many files are downloaded at once.
const DefaultWorkers = 8

// Options configure Pull.
type Options struct {
	Name, Revision string   // Revision "": DefaultRevision
	Include        []string // patterns of path.Match; none: all files
	Workers        int      // files at once; 0: DefaultWorkers
	Environ        []string // HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the variables of the cache
	Agent          string   // User-Agent
	Log            *slog.Logger
	Progress       func(done, total int64) // bytes; called by one goroutine at a time; nil: none

	pause, answer, stall time.Duration // of the client; 0: its own
}

// Pull downloads a model's revision into the cache and returns the folder of its snapshot. It
// transfers only what the cache lacks, and continues the files of an interrupted pull. Several
// pulls may run at once. When ctx ends, Pull returns its cause, and partial files stay.
func Pull(ctx context.Context, o Options) (dir string, err error) {
	p, files, err := look(ctx, o)
	if err != nil {
		return "", err
	}
	if err := p.open(); err != nil {
		return "", err
	}
	defer p.root.Close()
	if err := p.all(ctx, files, cmp.Or(o.Workers, DefaultWorkers)); err != nil {
		return "", fmt.Errorf("%s: %w", o.Name, err)
	}
	if err := p.link(files); err != nil {
		return "", err
	}
	if revision := cmp.Or(o.Revision, DefaultRevision); revision != p.commit {
		ref := path.Join("refs", revision)
		if err := p.replace(ref, func(tmp string) error { return p.root.WriteFile(tmp, []byte(p.commit), 0o644) }); err != nil {
			return "", err
		}
	}
	return filepath.Join(p.cache.Folder(o.Name), "snapshots", p.commit), nil
}

// Planned is a file that Pull would link into a snapshot.
type Planned struct {
	File
	Cached int64 // bytes of it that the cache has; less than its size: the rest is to be transferred
}

// Plan returns the commit of a model's revision, and the files that Pull would download, as the hub
// lists them. It transfers no file and writes nothing.
func Plan(ctx context.Context, o Options) (commit string, files []Planned, err error) {
	p, list, err := look(ctx, o)
	if err != nil {
		return "", nil, err
	}
	for _, f := range list {
		planned := Planned{File: f}
		if p.has(&f) {
			planned.Cached = f.Size
		} else if info, err := os.Stat(filepath.Join(p.cache.Folder(p.name), f.partial())); err == nil {
			planned.Cached = min(info.Size(), f.Size)
		}
		files = append(files, planned)
	}
	return p.commit, files, nil
}

// look asks the hub for the files of a revision.
func look(ctx context.Context, o Options) (*puller, []File, error) {
	if v := strings.ToUpper(getenv(o.Environ, "HF_HUB_OFFLINE")); slices.Contains([]string{"1", "ON", "YES", "TRUE"}, v) {
		return nil, nil, refuse("%s is not downloaded, because HF_HUB_OFFLINE=%s forbids it; unset HF_HUB_OFFLINE", o.Name, v)
	}
	if err := checkName(o.Name); err != nil {
		return nil, nil, err
	}
	cache, err := DefaultCache(o.Environ)
	if err != nil {
		return nil, nil, err
	}
	c, err := newClient(cmp.Or(getenv(o.Environ, "HF_ENDPOINT"), DefaultEndpoint), getenv(o.Environ, "HF_TOKEN"), o.Agent, o.Log)
	if err != nil {
		return nil, nil, err
	}
	c.pause, c.answer, c.stall = cmp.Or(o.pause, c.pause), cmp.Or(o.answer, c.answer), cmp.Or(o.stall, c.stall)
	revision := cmp.Or(o.Revision, DefaultRevision)
	commit, err := c.resolve(ctx, o.Name, revision)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", o.Name, err)
	}
	files, err := c.list(ctx, o.Name, commit)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", o.Name, err)
	}
	if files, err = choose(files, o.Include); err != nil {
		return nil, nil, err
	}
	if len(files) == 0 {
		return nil, nil, refuse("%s has no file that is downloaded: want names that end in one of %s and match --include", o.Name, strings.Join(extensions, ", "))
	}
	return &puller{client: c, cache: cache, name: o.Name, commit: commit, progress: o.Progress}, files, nil
}

// puller downloads one commit.
type puller struct {
	*client
	cache        Cache
	name, commit string
	root         *os.Root // the model's folder

	mu          sync.Mutex
	progress    func(done, total int64)
	done, total int64 // bytes
}

// open makes the model's folder. All writes below it go through a Root, which no link leads out of.
func (p *puller) open() error {
	dir := p.cache.Folder(p.name)
	err := os.MkdirAll(filepath.Join(dir, "blobs"), 0o777)
	if err == nil {
		p.root, err = os.OpenRoot(dir)
	}
	if err != nil {
		return fmt.Errorf("the Hugging Face cache cannot be written: %w; set HF_HUB_CACHE to a folder that can", err)
	}
	return nil
}

// all downloads the files that the cache lacks, at most workers at once. The first error ends all.
func (p *puller) all(ctx context.Context, files []File, workers int) error {
	var missing []File
	seen := map[string]bool{} // several names may have one blob
	need := int64(0)
	for _, f := range files {
		if seen[f.Hash] {
			continue
		}
		seen[f.Hash] = true
		p.total += f.Size
		if p.has(&f) {
			p.done += f.Size
			continue
		}
		missing, need = append(missing, f), need+f.Size
		if info, err := p.root.Stat(f.partial()); err == nil {
			need -= min(info.Size(), f.Size)
		}
	}
	if err := p.room(need); err != nil {
		return err
	}
	p.add(0)
	// The largest first, so that no worker starts one when the others are done.
	slices.SortStableFunc(missing, func(a, b File) int { return cmp.Compare(b.Size, a.Size) })
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for _, f := range missing {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := p.fetch(ctx, &f); err != nil {
				return fmt.Errorf("%s: %w", f.Path, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// add counts bytes and reports progress.
func (p *puller) add(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if p.progress != nil {
		p.progress(p.done, p.total)
	}
}

// room returns an error if the file system has fewer than need bytes free.
func (p *puller) room(need int64) error {
	var s unix.Statfs_t
	if err := unix.Statfs(p.cache.Folder(p.name), &s); err != nil {
		return nil // the writes will show it
	}
	if free := int64(min(s.Bavail, 1<<62/uint64(max(s.Bsize, 1)))) * int64(s.Bsize); need > free {
		return fmt.Errorf("%d MiB are missing, and %s has %d MiB free: free some, or set HF_HUB_CACHE to a larger disk", (need+1<<20-1)>>20, p.cache.Dir, free>>20)
	}
	return nil
}

func (f *File) blob() string    { return "blobs/" + f.Hash }
func (f *File) partial() string { return "blobs/" + f.Hash + ".incomplete" }

// has reports whether the cache has a file's blob. huggingface_hub may have linked it to a blob
// outside of the root, which several models share.
func (p *puller) has(f *File) bool {
	info, err := os.Stat(filepath.Join(p.cache.Folder(p.name), f.blob()))
	return err == nil && info.Mode().IsRegular() && info.Size() == f.Size
}

// fetch downloads a file's blob under its lock.
func (p *puller) fetch(ctx context.Context, f *File) error {
	unlock, err := lock(ctx, filepath.Join(p.cache.Dir, ".locks", folder(p.name), f.Hash+".lock"), func() {
		p.log.Info("waiting for another process that downloads the file", "model", p.name, "file", f.Path)
	})
	if err != nil {
		return err
	}
	defer unlock()
	if p.has(f) { // the other process downloaded it
		p.add(f.Size)
		return nil
	}
	d := &download{puller: p, File: f}
	if d.out, err = p.root.OpenFile(f.partial(), os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return err
	}
	defer d.out.Close()
	if err := d.resume(); err != nil {
		return err
	}
	err = p.retry(ctx, func() (bool, error) {
		before := d.n
		err := d.receive(ctx)
		return d.n-before >= minRate, err // less is none, so that a server cannot send a byte at a time
	})
	if err != nil {
		return err
	}
	if err := errors.Join(d.out.Sync(), d.out.Close()); err != nil {
		return d.local(err)
	}
	return p.root.Rename(f.partial(), f.blob())
}

// download is a file that arrives.
type download struct {
	*puller
	*File
	out     *os.File
	sum     hash.Hash // of the first n bytes
	n       int64
	resumed bool // some bytes are of an earlier pull
}

// resume hashes what an earlier pull left.
func (d *download) resume() error {
	d.sum = d.digest()
	n, err := io.Copy(d.sum, io.LimitReader(d.out, d.Size+1))
	switch {
	case err != nil:
		return err
	case n > d.Size:
		return d.restart()
	}
	d.n, d.resumed = n, n > 0
	d.add(n)
	return nil
}

// restart drops what has arrived.
func (d *download) restart() error {
	d.add(-d.n)
	d.n, d.resumed, d.sum = 0, false, d.digest()
	if err := d.out.Truncate(0); err != nil {
		return permanent{err}
	}
	_, err := d.out.Seek(0, io.SeekStart)
	return err
}

// receive sends one request for the rest of the file and appends the answer. It returns nil when
// the file is complete and has its hash.
func (d *download) receive(ctx context.Context) error {
	if d.n < d.Size {
		if err := d.rest(ctx); err != nil {
			return err
		}
	}
	if got := hex.EncodeToString(d.sum.Sum(nil)); got != d.Hash {
		resumed := d.resumed
		err := fmt.Errorf("what arrived has the hash %s, and the listing has %s", got, d.Hash)
		if restart := d.restart(); restart != nil {
			return restart
		}
		if resumed { // the earlier part may have been wrong
			return err
		}
		return permanent{fmt.Errorf("%w: the file is not kept; repeat the command, and check HF_ENDPOINT if it happens again", err)}
	}
	return nil
}

// rest appends the bytes from d.n on. Its time is bounded by a minimum rate, and by stall without a
// byte.
func (d *download) rest(ctx context.Context) error {
	limit := 2*d.stall + time.Duration((d.Size-d.n)/minRate)*time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("slower than %d bytes per second", minRate))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	stalled := time.AfterFunc(d.stall, func() { stop(fmt.Errorf("no byte within %v", d.stall)) })
	defer stalled.Stop()

	org, base, _ := strings.Cut(d.name, "/")
	parts := append([]string{org, base, "resolve", d.commit}, strings.Split(d.Path, "/")...)
	resp, err := d.get(ctx, d.files, d.at(nil, parts...), d.n)
	var status *statusError
	if errors.As(err, &status) && status.code == http.StatusRequestedRangeNotSatisfiable && d.n > 0 {
		if err := d.restart(); err != nil {
			return err
		}
		return fmt.Errorf("%w; the download starts again", errRange)
	} else if err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusPartialContent {
		var from int64
		if _, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-", &from); err != nil || from != d.n {
			return permanent{fmt.Errorf("%w: asked for bytes from %d on, got %.100q", errRange, d.n, resp.Header.Get("Content-Range"))}
		}
	} else if d.n > 0 { // the server ignores Range
		if err := d.restart(); err != nil {
			return err
		}
	}
	buf := make([]byte, 256<<10)
	for d.n < d.Size {
		k, err := resp.Body.Read(buf[:min(int64(len(buf)), d.Size-d.n)])
		if k > 0 {
			stalled.Reset(d.stall)
			w, err := d.out.Write(buf[:k])
			d.sum.Write(buf[:w])
			d.n += int64(w)
			d.add(int64(w))
			if err != nil {
				return d.local(err)
			}
		}
		if err != nil && d.n < d.Size {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			return fmt.Errorf("the connection to %s ended after %d of %d bytes: %w", resp.Request.URL.Host, d.n, d.Size, err)
		}
	}
	return nil
}

// errRange means that a server does not continue a file where it was asked to.
var errRange = errors.New("the server does not continue the file where it ended")

// local returns the error of a write, which another attempt does not change.
func (d *download) local(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = fmt.Errorf("%w: free space in %s, or set HF_HUB_CACHE to a larger disk, and repeat the command; finished parts are kept", err, d.cache.Dir)
	}
	return permanent{err}
}

// link makes the snapshot's links to the blobs. That of config.json is the last one, because a
// folder without it is not loaded.
func (p *puller) link(files []File) error {
	last := func(f File) int {
		if f.Path == "config.json" {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(files, func(a, b File) int { return last(a) - last(b) })
	for _, f := range files {
		name := path.Join("snapshots", p.commit, f.Path)
		target := strings.Repeat("../", strings.Count(name, "/")) + f.blob()
		if now, err := p.root.Readlink(name); err == nil && now == target {
			continue
		}
		if err := p.replace(name, func(tmp string) error { return p.root.Symlink(target, tmp) }); err != nil {
			return fmt.Errorf("link of %s: %w", f.Path, err)
		}
	}
	return nil
}

// replace makes a file outside of snapshots and refs and renames it, so that no reader finds a part
// of it.
func (p *puller) replace(name string, write func(tmp string) error) error {
	tmp := rand.Text() + ".tmp"
	if err := p.root.MkdirAll(path.Dir(name), 0o777); err != nil {
		return err
	}
	if err := write(tmp); err != nil {
		return err
	}
	if err := p.root.Rename(tmp, name); err != nil {
		return errors.Join(err, p.root.Remove(tmp))
	}
	return nil
}
