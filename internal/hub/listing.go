package hub

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"fmt"
	"hash"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of a listing.
const (
	maxName    = 512     // bytes of a path
	maxEntries = 100_000 // files and folders
	minPage    = 100     // entries that a page counts as, so that empty ones end
	maxFile    = 1 << 42 // bytes of a file
)

// extensions are those of the files that are downloaded. Code and pickled weights are not.
var extensions = []string{".safetensors", ".json", ".model", ".txt", ".jinja", ".gguf", ".tiktoken"}

// File is a file of a model's commit.
type File struct {
	Path string // slash-separated, relative to the snapshot
	Size int64  // bytes
	Hash string // the name of its blob: SHA-256 of a file in LFS, else git's SHA-1
}

// digest returns a hash whose sum over the content is f.Hash.
func (f *File) digest() hash.Hash {
	if len(f.Hash) == sha256.Size*2 {
		return sha256.New()
	}
	h := sha1.New()
	fmt.Fprintf(h, "blob %d\x00", f.Size)
	return h
}

var (
	sha1Text   = commitHash
	sha256Text = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// entry is a file or a folder of the hub's listing.
type entry struct {
	Type string `json:"type"`
	OID  string `json:"oid"`
	Size int64  `json:"size"`
	Path string `json:"path"`
	LFS  *struct {
		OID  string `json:"oid"`
		Size int64  `json:"size"`
	} `json:"lfs"`
}

// resolve returns the commit of a revision.
func (c *client) resolve(ctx context.Context, name, revision string) (commit string, err error) {
	if commitHash.MatchString(revision) {
		return revision, nil
	}
	var info struct {
		SHA string `json:"sha"`
	}
	org, base, _ := strings.Cut(name, "/")
	if _, err := c.object(ctx, c.at(nil, "api", "models", org, base, "revision", revision), &info); err != nil {
		return "", err
	}
	if !commitHash.MatchString(info.SHA) {
		return "", fmt.Errorf("%s: %.50q is not the hash of a commit; check HF_ENDPOINT", c.endpoint.Host, info.SHA)
	}
	return info.SHA, nil
}

// list returns the files of a commit that are downloaded. A listing with a name that could lead out
// of the snapshot, or with a name that occurs twice, is refused as a whole.
func (c *client) list(ctx context.Context, name, commit string) ([]File, error) {
	org, base, _ := strings.Cut(name, "/")
	query := url.Values{"recursive": {"true"}, "expand": {"false"}}
	l := listing{seen: map[string]bool{}}
	for n := 0; query != nil; {
		var page []entry
		head, err := c.object(ctx, c.at(query, "api", "models", org, base, "tree", commit), &page)
		if err != nil {
			return nil, err
		}
		if n += max(len(page), minPage); n > maxEntries {
			return nil, refuse("the listing has more than %d entries", maxEntries)
		}
		if err := l.add(page); err != nil {
			return nil, err
		}
		query = nextPage(head.Get("Link"))
	}
	return l.files, l.check()
}

// listing is what the pages of a listing contain.
type listing struct {
	seen  map[string]bool // by path: whether it is a folder
	files []File
}

// add adds a page.
func (l *listing) add(page []entry) error {
	for _, e := range page {
		if !validPath(e.Path) {
			return refuse("the listing has the file name %.100q, which is refused", e.Path)
		}
		if _, twice := l.seen[e.Path]; twice {
			return refuse("the listing has the file %.100q twice", e.Path)
		}
		l.seen[e.Path] = e.Type == "directory"
		if e.Type != "file" || !slices.Contains(extensions, path.Ext(e.Path)) {
			continue
		}
		f, err := e.file()
		if err != nil {
			return err
		}
		l.files = append(l.files, f)
	}
	return nil
}

// check returns an error if a path is below that of a file.
func (l *listing) check() error {
	for p := range l.seen {
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			if folder, ok := l.seen[dir]; ok && !folder {
				return refuse("the listing has %.100q below %.100q, which is a file", p, dir)
			}
		}
	}
	return nil
}

// validPath reports whether a name is a relative path of plain elements.
func validPath(name string) bool {
	return fs.ValidPath(name) && name != "." && len(name) <= maxName && utf8.ValidString(name) && !strings.ContainsRune(name, '\\') &&
		!strings.ContainsFunc(name, unicode.IsControl)
}

// file returns the File of a listed file.
func (e *entry) file() (File, error) {
	f := File{Path: e.Path, Size: e.Size, Hash: e.OID}
	valid := sha1Text
	if e.LFS != nil {
		f.Size, f.Hash, valid = e.LFS.Size, strings.TrimPrefix(e.LFS.OID, "sha256:"), sha256Text
	}
	if !valid.MatchString(f.Hash) || f.Size < 0 || f.Size > maxFile {
		return f, refuse("the listing has no usable size and hash of %.100q: %d, %.100q", f.Path, f.Size, f.Hash)
	}
	return f, nil
}

// nextPage returns the query of a Link header's next page. Its host and path are not used, so that
// no listing leads to another server.
func nextPage(link string) url.Values {
	for l := range strings.SplitSeq(link, ",") {
		target, attributes, _ := strings.Cut(strings.TrimSpace(l), ">")
		if u, err := url.Parse(strings.TrimPrefix(target, "<")); err == nil && strings.Contains(attributes, `rel="next"`) {
			return u.Query()
		}
	}
	return nil
}

// choose returns the files that match one of the patterns of path.Match; without patterns, all. A
// pattern without a slash is matched against the last element.
func choose(files []File, patterns []string) ([]File, error) {
	if len(patterns) == 0 {
		return files, nil
	}
	var chosen []File
	for _, f := range files {
		for _, p := range patterns {
			name := f.Path
			if !strings.Contains(p, "/") {
				name = path.Base(name)
			}
			ok, err := path.Match(p, name)
			if err != nil {
				return nil, refuse("--include %q: %w", p, err)
			}
			if ok {
				chosen = append(chosen, f)
				break
			}
		}
	}
	return chosen, nil
}
