package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
)

// models are those that native nodes serve, in the order in which they were taken
// up. Nodes of several models may stand behind one gateway: a request's model
// decides which of them it can go to.
type models struct{ all atomic.Pointer[[]*model] }

// All are the models; the caller changes nothing.
func (m *models) All() []*model {
	if all := m.all.Load(); all != nil {
		return *all
	}
	return nil
}

// Load is the first; nil: there is none.
func (m *models) Load() *model {
	if all := m.All(); len(all) > 0 {
		return all[0]
	}
	return nil
}

func (m *models) Store(all ...*model) { m.all.Store(&all) }

// errNoNode says that no decode node is there to ask for a bundle.
var errNoNode = errors.New("gateway: no decode node is ready")

// refresh takes up the models of decode nodes that are ready, and lets those go
// that none of them serves any more. While nodes serve one, others with another
// model of the same name wait: it is the next version of it.
func (g *Gateway) refresh(ctx context.Context) error {
	fleet, was := g.fleet.Now(), g.model.All()
	var next []*model
	for _, m := range was {
		if fleet.Ready(m.Fingerprint) > 0 {
			next = append(next, m)
		}
	}
	err := errNoNode
	for _, n := range fleet.Decode {
		member, print := n.Member(), n.Fingerprint()
		if !member.Ready || member.Draining || len(next) > 0 && (print == 0 || len(next) >= maxModels || g.waits(next, print) || time.Since(g.torn[print]) < tornPause) ||
			slices.ContainsFunc(next, func(m *model) bool { return print == 0 || m.Fingerprint == 0 || m.Fingerprint == print }) {
			continue
		}
		var m *model
		if m, err = g.takeUp(ctx, n, next); err == nil && m != nil {
			next = append(next, m)
		}
	}
	if len(next) > 0 {
		err = nil
	} else if len(was) > 0 { // what is gone may come back
		return err
	}
	if !slices.Equal(was, next) {
		g.model.Store(next...)
		g.follow(next)
	}
	return err
}

// tornPause is between two looks at a model that cannot be taken up, while others are
// served: its tokenizer may have tens of megabytes.
const tornPause = 30 * time.Second

// maxModels bounds those of one gateway's nodes: each holds its tokenizer.
const maxModels = 64

// waits says whether a model that was passed over is to wait still: the one of its
// name is there.
func (g *Gateway) waits(next []*model, print uint64) bool {
	name, passed := g.passed[print]
	return passed && slices.ContainsFunc(next, func(m *model) bool { return m.bundle.Model == name })
}

// takeUp makes a node's model one of the gateway's; nil without an error: it waits
// for its place.
func (g *Gateway) takeUp(ctx context.Context, n *nodes.Node, next []*model) (*model, error) {
	b, err := n.Bundle(ctx)
	if err != nil {
		return nil, err
	}
	name := g.o.ServedModelName
	for _, m := range next {
		if m.Fingerprint == b.Fingerprint {
			return nil, nil
		}
		if m.bundle.Model == b.Model {
			if g.passed == nil {
				g.passed = map[uint64]string{}
			}
			g.passed[b.Fingerprint] = b.Model
			g.Log.Info("another model of the same name waits until nobody serves the present one", "model", b.Model, "node", n.Name,
				"fingerprint", strconv.FormatUint(b.Fingerprint, 16))
			return nil, nil
		}
		if m.Name == name {
			name = ""
			g.Log.Warn("several models are served: --served-model-name names the first; give NAME=MODEL for others", "first", m.bundle.Model, "other", b.Model)
		}
	}
	m, err := newModel(b, name, g.o.ChatTemplate, time.Now())
	if err != nil {
		if g.torn == nil {
			g.torn = map[uint64]time.Time{}
		}
		g.torn[b.Fingerprint] = time.Now()
		g.Log.Warn("a node's model cannot be taken up", "node", n.Name, "error", err)
		return nil, err
	}
	if m.Text != nil {
		m.Text.RejectSpecial = g.o.RejectSpecialTokens
	}
	m.queue = g.queueFor(m, next)
	g.Log.Info("model taken up", "model", m.Name, "node", n.Name, "fingerprint", strconv.FormatUint(m.Fingerprint, 16),
		"max_model_len", b.MaxModelLen, "vocab", b.VocabSize, "tokenizer", m.Text != nil, "chat_template", m.Text != nil && m.Text.HasTemplate())
	return m, nil
}

// follow has the gateway hear of the models' nodes, and its metrics carry their
// names.
func (g *Gateway) follow(next []*model) {
	var names, served []string
	for _, m := range next {
		names, served = append(names, m.bundle.Model), append(served, m.Name)
	}
	g.subscribe(names)
	g.Meters.Set.SetModel(strings.Join(served, ","))
}

// queueFor is where a new model's requests wait: a queue of its own, so that those
// of one model do not stand before those of another.
func (g *Gateway) queueFor(m *model, others []*model) *exchange.Admission {
	if !slices.ContainsFunc(others, func(o *model) bool { return o.queue == g.Queue }) {
		return g.Queue
	}
	l := g.lim()
	a := exchange.NewAdmission(admit.Limits{Requests: l.MaxQueuedRequests, Tokens: l.MaxQueuedTokens})
	g.queues.Store(m.Fingerprint, a)
	return a
}

// lookForRoom follows the room of the models' nodes; the queue of a model that is
// gone goes when it is empty.
func (g *Gateway) lookForRoom() {
	all := g.model.All()
	for _, m := range all {
		r := g.fleet.Now().Room(m.Fingerprint, g.lim().NodeBacklog, g.lim().NodeBacklogTime)
		m.queue.SetRoom(r.Requests, r.Tokens)
	}
	g.queues.Range(func(print, a any) bool {
		if print, native := print.(uint64); native && a.(*exchange.Admission).Idle() && !slices.ContainsFunc(all, func(m *model) bool { return m.Fingerprint == print }) {
			g.queues.Delete(print)
		}
		return true
	})
	if g.proxy != nil {
		g.proxy.FollowRoom()
	}
}

// keepModel refreshes now, when the members change, and in between.
func (g *Gateway) keepModel(ctx context.Context) {
	tick := time.NewTicker(nodes.DefaultProbeInterval / 2)
	defer tick.Stop()
	said := ""
	for {
		if err := g.refresh(ctx); err == nil {
			said = ""
		} else if why := err.Error(); why != said && ctx.Err() == nil && g.proxy == nil {
			g.Log.Info("no model to serve yet", "error", err)
			said = why
		}
		select {
		case <-ctx.Done():
			return
		case <-g.membersChanged:
		case <-tick.C:
		}
	}
}

// find is the model that a request names, by its own or a further name, or an
// adapter of one. Where there is one model it need not be named.
func (g *Gateway) find(name string) (*model, *openai.Error) {
	all := g.model.All()
	switch {
	case len(all) == 0:
		return nil, openai.Unavailable(retryAfter, "no model is loaded yet: no decode node is ready")
	case name == "" && len(all) > 1:
		return nil, openai.BadRequest("model", "several models are served here: name one of /v1/models")
	case name == "" || name == all[0].Name:
		return all[0], nil
	}
	own := g.o.Foreign.Names[name]
	for _, m := range all {
		if m.Name == name {
			return m, nil
		}
		if m.Name == own {
			return m.as(name), nil
		}
	}
	fleet := g.fleet.Now()
	for _, m := range all {
		for _, a := range fleet.Adapters(m.Fingerprint) {
			if a.Name == name {
				return m.with(a), nil
			}
		}
	}
	served := make([]string, len(all))
	for i, m := range all {
		served[i] = strconv.Quote(m.Name)
	}
	return nil, &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model",
		Message: fmt.Sprintf("the model %q does not exist; this gateway serves %s", openai.Clip(name, 200), openai.Clip(strings.Join(served, ", "), 1000))}
}

// cards are the models, their further names and their adapters.
func (g *Gateway) cards() (list []openai.Model) {
	fleet := g.fleet.Now()
	for _, m := range g.model.All() {
		list = append(list, m.card())
		for _, name := range slices.Sorted(maps.Keys(g.o.Foreign.Names)) {
			if g.o.Foreign.Names[name] == m.Name {
				list = append(list, m.as(name).card())
			}
		}
		for _, a := range fleet.Adapters(m.Fingerprint) {
			list = append(list, m.with(a).card())
		}
	}
	return list
}

// as is the model under a further name.
func (m *model) as(name string) *model {
	w := *m
	w.Name = name
	return &w
}
