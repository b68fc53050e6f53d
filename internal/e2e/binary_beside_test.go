//go:build linux

package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// besides is a second gateway of a cluster that has two prefill and two decode
// nodes: beside them it has two pairs of servers of another kind, and its settings
// from a file. It is watched as any other, and panels and alerts are promtool's to
// look at.
type besides struct {
	*cluster
	of     *cluster
	otlp   *collector
	p, d   []*farServer
	gate   chan struct{} // of the decode servers
	file   string
	alerts liveAlerts
}

// beside starts it and has happen to it what metrics, panels, alerts and spans of
// upstreams are about.
func (c *cluster) beside() {
	c.t.Helper()
	open := make(chan struct{})
	close(open)
	b := &besides{cluster: newCluster(c.t), of: c, otlp: newCollector(c.t), gate: make(chan struct{})}
	b.seen = c.seen
	for range 2 {
		b.p, b.d = append(b.p, startFar(c.t, open)), append(b.d, startFar(c.t, b.gate))
	}
	path := binary(c.t)
	b.file = filepath.Join(b.state, "gateway.yaml")
	b.write("")
	b.start("env", "OTEL_BSP_SCHEDULE_DELAY=100", path, "gateway", "--config", b.file)
	b.wait(startBound, "it uses both decode nodes", func() bool { return b.body("/readyz") != "" && b.usable() == 2 })
	base := b.samples()

	b.inHand(base)
	b.tracedThere()
	b.untokenized(base)
	b.badFile(base)
	b.badCertificates()
	b.down(base)
	b.alerts.run(b.t)
	if fabric.Built {
		c.holdSeen()
	}
	b.signal(syscall.SIGINT)
	b.waitGone(stopBound)
}

func (b *besides) usable() float64 {
	n, _ := pick(b.scrape(gatewayNode), "tandem:gateway_usable_decode_nodes", "")
	return n
}

// write gives it its settings, and more.
func (b *besides) write(more string) {
	b.t.Helper()
	text := fmt.Sprintf("port: %d\nadvertise: 127.0.0.1\ngossip-port: 0\nnats-port: 0\nnode-name: gateway-beside\nmin-remote-prefill-tokens: 0\ntls-dir: %s\njoin: [\"127.0.0.1:%s\"]\n"+
		"upstream-prefill: [%s, %s]\nupstream-decode: [%s, %s]\ntokenizer: [builtin]\notlp-traces-endpoint: %s\n%s\n",
		b.port, b.of.argument("gateway", "--tls-dir"), b.of.argument("gateway", "--gossip-port"),
		b.p[0].URL, b.p[1].URL, b.d[0].URL, b.d[1].URL, b.otlp.URL, more)
	if err := os.WriteFile(b.file, []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// argument is what a flag of a process says.
func (c *cluster) argument(name, flag string) string {
	c.t.Helper()
	for _, p := range c.processes() {
		if p.name != name {
			continue
		}
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "cmdline"))
		if err != nil {
			c.t.Fatal(err)
		}
		args := strings.Split(string(text), "\x00")
		if i := slices.Index(args, flag); i >= 0 && i+1 < len(args) {
			return args[i+1]
		}
	}
	c.t.Fatalf("%s has no %s", name, flag)
	return ""
}

// samples are those of it and of the nodes.
func (b *besides) samples() map[string]float64 {
	b.t.Helper()
	out := map[string]float64{}
	addSamples(b.t, out, "gateway-beside", "gateway", b.scrape(gatewayNode))
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		addSamples(b.t, out, fmt.Sprintf("%s-%d", role, i%2), role, b.of.scrape(i))
	}
	return out
}

// ask sends a completion for the upstreams' model and wants an answer.
func (b *besides) ask(prompt any, stream bool) {
	b.t.Helper()
	resp, err := b.post("/v1/completions", map[string]any{"model": "m", "prompt": prompt, "stream": stream})
	if err != nil {
		b.t.Error(err)
		return
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || !strings.Contains(string(text), "yes") {
		b.t.Errorf("%s, %v: %s", resp.Status, err, text)
	}
}

// inHand has three requests wait at the decode servers while nodes answer a fourth.
func (b *besides) inHand(base map[string]float64) {
	b.t.Helper()
	const servers, requests, breakers, n = "tandem:gateway_upstreams", "tandem:gateway_upstream_requests", "tandem:gateway_upstream_breakers", 3
	g := []int{gatewayNode}
	done := make(chan struct{}, n)
	for range n {
		go func() {
			b.ask("hello", false)
			done <- struct{}{}
		}()
	}
	b.hold("three are in hand", []want{
		{g, servers, `state="up",task="prefill"`, 2}, {g, servers, `state="up",task="decode"`, 2}, {g, servers, "", 4},
		{g, breakers, `"closed"`, 4}, {g, breakers, "", 4}, {g, "tandem:gateway_usable_decode_nodes", "", 2},
		{g, requests, `"decode"`, n}, {g, requests, "", n}, {g, "tandem:gateway_requests_in_flight", "", n},
	})
	r := rand.New(rand.NewPCG(1, 1))
	b.answers(map[string]any{"model": oModel, "prompt": b.prompt(r, oPrompt), "max_tokens": oOutput, "ignore_eos": true})
	now := b.samples()
	b.alerts.shows(b.t, base, now, "Upstreams: requests in flight", 0, n, `{task="decode"}`)
	b.alerts.shows(b.t, base, now, "Upstreams as gateways see them", 0, 4, `{state="up", task="decode"}`, `{state="up", task="prefill"}`)
	b.alerts.shows(b.t, base, now, "Upstreams as gateways see them", 1, 4, `{state="closed"}`)
	close(b.gate)
	for range n {
		<-done
	}
	b.hold("all have been answered", []want{{g, requests, "", 0}, {g, "tandem:gateway_requests_in_flight", "", 0}, {g, "vllm:generation_tokens_total", "", oOutput + 2*n}})
}

// tracedThere holds the spans of a stream of theirs against what it was, and of the
// same once more when the server that answered it fails.
func (b *besides) tracedThere() {
	b.t.Helper()
	const root, attempt = "text_completion m", "text_completion m > attempt"
	prompt := "once upon a time"
	send := func(parent string) string {
		b.t.Helper()
		b.traceparent, b.headers = parent, map[string]string{"X-Request-Id": "traced-" + parent[3:7]}
		defer func() { b.traceparent, b.headers = "", nil }()
		b.ask(prompt, true)
		return "traced-" + parent[3:7]
	}
	first := strings.Replace(oParent, "0af7", "2cf9", 1)
	id := send(first)
	far := map[string]*farServer{}
	for _, f := range slices.Concat(b.p, b.d) {
		far[f.URL] = f
	}
	among := func(all []*farServer) any {
		return func(url string) bool { return slices.Contains(all, far[url]) }
	}
	positive := func(text string) bool { v, err := strconv.ParseFloat(text, 64); return err == nil && v > 0 && v < 60 }
	spans := b.holdTrace(b.otlp, first, []wantSpan{
		{root, "gateway-beside", map[string]any{"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tandem", "gen_ai.request.model": "m", "gen_ai.request.id": id,
			"gen_ai.request.choice.count": "1", "gen_ai.usage.input_tokens": "5", "gen_ai.usage.output_tokens": "2", "gen_ai.usage.cache_read.input_tokens": "3",
			"gen_ai.latency.time_to_first_token": positive, "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": "200"}, ""},
		{attempt, "gateway-beside", map[string]any{"server.address": among(b.d), "tandem.prefill.address": among(b.p), "tandem.attempt": "1", "gen_ai.request.model": "m"}, "first byte"},
	})
	if b.t.Failed() {
		return
	}
	// Both of the pair were asked below the attempt.
	told := func(trace string, s span, all ...string) {
		b.t.Helper()
		for _, url := range all {
			if got := far[url].traced(trace); !slices.Contains(got, hex.EncodeToString(s.SpanId)) {
				b.t.Errorf("%s was asked below %v, the attempt is %x", url, got, s.SpanId)
			}
		}
	}
	home := spans[attempt][0].attr("server.address")
	told(first[3:35], spans[attempt][0], home, spans[attempt][0].attr("tandem.prefill.address"))

	second := strings.Replace(oParent, "0af7", "3dfa", 1)
	g := []int{gatewayNode}
	failures := b.value(g, "tandem:gateway_attempt_failures_total", `"internal"`)
	far[home].errs.Store(true)
	send(second)
	far[home].errs.Store(false)
	b.hold("an attempt that failed", []want{{g, "tandem:gateway_attempt_failures_total", `"internal"`, failures + 1}})
	b.wait(startBound, "the spans of both attempts", func() bool {
		spans = b.otlp.trace(second[3:35])
		return len(spans[attempt]) == 2 && len(spans[root]) == 1
	})
	for _, s := range spans[attempt] {
		url := s.attr("server.address")
		failed := s.attr("tandem.attempt") == "1"
		if failed != (url == home) || failed != (s.attr("error.type") == "internal") || !failed && (s.attr("tandem.attempt") != "2" || s.attr("error.type") != "") {
			b.t.Errorf("an attempt says %v", s.Attributes)
		}
		told(second[3:35], s, url)
	}
}

// untokenized sends prompts that --tokenizer cannot take, which go by their bytes.
func (b *besides) untokenized(base map[string]float64) {
	b.t.Helper()
	const n = 2
	for range n {
		b.ask(map[string]int{"words": 1}, false)
	}
	b.hold("prompts that cannot be tokenized", []want{{[]int{gatewayNode}, "tandem:gateway_untokenized_prompts_total", "", n}})
	b.alerts.shows(b.t, base, b.samples(), "Routing decisions", 1, n)
}

// badFile gives it settings that it cannot take, and then those that it had.
func (b *besides) badFile(base map[string]float64) {
	b.t.Helper()
	g := []int{gatewayNode}
	const failed = "tandem:gateway_reload_failed"
	b.write("max-n: many")
	b.signal(syscall.SIGHUP)
	b.hold("a bad file", []want{{g, failed, `"config"`, 1}, {g, failed, "", 1}})
	now := b.samples()
	b.alerts.shows(b.t, base, now, "Gateway files not reloaded", 0, 1, `{part="config"}`)
	b.alerts.fires("TandemFileNotTaken", base, now)
	b.write("max-n: 3")
	b.signal(syscall.SIGHUP)
	b.hold("a good file", []want{{g, failed, "", 0}})
}

// badCertificates starts a further gateway, for clients that come by TLS, breaks its
// key and gives it back.
func (b *besides) badCertificates() {
	b.t.Helper()
	const failed = "tandem:gateway_reload_failed"
	g := []int{gatewayNode}
	path := binary(b.t)
	s := newCluster(b.t)
	cert, key := filepath.Join(s.state, "cert.pem"), filepath.Join(s.state, "key.pem")
	write := func(file, text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
	certText, keyText := selfSigned(b.t)
	write(cert, certText)
	write(key, keyText)
	s.start(path, "gateway", "--config", b.file, "--node-name", "gateway-tls", "--port", strconv.Itoa(s.port+1), "--admin-listen", fmt.Sprintf("127.0.0.1:%d", s.port), "--ssl-certfile", cert, "--ssl-keyfile", key)
	s.wait(startBound, "it tells its metrics", func() bool { return s.body("/metrics") != "" })
	samples := func() map[string]float64 {
		out := map[string]float64{}
		addSamples(b.t, out, "gateway-tls", "gateway", s.scrape(gatewayNode))
		return out
	}
	base := samples()
	write(key, "no key")
	s.signal(syscall.SIGHUP)
	s.hold("a bad key", []want{{g, failed, `"certificates"`, 1}, {g, failed, "", 1}})
	b.alerts.shows(b.t, base, samples(), "Gateway files not reloaded", 0, 1, `{part="certificates"}`)
	write(key, keyText)
	s.signal(syscall.SIGHUP)
	s.hold("its key", []want{{g, failed, "", 0}})
	s.signal(syscall.SIGINT)
	s.waitGone(stopBound)
}

// selfSigned is a certificate, and its key, as PEM.
func selfSigned(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(cryptorand.Reader, of, of, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// down has first one and then both of the decode servers say that they are ill.
func (b *besides) down(base map[string]float64) {
	b.t.Helper()
	const servers = "tandem:gateway_upstreams"
	g := []int{gatewayNode}
	for i, f := range b.d {
		f.ill.Store(true)
		down := float64(i + 1)
		b.hold("a server is ill", []want{{g, servers, `state="down",task="decode"`, down}, {g, servers, `state="up",task="decode"`, 2 - down}, {g, servers, `state="up",task="prefill"`, 2}, {g, servers, "", 4}})
		b.alerts.fires([]string{"TandemUpstreamDown", "TandemNoUpstream"}[i], base, b.samples())
	}
}
