package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// secretAPI is a Kubernetes API with one Secret.
type secretAPI struct {
	data      map[string][]byte
	version   int
	conflicts int // patches that are answered 409
	patches   int
}

func (a *secretAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/api/v1/namespaces/llm/secrets/tandem-certs" {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"message": "secrets \"other\" not found"}`)
		return
	}
	if r.Method == http.MethodPatch {
		var patch secretObject
		err := json.NewDecoder(r.Body).Decode(&patch)
		if a.patches++; err != nil || patch.Metadata.ResourceVersion != strconv.Itoa(a.version) || a.patches <= a.conflicts {
			w.WriteHeader(http.StatusConflict)
			return
		}
		maps.Copy(a.data, patch.Data)
		a.version++
	}
	var o secretObject
	o.Metadata.ResourceVersion, o.Data = strconv.Itoa(a.version), a.data
	_ = json.NewEncoder(w).Encode(o)
}

// A signal ends the work on a Secret with its status.
func TestSecretSignal(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
		<-release
	}))
	defer server.Close()
	defer close(release)
	var errOut bytes.Buffer
	args := []string{"ca", "--kubernetes-api", server.URL, "--kubernetes-secret", "llm/tandem-certs", "node/node"}
	if got := Tools().Main("1", args, nil, io.Discard, &errOut); got != 128+int(syscall.SIGTERM) || errOut.String() != "tandem ca: stopped: terminated\n" {
		t.Errorf("status %d: %s", got, &errOut)
	}
}

// A Secret gets what it lacks, keeps what is valid, and its files are those of a node.
func TestSecretCertificates(t *testing.T) {
	api := &secretAPI{data: map[string][]byte{"other": []byte("kept")}, version: 7, conflicts: 1}
	server := httptest.NewServer(api)
	defer server.Close()
	ca := func(want int, args ...string) (out, errOut string) {
		t.Helper()
		var o, e bytes.Buffer
		args = append([]string{"ca", "--kubernetes-api", server.URL}, args...)
		if got := Tools().Main("1", args, nil, &o, &e); got != want {
			t.Fatalf("%q: status %d, %s", args, got, &e)
		}
		return o.String(), e.String()
	}
	names := []string{"--kubernetes-secret", "llm/tandem-certs", "gateway/gateway", "node/node"}
	if out, _ := ca(0, names...); out != "gateway/gateway\nnode/node\n" || api.patches != 2 {
		t.Errorf("%q after %d patches", out, api.patches)
	}
	want := []string{"ca.crt", "ca.key", "gateway.crt", "gateway.key", "gossip.secret", "node.crt", "node.key", "other"}
	if got := slices.Sorted(maps.Keys(api.data)); !slices.Equal(got, want) {
		t.Fatalf("the Secret has %q, want %q", got, want)
	}
	// The chart shows a pod these keys as the files of a folder.
	dir := t.TempDir()
	for key, file := range map[string]string{"ca.crt": "ca.crt", "gossip.secret": "gossip.secret", "gateway.crt": "node.crt", "gateway.key": "node.key"} {
		if err := os.WriteFile(filepath.Join(dir, file), api.data[key], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if id, err := tlsconf.FolderIdentity(dir); err != nil || id.Role != tlsconf.Gateway || id.Name != "gateway" {
		t.Errorf("%v, %v", id, err)
	}

	before := maps.Clone(api.data)
	if out, errOut := ca(0, append(names, "--within", "1440h")...); out != "" || !strings.Contains(errOut, "valid for more than 1440h") || api.patches != 2 {
		t.Errorf("nothing is due: %q, %q, %d patches", out, errOut, api.patches)
	}
	if out, _ := ca(0, append(names, "node/d1")...); out != "node/d1\n" || !bytes.Equal(before["node.crt"], api.data["node.crt"]) {
		t.Errorf("a further name: %q", out)
	}
	// A certificate of the other role, one that is none, and one that expires are replaced.
	api.data["gateway.crt"], api.data["gateway.key"] = api.data["d1.crt"], api.data["d1.key"]
	api.data["node.crt"] = []byte("none")
	if out, _ := ca(0, names...); out != "gateway/gateway\nnode/node\n" {
		t.Errorf("spoiled ones: %q", out)
	}
	if out, _ := ca(0, append(names, "--within", "9000h")...); out != "gateway/gateway\nnode/node\n" || !bytes.Equal(before["ca.crt"], api.data["ca.crt"]) {
		t.Errorf("they expire: %q", out)
	}

	delete(api.data, "ca.key")
	if _, errOut := ca(1, append(names, "node/d2")...); !strings.Contains(errOut, "secret llm/tandem-certs: reading the authority in ") {
		t.Errorf("an authority without a key: %s", errOut)
	}
	if _, errOut := ca(1, "--kubernetes-secret", "llm/other", "node/a"); !strings.Contains(errOut, `secret llm/other: kubernetes: the API answers 404: secrets "other" not found`) {
		t.Errorf("a missing Secret: %s", errOut)
	}
	for _, bad := range [][]string{{"--kubernetes-secret", "tandem-certs", "node/a"}, {"--kubernetes-secret", "llm/a/b", "node/a"}, {"--kubernetes-secret", "llm/tandem-certs"},
		{"--kubernetes-secret", "llm/tandem-certs", "a"}, {"--kubernetes-secret", "llm/tandem-certs", "node/ca"},
		{"--kubernetes-secret", "llm/tandem-certs", "node/a", "gateway/a"}} {
		ca(2, bad...)
	}
}
