package proxy

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// Responses that servers store (/v1/responses/{id}) are only on the server that made them. The
// gateway learns the server of an id from the beginning of its answer. Without that, after a
// restart or through another gateway, it asks all servers in turn.
//
// Servers do not know the gateway's keys. So a response belongs to the key that made it, and to
// keys with operator rights. The owner of a response that another gateway relayed is not known. Any
// client that has its id, which servers draw from 122 random bits, may use it.

const (
	responsesPath = "/v1/responses"
	// StoredPath is the beginning of the paths of stored responses.
	StoredPath = responsesPath + "/"
	// maxStored bounds the ids whose servers are known, some 200 bytes each. The oldest is dropped
	// first.
	maxStored = 64 << 10
	// maxStale bounds the kept connections to one server that turn out to be closed.
	maxStale = 3
)

// stored has the servers of stored responses.
type stored struct {
	mu    sync.Mutex
	byID  map[string]storedAt
	order []string // ids, the oldest at next once there are maxStored
	next  int
}

// storedAt is where a response is stored, and the key of the client that it belongs to.
type storedAt struct {
	server string
	owner  *auth.Key // nil: not known, or there are no keys
}

// learn records the server of a response. Ids that are too long are left out, and so are those of
// another client, because vLLM lets clients choose an id.
func (s *stored) learn(id string, at storedAt) {
	if !openai.ValidID(id) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	was, known := s.byID[id]
	if known && !was.owner.Same(at.owner) {
		return
	}
	if !known {
		if s.byID == nil {
			s.byID = map[string]storedAt{}
		}
		if len(s.order) < maxStored {
			s.order = append(s.order, id)
		} else {
			delete(s.byID, s.order[s.next])
			s.order[s.next] = id
			s.next = (s.next + 1) % maxStored
		}
	}
	s.byID[id] = at
}

func (s *stored) find(id string) (storedAt, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, known := s.byID[id]
	return at, known
}

// allows reports whether a client with that key may use a response, and where the response is
// stored, if that is known. A nil key is that of a gateway without keys.
func (s *stored) allows(id string, k *auth.Key) (at storedAt, known, allowed bool) {
	at, known = s.find(id)
	return at, known, k == nil || k.Admin || at.owner == nil || at.owner.Same(k)
}

// checkPrevious refuses a request that continues another client's response. One that the gateway
// does not know may be the client's own: conversations continue through other gateways.
func (r *relay) checkPrevious() *openai.Error {
	id := r.envelope.Previous
	if id == "" || !r.responds() {
		return nil
	}
	if _, known, allowed := r.p.stored.allows(id, r.S.KeyOf(r.Ctx)); known && !allowed {
		fault := notStored(id)
		fault.Param = "previous_response_id"
		return fault
	}
	return nil
}

// responds reports whether the path's requests may continue a stored response.
func (r *relay) responds() bool { return strings.HasPrefix(r.path(), responsesPath) }

// learnStored records the server of the response in the beginning of an answer, if there is one.
func (r *relay) learnStored() {
	if r.path() != responsesPath || r.Status != 200 {
		return
	}
	r.p.stored.learn(responseID(r.held, r.events), storedAt{r.server.Name, r.S.KeyOf(r.Ctx)})
}

// responseID returns the id of a response in the beginning of its answer, or in the first event of
// a stream; empty: there is none.
func responseID(b []byte, events bool) string {
	if events {
		_, b, _ = bytes.Cut(b, []byte("data:"))
		b, _, _ = bytes.Cut(b, []byte("\n"))
		b = upstream.Member(b, "response")
	}
	return upstream.TextMember(b, "id")
}

// lookup is a request about a stored response.
type lookup struct {
	relay
	id      string
	servers []*upstream.Server // that may have the response
	known   bool               // servers has the one that made it
	down    int                // servers that cannot be asked
	kept    *storedAnswer      // of a server that may have the response; nil: none
}

// storedAnswer is an answer that counts unless another server has the response.
type storedAnswer struct {
	server      *upstream.Server
	status      int
	lines, held []byte
}

// ServeStored answers a request about a stored response by the server that has it.
func (p *Proxy) ServeStored(ctx *fasthttp.RequestCtx, path string) {
	l := &lookup{}
	l.p, l.sent, l.method = p, path, string(ctx.Method())
	if l.method == "HEAD" { // the head of the same answer
		l.method = "GET"
	}
	l.id, _, _ = strings.Cut(strings.TrimPrefix(path, StoredPath), "/")
	p.Answer(ctx, path, openai.Chat, l)
}

// notStored returns the error of a request for a response that no server has.
func notStored(id string) *openai.Error {
	return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "response_id", Message: fmt.Sprintf("no upstream has the response %q", openai.Clip(id, 100))}
}

// Prepare implements exchange.Backend.
func (l *lookup) Prepare() *openai.Error {
	l.body = l.Ctx.PostBody()
	if !plainPath(l.sent) {
		return notStored(l.id)
	}
	if fault := l.ReadHeaders(); fault != nil {
		return fault
	}
	if fault := l.LetIn(0); fault != nil {
		return fault
	}
	at, known, allowed := l.p.stored.allows(l.id, l.S.KeyOf(l.Ctx))
	if !allowed {
		return notStored(l.id)
	}
	all := l.p.Pool.Now().Servers
	for _, s := range all {
		switch {
		case known && s.Name == at.server:
			l.servers, l.known = []*upstream.Server{s}, true
			return nil
		case s.Up():
			l.servers = append(l.servers, s)
		default:
			l.down++
		}
	}
	if len(l.servers) == 0 {
		return openai.Unavailable(exchange.RetryAfter, "no upstream is up to be asked for the response %q", openai.Clip(l.id, 100))
	}
	return nil
}

// Claim implements exchange.Backend. Lookups compute nothing, so that they do not wait.
func (l *lookup) Claim() (exchange.Claim, *openai.Error) { return exchange.Claim{}, nil }

// Run implements exchange.Backend. It asks the servers in turn until one has the response. Another
// answer than 404 is that of all if no server has it.
func (l *lookup) Run() *openai.Error {
	for _, s := range l.servers {
		for stale := 0; ; stale++ {
			l.try = exchange.Begin(&l.Exchange, &l.life, s.Name, time.Now())
			err := l.ask(s, true, l.body, maxHeld)
			if err == nil {
				break
			}
			l.failure = upstreamFailure(err)
			fault := l.interrupted()
			if fault != nil {
				err = upstream.ErrNoVerdict
			}
			if l.end(err); fault != nil {
				return fault
			}
			l.AttemptFailed(l.failure, &l.try, "upstream", s.Name)
			if l.Status = 0; !l.failure.Lost || stale >= maxStale {
				l.down++
				break
			}
		}
		switch {
		case l.Status == 0: // it could not be asked
			continue
		case l.Status/100 == 2:
			if l.Status == 200 && !l.known && l.method == "GET" {
				l.p.stored.learn(l.id, storedAt{server: s.Name})
			}
			return nil
		case len(l.servers) == 1 && l.down == 0: // no other server can have it
			return nil
		}
		l.keep()
	}
	if k := l.kept; k != nil {
		l.server, l.Status, l.lines, l.held = k.server, k.status, k.lines, k.held
		l.full, l.events, l.length = true, false, len(k.held)
		return nil
	}
	l.Status = 0
	switch {
	case l.known:
		return l.failure.Fault()
	case l.down > 0:
		return openai.Unavailable(exchange.RetryAfter, "%d upstreams cannot be asked for the response %q, and no other has it", l.down, openai.Clip(l.id, 100))
	}
	return notStored(l.id)
}

// keep ends the call of an answer that may not be the right one. It keeps the answer unless its
// status is that of a server without the response. Refusals precede failures of servers.
func (l *lookup) keep() {
	switch none := l.Status == 404 || l.Status == 405 || l.Status == 501; {
	case none:
	case !l.full: // too large
		l.down++
	case l.kept == nil || l.kept.status >= 500 && l.Status < 500:
		l.kept = &storedAnswer{l.server, l.Status, bytes.Clone(l.lines), bytes.Clone(l.held)}
	}
	var unread error
	if !l.full {
		unread = upstream.ErrNoVerdict
	}
	l.end(unread)
	l.try.End(time.Now())
}

// Stop implements exchange.Backend.
func (l *lookup) Stop() {
	l.end(upstream.ErrNoVerdict)
	l.try.End(time.Now())
}

// Free implements exchange.Backend. The collector frees the request.
func (l *lookup) Free() {}
