package upstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
)

// Parameters of probes.
const (
	probeUp      = 2 * time.Second        // between probes of a server that is up
	probeDown    = 250 * time.Millisecond // between probes of any other: the delay until it is used again
	probeTimeout = 2 * time.Second
	probeMisses  = 3 // late probes in a row after which a server is down, because a busy one may be late once
	modelsEvery  = 10 * time.Second
	maxModels    = 1 << 20 // bytes of a list of models
	maxNames     = 4096    // models of one server
)

// Card is a server's description of a model.
type Card struct {
	ID  string
	Raw []byte // the server's JSON object
}

// keepProbing probes the server until ctx ends.
func (s *Server) keepProbing(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	missed := 0
	var listed time.Time // when the models were last requested
	var late0 time.Time  // when probes began to be late
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kick:
		case <-pause.C:
		}
		began := time.Now()
		err := s.probe(ctx)
		if ctx.Err() != nil {
			return
		}
		late := err != nil && !errors.Is(err, errDown)
		if missed++; !late {
			missed = 0
		} else if missed == 1 {
			late0 = began
			s.era.Add(1)
		}
		if stall := s.p.o.StallTimeout; stall > 0 && missed >= probeMisses && time.Since(late0) >= stall {
			if n := s.abortSilent(s.era.Load()); n > 0 {
				s.p.o.Log.Warn("upstream hangs: its requests are retried on other upstreams", "upstream", s.Name, "requests", n)
			}
			// The next era has the requests that were sent in this one, before the server was down.
			late0 = time.Now()
			s.era.Add(1)
		}
		switch was := s.up.Load(); {
		case err == nil:
			if !was || s.Breaker() != breaker.Closed && s.connLost.Load() {
				s.renew()
			}
			if !was || time.Since(listed) >= modelsEvery {
				s.list(ctx)
				s.askBootstrap(ctx)
				listed = time.Now()
			}
			if s.up.Store(true); !was {
				s.p.o.Log.Info("upstream is up", "upstream", s.Name)
			}
		case !late || missed >= probeMisses || !was:
			why := strings.ReplaceAll(strings.TrimPrefix(err.Error(), errDown.Error()+": "), "upstream: ", "")
			s.why.Store(&why)
			if s.up.Store(false); was {
				s.p.o.Log.Warn("upstream is down", "upstream", s.Name, "error", err)
				s.closeIdle(true)
			}
		}
		s.closeIdle(false)
		if s.up.Load() && missed == 0 {
			pause.Reset(probeUp)
		} else {
			pause.Reset(probeDown)
		}
	}
}

// errDown is the result of a probe that is certain: no process listens, or the server answers that
// it cannot serve.
var errDown = errors.New("upstream: down")

// probe requests the health path. A server without such a path is up if it lists models, so that
// another server at a reused address does not count as an upstream. A server that refuses the
// gateway's credentials is up, because clients' own may be forwarded. So is a server that limits
// the rate of requests, because clients get its answer.
func (s *Server) probe(ctx context.Context) error {
	status, _, err := s.get(ctx, s.p.o.HealthPath, 64<<10)
	switch {
	case err != nil:
		return err
	case status >= 500:
		return fmt.Errorf("%w: %s answers %d", errDown, s.p.o.HealthPath, status)
	case status < 300 || refused(status):
		return nil
	}
	models, body, err := s.get(ctx, s.base+"/v1/models", maxModels)
	if err != nil {
		return err
	}
	if models == 200 {
		_, err = parseModels(body)
	} else if !refused(models) {
		err = fmt.Errorf("%s/v1/models answers %d", s.base, models)
	}
	if err != nil {
		return fmt.Errorf("%w: no OpenAI-compatible server: %s answers %d, %w", errDown, s.p.o.HealthPath, status, err)
	}
	return nil
}

// refused reports whether a status asks for other credentials, or for fewer requests.
func refused(status int) bool { return status == 401 || status == 403 || status == 429 }

// list requests the server's models. If that fails, the list stays as it was.
func (s *Server) list(ctx context.Context) {
	status, body, err := s.get(ctx, s.base+"/v1/models", maxModels)
	var cards []Card
	switch {
	case err == nil && status == 200:
		if cards, err = parseModels(body); err != nil {
			s.p.o.Log.Warn("upstream's list of models cannot be read", "upstream", s.Name, "error", err)
			return
		}
	case err == nil && status < 500: // it has no such list, and gets the requests for models that no other server has
	default:
		s.p.o.Log.Warn("upstream's models cannot be listed", "upstream", s.Name, "status", status, "error", err)
		return
	}
	old := s.models.Swap(&cards)
	if old == nil || !slices.EqualFunc(*old, cards, func(a, b Card) bool { return a.ID == b.ID }) {
		s.p.rebuild()
	}
}

// askBootstrap requests the port of an SGLang prefill server's bootstrap server.
func (s *Server) askBootstrap(ctx context.Context) {
	if s.Role != Prefill || s.p.o.Protocol != SGLang || s.bootstrap.Load() != 0 {
		return
	}
	for _, path := range []string{"/get_server_info", "/server_info"} {
		if status, body, err := s.get(ctx, s.base+path, maxModels); err == nil && status == 200 {
			if port := bootstrapPort(body); port > 0 {
				s.bootstrap.Store(int32(port))
				return
			}
		}
	}
	s.p.o.Log.Warn("upstream does not report its bootstrap port", "upstream", s.Name, "default", defaultBootstrap)
}

// parseModels reads a list of models. Elements without an id are left out.
func parseModels(body []byte) ([]Card, error) {
	var list struct{ Data []json.RawMessage }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("upstream: models: %w", err)
	}
	var cards []Card
	for _, raw := range list.Data {
		var m struct{ ID string }
		if json.Unmarshal(raw, &m) != nil || m.ID == "" || len(cards) == maxNames {
			continue
		}
		var card bytes.Buffer
		_ = json.Compact(&card, raw) // it was read before
		cards = append(cards, Card{ID: m.ID, Raw: card.Bytes()})
	}
	if len(cards) == 0 {
		return nil, errors.New("upstream: models: no model in it")
	}
	return cards, nil
}

// get requests a small document. The breaker does not count it.
func (s *Server) get(ctx context.Context, path string, most int) (status int, body []byte, err error) {
	timeout := probeTimeout
	if stall := s.p.o.StallTimeout; stall > 0 {
		timeout = min(timeout, stall)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	until, _ := ctx.Deadline()
	c, err := s.acquire(ctx, until, true) // a kept one does not show whether the server accepts connections
	if err != nil {
		var late net.Error
		if ctx.Err() == nil && !(errors.As(err, &late) && late.Timeout()) { // refused, not late
			err = fmt.Errorf("%w: %w", errDown, err)
		}
		return 0, nil, err
	}
	fit := false
	defer func() { s.release(c, fit) }()
	c.hold()
	stop := context.AfterFunc(ctx, c.abort)
	defer stop()
	head := append(make([]byte, 0, 512), "GET "...)
	head = append(append(head, path...), " HTTP/1.1\r\nHost: "...)
	head = append(append(head, s.host...), "\r\nAccept: application/json\r\n"...)
	head = append(s.p.authorize(head), "\r\n"...)
	if err := c.send(head, nil, until); err != nil {
		return 0, nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
	}
	rep, _, err := c.head()
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
	}
	for {
		piece, err := c.next(true)
		if err == io.EOF {
			fit = c.reusable()
			return rep.Status, body, nil
		}
		if err != nil {
			return 0, nil, err
		}
		if body = append(body, piece...); len(body) > most {
			return 0, nil, fmt.Errorf("%w: %s: %s has more than %s bytes", ErrServer, s.Name, path, strconv.Itoa(most))
		}
	}
}
