//go:build linux

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	bodyClients = 32
	bodyGroup   = 2 << 30 // memory limit of the gateway's cgroup, in bytes
	bodyIdle    = 32 << 20
	bodyGrowth  = 1.5 // peak resident above idle, as a multiple of --max-body-memory
	pieceBytes  = 64 << 10
)

// sending is how a client sends its body.
type sending int

const (
	sendWhole   sending = iota
	sendHeld            // the last byte follows when all clients of the round have sent theirs
	sendChunked         // in chunks of 64 KiB, with the last one held likewise
	sendSlowly          // pieces with pauses
	sendHalf            // the connection ends within the body
	sendUnread          // the connection ends behind the body
)

// bodyOutcome is the answer to one body.
type bodyOutcome struct {
	status     int // 0: the client did not wait for an answer
	retryAfter string
	text       string
	err        error
}

// fittingBodies are bodies that are served however long they are. What is made of the
// first six takes several times their bytes.
func fittingBodies() []bomb {
	const text, chat = "/v1/completions", "/v1/chat/completions"
	hello := `{"max_tokens":1,"messages":[{"role":"user","content":"x"`
	return []bomb{
		{chat, hello + `,"name":"`, "ab cd. ", `"}]}`, 200, "usage"},
		{chat, hello + `}],"documents":[{"title":"a","text":"`, "ab cd. ", `"}]}`, 200, "usage"},
		{chat, hello + `}],"documents":[{"title":"a","text":"`, `\u00e9`, `"}]}`, 200, "usage"},
		{chat, hello + `}],"chat_template_kwargs":{"a":"`, "ab cd. ", `"}}`, 200, "usage"},
		{chat, hello + `}],"metadata":{"a":"`, "ab cd. ", `"}}`, 200, "usage"},
		{"/v1/responses", `{"max_output_tokens":1,"input":[{"type":"reasoning","content":"`, "ab cd. ", `"},{"role":"user","content":"x"}]}`, 200, "usage"},
		{chat, hello + `}],"user":"`, "x", `"}`, 200, "usage"},
		{text, `{"prompt":"x","max_tokens":1,"user":"`, `\"`, `"}`, 200, "usage"},
		{text, `{"prompt":"x","max_tokens":1`, "  \n\t", `}`, 200, "usage"},
		{text, `{"prompt":"x",`, " ", `"max_tokens":1}`, 200, "usage"},
	}
}

// 32 clients at a time send large bodies of every shape in every manner, next to streams.
// Those that fit are answered as they would be alone, the others get 429 with Retry-After.
// The gateway takes at most 1.5 times --max-body-memory above its idle memory, and gives
// it back. Where rights allow, it runs in a cgroup with 2 GiB of memory.
func TestBinaryHostileBodies(t *testing.T) {
	most, size, rounds, seed := int64(64<<20), 3<<20, 3, uint64(15)
	if soaking() {
		most, size, rounds = 1<<30, 32<<20-64<<10, 16
		if s, err := strconv.ParseUint(os.Getenv("TANDEM_SOAK_SEED"), 10, 64); err == nil {
			seed = s
		}
	}
	group := memoryGroup(t, bodyGroup)
	f := startHostileFleet(t, hostileFlags{gateway: []string{"--max-body-memory", strconv.FormatInt(most, 10)}, gatewayGroup: group})
	streams := newBystanders(f.cluster, seed)
	shapes := append(bombs(), fittingBodies()...)
	r := rand.New(rand.NewPCG(seed, 15))
	idle := resident(t, f.gateway, "VmRSS")
	counts := map[int]int{}
	var highest int64
	streams.during("bodies", func() {
		for round := range rounds {
			resetPeak(t, f.gateway)
			f.bodyRound(r, shapes, size, round, counts)
			peak := peakRSS(t, f.gateway)
			highest = max(highest, peak)
			if grown := peak - idle; float64(grown) > bodyGrowth*float64(most) {
				t.Errorf("round %d: %d MiB above idle, --max-body-memory is %d MiB", round, grown>>20, most>>20)
			}
			if !f.gateway.alive() {
				t.Fatal("the gateway has ended")
			}
		}
	})
	var back time.Duration
	began := time.Now()
	f.wait(20*time.Second, "the memory is back", func() bool {
		back = time.Since(began)
		return resident(t, f.gateway, "VmRSS") <= idle+bodyIdle
	})
	if counts[200] == 0 || counts[429] == 0 {
		t.Errorf("answers by status: %v; want some of 200 and of 429", counts)
	}
	for _, d := range []*daemon{f.gateway, f.prefill, f.decode[0], f.decode[1]} {
		if !d.alive() {
			t.Errorf("tandem %s has ended", d.cmd.Args[1])
		}
	}
	t.Logf("seed %d, %d rounds, bodies of up to %d MiB, --max-body-memory %d MiB, cgroup %v: answers %v, idle %d MiB, peak %d MiB (%.2f of --max-body-memory above idle), back after %v; %d streams, longest %v",
		seed, rounds, size>>20, most>>20, group != "", counts, idle>>20, highest>>20, float64(highest-idle)/float64(most), back.Round(time.Millisecond),
		streams.served.Load(), time.Duration(streams.longest.Load()).Round(time.Millisecond))
}

// bodyRound sends bodies from 32 clients at once and counts the answers by status. In
// even rounds the bodies end at the same moment. Four more clients go away meanwhile.
func (f *hostileFleet) bodyRound(r *rand.Rand, shapes []bomb, size, round int, counts map[int]int) {
	f.t.Helper()
	gate := &bodyGate{open: make(chan struct{})}
	start := make(chan struct{})
	outcomes := make([]bodyOutcome, bodyClients+4)
	bodies := make([]bomb, len(outcomes))
	order := r.Perm(len(shapes))
	var wg sync.WaitGroup
	for i := range outcomes {
		bodies[i] = shapes[order[i%len(order)]]
		if i%2 == 0 { // half of them are to be served
			all := fittingBodies()
			bodies[i] = all[r.IntN(len(all))]
		}
		how := []sending{sendHeld, sendHeld, sendHeld, sendChunked}[i%4]
		switch {
		case i >= bodyClients:
			how = []sending{sendHalf, sendUnread}[i%2]
		case round%2 == 1:
			how = []sending{sendWhole, sendWhole, sendChunked, sendSlowly}[i%4]
		}
		nBytes := size
		if i%3 == 0 {
			nBytes = size/2 + r.IntN(size/2)
		}
		if how == sendHeld || how == sendChunked {
			gate.wanted.Add(1)
		}
		wg.Go(func() {
			<-start
			outcomes[i] = f.sendBody(&bodies[i], nBytes, how, gate)
		})
	}
	close(start)
	wg.Wait()
	for i, o := range outcomes {
		b := &bodies[i]
		if i >= bodyClients {
			continue
		}
		if o.err == nil {
			counts[o.status]++
		}
		switch {
		case o.err != nil:
			f.t.Errorf("round %d, client %d, %s %.60s…: %v", round, i, b.path, b.head, o.err)
		case o.status == 429 && (o.retryAfter == "" || !strings.Contains(o.text, "--max-body-memory")):
			f.t.Errorf("round %d, client %d, %s %.60s…: 429, Retry-After %q, %.200s", round, i, b.path, b.head, o.retryAfter, o.text)
		case o.status != 429 && (o.status != b.status || !strings.Contains(o.text, b.says)):
			f.t.Errorf("round %d, client %d, %s %.60s…: %d %.200s, want %d with %q, or 429", round, i, b.path, b.head, o.status, o.text, b.status, b.says)
		}
	}
}

// bodyGate opens when all that are wanted have arrived.
type bodyGate struct {
	wanted, arrived atomic.Int64
	open            chan struct{}
}

func (g *bodyGate) arrive() {
	if g.arrived.Add(1) == g.wanted.Load() {
		close(g.open)
	}
}

// errAnswered is why a client sends no more of its body: the answer is there.
var errAnswered = errors.New("answered")

// sendBody sends a body of about size bytes and returns the answer.
func (f *hostileFleet) sendBody(b *bomb, size int, how sending, gate *bodyGate) (o bodyOutcome) {
	var held sync.Once
	arrive := func() {
		if how == sendHeld || how == sendChunked {
			held.Do(gate.arrive)
		}
	}
	defer arrive()
	nc, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", f.port))
	if err != nil {
		return bodyOutcome{err: err}
	}
	defer nc.Close()
	if err := nc.SetDeadline(time.Now().Add(3 * time.Minute)); err != nil {
		return bodyOutcome{err: err}
	}
	n := max(1, (size-len(b.head)-len(b.tail))/len(b.unit))
	length := len(b.head) + n*len(b.unit) + len(b.tail)
	framing := fmt.Sprintf("Content-Length: %d", length)
	if how == sendChunked {
		framing = "Transfer-Encoding: chunked"
	}
	answered := make(chan struct{})
	if how != sendHalf && how != sendUnread {
		go func() {
			defer close(answered)
			resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
			if err != nil {
				o.err = err
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			o = bodyOutcome{resp.StatusCode, resp.Header.Get("Retry-After"), string(text), err}
		}()
	}
	sent, stopAt := 0, length
	if how == sendHalf {
		stopAt = length / 2
	}
	write := func(p []byte) error {
		select {
		case <-answered:
			return errAnswered
		default:
		}
		p = p[:min(len(p), stopAt-sent)]
		if len(p) == 0 {
			return nil
		}
		last := sent+len(p) == length
		if held := (how == sendHeld || how == sendChunked) && last; held {
			if len(p) > 1 {
				if err := writePiece(nc, p[:len(p)-1], how); err != nil {
					return err
				}
				p = p[len(p)-1:]
			}
			arrive()
			select {
			case <-gate.open:
			case <-answered:
				return errAnswered
			case <-time.After(time.Minute):
				return errors.New("the other clients' bodies take longer than a minute")
			}
			sent = length - 1
		}
		sent += len(p)
		if how == sendSlowly && sent%(16*pieceBytes) < pieceBytes {
			time.Sleep(5 * time.Millisecond)
		}
		return writePiece(nc, p, how)
	}
	err = func() error {
		if _, err := fmt.Fprintf(nc, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n%s\r\n\r\n", b.path, framing); err != nil {
			return err
		}
		if err := write([]byte(b.head)); err != nil {
			return err
		}
		perPiece := max(1, pieceBytes/len(b.unit))
		piece := []byte(strings.Repeat(b.unit, perPiece))
		for left := n; left > 0; left -= perPiece {
			if err := write(piece[:min(left, perPiece)*len(b.unit)]); err != nil {
				return err
			}
		}
		if err := write([]byte(b.tail)); err != nil || how != sendChunked {
			return err
		}
		_, err := io.WriteString(nc, "0\r\n\r\n")
		return err
	}()
	arrive()
	if how == sendHalf || how == sendUnread {
		return bodyOutcome{}
	}
	<-answered // a refusal may come while the body is sent, whose writing then fails
	if o.err != nil && err != nil && !errors.Is(err, errAnswered) {
		o.err = errors.Join(o.err, err)
	}
	return o
}

// writePiece writes a part of a body, as a chunk if it is sent in chunks.
func writePiece(w io.Writer, p []byte, how sending) error {
	if how == sendChunked {
		p = slices.Concat(fmt.Appendf(nil, "%x\r\n", len(p)), p, []byte("\r\n"))
	}
	_, err := w.Write(p)
	return err
}

// memoryGroup makes a cgroup with a memory limit below this process's, of version 1 or 2,
// and returns its folder; empty: rights do not allow it.
func memoryGroup(t *testing.T, limit int64) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(own)) {
		hierarchy, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		switch {
		case hierarchy == "0" && controllers == "":
			root, file = "/sys/fs/cgroup", "memory.max"
		case !slices.Contains(strings.Split(controllers, ","), "memory"):
			continue
		}
		dir := filepath.Join(root, path, fmt.Sprintf("tandem-test-%d", os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { // when its process has ended
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		// Without the controller there is no such file; where this process is in a
		// group of version 2 by itself the controller cannot be had.
		if os.WriteFile(filepath.Join(dir, file), strconv.AppendInt(nil, limit, 10), 0) == nil {
			return dir
		}
	}
	return ""
}
