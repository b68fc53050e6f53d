package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// withGateway is the table of tools and a gateway that only has flags.
func withGateway() Table {
	return append(Table{New("gateway", "[flags]", "A gateway.", "tandem gateway", func(v *Invocation) error {
		var port int
		v.PortVar(&port, "port", 8000, "clients")
		v.StringSlice("api-key", nil, "keys")
		v.String("upstream-api-key", "", "a key")
		v.Secret("api-key", "upstream-api-key")
		v.String("api-key-file", "", "keys")
		v.String("nats-url", "", "a URL")
		v.StringSlice("upstream", nil, "URLs")
		v.Int("max-n", 1, "a number")
		v.Int("max-logprobs", 1, "a number")
		_, err := v.Parse(0)
		return err
	})}, Tools()...)
}

func diagnose(t *testing.T, env []string, args ...string) (status int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	status = withGateway().Main("1.2.3", append([]string{"doctor", "--role", "gateway"}, args...), env, &o, &e)
	return status, o.String(), e.String()
}

// unpack returns the files of a bundle.
func unpack(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(b)
	}
}

// A bundle has settings, results, versions and metrics, and none of the secrets that are planted in
// the flags, the environment, files and what the gateway answers.
func TestBundleHasNoSecrets(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	keys := write("keys", "PLANTED-file-key name=a\nPLANTED-other-key name=b\n")
	conf := write("gw.yaml", "api-key: [PLANTED-yaml-key]\nport: 0\napi-key-file: "+keys+"\nnats-url: nats://user:PLANTED-nats@nats.example:4222\nupstream: [\"http://u:PLANTED-url@host:1\"]\nmax-n: 3\n")
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/debug/nodes":
			io.WriteString(w, `{"version":"1","ready":true,"nodes":[]}`)
		default:
			io.WriteString(w, "metric_of_gateway 1\n# Bearer PLANTED-bearer, PLANTED-file-key, PLANTED-env-token PLANTED-flag-key\n-----BEGIN PRIVATE KEY-----\nPLANTEDpem\n-----END PRIVATE KEY-----\nhttp://a:PLANTED-metric@b/ hf_PLANTEDPLANTED\n")
		}
	}))
	defer gateway.Close()
	bundle := filepath.Join(dir, "report.tar.gz")
	env := []string{"HF_TOKEN=PLANTED-env-token", "TANDEM_UPSTREAM_API_KEY=PLANTED-upstream", "TANDEM_MAX_LOGPROBS=7"}
	status, out, errOut := diagnose(t, env, "--settings", conf, "--url", gateway.URL, "--api-key", "PLANTED-flag-key", "--bundle", bundle)
	if status != 0 {
		t.Fatalf("status %d, %s%s", status, out, errOut)
	}
	files := unpack(t, bundle)
	for name, text := range files {
		if strings.Contains(text, "PLANTED") {
			t.Errorf("%s has a secret:\n%s", name, text)
		}
	}
	if strings.Contains(out+errOut, "PLANTED") {
		t.Errorf("the output has a secret:\n%s%s", out, errOut)
	}
	for name, want := range map[string]string{
		"tandem-report/config/gateway.yaml": "max-n: 3", "tandem-report/doctor.txt": "0 problems", "tandem-report/doctor.json": `"problems":0`,
		"tandem-report/version.json": `"version":"1.2.3"`, "tandem-report/metrics.txt": "metric_of_gateway 1", "tandem-report/nodes.json": `"ready":true`,
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %q: %q", name, want, files[name])
		}
	}
	if !strings.Contains(files["tandem-report/config/gateway.yaml"], "max-logprobs: 7") {
		t.Error("the settings lack the environment's")
	}
	if info, err := os.Stat(bundle); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// A port that another program has is a problem for a role that was named, and the status is 1.
func TestDoctorFindsTakenPorts(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	status, out, errOut := diagnose(t, []string{"TANDEM_PORT=" + strconv.Itoa(port)}, "--json")
	var report struct {
		Problems int
		Checks   []struct{ Area, Name, State, Figure, Do string }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	i := slices.IndexFunc(report.Checks, func(c struct{ Area, Name, State, Figure, Do string }) bool {
		return c.Name == "gateway --port "+strconv.Itoa(port)
	})
	if status != 1 || report.Problems != 1 || i < 0 || report.Checks[i].State != "problem" || !strings.Contains(report.Checks[i].Figure, "(pid "+strconv.Itoa(os.Getpid())+")") {
		t.Errorf("status %d, %s%s", status, out, errOut)
	}
	if !strings.Contains(errOut, "1 of the checks found problems") {
		t.Errorf("%q", errOut)
	}
	env := []string{"TANDEM_PORT=" + strconv.Itoa(port)}
	if status, out, _ := diagnose(t, env, "--host", "127.0.0.2"); status != 0 || !strings.Contains(out, "free on 127.0.0.2") {
		t.Errorf("--host of another address: status %d, %s", status, out)
	}
}

// A signal ends the checks with its status, and the cut ones are not reported.
func TestDoctorSignal(t *testing.T) {
	var once sync.Once
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		once.Do(func() { _ = syscall.Kill(os.Getpid(), syscall.SIGINT) })
		<-r.Context().Done()
	}))
	defer server.Close()
	status, out, errOut := diagnose(t, []string{"TANDEM_PORT=0"}, "--url", server.URL)
	if status != 130 || out != "" || errOut != "tandem doctor: stopped: interrupt\n" {
		t.Errorf("status %d: %q %q", status, out, errOut)
	}
}

func TestDoctorRefuses(t *testing.T) {
	gateway := filepath.Join(t.TempDir(), "gateway.yaml")
	if err := os.WriteFile(gateway, []byte("port: 1\nno-flag: 2\nno-flag-2: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--role serve --settings " + gateway: `"no-flag"; ` + gateway + `:3: no flag is called "no-flag-2"; --role names the roles`,
		"--url ftp://gw:8000":                "write http://HOST:PORT",
		"--role driver":                      "want gateway, prefill, decode or serve",
		"--settings /none.yaml":              "none.yaml",
		"--bundle /none/x.tgz":               "--bundle",
	} {
		if status, _, errOut := diagnose(t, []string{"TANDEM_PORT=0"}, strings.Fields(args)...); status == 0 || !strings.Contains(errOut, want) {
			t.Errorf("%s: status %d, %q", args, status, errOut)
		}
	}
}
