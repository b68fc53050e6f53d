//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// pacedServer is a server whose streams have an event for each value of next, and whose other answers are
// the size of the request's body.
type pacedServer struct {
	*httptest.Server
	next chan string
}

func startPacedServer(t *testing.T) *pacedServer {
	t.Helper()
	p := &pacedServer{next: make(chan string)}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // a client that leaves shows below
		switch {
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		case r.URL.Path == "/health":
		case !bytes.Contains(body, []byte(`"stream":true`)):
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"bytes":%d}`, len(body))
		default:
			for {
				select {
				case event := <-p.next:
					w.Header().Set("Content-Type", "text/event-stream")
					io.WriteString(w, "data: "+event+"\n\n")
					w.(http.Flusher).Flush()
					if event == "[DONE]" {
						return
					}
				case <-r.Context().Done():
					return
				}
			}
		}
	}))
	t.Cleanup(p.Close)
	return p
}

// siteCertificate writes a certificate of llm.example and its key.
func siteCertificate(t *testing.T, dir string) (crt, key, both string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "llm.example"}, DNSNames: []string{"llm.example"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	certText := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyText := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
	crt, key, both = filepath.Join(dir, "site.crt"), filepath.Join(dir, "site.key"), filepath.Join(dir, "site.pem")
	for path, text := range map[string][]byte{crt: certText, key: keyText, both: append(certText, keyText...)} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return crt, key, both
}

// documented returns the configuration of docs/proxies.md in a language, with other texts in place
// of some. Each has to be there.
func documented(t *testing.T, language string, replace ...string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/proxies.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "```"+language+"\n")
	text, _, ended := strings.Cut(text, "```")
	if !found || !ended {
		t.Fatalf("docs/proxies.md has no configuration in %s", language)
	}
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("docs/proxies.md: the configuration in %s lacks %q", language, replace[i])
		}
		text = strings.ReplaceAll(text, replace[i], replace[i+1])
	}
	return text
}

// proxyProgram returns the path of nginx or haproxy.
func proxyProgram(t *testing.T, name string) string {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s, of Debian", name)
	}
	return program
}

// startProxy starts nginx or haproxy at a port of 127.0.0.1 by the configuration of docs/proxies.md, in
// front of gateways at ports. Ports and certificates differ from the page, and for a patience other
// than "" how long the proxy waits for a gateway.
func startProxy(t *testing.T, program string, port int, patience string, gateways ...int) {
	t.Helper()
	dir, name := t.TempDir(), filepath.Base(program)
	crt, key, both := siteCertificate(t, dir)
	if patience == "" {
		patience = "10m"
	}
	var cmd *exec.Cmd
	switch name {
	case "nginx":
		servers := documented(t, "nginx", "    server 127.0.0.1:8000 max_fails=0;", serverLines("    server 127.0.0.1:%[2]d max_fails=0;\n", gateways), "listen 443 ssl", fmt.Sprintf("listen 127.0.0.1:%d ssl", port),
			"/etc/ssl/site.crt", crt, "/etc/ssl/site.key", key, "proxy_read_timeout 10m", "proxy_read_timeout "+patience)
		user := ""
		if os.Geteuid() == 0 {
			user = "user root;\n"
		}
		text := fmt.Sprintf("%sdaemon off;\npid %[2]s/pid;\nerror_log stderr;\nevents {}\nhttp {\naccess_log off;\n"+
			"client_body_temp_path %[2]s/b; proxy_temp_path %[2]s/p; fastcgi_temp_path %[2]s/f; uwsgi_temp_path %[2]s/u; scgi_temp_path %[2]s/s;\n%[3]s}\n", user, dir, servers)
		file := filepath.Join(dir, "nginx.conf")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd = exec.Command(program, "-c", file, "-p", dir, "-e", "stderr")
	case "haproxy":
		text := documented(t, "haproxy", "    server gw1 127.0.0.1:8000 check inter 1s\n", serverLines("    server gw%[1]d 127.0.0.1:%[2]d check inter 1s\n", gateways),
			"bind :443 ssl", fmt.Sprintf("bind 127.0.0.1:%d ssl", port), "/etc/haproxy/site.pem", both, "timeout server 10m", "timeout server "+patience)
		file := filepath.Join(dir, "haproxy.cfg")
		if err := os.WriteFile(file, []byte("global\n    maxconn 100\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd = exec.Command(program, "-db", "-f", file)
	}
	var log output
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", name, log.String())
		}
	})
}

// serverLines returns a line of a configuration for each gateway: its number from 1 on, and its port.
func serverLines(line string, gateways []int) string {
	var b strings.Builder
	for i, port := range gateways {
		fmt.Fprintf(&b, line, i+1, port)
	}
	return b.String()
}

// The configurations of docs/proxies.md pass each event on at once, large bodies, and streams that
// are silent for longer than the proxy waits where --sse-early-head is set. Clients of a proxy do
// not count as programs on the gateway's machine. Ports, certificates and the proxy's patience
// differ from the page.
func TestBinaryProxies(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nginx", "haproxy"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			binary(t)
			program := proxyProgram(t, name)
			port := freePorts(t, 2)
			far := startPacedServer(t)
			daemonOf(t, "gateway", "--port", strconv.Itoa(port), "--upstream", far.URL, "--allowed-hosts", "llm.example", "--sse-early-head", "--sse-keep-alive", "200ms", "--shutdown-timeout", "2")
			startProxy(t, program, port+1, "1s", port)
			client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: "llm.example"}}}
			defer client.CloseIdleConnections()
			ask := func(method, path string, body []byte) (*http.Response, error) {
				req, err := http.NewRequest(method, fmt.Sprintf("https://127.0.0.1:%d%s", port+1, path), bytes.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				req.Host = "llm.example"
				req.Header.Set("Content-Type", "application/json")
				return client.Do(req)
			}
			whole := func(method, path string, body []byte) (int, string) {
				resp, err := ask(method, path, body)
				if err != nil {
					return 0, err.Error()
				}
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				if err != nil {
					return 0, err.Error()
				}
				return resp.StatusCode, string(text)
			}
			(&cluster{t: t}).wait(startBound, "the gateway is ready behind "+name, func() bool {
				status, text := whole("GET", "/readyz", nil)
				return status == 200 && text == "ok\n"
			})
			if status, text := whole("GET", "/debug/nodes", nil); status != 403 {
				t.Errorf("an operator's path: %d %s", status, text)
			}
			large := []byte(`{"model":"m","prompt":"` + strings.Repeat("x", 31<<20) + `"}`)
			if status, text := whole("POST", "/v1/completions", large); status != 200 || text != fmt.Sprintf(`{"bytes":%d}`, len(large)) {
				t.Errorf("a body of 31 MiB: %d %.300s", status, text)
			}
			// The first event comes after three times the proxy's patience. Each next event is sent when
			// the client has the one before.
			go func() { time.Sleep(3 * time.Second); far.next <- "0" }()
			resp, err := ask("POST", "/v1/completions", []byte(`{"model":"m","prompt":"x","stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			comments, events := 0, 0
			lines := bufio.NewScanner(resp.Body)
			for lines.Scan() {
				switch line := lines.Text(); {
				case line == "":
				case line[0] == ':':
					comments++
				case line == "data: [DONE]" && events == 5:
					events++
				case line == fmt.Sprintf("data: %d", events) && events < 5:
					events++
					next := strconv.Itoa(events)
					if events == 5 {
						next = "[DONE]"
					}
					select {
					case far.next <- next:
					case <-time.After(10 * time.Second):
						t.Fatal("the stream does not wait for its next event")
					}
				default:
					t.Fatalf("event %d: %q", events, line)
				}
			}
			if err := lines.Err(); err != nil || resp.StatusCode != 200 || events != 6 || comments < 5 {
				t.Errorf("%s, %d events, %d comments, %v", resp.Status, events, comments, err)
			}
		})
	}
}
