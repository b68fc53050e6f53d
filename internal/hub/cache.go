// Package hub downloads models from a Hugging Face hub into the cache that Hugging Face's tools
// share, and lists and removes what that cache holds.
//
// A pull resolves a revision to a commit, lists the commit's files, and downloads those that the
// cache lacks, several at once, each to blobs/HASH.incomplete under huggingface_hub's lock for that
// blob. A later pull continues such a file. The links of the snapshot are made after the last
// blob, config.json's at the end, and then the ref of the revision.
//
// Invariant: a file gets its name in blobs only after its size and hash equal those of the hub's
// listing. The token leaves the process only to the hub's own origin, over TLS or to loopback.
//
// The package does not read models, and nothing in it runs for a request.
package hub

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ErrModel is wrapped by errors that name a model, a revision or a file that does not exist or that
// is refused.
var ErrModel = errors.New("hub: no such model")

// refusal is an error that is ErrModel without its text.
type refusal struct{ error }

// Is implements errors.Is.
func (r refusal) Is(target error) bool { return target == ErrModel }

// Unwrap returns the error.
func (r refusal) Unwrap() error { return r.error }

// refuse returns a refusal with a text of fmt.Errorf.
func refuse(format string, args ...any) error { return refusal{fmt.Errorf(format, args...)} }

// maxIndex bounds a *.safetensors.index.json, in bytes.
const maxIndex = 64 << 20

// DefaultRevision is the branch that names without a revision refer to.
const DefaultRevision = "main"

var (
	// repository matches a model's name on a hub. Some of the oldest have no ORG/.
	repository = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*$`)

	// address matches a model's address on the Hugging Face hub.
	address = regexp.MustCompile(`^(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)([^/]+/[^/?#]+)`)

	// commitHash matches the full hash of a commit.
	commitHash = regexp.MustCompile(`^[0-9a-f]{40}$`)
)

// Name returns the name of a model that is written as ORG/NAME, or as its address on the Hugging
// Face hub, and reports whether the result can be a model's name.
func Name(text string) (name string, ok bool) {
	if at := address.FindStringSubmatch(text); at != nil {
		text = at[1]
	}
	return text, repository.MatchString(text)
}

// SplitRevision splits ORG/NAME:REVISION. An absent revision is "".
func SplitRevision(text string) (name, revision string, err error) {
	text, ok := Name(text)
	if !ok {
		text, revision, _ = strings.Cut(text, ":")
	}
	if revision != "" && !validPath(revision) {
		return "", "", refuse("%q is not the name of a branch, tag or commit", revision)
	}
	name, _ = Name(text)
	return name, revision, checkName(name)
}

// checkName returns an error unless a hub may have a model of that name, whose folder in a cache no
// other model has.
func checkName(name string) error {
	if !repository.MatchString(name) || !strings.Contains(name, "/") || strings.Contains(name, "--") || strings.Contains(name, "..") || len(name) > maxName {
		return refuse("%.100q, want ORG/NAME, such as Qwen/Qwen2.5-0.5B-Instruct", name)
	}
	return nil
}

// Cache is a folder in the layout of huggingface_hub.
type Cache struct{ Dir string }

// DefaultCache returns the cache that Hugging Face's tools use in this environment.
func DefaultCache(environ []string) (Cache, error) {
	for _, at := range []struct{ variable, below string }{
		{"HF_HUB_CACHE", ""}, {"HUGGINGFACE_HUB_CACHE", ""}, {"HF_HOME", "hub"}, {"XDG_CACHE_HOME", "huggingface/hub"}, {"HOME", ".cache/huggingface/hub"},
	} {
		if dir := getenv(environ, at.variable); dir != "" {
			if dir == "~" || strings.HasPrefix(dir, "~/") {
				dir = filepath.Join(getenv(environ, "HOME"), dir[1:])
			}
			return Cache{filepath.Join(dir, at.below)}, nil
		}
	}
	return Cache{}, refuse("no home folder to look for the Hugging Face cache in; set HF_HUB_CACHE, or give the model's folder")
}

// getenv returns the last value of a variable.
func getenv(environ []string, name string) (value string) {
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok && k == name {
			value = v
		}
	}
	return value
}

// folder is the name of a model's folder in a cache, and of the folder of its locks.
func folder(name string) string { return "models--" + strings.ReplaceAll(name, "/", "--") }

// Folder returns the path of a model's folder.
func (c Cache) Folder(name string) string { return filepath.Join(c.Dir, folder(name)) }

// Find returns the folder of a model's revision: a branch or tag is a file below refs that
// contains the commit. Without a revision and a ref main, a single snapshot is used. The error of a
// model that the cache lacks wraps fs.ErrNotExist.
func (c Cache) Find(name, revision string) (string, error) {
	ref := cmp.Or(revision, DefaultRevision)
	if !filepath.IsLocal(ref) {
		return "", refuse("%s: --revision %q is not the name of a branch, tag or commit", name, revision)
	}
	repo := c.Folder(name)
	if _, err := os.Stat(repo); err != nil {
		return "", refuse("%w", err)
	}
	commit := ref
	if text, err := os.ReadFile(filepath.Join(repo, "refs", ref)); err == nil {
		commit = strings.TrimSpace(string(text))
	}
	dir := filepath.Join(repo, "snapshots", commit)
	if info, err := os.Stat(dir); filepath.IsLocal(commit) && err == nil && info.IsDir() {
		return dir, nil
	}
	have, err := entries(filepath.Join(repo, "snapshots"))
	if err != nil {
		return "", refuse("%s: %w", name, err)
	}
	if revision == "" && len(have) == 1 {
		return filepath.Join(repo, "snapshots", have[0]), nil
	}
	if len(have) == 0 && revision == "" && filepath.IsLocal(commit) {
		return "", refuse("%s is not whole in the Hugging Face cache %s: `tandem pull %s` downloads the rest", name, c.Dir, name)
	}
	return "", refuse("%s: %s has no revision %q; it has the commits %q: choose one by --revision, or download again", name, repo, ref, have)
}

// entries returns the names in a folder. A folder that does not exist has none.
func entries(dir string) (names []string, err error) {
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, nil
}

// Snapshot is one commit of a model in a cache.
type Snapshot struct {
	Name    string   `json:"name"`
	Commit  string   `json:"commit"` // "": there are only blobs, as after an interrupted pull
	Refs    []string `json:"refs"`   // branches and tags that refer to it
	Dir     string   `json:"dir"`
	Size    int64    `json:"size"`    // bytes of its files; without a commit, of all blobs
	Missing []string `json:"missing"` // files without which the model cannot be loaded

	// GGUF has the files of a snapshot without safetensors, each of which is a model.
	GGUF []string `json:"-"`

	blobs []string // that its files link to
}

// Complete reports whether no file of the snapshot is missing.
func (s *Snapshot) Complete() bool { return len(s.Missing) == 0 }

// Complete reports whether a snapshot's folder has all files without which the model cannot be
// loaded.
func (c Cache) Complete(dir string) bool {
	s := Snapshot{Dir: dir}
	return s.read() == nil && s.Complete()
}

// List returns the snapshots in the cache, sorted by name and commit. It reads no file but refs and
// indexes of weights. Folders of other kinds are left out.
func (c Cache) List() (list []Snapshot, err error) {
	names, err := entries(c.Dir)
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		name, ok := strings.CutPrefix(n, "models--")
		if name = strings.ReplaceAll(name, "--", "/"); !ok || !repository.MatchString(name) {
			continue
		}
		of, err := c.snapshots(name)
		if err != nil {
			return nil, err
		}
		list = append(list, of...)
	}
	return list, nil
}

// snapshots returns the snapshots of a model: one without a commit if there are only blobs.
func (c Cache) snapshots(name string) (list []Snapshot, err error) {
	repo := c.Folder(name)
	commits, err := entries(filepath.Join(repo, "snapshots"))
	if err != nil {
		return nil, err
	}
	refs := map[string][]string{}
	if err := walk(filepath.Join(repo, "refs"), func(ref, path string) {
		if text, err := regular.ReadFile(path, maxName); err == nil {
			commit := strings.TrimSpace(string(text))
			refs[commit] = append(refs[commit], ref)
		}
	}); err != nil {
		return nil, err
	}
	for _, commit := range commits {
		s := Snapshot{Name: name, Commit: commit, Refs: refs[commit], Dir: filepath.Join(repo, "snapshots", commit)}
		if err := s.read(); err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	if len(commits) == 0 {
		s := Snapshot{Name: name, Dir: repo, Missing: []string{"config.json"}}
		err := walk(filepath.Join(repo, "blobs"), func(_, path string) {
			if info, err := os.Stat(path); err == nil {
				s.Size += info.Size()
			}
		})
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

// walk calls f for every file below a folder, with its name relative to it. A folder that does not
// exist has none.
func walk(dir string, f func(name, path string)) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			name, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			f(filepath.ToSlash(name), path)
		}
		return nil
	})
}

// read sets the size, the blobs and the missing files of a snapshot.
func (s *Snapshot) read() error {
	has := map[string]bool{}
	safetensors := false
	err := walk(s.Dir, func(name, file string) {
		info, err := os.Stat(file)
		if err != nil {
			s.Missing = append(s.Missing, name) // a link whose blob is gone
			return
		}
		has[name] = true
		top := path.Dir(name) == "."
		safetensors = safetensors || top && path.Ext(name) == ".safetensors"
		if top && path.Ext(name) == ".gguf" {
			s.GGUF = append(s.GGUF, name)
		}
		blob := file
		if to, err := os.Readlink(file); err == nil {
			if blob = to; !filepath.IsAbs(to) {
				blob = filepath.Join(filepath.Dir(file), to)
			}
		}
		if !slices.Contains(s.blobs, blob) {
			s.blobs, s.Size = append(s.blobs, blob), s.Size+info.Size()
		}
	})
	if err != nil {
		return err
	}
	for _, shard := range shards(filepath.Join(s.Dir, "model.safetensors.index.json")) {
		if !has[shard] {
			s.Missing = append(s.Missing, shard)
		}
	}
	gguf := len(s.GGUF) > 0
	if !gguf && !has["config.json"] {
		s.Missing = append(s.Missing, "config.json")
	}
	if safetensors {
		s.GGUF = nil
	} else if !gguf {
		s.Missing = append(s.Missing, "model.safetensors")
	}
	slices.Sort(s.Missing)
	s.Missing = slices.Compact(s.Missing)
	return nil
}

// shards returns the files that an index of weights names; none of a file that is no index.
func shards(file string) (names []string) {
	text, err := regular.ReadFile(file, maxIndex)
	var index struct {
		Map map[string]string `json:"weight_map"`
	}
	if err != nil || json.Unmarshal(text, &index) != nil {
		return nil
	}
	for _, name := range index.Map {
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Removal is what Remove deletes.
type Removal struct {
	Snapshots []Snapshot
	Bytes     int64 // of the blobs that only these snapshots use

	cache Cache
	name  string
	all   bool // no other snapshot of the model remains
	blobs []string
}

// PlanRemoval returns what removing a revision of a model deletes, or of all its revisions if
// revision is "". Blobs that another revision uses stay.
func (c Cache) PlanRemoval(name, revision string) (*Removal, error) {
	if _, err := os.Stat(c.Folder(name)); err != nil {
		return nil, refuse("the Hugging Face cache %s does not have %s", c.Dir, name)
	}
	list, err := c.snapshots(name)
	if err != nil {
		return nil, err
	}
	r := &Removal{cache: c, name: name, all: true}
	used := map[string]bool{}
	for _, s := range list {
		if revision == "" || s.Commit == revision || slices.Contains(s.Refs, revision) {
			r.Snapshots = append(r.Snapshots, s)
			continue
		}
		r.all = false
		for _, b := range s.blobs {
			used[b] = true
		}
	}
	if len(r.Snapshots) == 0 {
		return nil, refuse("the Hugging Face cache %s has no revision %q of %s; `tandem models` lists them", c.Dir, revision, name)
	}
	count := func(blob string) {
		if info, err := os.Stat(blob); err == nil && !used[blob] {
			used[blob] = true
			r.blobs, r.Bytes = append(r.blobs, blob), r.Bytes+info.Size()
		}
	}
	for _, s := range r.Snapshots {
		for _, b := range s.blobs {
			count(b)
		}
	}
	if r.all { // partial files, too
		return r, walk(filepath.Join(c.Folder(name), "blobs"), func(_, path string) { count(path) })
	}
	return r, nil
}

// Run deletes. It deletes nothing while a pull downloads a file of the model. Refs and links go
// before blobs, so that no snapshot is left without its files.
func (r *Removal) Run() error {
	locks := filepath.Join(r.cache.Dir, ".locks", folder(r.name))
	names, err := entries(locks)
	if err != nil {
		return err
	}
	for _, n := range names {
		unlock, err := tryLock(filepath.Join(locks, n))
		if err != nil {
			return fmt.Errorf("%s is not removed: %w", r.name, err)
		}
		defer unlock()
	}
	repo := r.cache.Folder(r.name)
	root, err := os.OpenRoot(repo)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, s := range r.Snapshots {
		for _, ref := range s.Refs {
			err = errors.Join(err, root.Remove(path.Join("refs", ref)))
		}
		if s.Commit != "" {
			err = errors.Join(err, root.RemoveAll(path.Join("snapshots", s.Commit)))
		}
	}
	if err != nil {
		return err
	}
	for _, blob := range r.blobs {
		// A file in the snapshot itself is gone, and one outside of the folder is not the model's.
		if name, err := filepath.Rel(repo, blob); err == nil && filepath.IsLocal(name) {
			if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	if !r.all {
		return nil
	}
	for _, name := range []string{"refs", "snapshots", "trees", "blobs"} {
		if err := root.RemoveAll(name); err != nil {
			return err
		}
	}
	return os.RemoveAll(repo)
}
