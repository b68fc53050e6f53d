package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// answering is a server that answers every request on a connection with the same
// bytes, and costs next to nothing.
func answering(b *testing.B, answer string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	models := []byte("HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n" + `{"data":[{"id":"m"}]} `)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReaderSize(c, 1<<17)
				for {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					if _, err := io.Copy(io.Discard, req.Body); err != nil {
						return
					}
					out := []byte(answer)
					if req.Method == "GET" {
						out = models
					}
					if _, err := c.Write(out); err != nil {
						return
					}
				}
			}()
		}
	}()
	return "http://" + l.Addr().String()
}

// BenchmarkRelay is requests of a size over sockets, one after the other: client,
// gateway and server in one process.
func BenchmarkRelay(b *testing.B) {
	text := `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`
	url := answering(b, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	g, err := New(Options{Listener: l, RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}}, Upstreams: Upstreams{Options: upstream.Options{Targets: []upstream.Target{{URL: url}}}}, DrainDelay: -1})
	if err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	for g.proxy.Pool.Now().Up() == 0 {
	}
	for _, size := range []int{100, 8 << 10, 100 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			body := ask(false, strings.Repeat("x", size))
			request := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nUser-Agent: bench\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			r := bufio.NewReader(c)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := io.WriteString(c, request); err != nil {
					b.Fatal(err)
				}
				resp, err := http.ReadResponse(r, nil)
				if err != nil || resp.StatusCode != 200 {
					b.Fatal(resp, err)
				}
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	stop()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}
