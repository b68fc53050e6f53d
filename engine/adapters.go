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

// ErrAdapter says that there is no such adapter: none of that name is loaded, or its
// folder has none.
var ErrAdapter = errors.New("engine: no such adapter")

// ErrAdapterTaken is behind refusals to load one: its files are refused, or the name,
// or every place, is taken.
var ErrAdapterTaken = errors.New("engine: adapter cannot be loaded")

// MaxAdapters bounds the places for adapters of a node, MaxAdapterName a name's
// bytes: all names travel in each heartbeat.
const (
	MaxAdapters    = 128
	MaxAdapterName = 256
)

// Adapter is a loaded one. Requests that name it are computed with it.
type Adapter struct {
	Name   string
	Digest uint64 // equal digests compute equally; never 0
	Rank   int
}

// AdapterDevice puts adapters into places, from 1 on; *model.Model is one. It is
// for the step goroutine.
type AdapterDevice interface {
	LoadAdapter(place int, a *model.Adapter) error
}

// AdapterModule names an adapter's folder.
type AdapterModule struct{ Name, Path string }

// adapters are the engine's places, owned by the step goroutine.
type adapters struct {
	named map[string]*adapterPlace
	free  []int // places, the next one last
}

// adapterPlace is an adapter in its place. Requests that run go on with it when
// its name has been taken away; then the last of them frees the place.
type adapterPlace struct {
	Adapter
	place int
	users int // requests and jobs
	gone  bool
}

func newAdapters(places int) adapters {
	a := adapters{named: map[string]*adapterPlace{}}
	for p := places; p > 0; p-- {
		a.free = append(a.free, p)
	}
	return a
}

// LoadAdapter reads an adapter's folder and gives it a name. Loading what is
// loaded already does nothing; another adapter under a name that is taken is
// refused, unless replace is set: then requests that run keep the old one.
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
		a, err = model.OpenAdapter(folder) // on the caller's goroutine: steps go on
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

// adapterFolder returns the folder that path names. With AdapterRoot a path outside of
// it gets the same fs.ErrNotExist as one that does not exist, so that nobody learns
// which files the node has.
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
	return "", fmt.Errorf("%w: no adapter that can be read is there below --lora-root: %w", model.ErrAdapter, fs.ErrNotExist)
}

// place puts an adapter into a free place.
func (e *Engine) place(name string, a *model.Adapter, replace bool) (Adapter, error) {
	t := &e.adapters
	old := t.named[name]
	switch {
	case old != nil && old.Digest == a.Digest:
		return old.Adapter, nil
	case old != nil && !replace:
		return Adapter{}, fmt.Errorf("%w: %s is the name of another one; unload that first, or load in place", ErrAdapterTaken, name)
	}
	at, idle := 0, old != nil && old.users == 0
	switch {
	case len(t.free) > 0:
		at = t.free[len(t.free)-1]
	case idle:
		at = old.place
	default:
		return Adapter{}, fmt.Errorf("%w: %s: all %d places are taken; unload another one, or start the node with a larger --max-cpu-loras", ErrAdapterTaken, name, e.o.AdapterPlaces)
	}
	if err := e.o.Adapters.LoadAdapter(at, a); err != nil {
		return Adapter{}, fmt.Errorf("%w: %s: %w", ErrAdapterTaken, name, err)
	}
	if old != nil {
		e.unname(old)
	}
	t.free = slices.DeleteFunc(t.free, func(p int) bool { return p == at })
	p := &adapterPlace{Adapter: Adapter{Name: name, Digest: a.Digest, Rank: a.Rank}, place: at}
	t.named[name] = p
	e.publishAdapters()
	return p.Adapter, nil
}

// UnloadAdapter takes a name away. Requests that run go on.
func (e *Engine) UnloadAdapter(name string) (err error) {
	derr := e.do(func() {
		p := e.adapters.named[name]
		if p == nil {
			err = fmt.Errorf("%w: %s is not loaded", ErrAdapter, name)
			return
		}
		e.unname(p)
		e.publishAdapters()
	})
	return cmp.Or(derr, err)
}

// unname takes an adapter's name away; its place is free when nobody uses it.
func (e *Engine) unname(p *adapterPlace) {
	p.gone = true
	delete(e.adapters.named, p.Name)
	if p.users == 0 {
		e.adapters.free = append(e.adapters.free, p.place)
	}
}

// EachAdapter calls f with each that is loaded, by name.
func (e *Engine) EachAdapter(f func(name string, digest uint64, rank int)) {
	for _, a := range *e.loaded.Load() {
		f(a.Name, a.Digest, a.Rank)
	}
}

// CheckAdapter says what Add or AddJob would refuse now.
func (e *Engine) CheckAdapter(name string, digest uint64) error {
	for _, a := range *e.loaded.Load() {
		if a.Name == name {
			return a.means(digest)
		}
	}
	return fmt.Errorf("%w: %s is not loaded on this node", ErrAdapter, name)
}

// means says whether an adapter is the one of a digest; 0 stands for any.
func (a *Adapter) means(digest uint64) error {
	if digest != 0 && digest != a.Digest {
		return fmt.Errorf("%w: %s is %016x on this node, %016x is asked for", ErrAdapter, a.Name, a.Digest, digest)
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

// adapter finds what a request names, before it is added. A digest other than 0
// has to match: KV is only as good as the adapter that computed it.
func (e *Engine) adapter(name string, digest uint64) (*adapterPlace, error) {
	if name == "" {
		return nil, nil
	}
	p := e.adapters.named[name]
	if p == nil {
		return nil, fmt.Errorf("%w: %s is not loaded on this node", ErrAdapter, name)
	}
	return p, p.means(digest)
}

// AdapterUse are the names of adapters, sorted: of requests and jobs that take part in steps, and of those that wait.
type AdapterUse struct{ Running, Waiting []string }

// adapterUse looks at everybody; it is asked for when somebody came, went, ran or gave way.
func (e *Engine) adapterUse() AdapterUse {
	running, waiting := map[string]bool{}, map[string]bool{}
	for _, r := range e.live {
		switch {
		case r.adapter == nil:
		case r.runs:
			running[r.adapter.Name] = true
		default:
			waiting[r.adapter.Name] = true
		}
	}
	return AdapterUse{slices.Sorted(maps.Keys(running)), slices.Sorted(maps.Keys(waiting))}
}

// enter puts a run on the books, with its adapter.
func (e *Engine) enter(id scheduler.RequestID, r *run, p *adapterPlace) {
	if p != nil {
		p.users++
		r.adapter = p
		e.useChanged = true
	}
	e.live[id] = r
}

// takesPart notes whether a run takes part in steps.
func (e *Engine) takesPart(r *run, runs bool) {
	e.useChanged = e.useChanged || r.adapter != nil && r.runs != runs
	r.runs = runs
}

// leave takes a run off the books.
func (e *Engine) leave(id scheduler.RequestID, r *run) {
	delete(e.live, id)
	if e.o.Drafter != nil && r.req != nil {
		e.o.Drafter.Forget(uint64(id))
	}
	p := r.adapter
	if p == nil {
		return
	}
	r.adapter = nil
	e.useChanged = true
	if p.users--; p.users == 0 && p.gone {
		e.adapters.free = append(e.adapters.free, p.place)
	}
}

// span is the place of a run's adapter, for the device; 0: none.
func (r *run) span() int32 {
	if r == nil || r.adapter == nil {
		return 0
	}
	return int32(r.adapter.place)
}

// checkAdapters verifies that each place is free, named or in use, once.
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
		if users[p] != p.users || p.gone && p.users == 0 {
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
