package gateway

import (
	"fmt"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
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
	groups      []kvcache.Group // of its nodes' caches
	systemPrint string          // system_fingerprint: weights and numerics
	text        *textModel      // nil: the bundle has no tokenizer

	queue *admission // where its requests wait

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
	for _, g := range b.Groups {
		if g.BlockTokens == 0 || int(g.BlockTokens)%m.blockTokens != 0 || int64(g.Window) > 1<<31-1 {
			return nil, fmt.Errorf("gateway: bundle of model %q: KV blocks of %d tokens and a window of %d, in units of %d", b.Model, g.BlockTokens, g.Window, m.blockTokens)
		}
		m.groups = append(m.groups, kvcache.Group{BlockTokens: int(g.BlockTokens), Window: int(g.Window)})
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
	return kvcache.Root(m.rootFields(salt))
}

// rootDigest is where the digests of their blocks start.
func (m *model) rootDigest(salt string) []byte {
	d := kvcache.DigestRoot(m.rootFields(salt))
	return d[:]
}

// rootFields are what requests have in common that may share cached blocks.
func (m *model) rootFields(salt string) (fingerprint, adapter, s string) {
	if m.adapter != nil { // its content, so that a name may be given to another one
		adapter = strconv.FormatUint(m.adapter.Digest, 16)
	}
	return strconv.FormatUint(m.fingerprint, 16), adapter, salt
}

// with is the model computed with an adapter, under the adapter's name.
func (m *model) with(a nodes.Adapter) *model {
	w := *m
	w.name, w.parent, w.adapter = a.Name, m.name, &nodepb.Adapter{Name: a.Name, Digest: a.Digest}
	return &w
}
