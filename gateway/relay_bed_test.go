package gateway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Bounds of relayed answers, in bytes: of an event, and of what is held until all of it is there.
const (
	maxEvent = 64 << 10
	maxHeld  = 64 << 10
)

// stranger is an OpenAI-compatible server made up for tests.
type stranger struct {
	testing.TB
	net     *rpc.Network
	name    string
	models  atomic.Pointer[[]string]
	answer  atomic.Pointer[http.HandlerFunc] // of POST requests
	health  atomic.Int64                     // status
	running atomic.Int64                     // requests in hand
	server  *http.Server

	mu   sync.Mutex
	seen []received
}

// received is a request as the server got it.
type received struct {
	path   string
	header http.Header
	body   string
}

// url is where the gateway finds it.
func (s *stranger) url() string { return "http://" + s.name }

// start has it listen.
func (s *stranger) start() {
	s.Helper()
	l, err := s.net.Listen(s.name + ":80")
	if err != nil {
		s.Fatal(err)
	}
	s.server = &http.Server{Handler: s}
	go func() { _ = s.server.Serve(l) }()
}

// kill closes it with all of its connections.
func (s *stranger) kill() { _ = s.server.Close() }

// requests are those it got, the oldest first.
func (s *stranger) requests() []received {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]received(nil), s.seen...)
}

// ServeHTTP implements http.Handler.
func (s *stranger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/health":
		w.WriteHeader(int(s.health.Load()))
	case r.URL.Path == "/v1/models":
		var cards []string
		for _, m := range *s.models.Load() {
			cards = append(cards, fmt.Sprintf(`{"id":%q,"object":"model","own":true}`, m))
		}
		fmt.Fprintf(w, `{"object":"list","data":[%s]}`, strings.Join(cards, ","))
	default:
		s.running.Add(1)
		defer s.running.Add(-1)
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.seen = append(s.seen, received{r.URL.RequestURI(), r.Header.Clone(), string(body)})
		s.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		(*s.answer.Load())(w, r)
	}
}

// does sets what it answers.
func (s *stranger) does(f http.HandlerFunc) { s.answer.Store(&f) }

// event writes events, each flushed.
func event(w http.ResponseWriter, texts ...string) {
	for _, t := range texts {
		_, _ = io.WriteString(w, t)
		w.(http.Flusher).Flush()
	}
}

// chunkEvent is an event with a piece of text.
func chunkEvent(text string) string {
	return fmt.Sprintf("data: {\"id\":\"x\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":%q}}]}\n\n", text)
}

// streams answers with a few events and a clean end.
func streams(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	event(w, chunkEvent("one "), chunkEvent("two "), chunkEvent("three"), "data: [DONE]\n\n")
}

// whole answers in one piece.
func whole(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Own", "kept")
	_, _ = io.WriteString(w, `{"id":"x","choices":[{"message":{"content":"hi"}}]}`)
}

// breaks ends the connection under an answer.
func breaks(w http.ResponseWriter) {
	c, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		c.Close()
	}
}

// strangers are servers that serve the model m and stream.
func strangers(t testing.TB, n *rpc.Network, names ...string) map[string]*stranger {
	all := map[string]*stranger{}
	for _, name := range names {
		s := &stranger{TB: t, net: n, name: name}
		s.models.Store(&[]string{"m"})
		s.health.Store(200)
		s.does(streams)
		s.start()
		t.Cleanup(func() { s.kill() })
		all[name] = s
	}
	return all
}

// relayBed is a gateway in front of strangers, all of them up.
type relayed struct {
	*bed
	far map[string]*stranger
}

func newRelayed(t testing.TB, o Options, names ...string) *relayed {
	t.Helper()
	n := rpc.NewNetwork()
	r := &relayed{far: strangers(t, n, names...)}
	if o.Upstreams.Targets == nil {
		for _, name := range names {
			o.Upstreams.Targets = append(o.Upstreams.Targets, upstream.Target{URL: r.far[name].url()})
		}
	}
	o.Upstreams.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) { return n.Dial(ctx, addr) }
	var err error
	if o.Listener, err = n.Listen("gateway"); err != nil {
		t.Fatal(err)
	}
	r.bed = newBedOn(t, n, o, nil)
	if nAll := len(o.Upstreams.Targets); nAll > 0 {
		r.until(func() bool { now := r.g.proxy.Pool.Now(); return now.Up() == nAll && now.Unknown == 0 })
	}
	t.Cleanup(func() {
		r.close()
		if err := r.g.proxy.Pool.Check(); err != nil {
			t.Error(err)
		}
		for _, s := range r.g.proxy.Pool.Now().Servers {
			if f := s.InFlight.Load(); f != 0 {
				t.Errorf("%d requests still counted on %s", f, s.Name)
			}
		}
	})
	return r
}

// ask is a chat request's body.
func ask(stream bool, text string) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"messages":[{"role":"user","content":%q}]}`, stream, text)
}

// never waits for a request's end on the server's side.
func never(w http.ResponseWriter, r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-time.After(2 * soon):
	}
}
