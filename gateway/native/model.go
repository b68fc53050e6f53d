package native

import (
	"fmt"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Model is what the gateway needs to serve a model, made from a node's bundle. It is not changed
// once made.
type Model struct {
	render.Model
	created     int64 // seconds since 1970, when this gateway loaded it
	bundle      *nodepb.Bundle
	groups      []kvcache.Group // of the nodes' caches
	systemPrint string          // system_fingerprint of weights and numerics

	queue *exchange.Admission // of its requests

	adapter *nodepb.Adapter // nil: none
	parent  string          // of a model with an adapter: the model without
}

// NewModel returns the model of a bundle. servedName and template replace the bundle's unless they
// are empty.
func NewModel(b *nodepb.Bundle, servedName, template string, now time.Time) (*Model, error) {
	m := &Model{created: now.Unix(), bundle: b}
	m.Model = render.Model{Name: servedName, Fingerprint: b.Fingerprint, MaxLen: int(b.MaxModelLen), Vocab: int(b.VocabSize), BlockTokens: int(b.BlockTokens)}
	if m.Name == "" {
		m.Name = b.Model
	}
	if m.BlockTokens == 0 {
		m.BlockTokens = kvcache.DefaultBlockTokens
	}
	for _, g := range b.Groups {
		if g.BlockTokens == 0 || int(g.BlockTokens)%m.BlockTokens != 0 || int64(g.Window) > 1<<31-1 {
			return nil, fmt.Errorf("gateway: bundle of model %q: KV blocks of %d tokens and a window of %d, in units of %d", b.Model, g.BlockTokens, g.Window, m.BlockTokens)
		}
		m.groups = append(m.groups, kvcache.Group{BlockTokens: int(g.BlockTokens), Window: int(g.Window)})
	}
	// Short, because every event of a stream has it.
	m.systemPrint = fmt.Sprintf("fp_%010x", xxhash.Sum64String(fmt.Sprintf("%x %s", b.Fingerprint, b.NumericsClass))>>24)
	if len(b.TokenizerJson) > 0 {
		t, err := render.NewTextModel(b, template)
		if err != nil {
			return nil, fmt.Errorf("gateway: bundle of model %q: %w", b.Model, err)
		}
		m.Text = t
	}
	return m, nil
}

// with returns the model computed with an adapter, under the adapter's name.
func (m *Model) with(a nodes.Adapter) *Model {
	w := *m
	w.Name, w.parent, w.Adapter, w.adapter = a.Name, m.Name, strconv.FormatUint(a.Digest, 16), &nodepb.Adapter{Name: a.Name, Digest: a.Digest}
	return &w
}

// Queue returns the queue of the model's requests.
func (m *Model) Queue() *exchange.Admission { return m.queue }

// Card returns the model's entry of /v1/models.
func (m *Model) Card() openai.Model {
	return openai.Model{ID: m.Name, Created: m.created, MaxModelLen: m.MaxLen, Parent: m.parent}
}
