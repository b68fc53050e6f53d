//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// mixed is a load of clients of every kind, and what became of their requests.
type mixed struct {
	*battle
	requests []map[string]any
	want     []string // what the requests give undisturbed
	kinds    []kind
	mu       sync.Mutex
	count    map[string]int
}

// kind is one way to use a gateway.
type kind struct {
	name  string
	often int // in so many
	do    func(rng *rand.Rand) error
}

func newMixed(b *battle) *mixed {
	m := &mixed{battle: b, requests: b.requests(), count: map[string]int{}}
	for i, r := range m.requests {
		told, err := b.told(r)
		if err != nil {
			b.t.Fatalf("request %d, undisturbed: %v", i, err)
		}
		m.want = append(m.want, told)
	}
	m.kinds = []kind{
		{"streams", 8, m.stream},
		{"aborts", 5, m.abort},
		{"slow readers", 1, m.slow},
		{"whole answers", 3, m.answer},
		{"chats", 2, m.chat},
		{"refused requests", 2, m.refused},
		{"texts tokenized", 1, m.tokenize},
	}
	return m
}

// stream wants what the request gives undisturbed.
func (m *mixed) stream(rng *rand.Rand) error {
	i := rng.IntN(len(m.requests))
	got, err := m.told(m.requests[i])
	if err == nil && got != m.want[i] {
		err = fmt.Errorf("request %d was altered:\n got %q\nwant %q", i, got, m.want[i])
	}
	return err
}

// open begins a stream and reads its first bytes.
func (m *mixed) open(rng *rand.Rand) (io.ReadCloser, error) {
	resp, err := m.post("/v1/completions", m.requests[rng.IntN(len(m.requests))])
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		return nil, fmt.Errorf("%s: %s", resp.Status, text)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 1+rng.IntN(2000))); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp.Body, nil
}

// abort leaves in the middle.
func (m *mixed) abort(rng *rand.Rand) error {
	body, err := m.open(rng)
	if err != nil {
		return err
	}
	return body.Close()
}

// slow stops reading for a while.
func (m *mixed) slow(rng *rand.Rand) error {
	body, err := m.open(rng)
	if err != nil {
		return err
	}
	defer body.Close()
	time.Sleep(time.Duration(rng.IntN(2000)) * time.Millisecond)
	rest, err := io.ReadAll(body)
	if err == nil && !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
		err = fmt.Errorf("a slow reader's stream ends in %q", tail(rest))
	}
	return err
}

// answer wants exactly the tokens that it asks for.
func (m *mixed) answer(rng *rand.Rand) error {
	_, err := m.complete(m.prompt(rng, 1+rng.IntN(300)), 1+rng.IntN(60))
	return err
}

// ask posts a body and wants a status.
func (m *mixed) ask(path string, body map[string]any, status int, has string) error {
	resp, err := m.post(path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != status || !strings.Contains(string(text), has)) {
		err = fmt.Errorf("%s %v: %s: %s", path, body, resp.Status, text)
	}
	return err
}

func (m *mixed) chat(rng *rand.Rand) error {
	return m.ask("/v1/chat/completions", map[string]any{
		"messages":   []map[string]string{{"role": "user", "content": fmt.Sprintf("What is %d?", rng.IntN(1000))}},
		"max_tokens": 1 + rng.IntN(50), "seed": rng.IntN(9), "stream": rng.IntN(2) == 0,
	}, http.StatusOK, `"finish_reason":"`)
}

func (m *mixed) refused(rng *rand.Rand) error {
	bad := []map[string]any{
		{}, {"prompt": ""}, {"prompt": "x", "n": -1}, {"prompt": "x", "temperature": "hot"}, {"prompt": []int{1 << 30}},
		{"prompt": m.prompt(rng, 30_000)}, {"prompt": "x", "max_tokens": 1 << 40}, {"prompt": "x", "best_of": 99},
	}
	return m.ask("/v1/completions", bad[rng.IntN(len(bad))], http.StatusBadRequest, `"error"`)
}

func (m *mixed) tokenize(rng *rand.Rand) error {
	return m.ask("/tokenize", map[string]any{"prompt": strings.Repeat("töken 数 ", 1+rng.IntN(200))}, http.StatusOK, `"count":`)
}

// client makes requests of all kinds until the end.
func (m *mixed) client(rng *rand.Rand, end time.Time) {
	total := 0
	for _, k := range m.kinds {
		total += k.often
	}
	for time.Now().Before(end) && !m.t.Failed() {
		at, k := rng.IntN(total), 0
		for ; at >= m.kinds[k].often; k++ {
			at -= m.kinds[k].often
		}
		if err := m.kinds[k].do(rng); err != nil {
			m.t.Errorf("seed %d, %s: %v", m.seed, m.kinds[k].name, err)
			continue
		}
		m.mu.Lock()
		m.count[m.kinds[k].name]++
		m.mu.Unlock()
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
	}
}

// resident is the memory of the gateway's process, in bytes.
func (m *mixed) resident() int64 {
	m.t.Helper()
	for _, p := range m.processes() {
		if !strings.HasPrefix(p.name, "gateway") {
			continue
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.pid))
		if err != nil {
			m.t.Fatal(err)
		}
		pages, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
		if err != nil {
			m.t.Fatal(err)
		}
		return pages * int64(os.Getpagesize())
	}
	m.t.Fatalf("no gateway among %v", m.processes())
	return 0
}

// Clients of every kind use a cluster whose nodes are killed now and then:
// streams and whole answers, long and short, some left in the middle, some read
// slowly, some requests that are refused. None fails or is altered, nothing is
// left running, and the gateway does not grow.
func TestBinaryMixedLoad(t *testing.T) {
	const clients, mostGrowth = 12, 64 << 20
	length, seed := soakMinutes(t), soakSeed(t, 20261122)
	b := newBattle(t, seed, ranks{})
	m := newMixed(b)
	began := time.Now()
	end := began.Add(length)
	var wg sync.WaitGroup
	defer wg.Wait() // also when the test has failed, which ends the clients
	for i := range clients {
		wg.Go(func() { m.client(rand.New(rand.NewPCG(seed, uint64(2+i))), end) })
	}
	kills, warm := 0, int64(0)
	for time.Now().Before(end) && !t.Failed() {
		time.Sleep(min(time.Until(end), time.Second+time.Duration(b.rand.IntN(8000))*time.Millisecond))
		if kills++; time.Now().Before(end) || kills == 1 {
			b.replace(b.nodes[b.rand.IntN(len(b.nodes))])
			b.whole(b.gateways...)
		}
		if warm == 0 && time.Since(began) > length/4 {
			warm = m.resident()
		}
	}
	wg.Wait()
	b.wait(stopBound, "nothing is left running", func() bool {
		var load struct {
			Server float64 `json:"server_load"`
		}
		return b.getJSON("/load", &load) == nil && load.Server == 0
	})
	grown := m.resident()
	counts, err := json.Marshal(m.count)
	if err = errors.Join(err, b.t.Context().Err()); err != nil {
		t.Fatal(err)
	}
	t.Logf("note: seed %d, %v of mixed load, %d kills, %.0f resumes: %s; the gateway took %d MiB after a quarter, %d MiB at the end",
		seed, time.Since(began).Round(time.Second), kills, b.gatewayMetric("tandem:gateway_resumes_total"), counts, warm>>20, grown>>20)
	if grown > warm+warm/2+mostGrowth {
		t.Errorf("the gateway grew from %d to %d MiB", warm>>20, grown>>20)
	}
	for _, k := range m.kinds {
		if m.count[k.name] == 0 && length > time.Minute {
			t.Errorf("no %s in %v", k.name, length)
		}
	}
}
