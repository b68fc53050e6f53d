// Package hubtest is a Hugging Face hub for tests: the part of its HTTP protocol that downloads a
// model, with storage of large files on another server.
package hubtest

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Commit is the only commit of the model.
const Commit = "0123456789abcdef0123456789abcdef01234567"

// Hub is the server's state.
type Hub struct {
	Name  string            // of the model, ORG/NAME
	Files map[string][]byte // by path. Safetensors, GGUF and tokenizer.model files are in LFS
	Page  int               // entries of a page of the listing; 0: all

	URL     string // of the hub
	Storage string // of the other server

	mu    sync.Mutex
	asked []Request
	hook  Hook
}

// Hook may answer a request to the hub or, with storage, to the storage. It returns false for the
// usual answer.
type Hook func(w http.ResponseWriter, r *http.Request, storage bool) bool

// SetHook sets the hook of later requests; nil: none. Requests of an earlier pull may still run.
func (h *Hub) SetHook(f Hook) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hook = f
}

// Request is one that a server received.
type Request struct {
	Storage                            bool
	Method, Path, Authorization, Range string
}

// New starts a hub with a model.
func New(t testing.TB, name string, files map[string][]byte) *Hub {
	h := &Hub{Name: name, Files: files}
	hub, storage := httptest.NewServer(h.handler(false)), httptest.NewServer(h.handler(true))
	t.Cleanup(hub.Close)
	t.Cleanup(storage.Close)
	h.URL, h.Storage = hub.URL, storage.URL
	return h
}

// Memory returns a temporary folder, in memory where the system has such a file system, because
// pulls sync every file.
func Memory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tandem-hub-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Folder returns the files of a folder.
func Folder(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if n.Type().IsRegular() {
			if files[n.Name()], err = os.ReadFile(filepath.Join(dir, n.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return files
}

// Requests returns what was asked since the last call.
func (h *Hub) Requests() []Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	asked := h.asked
	h.asked = nil
	return asked
}

// LFS reports whether a file is in LFS.
func LFS(name string) bool {
	return slices.Contains([]string{".safetensors", ".gguf", ".model"}, path.Ext(name))
}

// Hash returns the name of the blob of a file.
func Hash(name string, text []byte) string {
	if LFS(name) {
		sum := sha256.Sum256(text)
		return hex.EncodeToString(sum[:])
	}
	return gitHash(text)
}

func gitHash(text []byte) string {
	sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(text), text))
	return hex.EncodeToString(sum[:])
}

// Entry returns a file's entry of the listing.
func Entry(name string, text []byte) map[string]any {
	e := map[string]any{"type": "file", "oid": gitHash(text), "size": len(text), "path": name}
	if LFS(name) {
		e["oid"] = gitHash([]byte("pointer of " + name))
		e["lfs"] = map[string]any{"oid": Hash(name, text), "size": len(text), "pointerSize": 134}
	}
	return e
}

func (h *Hub) handler(storage bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		h.asked = append(h.asked, Request{storage, r.Method, r.URL.Path, r.Header.Get("Authorization"), r.Header.Get("Range")})
		hook := h.hook
		h.mu.Unlock()
		if hook != nil && hook(w, r, storage) {
			return
		}
		file, ok := strings.CutPrefix(r.URL.Path, "/"+h.Name+"/resolve/"+Commit+"/")
		switch {
		case storage:
			if file, ok = strings.CutPrefix(r.URL.Path, "/blob/"); ok {
				h.send(w, r, file)
				return
			}
		case ok:
			h.resolve(w, r, file)
			return
		case strings.HasPrefix(r.URL.Path, "/"+h.Name+"/resolve/main/"):
			h.resolve(w, r, path.Base(r.URL.Path))
			return
		case r.URL.Path == "/api/models/"+h.Name || strings.HasPrefix(r.URL.Path, "/api/models/"+h.Name+"/revision/"):
			revision := path.Base(r.URL.Path)
			if !slices.Contains([]string{"main", path.Base(h.Name), "v1", "1", Commit}, revision) {
				Refuse(w, 404, "RevisionNotFound")
				return
			}
			siblings := []any{}
			for _, name := range slices.Sorted(maps.Keys(h.Files)) {
				siblings = append(siblings, map[string]any{"rfilename": name})
			}
			answer(w, map[string]any{"_id": "1", "id": h.Name, "sha": Commit, "private": false, "gated": false, "tags": []any{}, "siblings": siblings})
			return
		case r.URL.Path == "/api/models/"+h.Name+"/tree/"+Commit:
			h.tree(w, r)
			return
		}
		Refuse(w, 404, "RepoNotFound")
	})
}

// tree answers with the listing.
func (h *Hub) tree(w http.ResponseWriter, r *http.Request) {
	names := slices.Sorted(maps.Keys(h.Files))
	from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
	end := len(names)
	if h.Page > 0 && from+h.Page < end {
		end = from + h.Page
		q := r.URL.Query()
		q.Set("cursor", strconv.Itoa(end))
		next := url.URL{Scheme: "https", Host: "elsewhere.example", Path: r.URL.Path, RawQuery: q.Encode()}
		if from%2 == 0 {
			next = url.URL{Scheme: "http", Host: r.Host, Path: r.URL.Path, RawQuery: q.Encode()}
		}
		w.Header().Set("Link", "<"+next.String()+`>; rel="next"`)
	}
	page := []any{}
	for _, name := range names[from:end] {
		page = append(page, Entry(name, h.Files[name]))
	}
	answer(w, page)
}

// resolve answers with a file, or with its place in the storage.
func (h *Hub) resolve(w http.ResponseWriter, r *http.Request, name string) {
	text, ok := h.Files[name]
	if !ok {
		Refuse(w, 404, "EntryNotFound")
		return
	}
	w.Header().Set("X-Repo-Commit", Commit)
	w.Header().Set("ETag", `"`+Hash(name, text)+`"`)
	if LFS(name) {
		w.Header().Set("X-Linked-Etag", `"`+Hash(name, text)+`"`)
		w.Header().Set("X-Linked-Size", strconv.Itoa(len(text)))
		http.Redirect(w, r, h.Storage+"/blob/"+name+"?signature=secret", http.StatusFound)
		return
	}
	h.send(w, r, name)
}

// send answers with a file, or with the range that was asked for.
func (h *Hub) send(w http.ResponseWriter, r *http.Request, name string) {
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(h.Files[name]))
}

// Refuse answers with a status and the hub's code of an error.
func Refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("X-Error-Code", code)
	w.Header().Set("X-Error-Message", code)
	w.WriteHeader(status)
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
