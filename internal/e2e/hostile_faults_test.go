//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/gateway/liveness"
)

// The campaign of faults: processes of a fleet (two gateways, two prefill and three
// decode nodes, mutual TLS) are killed, stopped and restarted while 64 clients stream.
// The result is a row of a table for each fault. With TANDEM_SOAK_TABLE=FILE the rows
// are also appended to a file.

const (
	faultStreams  = 64
	faultTokens   = 900
	shortStreams  = 24
	shortTokens   = 300
	promptsRemote = 450 // tokens of prompts that a prefill node computes
	remoteTokens  = 120
	// silencePause is how long a stopped decode node may pause its streams.
	silencePause = 2500 * time.Millisecond
	// nodesLost counts nodes that lost their streams to silence.
	nodesLost = "tandem:gateway_nodes_lost_total"
)

// faultFleet is a fleet and the requests of its clients.
type faultFleet struct {
	*battle
	decode, prefill []*member
	short, remote   *faultLoad // prompts below and above what prefill nodes take over
	tokens          int
}

// faultLoad is requests with their undisturbed results.
type faultLoad struct {
	requests []map[string]any
	want     []string
}

// faultRow is what the clients of one row saw.
type faultRow struct {
	name              string
	streams           int
	whole, cut, wrong int
	resumed, lost     int           // streams; nodes that lost streams to silence
	pause             time.Duration // longest between two events of a stream
	first             time.Duration // longest wait for a first event
	errors            []string
	lasted            time.Duration
	mu                sync.Mutex
	begun             atomic.Int64 // streams with a first event
	short             atomic.Int64 // nanoseconds of the longest pause below notedPause
	pauses            []pause      // of at least notedPause
}

// pause is a time without an event of a stream.
type pause struct{ from, to time.Time }

// notedPause is the shortest pause that faultRow.pauses has.
const notedPause = 200 * time.Millisecond

func newFaults(t *testing.T, seed uint64, streams, tokens int) *faultFleet {
	t.Helper()
	b := newBattle(t, seed, ranks{gateways: 2, nodes: []string{"--kv-cache-memory-bytes", "256MiB"}}) // room for all streams on one node
	f := &faultFleet{battle: b, prefill: b.nodes[:2], decode: b.nodes[2:], tokens: tokens}
	f.short = f.load(streams, func(i int) (prompt, tokens int) { return 8 + 2*(i%10), f.tokens - f.rand.IntN(f.tokens/3) })
	return f
}

// load draws requests, half of them greedy and half sampled, and learns their results.
func (f *faultFleet) load(streams int, size func(i int) (prompt, tokens int)) *faultLoad {
	f.t.Helper()
	l := &faultLoad{want: make([]string, streams)}
	for i := range streams {
		prompt, tokens := size(i)
		r := map[string]any{"stream": true, "ignore_eos": true, "max_tokens": tokens, "temperature": 0, "prompt": f.prompt(f.rand, prompt)}
		if i%2 == 1 {
			r["temperature"], r["seed"] = 0.9, i
		}
		l.requests = append(l.requests, r)
	}
	var wg sync.WaitGroup
	for i, r := range l.requests {
		wg.Go(func() {
			var err error
			if l.want[i], err = f.told(r); err != nil {
				f.t.Errorf("request %d, undisturbed: %v", i, err)
			}
		})
	}
	wg.Wait()
	if f.t.Failed() {
		f.t.FailNow()
	}
	return l
}

// long returns the requests whose prompts prefill nodes compute; their caches are cold.
func (f *faultFleet) long() *faultLoad {
	f.t.Helper()
	if f.remote == nil {
		f.remote = f.load(len(f.short.requests), func(int) (int, int) { return promptsRemote, remoteTokens })
	}
	f.replace(f.nodes...)
	f.whole(f.gateways...)
	return f.remote
}

// stream reads one stream to its end and notes what came of it.
func (o *faultRow) stream(at *battle, request map[string]any, want string) {
	began := time.Now()
	last, seen := began, false
	var text strings.Builder
	err := func() error {
		resp, err := at.post("/v1/completions", request)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(resp.Body)
			return fmt.Errorf("%s: %s", resp.Status, body)
		}
		for lines := bufio.NewReader(resp.Body); ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return fmt.Errorf("after %d characters: %w", text.Len(), err)
			}
			data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: "))
			switch {
			case !ok:
				continue
			case string(data) == "[DONE]":
				return nil
			}
			var e struct {
				Choices []struct {
					Text   string
					Finish string `json:"finish_reason"`
				}
				Error *struct{ Message string }
			}
			if err := json.Unmarshal(data, &e); err != nil {
				return fmt.Errorf("%w in %q", err, data)
			}
			if e.Error != nil {
				return fmt.Errorf("error event: %s", e.Error.Message)
			}
			now := time.Now()
			o.event(last, now, !seen)
			last, seen = now, true
			for _, c := range e.Choices {
				text.WriteString(c.Text)
				if c.Finish != "" {
					fmt.Fprintf(&text, "<%s>", c.Finish)
				}
			}
		}
	}()
	if seen { // until the end, however it came
		o.event(last, time.Now(), false)
	}
	got := text.String() + "\n\n"
	o.mu.Lock()
	defer o.mu.Unlock()
	o.streams++
	switch {
	case err != nil:
		o.cut++
		o.errors = append(o.errors, err.Error())
		if !strings.HasPrefix(want, text.String()) {
			o.wrong++
		}
	case got != want:
		o.wrong++
		o.errors = append(o.errors, fmt.Sprintf("altered: got %q, want %q", tail([]byte(got)), tail([]byte(want))))
	default:
		o.whole++
	}
}

// event notes the time between two events of a stream.
func (o *faultRow) event(from, to time.Time, first bool) {
	d := to.Sub(from)
	if first {
		o.begun.Add(1)
	}
	if !first && d < notedPause {
		for most := o.short.Load(); int64(d) > most && !o.short.CompareAndSwap(most, int64(d)); {
			most = o.short.Load()
		}
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if first {
		o.first = max(o.first, d)
		return
	}
	o.pause = max(o.pause, d)
	o.pauses = append(o.pauses, pause{from, to})
}

// fault is one row of the table.
type fault struct {
	name  string
	load  func(f *faultFleet) *faultLoad // nil: short prompts
	doors []int                          // gateways that clients use by turns; nil: the first
	early bool                           // do begins with the streams, not after they have begun
	do    func(f *faultFleet)
	// What the row may show besides whole streams.
	cut    func(streams int) int // exactly so many; nil: none
	still  bool                  // no stream is resumed and no node loses streams
	pause  time.Duration         // at most; 0: faultPause
	inMake bool                  // part of the short form
}

// faultPause is the longest pause of rows that name none. On a machine with nothing
// else to do it is below 2.5 s.
const faultPause = 15 * time.Second

// run plays a row and waits until the fleet is whole again.
func (f *faultFleet) run(row fault) *faultRow {
	f.t.Helper()
	load := f.short
	if row.load != nil {
		load = row.load(f)
	}
	doors := []*battle{f.at(f.gateways[0])}
	if row.doors != nil {
		doors = nil
		for _, i := range row.doors {
			doors = append(doors, f.at(f.gateways[i]))
		}
	}
	o := &faultRow{name: row.name}
	resumed, lost := f.counted("tandem:gateway_resumes_total"), f.counted(nodesLost)
	began := time.Now()
	var wg sync.WaitGroup
	for i, r := range load.requests {
		wg.Go(func() { o.stream(doors[i%len(doors)], r, load.want[i]) })
	}
	if !row.early {
		f.wait(startBound, "streams have begun", func() bool { return int(o.begun.Load()) >= len(load.requests) })
	}
	row.do(f)
	wg.Wait()
	o.lasted, o.pause = time.Since(began), max(o.pause, time.Duration(o.short.Load()))
	o.resumed, o.lost = f.grown("tandem:gateway_resumes_total", resumed), f.grown(nodesLost, lost)
	f.hold(row, o)
	f.recover()
	return o
}

// counted is a counter of each gateway; -1 where it does not answer.
func (f *faultFleet) counted(name string) (all []float64) {
	for _, g := range f.gateways {
		v := -1.0
		if g.alive() {
			if got, ok := f.metric(g, name, ""); ok {
				v = got
			}
		}
		all = append(all, v)
	}
	return all
}

// grown is by how much a counter has grown, over gateways that are still the same.
func (f *faultFleet) grown(name string, before []float64) (sum int) {
	for i, now := range f.counted(name) {
		if now > before[i] && before[i] >= 0 {
			sum += int(now - before[i])
		}
	}
	return sum
}

// alive reports whether the process runs, stopped or not.
func (m *member) alive() bool {
	select {
	case <-m.ended:
		return false
	default:
		return true
	}
}

// hold compares a row with what it may show, and reports it.
func (f *faultFleet) hold(row fault, o *faultRow) {
	f.t.Helper()
	cut, most := 0, row.pause
	if row.cut != nil {
		cut = row.cut(o.streams)
	}
	if most == 0 {
		most = faultPause
	}
	if o.wrong > 0 || o.cut != cut || o.whole != o.streams-cut {
		f.t.Errorf("%s: %d of %d streams whole, %d cut (want %d), %d wrong: %q", row.name, o.whole, o.streams, o.cut, cut, o.wrong, o.errors[:min(3, len(o.errors))])
	}
	if row.still && (o.resumed > 0 || o.lost > 0) {
		f.t.Errorf("%s: %d streams were resumed and %d nodes lost streams, want none", row.name, o.resumed, o.lost)
	}
	if o.pause > most {
		f.t.Errorf("%s: the longest pause is %v, want at most %v", row.name, o.pause.Round(time.Millisecond), most)
	}
	line := fmt.Sprintf("| %s | %d | %d | %d | %d | %d | %d | %.1f | %.1f |", row.name, o.streams, o.whole, o.resumed, o.lost, o.cut, o.wrong, o.pause.Seconds(), o.first.Seconds())
	f.t.Logf("note: %s", line)
	record(f.t, line)
}

// record appends a line to the file that TANDEM_SOAK_TABLE names.
func record(t *testing.T, line string) {
	t.Helper()
	path := os.Getenv("TANDEM_SOAK_TABLE")
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = fmt.Fprintln(file, line)
		err = cmp.Or(err, file.Close())
	}
	if err != nil {
		t.Error(err)
	}
}

// recover has every process run again, and waits until nothing is being answered.
func (f *faultFleet) recover() {
	f.t.Helper()
	for _, m := range f.all() {
		if !m.alive() {
			f.begin(m)
			continue
		}
		m.signal(f.t, syscall.SIGCONT)
	}
	f.whole(f.gateways...)
	f.wait(startBound, "no request is left on a gateway or a node", func() bool {
		for _, m := range f.all() {
			name := "vllm:num_requests_running"
			if m.role == "gateway" {
				name = "tandem:gateway_requests_in_flight"
			}
			if v, ok := f.metric(m, name, ""); !ok || v != 0 {
				return false
			}
		}
		return true
	})
}

// stop stops processes for a while.
func (f *faultFleet) stop(d time.Duration, ms ...*member) {
	for _, m := range ms {
		m.signal(f.t, syscall.SIGSTOP)
	}
	time.Sleep(d)
	for _, m := range ms {
		m.signal(f.t, syscall.SIGCONT)
	}
}

// term ends processes as a supervisor does and wants exit status 0.
func (f *faultFleet) term(ms ...*member) {
	for _, m := range ms {
		m.signal(f.t, syscall.SIGTERM)
	}
	for _, m := range ms {
		f.gone(m, time.Minute)
		if code := m.cmd.ProcessState.ExitCode(); code != 0 {
			f.t.Errorf("%s ended with status %d", m.name, code)
		}
	}
}

// killAll kills processes at once.
func (f *faultFleet) killAll(ms ...*member) {
	for _, m := range ms {
		m.signal(f.t, syscall.SIGKILL)
	}
	for _, m := range ms {
		f.gone(m, stopBound)
	}
}

// limitFiles sets the limit on file descriptors of a process that runs.
func limitFiles(t *testing.T, m *member, n uint64) {
	t.Helper()
	limit := syscall.Rlimit{Cur: n, Max: n}
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(m.cmd.Process.Pid), syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&limit)), 0, 0, 0); errno != 0 {
		t.Fatalf("limit of %s: %v", m.name, errno)
	}
}

// dialAll opens connections, sends each the bytes and returns them open.
func (f *faultFleet) dialAll(network, address string, n int, send func(i int) []byte) (all []net.Conn) {
	for i := range n {
		c, err := net.DialTimeout(network, address, 10*time.Second)
		if err != nil {
			continue // a server may refuse what is too much
		}
		_ = c.SetWriteDeadline(time.Now().Add(5 * time.Second))
		_, _ = c.Write(send(i))
		all = append(all, c)
	}
	return all
}

func closeAll(conns []net.Conn, reset bool) {
	for _, c := range conns {
		if t, ok := c.(*net.TCPConn); ok && reset {
			_ = t.SetLinger(0)
		}
		c.Close()
	}
}

// completion is an HTTP request for a stream.
func (f *faultFleet) completion(i int) []byte {
	body, err := json.Marshal(f.short.requests[i%len(f.short.requests)])
	if err != nil {
		f.t.Error(err)
	}
	return fmt.Appendf(nil, "POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", f.gateways[0].host, len(body), body)
}

// spoil opens connections with garbage and silent ones to every port of the fleet.
func (f *faultFleet) spoil() {
	var conns []net.Conn
	for _, m := range f.all() {
		ports := map[string][]string{"gateway": {"8000", "7946", "4222"}, "prefill": {"7301", "7946", "7101"}, "decode": {"7302", "7946", "7102", "7202"}}[m.role]
		for _, port := range ports {
			at := net.JoinHostPort(m.host, port)
			closeAll(f.dialAll("tcp", at, 60, func(int) []byte { return garbage(f.rand, 1+f.rand.IntN(4096)) }), true)
			conns = append(conns, f.dialAll("tcp", at, 50, func(int) []byte { return nil })...)
		}
		closeAll(f.dialAll("udp", net.JoinHostPort(m.host, "7946"), 800, func(int) []byte { return garbage(f.rand, 1+f.rand.IntN(1400)) }), false)
	}
	f.t.Logf("note: %d silent connections", len(conns))
	time.Sleep(2 * time.Second)
	closeAll(conns, false)
}

func garbage(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// faultTable is the campaign's rows, in order.
func faultTable() []fault {
	all := func(n int) int { return n }
	half := func(n int) int { return n / 2 }
	long := (*faultFleet).long
	return []fault{
		{name: "none", do: func(*faultFleet) {}, still: true},
		{name: "SIGKILL d1", inMake: true, do: func(f *faultFleet) { f.killAll(f.decode[0]) }},
		{name: "SIGKILL d1 and d2 at once", do: func(f *faultFleet) { f.killAll(f.decode[:2]...) }},
		{name: "SIGKILL d1, back on the same ports after 1 s", do: func(f *faultFleet) {
			f.killAll(f.decode[0])
			time.Sleep(time.Second)
			f.begin(f.decode[0])
		}},
		{name: "SIGKILL p1 during prefills", load: long, early: true, do: func(f *faultFleet) {
			time.Sleep(time.Duration(50+f.rand.IntN(300)) * time.Millisecond)
			f.killAll(f.prefill[0])
		}},
		{name: "SIGKILL p1 and p2 during prefills", load: long, early: true, do: func(f *faultFleet) {
			time.Sleep(time.Duration(50+f.rand.IntN(300)) * time.Millisecond)
			f.killAll(f.prefill...)
		}},
		{name: "SIGKILL p1 mid-transfer", load: long, early: true, do: func(f *faultFleet) {
			f.transferring()
			f.killAll(f.prefill[0])
		}},
		{name: "SIGSTOP p2 15 s mid-transfer", load: long, early: true, do: func(f *faultFleet) {
			f.transferring()
			f.stop(15*time.Second, f.prefill[1])
		}},
		{name: "SIGSTOP d1 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.decode[0]) }},
		{name: "SIGSTOP d1 60 s", do: func(f *faultFleet) { f.stop(time.Minute, f.decode[0]) }},
		{name: "the run after it", do: func(*faultFleet) {}, still: true},
		{name: "SIGSTOP d1 4 s", inMake: true, do: func(f *faultFleet) { f.stop(4*time.Second, f.decode[0]) }},
		{name: "SIGSTOP p1 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.prefill[0]) }, still: true},
		{name: "SIGSTOP the other gateway 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.gateways[1]) }, still: true},
		{name: "SIGSTOP the gateway 3 s", inMake: true, do: func(f *faultFleet) { f.stop(3*time.Second, f.gateways[0]) }, still: true},
		{name: "SIGSTOP the gateway 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.gateways[0]) }, still: true, pause: 20 * time.Second},
		{name: "SIGSTOP all decode nodes 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.decode...) }, still: true, pause: 20 * time.Second},
		{name: "SIGSTOP all nodes and gateways 10 s", do: func(f *faultFleet) { f.stop(10*time.Second, f.all()...) }, still: true, pause: 20 * time.Second},
		{name: "SIGTERM d1 (exit 0)", do: func(f *faultFleet) { f.term(f.decode[0]) }},
		{name: "SIGTERM d1 and p1", do: func(f *faultFleet) { f.term(f.decode[0], f.prefill[0]) }},
		{name: "rolling SIGTERM and start of d1, d2, d3", do: func(f *faultFleet) {
			for _, m := range f.decode {
				f.term(m)
				f.begin(m)
				f.whole(f.gateways...)
			}
		}},
		{name: "SIGKILL gw1, streams on gw2", doors: []int{1}, do: func(f *faultFleet) { f.killAll(f.gateways[0]) }},
		{name: "SIGKILL gw2, streams on gw1", do: func(f *faultFleet) { f.killAll(f.gateways[1]) }},
		{name: "SIGKILL gw1, half of the streams on it", doors: []int{0, 1}, do: func(f *faultFleet) { f.killAll(f.gateways[0]) }, cut: half},
		{name: "SIGTERM gw1, half of the streams on it (exit 0)", doors: []int{0, 1}, do: func(f *faultFleet) { f.term(f.gateways[0]) }},
		{name: "SIGKILL all decode nodes", do: func(f *faultFleet) { f.killAll(f.decode...) }, cut: all, pause: 20 * time.Second},
		{name: "the same, all back after 3 s", do: func(f *faultFleet) {
			f.killAll(f.decode...)
			time.Sleep(3 * time.Second)
			for _, m := range f.decode {
				f.begin(m)
			}
		}, pause: 20 * time.Second},
		{name: "d1 with 40 descriptors", do: func(f *faultFleet) {
			limitFiles(f.t, f.decode[0], 40)
			time.Sleep(3 * time.Second)
			f.term(f.decode[0])
		}},
		{name: "1,000 idle connections, 500 with half a head", early: true, do: func(f *faultFleet) {
			at := net.JoinHostPort(f.gateways[0].host, "8000")
			conns := append(f.dialAll("tcp", at, 500, func(int) []byte { return nil }),
				f.dialAll("tcp", at, 500, func(int) []byte { return []byte("POST /v1/completions HTTP/1.1\r\nHost") })...)
			defer closeAll(conns, false)
			time.Sleep(5 * time.Second)
		}, still: true},
		{name: "200 clients that vanish (RST)", early: true, do: func(f *faultFleet) {
			conns := f.dialAll("tcp", net.JoinHostPort(f.gateways[0].host, "8000"), 200, f.completion)
			time.Sleep(time.Second)
			closeAll(conns, true)
		}, still: true},
		{name: "100 clients that never read", early: true, do: func(f *faultFleet) {
			conns := f.dialAll("tcp", net.JoinHostPort(f.gateways[0].host, "8000"), 100, f.completion)
			defer closeAll(conns, true)
			time.Sleep(5 * time.Second)
		}, still: true},
		{name: "spoiled connections on every port", do: func(f *faultFleet) { f.spoil() }, still: true},
	}
}

// transferring waits until KV has come from prefill nodes, which have more to send.
func (f *faultFleet) transferring() {
	f.wait(startBound, "KV is being transferred", func() bool {
		for _, m := range f.decode {
			if v, ok := f.metric(m, "tandem:kv_transfer_bytes_total", `direction="in"`); ok && v > 0 {
				return true
			}
		}
		return false
	})
}

// Every fault of the table: no stream is cut that need not be, none differs, nothing
// moves without need.
func TestBinaryHostileFaults(t *testing.T) {
	t.Parallel()
	streams, tokens, seed := shortStreams, shortTokens, uint64(20261123)
	if soaking() {
		streams, tokens, seed = faultStreams, faultTokens, soakSeed(t, seed)
	}
	f := newFaults(t, seed, streams, tokens)
	record(t, fmt.Sprintf("\nSeed %d, %s.\n\n| fault | streams | whole | resumed | nodes lost to silence | cut | wrong | longest pause, s | longest first token, s |\n|---|---|---|---|---|---|---|---|---|", seed, time.Now().UTC().Format(time.DateTime)))
	for _, row := range faultTable() {
		if (soaking() || row.inMake) && strings.Contains(row.name, os.Getenv("TANDEM_SOAK_FAULT")) {
			f.run(row)
		}
	}
}

// 50 stops of a decode node under streams that never end: the 99th percentile of the
// longest pauses is at most silencePause.
func TestBinaryHostileStopped(t *testing.T) {
	if !soaking() {
		t.Skip("part of a soak: ten minutes")
	}
	stops := 50
	if text := os.Getenv("TANDEM_SOAK_STOPS"); text != "" {
		var err error
		if stops, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	seed := soakSeed(t, 20261123)
	f := newFaults(t, seed, faultStreams, faultTokens)
	var longest []time.Duration
	lost := f.counted(nodesLost)
	o := f.loop(func(o *faultRow) {
		var began time.Time
		for range stops {
			// One of three nodes may lose its streams within 10 s.
			time.Sleep(time.Until(began.Add(liveness.Window + time.Duration(500+f.rand.IntN(1000))*time.Millisecond)))
			m := f.decode[f.rand.IntN(len(f.decode))]
			began = time.Now()
			f.stop(4*time.Second, m)
			o.mu.Lock()
			most := time.Duration(0)
			for _, p := range o.pauses {
				if p.to.After(began) {
					most = max(most, p.to.Sub(p.from))
				}
			}
			o.pauses = nil
			o.mu.Unlock()
			longest = append(longest, most)
			f.whole(f.gateways...)
		}
	})
	slices.Sort(longest)
	p99 := longest[(len(longest)*99+99)/100-1]
	line := fmt.Sprintf("%d times SIGSTOP of a decode node under %d streams (seed %d): longest pause %.2f s at the median, %.2f s at p99, %.2f s at most; nodes lost to silence %d; %d streams whole, %d cut, %d wrong.",
		len(longest), faultStreams, seed, longest[len(longest)/2].Seconds(), p99.Seconds(), longest[len(longest)-1].Seconds(), f.grown(nodesLost, lost), o.whole, o.cut, o.wrong)
	t.Logf("note: %s", line)
	record(t, "\n"+line)
	if p99 > silencePause {
		t.Errorf("p99 of the longest pauses is %v, want at most %v: %v", p99, silencePause, longest)
	}
	if o.cut+o.wrong > 0 {
		t.Errorf("%d streams cut, %d wrong: %q", o.cut, o.wrong, o.errors[:min(3, len(o.errors))])
	}
}

// loop runs streams again and again until do returns.
func (f *faultFleet) loop(do func(o *faultRow)) *faultRow {
	o := &faultRow{}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i, r := range f.short.requests {
		at := f.at(f.gateways[i%len(f.gateways)])
		wg.Go(func() {
			for {
				o.stream(at, r, f.short.want[i])
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	defer wg.Wait()
	defer close(done)
	f.wait(startBound, "streams have begun", func() bool { return int(o.begun.Load()) >= len(f.short.requests)*3/4 })
	do(o)
	return o
}

// Half an hour of as many streams as the machine can take: no node is taken for
// stopped.
func TestBinaryHostileLoad(t *testing.T) {
	if !soaking() {
		t.Skip("part of a soak: half an hour")
	}
	seed, length := soakSeed(t, 20261123), min(30*time.Minute, soakMinutes(t))
	f := newFaults(t, seed, faultStreams, faultTokens)
	lost, resumed := f.counted(nodesLost), f.counted("tandem:gateway_resumes_total")
	o := f.loop(func(*faultRow) { time.Sleep(length) })
	moved, again := f.grown(nodesLost, lost), f.grown("tandem:gateway_resumes_total", resumed)
	line := fmt.Sprintf("%v of full load, %d streams at once (seed %d): %d streams whole, %d cut, %d wrong, %d resumed; nodes lost to silence %d; longest pause %.2f s.",
		length, faultStreams, seed, o.whole, o.cut, o.wrong, again, moved, o.pause.Seconds())
	t.Logf("note: %s", line)
	record(t, "\n"+line)
	if moved+again+o.cut+o.wrong > 0 {
		t.Errorf("streams moved without need, or were not whole: %s %q", line, o.errors[:min(3, len(o.errors))])
	}
}
