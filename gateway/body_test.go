package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// Bodies lie in memory that requests share in turn. Whatever their sizes and however
// they come, each server gets its own request's bytes; clients that ask whether
// to go on are told so, and the others are not.
func TestBodiesInLentMemory(t *testing.T) {
	b := newRelayed(t, Options{Limits: Limits{MaxBodyBytes: 4 << 20}}, "s1")
	s := b.far["s1"]
	s.does(whole)
	conns := []*client{b.dial(), b.dial()}
	nSent := 0
	for i, nBytes := range []int{10, 2 << 10, 100 << 10, 3000, 70 << 10, 5, 1<<20 + 1} {
		for _, how := range []string{"at once", "in chunks", "asking", "streaming"} {
			c := conns[i%len(conns)]
			body := ask(how == "streaming", fmt.Sprint(i, strings.Repeat(string(rune('a'+i)), nBytes)))
			head := "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
			sent := fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body)
			if how == "in chunks" {
				sent = fmt.Sprintf("%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", head, len(body), body)
			}
			if how == "asking" {
				if _, err := fmt.Fprintf(c, "%sExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", head, len(body)); err != nil {
					t.Fatal(err)
				}
				if line, err := c.r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
					t.Fatalf("asked, a client was told %q, %v", line, err)
				}
				if line, err := c.r.ReadString('\n'); err != nil || line != "\r\n" {
					t.Fatalf("%q, %v", line, err)
				}
				sent = body
			}
			if _, err := io.WriteString(c, sent); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(c.r, nil)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(resp.Body)
			if resp.StatusCode != 200 || err != nil {
				t.Fatalf("%d bytes, %s: %s %s %v", len(body), how, resp.Status, answer, err)
			}
			nSent++
			if all := s.requests(); len(all) != nSent || all[nSent-1].body != body || all[nSent-1].header.Get("Expect") != "" {
				t.Fatalf("%d bytes, %s: the server got other bytes, or was asked with %q", len(body), how, all[len(all)-1].header["Expect"])
			}
		}
	}
}
