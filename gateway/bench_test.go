package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// One request after the other over a socket: parse, route, one attempt, answer.
// Client and node are in the figure.
func BenchmarkRequest(b *testing.B) {
	for _, stream := range []bool{false, true} {
		for _, tokens := range []int{1, 64} {
			b.Run(fmt.Sprintf("stream=%v/tokens=%d", stream, tokens), func(b *testing.B) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					b.Fatal(err)
				}
				bed := newBed(b, Options{Listener: l}, one(nodestest.Options{Token: ramble}))
				c, err := net.Dial("tcp", bed.g.Addr())
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				body := fmt.Sprintf(`{"prompt":"hello","max_tokens":%d,"stream":%v}`, tokens, stream)
				request := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				r := bufio.NewReader(c)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := io.WriteString(c, request); err != nil {
						b.Fatal(err)
					}
					resp, err := http.ReadResponse(r, nil)
					if err != nil {
						b.Fatal(err)
					}
					if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
						b.Fatal(resp.StatusCode, err)
					}
				}
			})
		}
	}
}
