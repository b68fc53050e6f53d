//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// upstreamCase is bytes that an upstream answers with and what the client then has.
type upstreamCase struct {
	name, answer string
	status       int
	body         string // of a 200
	cut          bool   // its end is missing, or an error event
	kept         bool   // another request may come on the connection
}

// farEvents is a whole stream.
const farEvents = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\ndata: [DONE]\n\n"

// upstreamCases are the 32 cases.
func upstreamCases() (all []upstreamCase) {
	const ok, body = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n", `{"id":"secret","choices":[]}`
	size := fmt.Sprintf("Content-Length: %d\r\n", len(body))
	chunks := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	const chunked = "Transfer-Encoding: chunked\r\n"
	add := func(c upstreamCase) { all = append(all, c) }
	bad := func(name, answer string) { add(upstreamCase{name: name, answer: answer, status: 502}) }
	failed := func(name, answer string) { add(upstreamCase{name: name, answer: answer, status: 503}) }
	whole := func(name, answer string, kept bool) {
		add(upstreamCase{name: name, answer: answer, status: 200, body: body, kept: kept})
	}
	whole("length", ok+size+"\r\n"+body, true)
	whole("chunks", ok+chunked+"\r\n"+chunks, true)
	whole("to the end", ok+"Connection: close\r\n\r\n"+body, false)
	whole("100 before it", "HTTP/1.1 100 Continue\r\n\r\n"+ok+size+"\r\n"+body, true)
	whole("another answer behind it", ok+size+"\r\n"+body+ok+size+"\r\n"+strings.Replace(body, "secret", "poison", 1), false)
	bad("length and encoding", ok+size+chunked+"\r\n"+chunks)
	bad("encoding and length", ok+chunked+size+"\r\n"+chunks)
	bad("encoding in HTTP/1.0", strings.Replace(ok, "/1.1", "/1.0", 1)+chunked+"\r\n"+chunks)
	bad("space before the colon of an encoding", ok+"Transfer-Encoding : chunked\r\n\r\n"+chunks)
	bad("space before the colon of a length", ok+strings.Replace(size, ":", " :", 1)+"\r\n"+body)
	bad("folded header", ok+"X-A: a\r\n b\r\n"+size+"\r\n"+body)
	bad("folded by a tab", ok+"X-A: a\r\n\tb\r\n"+size+"\r\n"+body)
	bad("NUL in a value", ok+"X-A: a\x00b\r\n"+size+"\r\n"+body)
	bad("NUL in a name", ok+"X\x00A: a\r\n"+size+"\r\n"+body)
	bad("bare LF in a value", ok+"X-A: a\nX-B: b\r\n"+size+"\r\n"+body)
	bad("bare CR in a value", ok+"X-A: a\rX-B: b\r\n"+size+"\r\n"+body)
	bad("signed length", ok+"Content-Length: +7\r\n\r\n1234567")
	bad("negative length", ok+"Content-Length: -7\r\n\r\n1234567")
	bad("two lengths", ok+size+"Content-Length: 7\r\n\r\n"+body)
	bad("huge length", ok+"Content-Length: 99999999999999999999\r\n\r\n"+body)
	bad("unknown encoding", ok+"Transfer-Encoding: gzip, chunked\r\n\r\n"+chunks)
	bad("encoding twice", ok+chunked+chunked+"\r\n"+chunks)
	bad("status 999", strings.Replace(ok, "200", "999", 1)+size+"\r\n"+body)
	bad("status 099", strings.Replace(ok, "200", "099", 1)+size+"\r\n"+body)
	bad("status of four digits", strings.Replace(ok, "200", "2000", 1)+size+"\r\n"+body)
	bad("no colon", ok+"X-A\r\n"+size+"\r\n"+body)
	bad("empty name", ok+": a\r\n"+size+"\r\n"+body)
	bad("not HTTP", "SSH-2.0-OpenSSH_9.2p1\r\n\r\n")
	failed("endless head", ok+strings.Repeat("X-A: "+strings.Repeat("a", 1000)+"\r\n", 100))
	failed("short body", ok+"Content-Length: 1000\r\n\r\n"+body)
	failed("chunk without a size", ok+chunked+"\r\nxyz\r\n"+body+"\r\n0\r\n\r\n")
	add(upstreamCase{name: "stream without an end", answer: "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + strings.TrimSuffix(farEvents, "data: [DONE]\n\n"), status: 200, cut: true})
	return all
}

// hostileUpstream is a server that answers request i of its model with case i, and
// reports on ended whether the gateway then closed the connection (true) or used it again.
type hostileUpstream struct {
	t     *testing.T
	cases []upstreamCase
	ended chan bool
}

// serve serves one connection.
func (u *hostileUpstream) serve(conn net.Conn) {
	defer conn.Close()
	r := bufio.NewReader(conn)
	pending := false // an answer of a case was the last
	for {
		req, err := http.ReadRequest(r)
		if pending {
			u.ended <- err != nil
		}
		if pending = false; err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		answer, last := `{"object":"list","data":[{"id":"far","object":"model"}]}`, false
		if answer = fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(answer), answer); req.Method == "POST" {
			var asked struct{ Prompt string }
			i, err := -1, json.Unmarshal(body, &asked)
			if err == nil {
				i, err = strconv.Atoi(asked.Prompt)
			}
			if err != nil || i < 0 {
				answer = fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(goodAnswer), goodAnswer)
			} else {
				c := u.cases[i]
				answer, pending, last = c.answer, true, c.status == 503 || c.cut || strings.Contains(c.answer, "Connection: close")
			}
		}
		if _, err := io.WriteString(conn, answer); err != nil && !pending {
			return
		}
		if last { // the end is part of the case
			_ = conn.(*net.TCPConn).CloseWrite()
		}
	}
}

// goodAnswer answers requests between the cases.
const goodAnswer = `{"id":"good","choices":[]}`

// Each of 32 hostile answers of an upstream has its outcome at the client. Of a malformed
// one nothing is passed on and the connection closes; the next request gets its own answer.
func TestBinaryHostileUpstream(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u := &hostileUpstream{t: t, cases: upstreamCases(), ended: make(chan bool, 100)}
	if len(u.cases) != 32 {
		t.Fatalf("%d cases", len(u.cases))
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go u.serve(conn)
		}
	}()
	t.Cleanup(func() { l.Close() })
	f := startHostileFleet(t, hostileFlags{gateway: []string{"--upstream", "http://" + l.Addr().String()}})
	f.waitModels("far", "tandem-builtin")
	b := newBystanders(f.cluster, 4)
	resetPeak(t, f.gateway)
	before := resident(t, f.gateway, "VmRSS")
	b.during("hostile upstream", func() {
		for i, c := range u.cases {
			u.attack(f, i, c)
		}
	})
	if peak := peakRSS(t, f.gateway); peak > before+hostileHeap {
		t.Errorf("the gateway's resident memory rose from %d to %d MiB", before>>20, peak>>20)
	}
	if !f.gateway.alive() {
		t.Error("the gateway ended")
	}
}

// attack runs one case and then a good request.
func (u *hostileUpstream) attack(f *hostileFleet, i int, c upstreamCase) {
	resp, err := f.post("/v1/completions", map[string]any{"model": "far", "prompt": strconv.Itoa(i), "stream": c.cut})
	if err != nil {
		u.t.Errorf("%s: %v", c.name, err)
		return
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	switch {
	case resp.StatusCode != c.status:
		u.t.Errorf("%s: %s %s, want %d", c.name, resp.Status, body, c.status)
	case c.cut && err == nil && !bytes.Contains(body, []byte(`"error"`)):
		u.t.Errorf("%s: looks whole: %q", c.name, body)
	case c.status == 200 && !c.cut && (err != nil || string(body) != c.body):
		u.t.Errorf("%s: %q %v, want %q", c.name, body, err, c.body)
	case c.status != 200 && (bytes.Contains(body, []byte(`"secret"`)) || resp.Header.Get("X-A") != ""):
		u.t.Errorf("%s: passed on: %v %s", c.name, resp.Header, body)
	}
	good := func() bool {
		resp, err := f.post("/v1/completions", map[string]any{"model": "far", "prompt": "good"})
		if err != nil {
			u.t.Errorf("after %s: %v", c.name, err)
			return true
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if resp.StatusCode == 503 { // its breaker is open
			return false
		}
		if resp.StatusCode != 200 || err != nil || string(body) != goodAnswer {
			u.t.Errorf("after %s: %s %q %v", c.name, resp.Status, body, err)
		}
		return true
	}
	f.wait(startBound, "the upstream serves after "+c.name, good)
	select {
	case closed := <-u.ended:
		if closed == c.kept {
			u.t.Errorf("%s: the connection was closed: %v, want %v", c.name, closed, !c.kept)
		}
	case <-time.After(startBound):
		u.t.Errorf("%s: the connection was neither closed nor used again", c.name)
	}
}
