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
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
)

// How servers are looked at.
const (
	probeUp      = 2 * time.Second        // between probes of a server that is up
	probeDown    = 250 * time.Millisecond // of one that is not: it serves again this long after it can
	probeTimeout = 2 * time.Second
	probeMisses  = 3 // late probes in a row that take a server down: a busy one is late now and then
	modelsEvery  = 10 * time.Second
	maxModels    = 1 << 20 // bytes of a list of models
	maxNames     = 4096    // models of one server
)

// Card is a model as its server describes it.
type Card struct {
	ID  string
	Raw []byte // the server's JSON object
}

// keep probes the server until ctx ends.
func (s *Server) keep(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	missed := 0
	var listed time.Time // when the models were asked for last
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
			if n := s.abortSilent(); n > 0 {
				s.p.o.Log.Warn("upstream hangs: its requests go elsewhere", "upstream", s.Name, "requests", n)
			}
			// What was asked since this era began, before the server counted as down, is next.
			late0 = time.Now()
			s.era.Add(1)
		}
		switch was := s.up.Load(); {
		case err == nil:
			if !was || s.Breaker() != breaker.Closed && s.cutOff.Load() {
				s.renew()
			}
			if !was || time.Since(listed) >= modelsEvery {
				s.list(ctx)
				s.meet(ctx)
				listed = time.Now()
			}
			if s.up.Store(true); !was {
				s.p.o.Log.Info("upstream is up", "upstream", s.Name)
			}
		case !late || missed >= probeMisses || !was:
			why := err.Error()
			s.why.Store(&why)
			if s.up.Store(false); was {
				s.p.o.Log.Warn("upstream is down", "upstream", s.Name, "error", err)
				s.sweep(true)
			}
		}
		s.sweep(false)
		if s.up.Load() && missed == 0 {
			pause.Reset(probeUp)
		} else {
			pause.Reset(probeDown)
		}
	}
}

// errDown is a probe's sure answer: nobody listens, or the server says itself
// that it cannot serve.
var errDown = errors.New("foreign: down")

// probe asks for the server's health. A server that knows no such path is alive.
func (s *Server) probe(ctx context.Context) error {
	status, _, err := s.get(ctx, s.p.o.HealthPath, 64<<10)
	switch {
	case err != nil:
		return err
	case status >= 500:
		return fmt.Errorf("%w: %s answers %d", errDown, s.p.o.HealthPath, status)
	}
	return nil
}

// list asks for the server's models. What cannot be had stays as it was.
func (s *Server) list(ctx context.Context) {
	status, body, err := s.get(ctx, s.base+"/v1/models", maxModels)
	var cards []Card
	switch {
	case err == nil && status == 200:
		if cards, err = parseModels(body); err != nil {
			s.p.o.Log.Warn("upstream's list of models cannot be read", "upstream", s.Name, "error", err)
			return
		}
	case err == nil && status < 500: // it has no such list: it gets whatever nobody else serves
	default:
		s.p.o.Log.Warn("upstream's models cannot be listed", "upstream", s.Name, "status", status, "error", err)
		return
	}
	old := s.models.Swap(&cards)
	if old == nil || !slices.EqualFunc(*old, cards, func(a, b Card) bool { return a.ID == b.ID }) {
		s.p.rebuild()
	}
}

// meet asks an SGLang prefill server for the port that decode servers meet it at.
func (s *Server) meet(ctx context.Context) {
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
	s.p.o.Log.Warn("upstream does not tell its bootstrap port", "upstream", s.Name, "taken", defaultBootstrap)
}

// parseModels reads a list of models. Elements without an id are left out.
func parseModels(body []byte) ([]Card, error) {
	var list struct{ Data []json.RawMessage }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("foreign: models: %w", err)
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
		return nil, errors.New("foreign: models: no model in it")
	}
	return cards, nil
}

// get fetches a small thing. It takes no part in the breaker.
func (s *Server) get(ctx context.Context, path string, most int) (status int, body []byte, err error) {
	patience := probeTimeout
	if stall := s.p.o.StallTimeout; stall > 0 {
		patience = min(patience, stall)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	until, _ := ctx.Deadline()
	c, err := s.take(ctx, until, true) // a kept one does not show whether the server accepts others
	if err != nil {
		var late net.Error
		if ctx.Err() == nil && !(errors.As(err, &late) && late.Timeout()) { // refused, not late
			err = fmt.Errorf("%w: %w", errDown, err)
		}
		return 0, nil, err
	}
	fit := false
	defer func() { s.give(c, fit) }()
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
