//go:build linux

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// hostileHeap is how much resident memory attacks over HTTP may add to the gateway, in bytes.
const hostileHeap = 128 << 20

// farBody is a request for the model of the upstream.
const farBody = `{"model":"far","prompt":"x","max_tokens":1}`

// rawCase is bytes that a client sends and the statuses of all answers. A last
// request follows on the connection, whose answer is 200: it is only there where
// the connection is still in step.
type rawCase struct {
	name, text string
	want       []int
}

var (
	answers400 = []int{400}
	answers200 = []int{200, 200}
)

// posted is a request for the upstream with more header lines, and its body.
func posted(headers, body string) string {
	return "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers + "\r\n" + body
}

// inChunks is farBody as one chunk and the end.
var inChunks = fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(farBody), farBody)

// clientCases are the 77 cases.
func clientCases() (all []rawCase) {
	add := func(name, text string, want []int) { all = append(all, rawCase{name, text, want}) }
	size := fmt.Sprintf("Content-Length: %d\r\n", len(farBody))
	const chunked = "Transfer-Encoding: chunked\r\n"
	add("length", posted(size, farBody), answers200)
	add("chunks", posted(chunked, inChunks), answers200)
	add("length in capitals", posted(strings.ToUpper(size), farBody), answers200)
	// Two framings.
	add("length, then encoding", posted(size+chunked, inChunks), answers400)
	add("encoding, then length", posted(chunked+size, inChunks), answers400)
	add("short length, then encoding", posted("Content-Length: 4\r\n"+chunked, inChunks), answers400)
	add("length of zero and encoding", posted("Content-Length: 0\r\n"+chunked, inChunks), answers400)
	add("both, asked to keep", posted("Connection: keep-alive\r\n"+size+chunked, inChunks), answers400)
	add("both, expecting", posted("Expect: 100-continue\r\n"+size+chunked, inChunks), answers400)
	add("both, of a GET", "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"+chunked+"\r\n0\r\n\r\n", answers400)
	add("encoding in HTTP/1.0", strings.Replace(posted("Connection: keep-alive\r\n"+chunked, inChunks), "/1.1", "/1.0", 1), answers400)
	add("both in HTTP/1.0", strings.Replace(posted("Connection: keep-alive\r\n"+size+chunked, inChunks), "/1.1", "/1.0", 1), answers400)
	add("encoding in HTTP/1.9", strings.Replace(posted(chunked, inChunks), "/1.1", "/1.9", 1), []int{200}) // as HTTP/1.1; the connection ends
	// Lengths.
	for _, value := range []string{"+43", "-1", "-0", "0x2b", "4_3", "43 43", "43, 43", "43,", "", "4.3e1", "\"43\"", "99999999999999999999", "18446744073709551659", "٤٣", "\x0b43"} {
		add(fmt.Sprintf("Content-Length: %q", value), posted("Content-Length: "+value+"\r\n", farBody), answers400)
	}
	add("equal lengths twice", posted(size+size, farBody), answers400)
	add("two lengths", posted(size+"Content-Length: 0\r\n", farBody), answers400)
	add("beyond the limit", posted("Content-Length: 99999999999\r\n", ""), []int{413})
	// Encodings.
	for _, value := range []string{"identity", "gzip, chunked", "chunked, identity", "chunked, chunked", "xchunked", "chunkedx", "\x0bchunked", "\"chunked\"", "chunked;x=y", "", "chunked,", "cow"} {
		add(fmt.Sprintf("Transfer-Encoding: %q", value), posted("Transfer-Encoding: "+value+"\r\n", inChunks), answers400)
	}
	add("encoding twice", posted(chunked+chunked, inChunks), answers400)
	add("space before the colon of an encoding", posted("Transfer-Encoding : chunked\r\n", inChunks), answers400)
	add("tab before the colon of a length", posted(fmt.Sprintf("Content-Length\t: %d\r\n", len(farBody)), farBody), answers400)
	// Chunks.
	for name, body := range map[string]string{
		"0x": "0x2b\r\n" + farBody + "\r\n0\r\n\r\n", "a space first": " 2b\r\n" + farBody + "\r\n0\r\n\r\n", "a sign": "-2b\r\n" + farBody + "\r\n0\r\n\r\n",
		"an overflow": "100000000000000002b\r\n" + farBody + "\r\n0\r\n\r\n", "no size": "\r\n" + farBody + "\r\n0\r\n\r\n", "a bare LF": "2b\n" + farBody + "\n0\n\n",
		"too much": "2b\r\n" + farBody + "xx\r\n0\r\n\r\n", "no digits": "xyz\r\n" + farBody + "\r\n0\r\n\r\n", "a plus": "+2b\r\n" + farBody + "\r\n0\r\n\r\n",
	} {
		add("a chunk with "+name, posted(chunked, body), answers400)
	}
	add("a smuggled length as trailer", posted(chunked, strings.TrimSuffix(inChunks, "\r\n")+"Content-Length: 5\r\n\r\n"), answers400)
	add("a smuggled key as trailer", posted(chunked, strings.TrimSuffix(inChunks, "\r\n")+"Authorization: Bearer x\r\n\r\n"), answers400)
	// Heads.
	for name, line := range map[string]string{
		"a bare CR": "X: a\rb\r\n", "NUL in a value": "X: a\x00b\r\n", "NUL in a name": "X\x00: a\r\n", "no colon": "X\r\n", "an empty name": ": a\r\n", "a second Host": "Host: u\r\n",
		"DEL": "X: a\x7fb\r\n", "a space in a name": "X Y: a\r\n", "a space first": " X: a\r\n",
	} {
		want := answers400
		if name == "a space first" { // continues the line before, as one space
			want = []int{415, 200}
		}
		add("a head with "+name, posted(line+size, farBody), want)
	}
	const end = " HTTP/1.1\r\nHost: localhost\r\n\r\n"
	add("no Host", "GET /livez HTTP/1.1\r\n\r\n", answers400)
	add("two spaces", "GET  /livez"+end, answers400)
	add("no version", "GET /livez\r\nHost: localhost\r\n\r\n", answers400)
	add("HTTP/3", "GET /livez HTTP/x\r\nHost: localhost\r\n\r\n", answers400)
	add("a method with a brace", "G{T /livez"+end, answers400)
	add("control in the target", "GET /li\x01vez"+end, answers400)
	add("HTTP/2's preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{505})
	add("HTTP/2.0", "GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n", []int{505})
	add("an unknown expectation", posted("Expect: 200-ok\r\n"+size, farBody), []int{417})
	add("a head of 20 KB", "GET /livez HTTP/1.1\r\nHost: localhost\r\nX: "+strings.Repeat("x", 20<<10)+"\r\n\r\n", []int{431})
	add("pipelined", "GET /livez"+end+"GET /nope"+end, []int{200, 404, 200})
	return all
}

// startFarServer is an upstream that serves the model far and records bodies.
func startFarServer(t *testing.T) (url string, bodies func() []string) {
	t.Helper()
	var mu sync.Mutex
	var got []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "GET" {
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"far","object":"model"}]}`)
			return
		}
		body, err := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		if got = append(got, string(body)); err != nil {
			got = append(got, err.Error())
		}
		_, _ = io.WriteString(w, `{"id":"x","choices":[]}`)
	}))
	t.Cleanup(s.Close)
	return s.URL, func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(got) }
}

// statuses sends bytes and a last request, and returns the statuses of all answers.
func statuses(addr, text string) (got []int, err error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(startBound)); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(conn, text+"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	for {
		resp, err := http.ReadResponse(r, nil)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && r.Buffered() == 0 {
			return got, nil
		}
		if err != nil {
			return got, err
		}
		if resp.StatusCode == http.StatusContinue {
			return got, errors.New("100 Continue")
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return got, err
		}
		got = append(got, resp.StatusCode)
	}
}

// Each of 77 hostile requests has its answer, its connection ends where it cannot be in
// step, and an upstream only gets whole requests.
func TestBinaryHostileHTTP(t *testing.T) {
	url, bodies := startFarServer(t)
	f := startHostileFleet(t, hostileFlags{gateway: []string{"--upstream", url}})
	f.waitModels("far", "tandem-builtin")
	b := newBystanders(f.cluster, 3)
	cases := clientCases()
	if len(cases) != 77 {
		t.Fatalf("%d cases", len(cases))
	}
	resetPeak(t, f.gateway)
	before := resident(t, f.gateway, "VmRSS")
	addr, whole := fmt.Sprintf("127.0.0.1:%d", f.port), 0
	b.during("hostile HTTP", func() {
		for _, c := range cases {
			got, err := statuses(addr, c.text)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%s: %v %v, want %v", c.name, got, err, c.want)
			}
			if c.want[0] == 200 && strings.HasPrefix(c.text, "POST") {
				whole++
			}
		}
	})
	if got := bodies(); len(got) != whole || slices.ContainsFunc(got, func(body string) bool { return body != farBody }) {
		t.Errorf("the upstream got %q, want %d of %q", got, whole, farBody)
	}
	if peak := peakRSS(t, f.gateway); peak > before+hostileHeap {
		t.Errorf("the gateway's resident memory rose from %d to %d MiB", before>>20, peak>>20)
	}
	if !f.gateway.alive() {
		t.Error("the gateway ended")
	}
}

// waitModels waits until the gateway lists models.
func (f *hostileFleet) waitModels(names ...string) {
	f.t.Helper()
	f.wait(startBound, "the gateway lists all models", func() bool {
		var list struct{ Data []struct{ ID string } }
		if f.getJSON("/v1/models", &list) != nil {
			return false
		}
		for _, m := range list.Data {
			names = slices.DeleteFunc(names, func(name string) bool { return name == m.ID })
		}
		return len(names) == 0
	})
}
