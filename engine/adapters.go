package engine

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// ErrAdapter means that there is no such adapter: none of that name is loaded, or
// the folder does not hold one.
var ErrAdapter = errors.New("engine: no such adapter")

// ErrAdapterTaken means that an adapter cannot be loaded: its files are refused, its
// name is in use, or every place is.
var ErrAdapterTaken = errors.New("engine: adapter cannot be loaded")

// MaxAdapters bounds the places for adapters of a node, and MaxAdapterName the bytes
// of a name, because each heartbeat carries all names.
const (
	MaxAdapters    = 128
	MaxAdapterName = 256
)

// Adapter is a loaded adapter. Requests that name it are computed with it.
type Adapter struct {
	Name   string
	Digest uint64 // equal digests compute equally; never 0
	Rank   int
}

// AdapterDevice loads adapters into places, from 1 on. *model.Model implements it. It
// is called on the step goroutine.
type AdapterDevice interface {
	LoadAdapter(place int, a *model.Adapter) error
}

// AdapterModule is an adapter's name and folder.
type AdapterModule struct{ Name, Path string }

// adapters is the set of the engine's places. The step goroutine owns it.
type adapters struct {
	named map[string]*adapterPlace
	free  []int // places, the next one last
}

// adapterPlace is an adapter in its place. After its name has been removed, requests
// that run keep using it, and the last of them frees the place.
type adapterPlace struct {
	Adapter
	place   int
	users   int // requests and jobs
	removed bool
}

func newAdapters(places int) adapters {
	a := adapters{named: map[string]*adapterPlace{}}
	for p := places; p > 0; p-- {
		a.free = append(a.free, p)
	}
	return a
}

// LoadAdapter reads an adapter's folder and gives it a name. It does nothing if that
// adapter is already loaded. Another adapter of the same name is an error unless
// replace is set; then requests that run keep the old one.
func (e *Engine) LoadAdapter(name, path string, replace bool) (digest uint64, rank int, err error) {
	if e.o.AdapterPlaces == 0 {
		return 0, 0, fmt.Errorf("%w: %s: this node was started without --enable-lora", ErrAdapterTaken, name)
	}
	if name == "" || len(name) > MaxAdapterName || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' }) {
		return 0, 0, fmt.Errorf("%w: the name %q: want 1 to %d bytes without control characters", ErrAdapterTaken, name, MaxAdapterName)
	}
	folder, err := e.adapterFolder(path)
	var a *model.Adapter
	if err == nil {
		a, err = model.OpenAdapter(folder) // on the caller's goroutine, so that steps continue
	}
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, fmt.Errorf("%w: %s: %w", ErrAdapter, name, err)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("%w: %s: %w", ErrAdapterTaken, name, err)
	}
	var info Adapter
	if derr := e.do(func() { info, err = e.place(name, a, replace) }); derr != nil {
		err = derr
	}
	return info.Digest, info.Rank, err
}

// adapterFolder returns the folder of path. With AdapterRoot a path outside of it
// returns the same fs.ErrNotExist as one that does not exist, so that a client cannot
// find out which files the node has.
func (e *Engine) adapterFolder(path string) (string, error) {
	root := e.o.AdapterRoot
	if root == "" {
		return path, nil
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(root, path)
	}
	folder, err := filepath.EvalSymlinks(path)
	if err == nil {
		if within, rerr := filepath.Rel(root, folder); rerr == nil && filepath.IsLocal(within) {
			return folder, nil
		}
	}
	return "", fmt.Errorf("%w: no readable adapter at this path below --lora-root: %w", model.ErrAdapter, fs.ErrNotExist)
}

// place loads an adapter into a free place.
func (e *Engine) place(name string, a *model.Adapter, replace bool) (Adapter, error) {
	t := &e.adapters
	old := t.named[name]
	switch {
	case old != nil && old.Digest == a.Digest:
		return old.Adapter, nil
	case old != nil && !replace:
		return Adapter{}, fmt.Errorf("%w: %s is the name of another adapter; unload that first, or load in place", ErrAdapterTaken, name)
	}
	at, idle := 0, old != nil && old.users == 0
	switch {
	case len(t.free) > 0:
		at = t.free[len(t.free)-1]
	case idle:
		at = old.place
	default:
		return Adapter{}, fmt.Errorf("%w: %s: all %d places are in use; unload another adapter, or start the node with a larger --max-cpu-loras", ErrAdapterTaken, name, e.o.AdapterPlaces)
	}
	if err := e.o.Adapters.LoadAdapter(at, a); err != nil {
		return Adapter{}, fmt.Errorf("%w: %s: %w", ErrAdapterTaken, name, err)
	}
	if old != nil {
		e.removeName(old)
	}
	t.free = slices.DeleteFunc(t.free, func(p int) bool { return p == at })
	p := &adapterPlace{Adapter: Adapter{Name: name, Digest: a.Digest, Rank: a.Rank}, place: at}
	t.named[name] = p
	e.publishAdapters()
	return p.Adapter, nil
}

// UnloadAdapter removes a name. Requests that run keep their adapter.
func (e *Engine) UnloadAdapter(name string) (err error) {
	derr := e.do(func() {
		p := e.adapters.named[name]
		if p == nil {
			err = fmt.Errorf("%w: %s is not loaded", ErrAdapter, name)
			return
		}
		e.removeName(p)
		e.publishAdapters()
	})
	return cmp.Or(derr, err)
}

// removeName removes an adapter's name. The place becomes free when no request uses it.
func (e *Engine) removeName(p *adapterPlace) {
	p.removed = true
	delete(e.adapters.named, p.Name)
	if p.users == 0 {
		e.adapters.free = append(e.adapters.free, p.place)
	}
}

// EachAdapter calls f for each loaded adapter, in order of names.
func (e *Engine) EachAdapter(f func(name string, digest uint64, rank int)) {
	for _, a := range *e.loaded.Load() {
		f(a.Name, a.Digest, a.Rank)
	}
}

// CheckAdapter returns the error that Add or AddJob would return now.
func (e *Engine) CheckAdapter(name string, digest uint64) error {
	for _, a := range *e.loaded.Load() {
		if a.Name == name {
			return a.checkDigest(digest)
		}
	}
	return fmt.Errorf("%w: %s is not loaded on this node", ErrAdapter, name)
}

// checkDigest returns an error if the adapter's digest is another one; 0 matches any.
func (a *Adapter) checkDigest(digest uint64) error {
	if digest != 0 && digest != a.Digest {
		return fmt.Errorf("%w: %s has digest %016x on this node, the request needs %016x", ErrAdapter, a.Name, a.Digest, digest)
	}
	return nil
}

func (e *Engine) publishAdapters() {
	all := make([]Adapter, 0, len(e.adapters.named))
	for _, p := range e.adapters.named {
		all = append(all, p.Adapter)
	}
	slices.SortFunc(all, func(a, b Adapter) int { return strings.Compare(a.Name, b.Name) })
	e.loaded.Store(&all)
}

// adapter returns the adapter of a request before the request is added. A digest
// other than 0 must match, because KV is valid only for the adapter that computed it.
func (e *Engine) adapter(name string, digest uint64) (*adapterPlace, error) {
	if name == "" {
		return nil, nil
	}
	p := e.adapters.named[name]
	if p == nil {
		return nil, fmt.Errorf("%w: %s is not loaded on this node", ErrAdapter, name)
	}
	return p, p.checkDigest(digest)
}

// AdapterUse lists the names of adapters in use, sorted: of requests and jobs that
// take part in steps, and of those that wait.
type AdapterUse struct{ Running, Waiting []string }

// adapterUse ranges over all requests and jobs. publish calls it only after one of
// them has come, left, run or been preempted.
func (e *Engine) adapterUse() AdapterUse {
	running, waiting := map[string]bool{}, map[string]bool{}
	for _, r := range e.live {
		switch {
		case r.adapter == nil:
		case r.running:
			running[r.adapter.Name] = true
		default:
			waiting[r.adapter.Name] = true
		}
	}
	return AdapterUse{slices.Sorted(maps.Keys(running)), slices.Sorted(maps.Keys(waiting))}
}

// register registers a run and its adapter.
func (e *Engine) register(id scheduler.RequestID, r *run, p *adapterPlace) {
	if p != nil {
		p.users++
		r.adapter = p
		e.adaptersChanged = true
	}
	e.live[id] = r
}

// setRunning records whether a run takes part in steps.
func (e *Engine) setRunning(r *run, runs bool) {
	e.adaptersChanged = e.adaptersChanged || r.adapter != nil && r.running != runs
	r.running = runs
}

// remove removes a run.
func (e *Engine) remove(id scheduler.RequestID, r *run) {
	delete(e.live, id)
	if r.guide != nil {
		r.guide.Close(e.masks)
	}
	if e.o.Drafter != nil && r.req != nil {
		e.o.Drafter.Remove(uint64(id))
	}
	p := r.adapter
	if p == nil {
		return
	}
	r.adapter = nil
	e.adaptersChanged = true
	if p.users--; p.users == 0 && p.removed {
		e.adapters.free = append(e.adapters.free, p.place)
	}
}

// span returns the place of a run's adapter for the device; 0: none.
func (r *run) span() int32 {
	if r == nil || r.adapter == nil {
		return 0
	}
	return int32(r.adapter.place)
}

// checkAdapters verifies that each place is free, named or in use, exactly once.
func (e *Engine) checkAdapters() error {
	seen := make([]int, e.o.AdapterPlaces+1)
	users := map[*adapterPlace]int{}
	for _, p := range e.adapters.free {
		seen[p]++
	}
	all := map[*adapterPlace]bool{}
	for _, p := range e.adapters.named {
		all[p] = true
	}
	for _, r := range e.live {
		if r.adapter != nil {
			all[r.adapter] = true
			users[r.adapter]++
		}
	}
	for p := range all {
		seen[p.place]++
		if users[p] != p.users || p.removed && p.users == 0 {
			return fmt.Errorf("adapter %s in place %d: %d users, counted %d", p.Name, p.place, users[p], p.users)
		}
	}
	for place, n := range seen[1:] {
		if n != 1 {
			return fmt.Errorf("place %d for adapters is held %d times", place+1, n)
		}
	}
	return nil
}
