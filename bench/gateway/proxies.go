package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// apiKey is the client's API key. Only Tandem checks it.
const apiKey = "sk-bench-0123456789abcdef"

// startTimeout is the longest time until a proxy answers.
const startTimeout = 60 * time.Second

// backends is the number of backends of every proxy.
const backends = 2

// proxy is a server that gets requests: a proxy, or a backend.
type proxy struct {
	name     string
	addr     string
	tls      *tls.Config // of its clients; nil: plain TCP
	children []*child    // whose CPU time and memory count
}

// peer has the command and the files of a proxy. All other settings are the proxy's defaults.
type peer struct {
	name    string
	binary  func(*options) string
	version []string // arguments that print its version
	files   func(w *place) map[string]string
	args    func(w *place) []string
}

// place is where a peer runs.
type place struct {
	dir         string
	port, extra int      // for clients, and for the peer's own use
	urls        []string // of the backends
	certs       string   // folder of tlsconf with the certificate of 127.0.0.1; empty: nothing uses TLS
	clients     bool     // clients use TLS; else, with certs, backends do
}

func (w *place) cert() string { return filepath.Join(w.certs, tlsconf.NodeCertFile) }
func (w *place) key() string  { return filepath.Join(w.certs, tlsconf.NodeKeyFile) }
func (w *place) ca() string   { return filepath.Join(w.certs, tlsconf.CACertFile) }

var peers = []peer{
	{
		name: "tandem", binary: func(o *options) string { return o.binary }, version: []string{"version"},
		files: func(*place) map[string]string {
			return map[string]string{"keys": apiKey + " name=bench\n"}
		},
		args: func(w *place) []string {
			a := []string{"gateway", "--port", strconv.Itoa(w.port), "--api-key-file", filepath.Join(w.dir, "keys"), "--log-level", "warning", "--policy", "prefix"}
			for _, u := range w.urls {
				a = append(a, "--upstream", u)
			}
			switch {
			case w.certs == "":
			case w.clients:
				a = append(a, "--ssl-certfile", w.cert(), "--ssl-keyfile", w.key())
			default:
				a = append(a, "--upstream-ca-file", w.ca())
			}
			return a
		},
	},
	{
		name: "nginx", binary: func(o *options) string { return o.nginx }, version: []string{"-v"}, files: nginxFiles,
		args: func(w *place) []string {
			return []string{"-c", filepath.Join(w.dir, "nginx.conf"), "-p", w.dir, "-e", filepath.Join(w.dir, "error.log")}
		},
	},
	{
		name: "haproxy", binary: func(o *options) string { return o.haproxy }, version: []string{"-v"}, files: haproxyFiles,
		args: func(w *place) []string {
			return []string{"-db", "-f", filepath.Join(w.dir, "haproxy.cfg")}
		},
	},
	router("vllm-router consistent_hash", "consistent_hash", func(o *options) string { return o.vllm }),
	router("vllm-router cache_aware", "cache_aware", func(o *options) string { return o.vllm }),
	router("smg prefix_hash", "prefix_hash", func(o *options) string { return o.smg }),
	router("smg cache_aware", "cache_aware", func(o *options) string { return o.smg }),
}

func names() (all []string) {
	for _, p := range peers {
		all = append(all, p.name)
	}
	return all
}

// router returns vllm-router or smg, which both come from SGLang's router and have the same flags.
func router(name, policy string, binary func(*options) string) peer {
	return peer{name: name, binary: binary, args: func(w *place) []string {
		a := []string{"--host", "127.0.0.1", "--port", strconv.Itoa(w.port), "--policy", policy, "--log-level", "warn", "--prometheus-port", strconv.Itoa(w.extra), "--worker-urls"}
		if strings.HasPrefix(name, "smg") {
			a = append([]string{"launch"}, a...)
		} else {
			a[slices.Index(a, "warn")] = "warning"
		}
		return append(a, w.urls...)
	}}
}

// nginxFiles returns a configuration that passes answers on as they come, keeps connections, and
// keeps bodies of the sizes that are measured in memory.
func nginxFiles(w *place) map[string]string {
	var servers strings.Builder
	for _, u := range w.urls {
		_, at, _ := strings.Cut(u, "://")
		fmt.Fprintf(&servers, "    server %s;\n", at)
	}
	listen, upstream, secure := "", "http://mock", ""
	switch {
	case w.certs == "":
	case w.clients:
		listen = " ssl"
		secure = fmt.Sprintf("    ssl_certificate %s;\n    ssl_certificate_key %s;\n", w.cert(), w.key())
	default:
		upstream = "https://mock"
		secure = fmt.Sprintf("    proxy_ssl_trusted_certificate %s;\n    proxy_ssl_verify on;\n    proxy_ssl_name %s;\n    proxy_ssl_protocols TLSv1.2 TLSv1.3;\n", w.ca(), tlsconf.NodeDNSName)
	}
	user := ""
	if os.Geteuid() == 0 {
		user = "user root;\n"
	}
	return map[string]string{"nginx.conf": fmt.Sprintf(`%sdaemon off;
worker_processes 2;
pid %[2]s/nginx.pid;
error_log %[2]s/error.log warn;
events { worker_connections 16384; }
http {
  access_log off;
  keepalive_requests 1000000000;
  client_max_body_size 64m;
  client_body_buffer_size 256k;
  client_body_temp_path %[2]s/body; proxy_temp_path %[2]s/proxy; fastcgi_temp_path %[2]s/fastcgi; uwsgi_temp_path %[2]s/uwsgi; scgi_temp_path %[2]s/scgi;
  upstream mock {
%[3]s    keepalive 1024;
    keepalive_requests 1000000000;
  }
  server {
    listen 127.0.0.1:%[4]d%[5]s;
%[6]s    location / {
      proxy_pass %[7]s;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }
  }
}
`, user, w.dir, servers.String(), w.port, listen, secure, upstream)}
}

func haproxyFiles(w *place) map[string]string {
	var servers strings.Builder
	for i, u := range w.urls {
		fmt.Fprintf(&servers, "  server mock%d %s check\n", i, strings.TrimPrefix(u, "http://"))
	}
	return map[string]string{"haproxy.cfg": fmt.Sprintf(`global
  nbthread 2
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option http-no-delay
frontend clients
  bind 127.0.0.1:%d
  default_backend mock
backend mock
  balance roundrobin
  http-reuse always
%s`, w.port, servers.String())}
}

// bed has the processes of a part.
type bed struct {
	proxies  []*proxy
	tls      *tls.Config // of the proxies' clients; nil: plain TCP
	clients  bool        // clients use TLS
	versions map[string]string
	children []*child
}

// startBackend starts a backend, over HTTPS where certs is a folder of tlsconf, and returns its
// URL.
func startBackend(certs string) (c *child, url string, err error) {
	c, addr, err := startOwn("mock-backend", envGap+"="+gap.String(), envBackendCerts+"="+certs)
	if certs != "" {
		return c, "https://" + addr, err
	}
	return c, "http://" + addr, err
}

// startBed starts the backends and all proxies that a part measures.
func startBed(ctx context.Context, o *options, part string) (b *bed, err error) {
	b = &bed{versions: map[string]string{}}
	defer func() {
		if err != nil {
			b.close()
			b = nil
		}
	}()
	certs, chosen := "", o.proxies
	if part == clientsTLS || part == upstreamsTLS {
		chosen = "tandem,nginx"
		if certs, err = makeCerts(o); err != nil {
			return b, err
		}
		if b.clients = part == clientsTLS; b.clients {
			b.tls = &tls.Config{InsecureSkipVerify: true} // only what a token costs is measured
		}
	}
	direct, urls := &proxy{name: "direct"}, []string(nil)
	for range backends {
		at := certs
		if b.clients {
			at = ""
		}
		c, url, err := startBackend(at)
		if err != nil {
			return b, err
		}
		b.children, direct.children = append(b.children, c), append(direct.children, c)
		_, direct.addr, _ = strings.Cut(url, "://")
		urls = append(urls, url)
	}
	if certs != "" && !b.clients {
		direct.tls = &tls.Config{InsecureSkipVerify: true}
	}
	b.proxies = []*proxy{direct}
	if part == "native" {
		chosen = "nginx"
		p, err := b.startNative(o, "native", o.binary)
		if err != nil {
			return b, fmt.Errorf("native: %w", err)
		}
		b.proxies = append(b.proxies, p)
	}
	for _, p := range peers {
		if chosen != "" && !slices.Contains(strings.Split(chosen, ","), p.name) {
			continue
		}
		if err := b.startPeer(o, p, urls, certs); err != nil {
			return b, fmt.Errorf("%s: %w", p.name, err)
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, len(b.proxies))
	for i, p := range b.proxies {
		wg.Go(func() { errs[i] = p.await(ctx) })
	}
	wg.Wait()
	return b, errors.Join(errs...)
}

func (b *bed) close() {
	for _, c := range slices.Backward(b.children) {
		c.stop()
	}
}

func (b *bed) startPeer(o *options, p peer, urls []string, certs string) error {
	binary, err := exec.LookPath(p.binary(o))
	if err != nil {
		return fmt.Errorf("%w (set its flag)", err)
	}
	if binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	dir, err := o.folder(strings.ReplaceAll(p.name, " ", "-"))
	if err != nil {
		return err
	}
	if b.versions[p.name], err = version(binary, p); err != nil {
		return err
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	extra, err := freePort()
	if err != nil {
		return err
	}
	w := &place{dir: dir, port: port, extra: extra, urls: urls, certs: certs, clients: b.clients}
	if p.files != nil {
		for name, text := range p.files(w) {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				return err
			}
		}
	}
	c, err := start(dir, "out", append([]string{binary}, p.args(w)...)...)
	if err != nil {
		return err
	}
	b.children = append(b.children, c)
	b.proxies = append(b.proxies, &proxy{name: p.name, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), tls: b.tls, children: []*child{c}})
	return nil
}

var number = regexp.MustCompile(`[0-9]+\.[0-9]+[^\s,]*`)

// version returns the version of a binary or, without arguments for it, of the package that pip
// installed.
func version(binary string, p peer) (string, error) {
	argv := append([]string{binary}, p.version...)
	if p.version == nil {
		argv = []string{filepath.Join(filepath.Dir(binary), "pip"), "--disable-pip-version-check", "show", filepath.Base(binary)}
	}
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return number.FindString(string(out)), nil
}

// makeCerts makes a certificate of 127.0.0.1 and returns its folder.
func makeCerts(o *options) (string, error) {
	dir, err := o.folder("certs")
	if err != nil {
		return "", err
	}
	if err := tlsconf.CreateCA(dir); err != nil {
		return "", err
	}
	return tlsconf.IssueNode(dir, "mock", []string{"127.0.0.1"})
}

// startNative starts Tandem's gateway with a mock of a decode node.
func (b *bed) startNative(o *options, folder, binary string) (*proxy, error) {
	dir, err := o.folder(folder)
	if err != nil {
		return nil, err
	}
	certs := filepath.Join(dir, "certs")
	if err := tlsconf.CreateCA(certs); err != nil {
		return nil, err
	}
	at := map[string]string{}
	for _, name := range []string{"gateway", "node"} { // names of nodes are also their roles
		if at[name], err = tlsconf.IssueNode(certs, name+"/"+name, nil); err != nil {
			return nil, err
		}
	}
	var ports [3]int
	for i := range ports {
		if ports[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	keys := filepath.Join(dir, "keys")
	if err := os.WriteFile(keys, []byte(apiKey+" name=bench\n"), 0o600); err != nil {
		return nil, err
	}
	binary, err = filepath.Abs(binary)
	if err != nil {
		return nil, err
	}
	if b.versions["tandem, native"], err = version(binary, peers[0]); err != nil {
		return nil, err
	}
	c, err := start(dir, "out", binary, "gateway", "--port", strconv.Itoa(ports[0]), "--gossip-port", strconv.Itoa(ports[1]), "--nats-port", strconv.Itoa(ports[2]),
		"--tls-dir", at["gateway"], "--api-key-file", keys, "--log-level", "warning")
	if err != nil {
		return nil, err
	}
	b.children = append(b.children, c)
	n, _, err := startOwn("mock-node", envCerts+"="+at["node"], fmt.Sprintf("%s=127.0.0.1:%d", envJoin, ports[1]))
	if err != nil {
		return nil, err
	}
	b.children = append(b.children, n)
	return &proxy{name: "tandem, native", addr: fmt.Sprintf("127.0.0.1:%d", ports[0]), children: []*child{c}}, nil
}

// await waits until a proxy answers requests.
func (p *proxy) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	body := `{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":1}`
	last := errors.New("no request was sent")
	scheme, client := "http://", http.DefaultClient
	if p.tls != nil {
		scheme, client = "https://", &http.Client{Transport: &http.Transport{TLSClientConfig: p.tls.Clone()}}
		defer client.CloseIdleConnections()
	}
	for ctx.Err() == nil {
		for _, c := range p.children {
			if err := c.ended(); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
		req, err := http.NewRequestWithContext(ctx, "POST", scheme+p.addr+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+apiKey)
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return nil
			}
			err = fmt.Errorf("it answers %s", resp.Status)
		}
		last = err
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("%s: it does not answer within %v: %w", p.name, startTimeout, last)
}

func (p *proxy) cpu() (sum time.Duration, err error) {
	for _, c := range p.children {
		t, err := c.cpu()
		if err != nil {
			return 0, err
		}
		sum += t
	}
	return sum, nil
}

func (p *proxy) anonymous() (sum float64, err error) {
	for _, c := range p.children {
		mb, err := c.anonymous()
		if err != nil {
			return 0, err
		}
		sum += mb
	}
	return sum, nil
}
