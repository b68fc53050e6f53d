package kubernetes

import (
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A client trusts the authorities of its file, sends the token that the file has at that time, and
// returns the API's message.
func TestClient(t *testing.T) {
	var got []string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, r.Method+" "+r.URL.String()+" "+r.Header.Get("Authorization")+" "+r.Header.Get("Content-Type")+" "+string(body))
		if r.URL.Path == "/no" {
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, `{"message": "you may not"}`)
		}
	}))
	defer server.Close()
	dir := t.TempDir()
	token := write(t, dir, "token", "one\n")
	ca := write(t, dir, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	c, err := New(Options{API: server.URL + "/", TokenFile: token, CAFile: ca})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, err := c.Get(t.Context(), "/yes", url.Values{"a": {"b"}})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	write(t, dir, "token", "two")
	if err := c.MergePatch(t.Context(), "/yes", []byte(`{}`)); err != nil {
		t.Fatal(err)
	}
	var status *StatusError
	if _, err := c.Get(t.Context(), "/no", nil); !errors.As(err, &status) || status.Code != 403 || err.Error() != "kubernetes: the API answers 403: you may not" {
		t.Errorf("%v", err)
	}
	want := "GET /yes?a=b Bearer one  \nPATCH /yes Bearer two application/merge-patch+json {}\nGET /no Bearer two  "
	if text := strings.Join(got, "\n"); text != want {
		t.Errorf("requests:\n%s\nwant:\n%s", text, want)
	}
}

// A redirect of a patch is an error: net/http would send a GET, which succeeds.
func TestRedirect(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/old":
			w.Header().Set("Location", "/new")
			w.WriteHeader(http.StatusMovedPermanently)
		case "/round":
			http.Redirect(w, r, "/round", http.StatusFound)
		}
	}))
	defer server.Close()
	c, err := New(Options{API: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, err := c.Get(t.Context(), "/old", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if err := c.MergePatch(t.Context(), "/old", []byte(`{}`)); err == nil || err.Error() != "kubernetes: the API answers 301: it redirects to /new" {
		t.Errorf("a patch: %v", err)
	}
	if _, err := c.Get(t.Context(), "/round", nil); err == nil || !strings.Contains(err.Error(), "answers 302: it redirects to /round") {
		t.Errorf("a circle: %v", err)
	}
}

// A client without an API is an error, and so are files that cannot be used.
func TestBadOptions(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := New(Options{}); !errors.Is(err, ErrNoCluster) {
		t.Errorf("%v", err)
	}
	dir := t.TempDir()
	if _, err := New(Options{API: "https://a", CAFile: write(t, dir, "none", "text")}); err == nil || !strings.Contains(err.Error(), "no certificate in PEM") {
		t.Errorf("%v", err)
	}
	if _, err := New(Options{API: "https://a", CAFile: filepath.Join(dir, "missing")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	c, err := New(Options{API: "http://127.0.0.1:1", TokenFile: filepath.Join(dir, "missing")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(t.Context(), "/", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
