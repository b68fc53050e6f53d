//go:build linux

package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// daemon is one process of a fleet whose ports are all known.
type daemon struct {
	cmd   *exec.Cmd
	log   output
	ended chan struct{} // closed when cmd has ended
}

// daemonOf starts a long-running command; the test ends it and looks for faults.
func daemonOf(t *testing.T, args ...string) *daemon {
	t.Helper()
	return wrappedDaemon(t, nil, args...)
}

// wrappedDaemon is daemonOf for a program that another one starts: wrapper is its
// command line, to which the program's is appended. It must exec, so that signals
// reach the program.
func wrappedDaemon(t *testing.T, wrapper []string, args ...string) *daemon {
	t.Helper()
	path := binary(t)
	line := append(append(slices.Clone(wrapper), path), args...)
	d := &daemon{cmd: exec.Command(line[0], line[1:]...), ended: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	d.cmd.WaitDelay = time.Second
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var failure error
	go func() {
		failure = d.cmd.Wait()
		close(d.ended)
	}()
	t.Cleanup(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-d.ended:
			if err := failure; err != nil {
				t.Errorf("tandem %s ended with %v", args[0], err)
			}
		case <-time.After(stopBound):
			t.Errorf("tandem %s does not stop", args[0])
			_ = d.cmd.Process.Kill()
		}
		if strings.Contains(d.log.String(), "panic") {
			t.Errorf("tandem %s has panicked", args[0])
		}
		if t.Failed() {
			t.Logf("tandem %q:\n%s", args, &d.log)
		}
	})
	return d
}

// held is what a process has open, as its metrics tell.
type held struct{ files, goroutines int }

// stray is how much of either comes and goes by itself: gossip, NATS' pings, the
// HTTP servers' idle workers. Whatever must leak nothing is done more often than
// this, so that one thing left behind each time shows.
const stray = 8

// holds asks the process, whose metrics are at a port.
func (d *daemon) holds(t *testing.T, port int) held {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Get("http://127.0.0.1:" + strconv.Itoa(port) + "/metrics")
	if err != nil {
		t.Fatalf("the process does not tell what it holds: %v\n%s", err, &d.log)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	value := func(name string) int {
		_, rest, _ := strings.Cut(string(text), "\n"+name+" ")
		line, _, _ := strings.Cut(rest, "\n")
		v, err := strconv.ParseFloat(line, 64)
		if err != nil || v < 1 {
			t.Fatalf("%s is %q: %v", name, line, err)
		}
		return int(v)
	}
	return held{value("process_open_fds"), value("go_goroutines")}
}

// settled is what the process holds once that has not grown for a second: NATS
// and gossip connect beside the first requests.
func (d *daemon) settled(t *testing.T, port int) held {
	t.Helper()
	most, since := d.holds(t, port), time.Now()
	for began := time.Now(); time.Since(since) < time.Second && time.Since(began) < 10*time.Second; time.Sleep(50 * time.Millisecond) {
		if h := d.holds(t, port); h.files > most.files || h.goroutines > most.goroutines {
			most, since = held{max(h.files, most.files), max(h.goroutines, most.goroutines)}, time.Now()
		}
	}
	return most
}

// returns waits until the process holds no more than it did, but for what is
// stray.
func (d *daemon) returns(t *testing.T, port int, before held) {
	t.Helper()
	var now held
	for began := time.Now(); time.Since(began) < 30*time.Second; time.Sleep(100 * time.Millisecond) {
		if now = d.holds(t, port); now.files <= before.files+stray && now.goroutines <= before.goroutines+stray {
			return
		}
	}
	t.Errorf("tandem %s holds %+v, before it was %+v", d.cmd.Args[1], now, before)
}

// knownFleet is a gateway and a decode node with the ports below.
type knownFleet struct {
	gateway, decode                                  *daemon
	http, gossip, nats, nodeGossip, rpc, kv, metrics int
	certs                                            string
}

func (f *knownFleet) url(path string) string {
	return "http://127.0.0.1:" + strconv.Itoa(f.http) + path
}

// startKnownFleet starts a gateway and a decode node. Their certificates are of the names
// that `tandem ca` gets; without names they have roles.
func startKnownFleet(t *testing.T, names ...string) *knownFleet {
	t.Helper()
	if len(names) == 0 {
		names = []string{"gateway/g", "node/d"}
	}
	p := freePorts(t, 7)
	f := &knownFleet{http: p, gossip: p + 1, nats: p + 2, nodeGossip: p + 3, rpc: p + 4, kv: p + 5, metrics: p + 6, certs: t.TempDir()}
	if _, errOut, err := tandem(t, nil, append([]string{"ca", f.certs}, names...)...); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	n := strconv.Itoa
	f.gateway = daemonOf(t, "gateway", "--tls-dir", filepath.Join(f.certs, "g"), "--port", n(f.http), "--gossip-port", n(f.gossip),
		"--nats-port", n(f.nats), "--max-request-body", "64KiB", "--shutdown-timeout", "1")
	f.decode = daemonOf(t, "decode", "--tls-dir", filepath.Join(f.certs, "d"), "--join", "127.0.0.1:"+n(f.gossip), "--gossip-port", n(f.nodeGossip),
		"--rpc-port", n(f.rpc), "--kv-port", n(f.kv), "--http-port", n(f.metrics), "--kv-tls", "--threads", "1", "--shutdown-timeout", "1")
	f.waitReady(t, startBound)
	return f
}

// waitReady waits until the gateway has a decode node and its model.
func (f *knownFleet) waitReady(t *testing.T, bound time.Duration) {
	t.Helper()
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(f.url("/readyz"))
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		if time.Since(began) > bound {
			t.Fatalf("not ready within %v: %v\n%s\n%s", bound, err, &f.gateway.log, &f.decode.log)
		}
	}
}

// ask sends a body and returns status and answer.
func (f *knownFleet) ask(t *testing.T, path string, body []byte) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Post(f.url(path), "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// certificate is a key with a certificate, signed by itself where no parent is
// given.
func certificate(t *testing.T, parent *tls.Certificate, from, until time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "made by a test"}, NotBefore: from, NotAfter: until,
		DNSNames: []string{"tandem-node"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: parent == nil,
	}
	signer, signKey := c, any(key)
	if parent != nil {
		signer, signKey = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(crand.Reader, c, signer, &key.PublicKey, signKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// nodeFolder is the folder of a node with a certificate of an authority.
func nodeFolder(t *testing.T, ca *tls.Certificate, of tls.Certificate) (dir string) {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(of.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	for name, b := range map[string]*pem.Block{
		"ca.crt": {Type: "CERTIFICATE", Bytes: ca.Certificate[0]}, "node.crt": {Type: "CERTIFICATE", Bytes: of.Certificate[0]},
		"node.key": {Type: "PRIVATE KEY", Bytes: key},
	} {
		put(t, filepath.Join(dir, name), pem.EncodeToMemory(b))
	}
	put(t, filepath.Join(dir, "gossip.secret"), []byte(strings.Repeat("5a", 32)))
	return dir
}

// A gateway warns of certificates that expire within 30 days, the cluster's and that for clients, and
// has their ends as metrics: of a chain the first. The alert fires for both.
func TestBinaryCertificateExpiresSoon(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ca := certificate(t, nil, now.Add(-time.Hour), now.Add(9*24*time.Hour+time.Hour))
	of := certificate(t, &ca, now.Add(-time.Hour), now.Add(20*24*time.Hour+time.Hour))
	dir := nodeFolder(t, &ca, of)
	c := newCluster(t)
	admin := c.port + 1
	c.start(binary(t), "gateway", "--tls-dir", dir, "--port", strconv.Itoa(c.port), "--gossip-port", "0", "--nats-port", "0", "--admin-listen", fmt.Sprintf("127.0.0.1:%d", admin),
		"--ssl-certfile", filepath.Join(dir, "node.crt"), "--ssl-keyfile", filepath.Join(dir, "node.key"))
	t.Cleanup(func() { _ = c.cmd.Process.Kill() }) // no argument has the state folder
	for _, want := range []string{"certificate expires soon certificate=" + dir + " ", "days=9 ", "tandem ca renew DIR", "certificate expires soon certificate=" + filepath.Join(dir, "node.crt"), "days=20 "} {
		c.wait(startBound, want, func() bool { return strings.Contains(c.stderr.String(), want) })
	}
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", admin))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for kind, until := range map[string]time.Time{"cluster": ca.Leaf.NotAfter, "clients": of.Leaf.NotAfter} {
		if got, found := pick(string(text), "tandem:certificate_expiry_timestamp_seconds", `certificate="`+kind+`"`); !found || got != float64(until.Unix()) {
			t.Errorf("%s: %v, %v, want %v", kind, got, found, until)
		}
	}
	c.port = admin
	p := startProm(t, c, quickened(t))
	p.until("both certificates", `count by (alertname) (ALERTS{alertname="TandemCertificateExpires", alertstate="firing"})`, sum(2))
}

// A node whose certificate has expired does not start and says so.
func TestBinaryExpiredCertificate(t *testing.T) {
	now := time.Now()
	ca := certificate(t, nil, now.Add(-48*time.Hour), now.Add(time.Hour))
	dir := nodeFolder(t, &ca, certificate(t, &ca, now.Add(-24*time.Hour), now.Add(-time.Hour)))
	for _, command := range []string{"gateway", "decode"} {
		refusedStart(t, command, 2, []string{dir, "expired", "tandem ca"}, command, "--tls-dir", dir)
	}
}

// Nobody who knocks at a port of the fleet, with garbage, with another protocol
// or with certificates of their own, gets in, stops anything or costs a file or a
// goroutine.
func TestBinaryStrangers(t *testing.T) {
	const seed = 20260729
	r := rand.New(rand.NewPCG(seed, 1))
	f := startKnownFleet(t)
	now := time.Now()
	theirs := certificate(t, nil, now.Add(-time.Hour), now.Add(time.Hour))
	ca, err := tls.LoadX509KeyPair(filepath.Join(f.certs, "ca.crt"), filepath.Join(f.certs, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	valid := certificate(t, &ca, now.Add(-time.Hour), now.Add(time.Hour))
	expired := certificate(t, &ca, now.Add(-2*time.Hour), now.Add(-time.Hour))
	good := []byte(`{"messages":[{"role":"user","content":"What is prefill?"}],"max_tokens":4,"temperature":0}`)
	status, want := f.ask(t, "/v1/chat/completions", good)
	if status != 200 {
		t.Fatalf("before: %d %s", status, want)
	}
	gatewayBefore, decodeBefore := f.gateway.settled(t, f.http), f.decode.settled(t, f.metrics)

	garbage := [][]byte{
		nil, {0}, []byte("\n"), []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), []byte("POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}"),
		[]byte("CONNECT {}\r\nPING\r\n"), bytes.Repeat([]byte{0xff}, 4096), {0x16, 3, 1, 0xff, 0xff, 1, 0, 0, 1}, // the head of a TLS hello that never comes
		[]byte("TNDM\x00\x00\x00\x01"), bytes.Repeat([]byte{0}, 70000),
	}
	for range 8 {
		b := make([]byte, 1+r.IntN(4096))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		garbage = append(garbage, b)
	}
	for name, port := range map[string]int{
		"gateway's http": f.http, "gateway's gossip": f.gossip, "NATS": f.nats,
		"decode's gossip": f.nodeGossip, "rpc": f.rpc, "kv": f.kv, "decode's http": f.metrics,
	} {
		addr := "127.0.0.1:" + strconv.Itoa(port)
		for i, b := range garbage {
			knock(t, fmt.Sprintf("seed %d, %s, garbage %d", seed, name, i), "tcp", addr, b)
		}
		if strings.Contains(name, "gossip") {
			for i, b := range garbage {
				knock(t, fmt.Sprintf("seed %d, %s, packet %d", seed, name, i), "udp", addr, b[:min(len(b), 1400)])
			}
		}
	}
	for name, port := range map[string]int{"NATS": f.nats, "rpc": f.rpc, "kv": f.kv} {
		addr := "127.0.0.1:" + strconv.Itoa(port)
		for what, certs := range map[string][]tls.Certificate{"no certificate": nil, "another authority's": {theirs}, "one that has expired": {expired}} {
			for range stray {
				if err := handshake(addr, port == f.nats, certs, 15*time.Second); !toldByTLS(err) {
					t.Errorf("%s: a client with %s was not refused by TLS: %v", name, what, err)
				}
			}
		}
		if err := handshake(addr, port == f.nats, []tls.Certificate{valid}, time.Second); toldByTLS(err) {
			t.Errorf("%s: a client with a certificate of the cluster's was refused: %v", name, err)
		}
	}

	status, got := f.ask(t, "/v1/chat/completions", good)
	if content(want) == "" || status != 200 || content(got) != content(want) {
		t.Errorf("after: %d %s, before: %s", status, got, want)
	}
	f.gateway.returns(t, f.http, gatewayBefore)
	f.decode.returns(t, f.metrics, decodeBefore)
}

// content is the text of an answer.
func content(answer string) string {
	_, rest, _ := strings.Cut(answer, `"content":"`)
	text, _, _ := strings.Cut(rest, `"`)
	return text
}

// knock sends bytes and reads whatever comes until the other side closes, or a
// moment is over.
func knock(t *testing.T, what, network, addr string, b []byte) {
	t.Helper()
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		t.Errorf("%s: nobody listens: %v", what, err)
		return
	}
	defer c.Close()
	_, _ = c.Write(b) // it may be closed already
	if network == "udp" {
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
}

// handshake is a TLS client, after the server's greeting where it gives one, that
// says nothing: it answers why the server ended that, or that it did not in time.
func handshake(addr string, greeted bool, certs []tls.Certificate, patience time.Duration) error {
	raw, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer raw.Close()
	if err := raw.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	for b := []byte{0}; greeted && b[0] != '\n'; {
		if _, err := raw.Read(b); err != nil {
			return err
		}
	}
	c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, Certificates: certs, ServerName: "tandem-node"})
	if err := c.Handshake(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, io.LimitReader(c, 1<<20)) // TLS 1.3 tells a client late that it is refused
	return err
}

// toldByTLS says whether the other side ended the connection for its certificate.
func toldByTLS(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// Requests that cannot be served get the right status and name the field.
func TestBinaryBadRequests(t *testing.T) {
	f := startKnownFleet(t)
	gatewayBefore, decodeBefore := f.gateway.settled(t, f.http), f.decode.settled(t, f.metrics)
	const chat, complete = "/v1/chat/completions", "/v1/completions"
	for what, c := range map[string]struct {
		path, body string
		status     int
		want       []string
	}{
		"empty":                 {chat, ``, 400, nil},
		"torn":                  {chat, `{"messages": [`, 400, []string{"JSON"}},
		"not an object":         {chat, `[1]`, 400, []string{"object"}},
		"no messages":           {chat, `{}`, 400, []string{"messages"}},
		"messages of a type":    {chat, `{"messages": 7}`, 400, []string{"messages"}},
		"a number as text":      {complete, `{"prompt": "a", "max_tokens": "7"}`, 400, []string{"max_tokens"}},
		"out of range":          {complete, `{"prompt": "a", "temperature": -1}`, 400, []string{"temperature", "-1"}},
		"another model":         {complete, `{"prompt": "a", "model": "gpt-9"}`, 404, []string{"gpt-9"}},
		"bad UTF-8":             {complete, "{\"prompt\": \"a\xff\xfe\"}", 400, []string{"UTF-8"}},
		"past the context":      {complete, `{"prompt": [` + strings.Repeat("300,", 2100) + `300], "max_tokens": 1}`, 400, []string{"2048"}},
		"more than the context": {complete, `{"prompt": "a", "max_tokens": 100000}`, 400, []string{"100000"}},
		"a token that is none":  {complete, `{"prompt": [1, 99999999]}`, 400, []string{"99999999"}},
		"a body too large":      {complete, `{"prompt": "` + strings.Repeat("a", 70<<10) + `"}`, 413, []string{"65536"}},
		"nested without end":    {chat, strings.Repeat(`{"a":[`, 9000), 400, nil},
		"no such route":         {"/v1/luck", `{}`, 404, []string{"/v1/luck"}},
	} {
		status, answer := f.ask(t, c.path, []byte(c.body))
		for range stray {
			f.ask(t, c.path, []byte(c.body))
		}
		if status != c.status || !strings.Contains(answer, `"error"`) {
			t.Errorf("%s: %d %.300s, want %d", what, status, answer, c.status)
		}
		for _, w := range c.want {
			if !strings.Contains(answer, w) {
				t.Errorf("%s: no %q in %.300s", what, w, answer)
			}
		}
	}
	if status, answer := f.ask(t, complete, []byte(`{"prompt": "a", "max_tokens": 2}`)); status != 200 {
		t.Errorf("after all that: %d %s", status, answer)
	}
	f.gateway.returns(t, f.http, gatewayBefore)
	f.decode.returns(t, f.metrics, decodeBefore)
}
