package gateway

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"gateway"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// A client that sends plain HTTP to a port with TLS is answered with what to do; one that sends
// something else gets no text.
func TestPlainHTTPToTLS(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := newBed(t, Options{Listener: l, TLS: &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}}}, nil)
	for sent, want := range map[string]string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n":                                                        "write https:// instead of http://",
		"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{\"a\": 42}":         `"type":"BadRequestError"`,
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + strings.Repeat(" ", 4e6): `"type":"BadRequestError"`,
		"nonsense\r\n\r\n":     "",
		"\x00\x01\x02\x03\x04": "",
	} {
		nc, err := net.Dial("tcp", b.g.Addr())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nc.Write([]byte(sent)); err != nil {
			t.Error(err)
		}
		got, _ := io.ReadAll(nc) // a reset may end it
		if want == "" && bytes.Contains(got, []byte("HTTP")) || !bytes.Contains(got, []byte(want)) || want != "" && !bytes.HasPrefix(got, []byte("HTTP/1.1 400 Bad Request\r\n")) {
			t.Errorf("%.100q: %q, want %q", sent, got, want)
		}
		nc.Close()
	}
}

// Over sockets, plain and TLS: the watch for a client's going hands the
// connection back whole, request after request, and sees the client go.
func TestSockets(t *testing.T) {
	for name, conf := range map[string]*tls.Config{"tcp": nil, "tls": {Certificates: []tls.Certificate{selfSigned(t)}}} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			gate := make(chan struct{})
			b := newBed(t, Options{Listener: l, TLS: conf}, one(nodestest.Options{Gate: gate}))
			nc, err := net.Dial("tcp", b.g.Addr())
			if err != nil {
				t.Fatal(err)
			}
			if conf != nil {
				nc = tls.Client(nc, &tls.Config{InsecureSkipVerify: true})
			}
			c := &client{bed: b, Conn: nc, r: bufio.NewReader(nc)}
			defer c.Close()
			for i := range 6 {
				body := `{"prompt":"x","max_tokens":4}`
				if i%2 == 0 {
					body = `{"prompt":"x","max_tokens":4,"stream":true}`
				}
				c.send("POST", "/v1/completions", body)
				go feed(gate, 4)
				r := c.receive()
				if r.StatusCode != 200 || r.err != nil {
					t.Fatalf("request %d: %d %q %v", i, r.StatusCode, r.body, r.err)
				}
			}
			c.send("POST", "/v1/completions", streamed)
			b.until(func() bool { return b.nodes["d1"].Running() == 1 })
			c.Close()
			if err := b.nodes["d1"].Wait(soon, func() bool { return b.nodes["d1"].Cancelled() == 1 }); err != nil {
				t.Fatal(err)
			}
		})
	}
}
