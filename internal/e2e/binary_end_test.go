//go:build linux

package e2e

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	members "github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Every node is stopped in order and started again, one after the other, under
// load, and then drained through the gateway and taken back. None of them gets the
// time to finish what it has: its streams go on elsewhere, and their clients notice
// nothing.
func TestBinaryRollingRestart(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 11, ranks{nodes: []string{"--shutdown-timeout", "20ms"}})
	resumes := b.disturb(func() {
		for _, m := range b.nodes {
			b.busy(m)
			m.signal(t, syscall.SIGTERM)
			b.gone(m, stopBound)
			if !m.cmd.ProcessState.Success() {
				t.Errorf("%s ended with %s", m.name, m.cmd.ProcessState)
			}
			b.begin(m)
			b.returned([]*member{m})
		}
		for _, m := range b.nodes { // and through the gateway, which takes them back
			b.busy(m)
			b.order(http.MethodPost, "/admin/drain/"+m.name+"?timeout=10ms")
			b.wait(stopBound, m.name+" is drained", func() bool { return b.fleet()[m.name].Draining && b.fleet()[m.name].Running == 0 })
			b.order(http.MethodDelete, "/admin/drain/"+m.name)
			b.whole(b.gateways...)
		}
	})
	if resumes == 0 {
		t.Error("no stream was handed over: the restarts have met nobody in the middle of one")
	}
}

// busy waits a while for a node to have streams.
func (b *battle) busy(m *member) {
	for end := time.Now().Add(10 * time.Second); m.role == "decode" && b.fleet()[m.name].Running == 0 && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
}

// order asks the gateway for something that operators may.
func (b *battle) order(method, path string) {
	b.t.Helper()
	req, err := http.NewRequest(method, b.url(path), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	resp, err := b.client().Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode/100 != 2 {
		b.t.Fatalf("%s %s: %s: %s", method, path, resp.Status, text)
	}
}

// idle waits until no node holds anything for a request.
func (b *battle) idle(bound time.Duration) (took time.Duration) {
	b.t.Helper()
	left := ""
	defer func() {
		if b.t.Failed() {
			b.t.Logf("left: %s", left)
		}
	}()
	return b.wait(bound, "no node holds anything for a request", func() bool {
		for _, m := range b.nodes {
			held := []struct{ name, label string }{
				{"tandem:kv_blocks", `state="used"`}, {"tandem:kv_blocks", `state="pinned"`}, {"tandem:kv_blocks_in_transfer", ""},
				{"vllm:num_requests_running", ""}, {"vllm:num_requests_waiting", ""},
			}
			if m.role == "decode" {
				held = append(held, struct{ name, label string }{"tandem:kv_leases", ""}, struct{ name, label string }{"tandem:queue_length", `queue="attempts"`})
			} else {
				held = append(held, struct{ name, label string }{"tandem:queue_length", `queue="prefill_jobs"`})
			}
			for _, h := range held {
				if v, ok := b.metric(m, h.name, h.label); !ok || v != 0 {
					left = m.name + " " + h.name + h.label
					return false
				}
			}
		}
		return true
	})
}

// long is a stream that lasts for seconds.
func (b *battle) long(seed int) (*sse, error) {
	return b.stream(b.prompt(b.rand, 100+seed), 1500)
}

// both starts long streams on two gateways, and has read of each.
func (b *battle) both(n int) (first, second []*sse) {
	b.t.Helper()
	for i := range 2 * n {
		at, keep := b, &first
		if i%2 == 0 {
			at, keep = b.at(b.gateways[1]), &second
		}
		s, err := at.long(i)
		if err == nil {
			err = s.next()
		}
		if err != nil {
			b.t.Fatal(err)
		}
		*keep = append(*keep, s)
	}
	return first, second
}

// A gateway that is killed leaves its clients with an abort, never with a clean
// end; the nodes free what its requests held, the other gateway's streams go on,
// and a gateway that is started again serves.
func TestBinaryGatewayKilled(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 13, ranks{gateways: 2})
	aborted := 0
	for tries := 0; aborted == 0 && tries < 5; tries++ { // a test that was held up may find its streams finished
		mine, others := b.both(4)
		b.kill(b.gateways[0])
		for i, s := range mine {
			switch err := s.rest(); {
			case err != nil && !s.done && s.finish == "":
				aborted++
			case err != nil || !s.done || s.finish != "length":
				t.Errorf("stream %d of the killed gateway looks finished after %d events: %v, [DONE] %v, finish_reason %q", i, s.events, err, s.done, s.finish)
			}
		}
		for i, s := range others {
			if err := s.rest(); err != nil || !s.done || s.finish != "length" || s.failed != "" {
				t.Errorf("stream %d of the other gateway ended after %d events with %v, [DONE] %v, finish_reason %q, error %q", i, s.events, err, s.done, s.finish, s.failed)
			}
		}
		idle := b.idle(stopBound)
		b.begin(b.gateways[0])
		began := time.Now()
		b.whole(b.gateways[0])
		t.Logf("note: %d streams of a killed gateway were aborted; %v after the other's last one the nodes hold nothing; started again, it uses all nodes after %v",
			aborted, idle.Round(10*time.Millisecond), time.Since(began).Round(10*time.Millisecond))
	}
	if aborted == 0 {
		t.Error("no stream was aborted: the kill has met nobody in the middle of one")
	}
	if resumes, _ := b.metric(b.gateways[1], "tandem:gateway_resumes_total", ""); resumes != 0 {
		t.Errorf("%v streams of the other gateway had to be resumed", resumes)
	}
	if _, err := b.complete(b.prompt(b.rand, 50), 5); err != nil {
		t.Errorf("the gateway that was started again: %v", err)
	}
}

// SIGTERM of a gateway: what streams has its end, who comes late is told so, and
// the process ends.
func TestBinaryGatewayDrained(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 17, ranks{gateways: 2, gateway: []string{"--shutdown-timeout", "2m"}})
	var mine []*sse
	for i := range 8 {
		s, err := b.long(i)
		if err != nil {
			t.Fatal(err)
		}
		mine = append(mine, s)
	}
	b.gateways[0].signal(t, syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() {
		var errs error
		for _, s := range mine {
			errs = errors.Join(errs, s.rest())
		}
		ended <- errs
	}()
	var late error
	b.wait(stopBound, "who comes late is refused", func() bool {
		_, late = b.complete([]int32{400, 401}, 1)
		return late != nil
	})
	if text := late.Error(); !strings.Contains(text, "refused") && !strings.Contains(text, "503") && !errors.Is(late, io.EOF) && !strings.Contains(text, "reset") {
		t.Errorf("who comes late is told: %v", late)
	}
	if err := <-ended; err != nil {
		t.Errorf("streams of the draining gateway: %v", err)
	}
	for i, s := range mine {
		if !s.done || s.finish != "length" || s.failed != "" {
			t.Errorf("stream %d ended after %d events with [DONE] %v, finish_reason %q, error %q", i, s.events, s.done, s.finish, s.failed)
		}
	}
	b.gone(b.gateways[0], stopBound)
	if !b.gateways[0].cmd.ProcessState.Success() {
		t.Errorf("it ended with %s", b.gateways[0].cmd.ProcessState)
	}
	if _, err := b.at(b.gateways[1]).complete(b.prompt(b.rand, 50), 5); err != nil {
		t.Errorf("the other gateway: %v", err)
	}
	b.idle(stopBound)
}

// A fleet's only gateway is killed and started again, at once and after the nodes
// have noticed: it knows nobody, and they come back to it.
func TestBinaryGatewayReturns(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 19, ranks{})
	for _, away := range []time.Duration{0, 8 * time.Second} {
		b.kill(b.gateways[0])
		time.Sleep(away)
		b.begin(b.gateways[0])
		began := time.Now()
		b.whole(b.gateways[0])
		t.Logf("note: a fleet's only gateway, killed and away for %v, uses all nodes %v after its start", away, time.Since(began).Round(10*time.Millisecond))
		if _, err := b.complete(b.prompt(b.rand, 50), 5); err != nil {
			t.Error(err)
		}
	}
}

// startNATS starts the battle's server, or starts it again; the test's end closes
// it if nobody has.
func (b *battle) startNATS() *members.Server {
	b.t.Helper()
	m, err := tlsconf.Load(filepath.Join(b.certs, "node"), slog.New(slog.DiscardHandler))
	if err != nil {
		b.t.Fatal(err)
	}
	s, err := members.StartServer(members.ServerOptions{Name: "nats", Listen: b.nats, TLS: m.Server()})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		s.Close()
		if err := m.Close(); err != nil {
			b.t.Error(err)
		}
	})
	return s
}

// cached is how many blocks of its nodes' caches the gateway knows of.
func (b *battle) cached() (blocks int) {
	for _, n := range b.fleet() {
		blocks += n.CacheBlocks
	}
	return blocks
}

// NATS is not there, comes, goes in the middle of everything, and comes back: no
// stream notices.
func TestBinaryNATSDown(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 29, ranks{nats: true})
	b.disturb(func() {
		if n := b.cached(); n != 0 {
			t.Errorf("without NATS the gateway knows of %d cached blocks", n)
		}
		for range 2 {
			s := b.startNATS()
			b.wait(startBound, "the gateway hears what is cached", func() bool { return b.cached() > 0 })
			time.Sleep(time.Second)
			s.Close()
			time.Sleep(3 * time.Second)
		}
	})
}
