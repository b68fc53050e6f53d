package gateway

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// model is what the gateway needs to serve a model, made from a node's bundle.
// It is not changed once made.
type model struct {
	name        string // as clients say it
	fingerprint uint64
	created     int64 // seconds since 1970, when this gateway took it up
	bundle      *nodepb.Bundle
	blockTokens int
	systemPrint string     // system_fingerprint: weights and numerics
	text        *textModel // nil: the bundle has no tokenizer

	adapter *nodepb.Adapter // that computes its requests; nil: none
	parent  string          // of one with an adapter: the model without
}

func newModel(b *nodepb.Bundle, servedName, template string, now time.Time) (*model, error) {
	m := &model{name: servedName, fingerprint: b.Fingerprint, created: now.Unix(), bundle: b, blockTokens: int(b.BlockTokens)}
	if m.name == "" {
		m.name = b.Model
	}
	if m.blockTokens == 0 {
		m.blockTokens = kvcache.DefaultBlockTokens
	}
	// Short, since every event of a stream carries it.
	m.systemPrint = fmt.Sprintf("fp_%010x", xxhash.Sum64String(fmt.Sprintf("%x %s", b.Fingerprint, b.NumericsClass))>>24)
	if len(b.TokenizerJson) > 0 {
		t, err := newTextModel(b, template)
		if err != nil {
			return nil, fmt.Errorf("gateway: bundle of model %q: %w", b.Model, err)
		}
		m.text = t
	}
	return m, nil
}

// root is where the block hashes of requests with the salt start.
func (m *model) root(salt string) kvcache.Hash {
	adapter := ""
	if m.adapter != nil { // its content, so that a name may be given to another one
		adapter = strconv.FormatUint(m.adapter.Digest, 16)
	}
	return kvcache.Root(strconv.FormatUint(m.fingerprint, 16), adapter, salt)
}

// with is the model computed with an adapter, under the adapter's name.
func (m *model) with(a upstream.Adapter) *model {
	w := *m
	w.name, w.parent, w.adapter = a.Name, m.name, &nodepb.Adapter{Name: a.Name, Digest: a.Digest}
	return &w
}

// errNoNode says that no decode node is there to ask for a bundle.
var errNoNode = errors.New("gateway: no decode node is ready")

// refresh takes up the fleet's model when there is none yet, or when no ready
// decode node serves the present one any more.
func (g *Gateway) refresh(ctx context.Context) error {
	fleet := g.fleet.Now()
	if m := g.model.Load(); m != nil && fleet.Ready(m.fingerprint) > 0 {
		return nil
	}
	err := errNoNode
	for _, n := range fleet.Decode {
		member := n.Member()
		if !member.Ready || member.Draining {
			continue
		}
		var b *nodepb.Bundle
		if b, err = n.Bundle(ctx); err != nil {
			continue
		}
		var m *model
		if m, err = newModel(b, g.o.ServedModelName, g.o.ChatTemplate, time.Now()); err != nil {
			continue
		}
		g.model.Store(m)
		g.subscribe(b.Model)
		g.meters.set.SetModel(m.name)
		g.log.Info("model taken up", "model", m.name, "node", n.Name, "fingerprint", strconv.FormatUint(m.fingerprint, 16),
			"max_model_len", b.MaxModelLen, "vocab", b.VocabSize, "tokenizer", m.text != nil, "chat_template", m.text != nil && m.text.chat != nil)
		return nil
	}
	return err
}

// keepModel refreshes now, when the members change, and in between.
func (g *Gateway) keepModel(ctx context.Context) {
	tick := time.NewTicker(upstream.DefaultProbeInterval / 2)
	defer tick.Stop()
	said := ""
	for {
		if err := g.refresh(ctx); err == nil {
			said = ""
		} else if why := err.Error(); why != said && ctx.Err() == nil && g.foreign == nil {
			g.log.Info("no model to serve yet", "error", err)
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

// find is the model that a request names, or an adapter of it; empty names the
// model itself.
func (g *Gateway) find(name string) (*model, *openai.Error) {
	m := g.model.Load()
	if m == nil {
		return nil, openai.Unavailable(retryAfter, "no model is loaded yet: no decode node is ready")
	}
	if name != "" && name != m.name {
		for _, a := range g.fleet.Now().Adapters(m.fingerprint) {
			if a.Name == name {
				return m.with(a), nil
			}
		}
		return nil, &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model",
			Message: fmt.Sprintf("the model %q does not exist; this gateway serves %q", name, m.name)}
	}
	return m, nil
}
