package native

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// models are the served models, in the order in which they were loaded. A gateway may have nodes of
// several models. A request's model decides which of them it can use.
type models struct{ all atomic.Pointer[[]*Model] }

// All returns the models. The caller does not change the slice.
func (m *models) All() []*Model {
	if all := m.all.Load(); all != nil {
		return *all
	}
	return nil
}

// Load returns the first model; nil: there is none.
func (m *models) Load() *Model {
	if all := m.All(); len(all) > 0 {
		return all[0]
	}
	return nil
}

func (m *models) Store(all ...*Model) { m.all.Store(&all) }

// errNoNode reports that no decode node can give its bundle.
var errNoNode = errors.New("gateway: no decode node is ready")

// refresh loads the models of ready decode nodes and drops those that no node serves any more. With
// KeepModels, or while prefill nodes compute vectors of them, it keeps them until a model of the
// same name comes. While nodes serve a model, another model of the same name waits, because it is
// the next version. Nodes of equal weights are one model, under each name that they announce.
func (fl *Fleet) refresh(ctx context.Context) error {
	fleet, was := fl.Nodes.Now(), fl.Models.All()
	next := fl.rename(fleet, was)
	err := errNoNode
	for _, n := range fleet.Decode {
		member, print := n.Member(), n.Fingerprint()
		if !member.Ready || member.Draining || len(next) > 0 && (print == 0 || len(next) >= maxModels && full(fleet, next) || fl.waits(next, pendingModel{print, member.Model}) || time.Since(fl.failedModels[print]) < failedPause) ||
			slices.ContainsFunc(next, func(m *Model) bool { return print == 0 || m.Fingerprint == 0 || m.Fingerprint == print }) {
			continue
		}
		var m *Model
		if m, err = fl.load(ctx, n, next); err == nil && m != nil {
			next = slices.DeleteFunc(next, func(old *Model) bool { return m.replaces(fleet, old) })
			next = fl.rename(fleet, append(spare(fleet, next), m))
		}
	}
	fl.learnVectors(ctx, fleet, next)
	if len(next) > 0 {
		err = nil
	} else if len(was) > 0 { // its nodes may come back
		return err
	}
	if !slices.Equal(was, next) {
		fl.Models.Store(next...)
		var names []string
		for _, m := range next {
			names = append(names, m.names...)
		}
		fl.Meters.SetModel(strings.Join(names, ","))
	}
	fl.subscribe(fleet, next)
	return err
}

// learnVectors replaces the models whose bundles are of older nodes, which have no vectors, once a
// newer node serves them.
func (fl *Fleet) learnVectors(ctx context.Context, fleet *nodes.Snapshot, models []*Model) {
	for i, m := range models {
		at := slices.IndexFunc(fleet.Decode, func(n *nodes.Node) bool { return n.Pools(m.Fingerprint, nodes.VectorVersion) })
		if m.bundle.Vectors != nil || at < 0 || time.Since(fl.failedModels[m.Fingerprint]) < failedPause {
			continue
		}
		b, err := fleet.Decode[at].Bundle(ctx)
		if err != nil || b.Vectors == nil || b.Fingerprint != m.Fingerprint {
			fl.failedModels[m.Fingerprint] = time.Now()
			continue
		}
		w := *m
		w.bundle = proto.CloneOf(m.bundle)
		w.bundle.Vectors, models[i] = b.Vectors, &w
	}
}

// absent reports whether no decode node serves the model.
func (m *Model) absent(fleet *nodes.Snapshot) bool {
	names, _ := fleet.Names(m.Fingerprint, m.bundle.Model)
	return len(names) == 0
}

// replaces reports whether the model has a name of old, which is absent.
func (m *Model) replaces(fleet *nodes.Snapshot, old *Model) bool {
	return old.absent(fleet) && slices.ContainsFunc(m.announced, func(name string) bool { return slices.Contains(old.announced, name) })
}

// rename returns the models under the names that decode nodes announce now. A model keeps its
// announced names, and gets the others that no other model has. Models without a name are dropped,
// or keep their former ones (Options.KeepModels, and Model.stays).
func (fl *Fleet) rename(fleet *nodes.Snapshot, models []*Model) (next []*Model) {
	announced, kept, taken := make([][]string, len(models)), make([][]string, len(models)), map[string]bool{}
	for i, m := range models {
		announced[i], _ = fleet.Names(m.Fingerprint, m.bundle.Model)
		for _, name := range announced[i] {
			if slices.Contains(m.announced, name) {
				kept[i], taken[name] = append(kept[i], name), true
			}
		}
	}
	for i, m := range models {
		for _, name := range announced[i] {
			if !taken[name] {
				kept[i], taken[name] = append(kept[i], name), true
			}
		}
		if slices.Sort(kept[i]); len(kept[i]) > 0 {
			next = append(next, m.under(kept[i]))
		} else if (fl.o.KeepModels || m.stays(fleet)) && len(announced[i]) == 0 && !slices.ContainsFunc(m.announced, func(name string) bool { return taken[name] }) {
			next = append(next, m)
		}
	}
	return next
}

// stays reports whether prefill nodes compute vectors of a model that no decode node serves. A name
// that the gateway's operator gave is left to the next model.
func (m *Model) stays(fleet *nodes.Snapshot) bool {
	return !m.renamed && fleet.Pools(m.Fingerprint, nodes.VectorVersion)
}

// under returns the model under the names that nodes announce. It keeps its first name while a node
// announces it. A name that the gateway's operator gave replaces them.
func (m *Model) under(announced []string) *Model {
	if slices.Equal(m.announced, announced) {
		return m
	}
	w := *m
	w.announced = announced
	if !m.renamed {
		w.names = announced
		if !slices.Contains(announced, m.Name) {
			w.Name = announced[0]
		}
	}
	return &w
}

// failedPause is the pause after a model that could not be loaded, while others are served, because
// its tokenizer may have tens of megabytes.
const failedPause = 30 * time.Second

// maxModels bounds the models of one gateway's nodes: each has its tokenizer in memory.
const maxModels = 64

// full reports whether no further model fits. It ignores absent models.
func full(fleet *nodes.Snapshot, next []*Model) bool {
	n := 0
	for _, m := range next {
		if !m.absent(fleet) {
			n++
		}
	}
	return n >= maxModels
}

// spare returns the models without the oldest absent one if they are 2*maxModels, so that absent
// models never keep one that nodes serve from being loaded.
func spare(fleet *nodes.Snapshot, models []*Model) []*Model {
	oldest := slices.IndexFunc(models, func(m *Model) bool { return m.absent(fleet) })
	if len(models) < 2*maxModels || oldest < 0 {
		return models
	}
	return slices.Delete(models, oldest, oldest+1)
}

// pendingModel is a newer version of a model, as a node announces it, that waits until no node
// serves the current one.
type pendingModel struct {
	fingerprint uint64
	announced   string
}

// waits reports whether a pending model waits because the current one of its name is served.
func (fl *Fleet) waits(next []*Model, p pendingModel) bool {
	name, pending := fl.pendingModels[p]
	fleet := fl.Nodes.Now()
	return pending && slices.ContainsFunc(next, func(m *Model) bool { return slices.Contains(m.announced, name) && !m.absent(fleet) })
}

// load makes a node's model one of the gateway's; nil without an error: the model is served
// already, or waits.
func (fl *Fleet) load(ctx context.Context, n *nodes.Node, next []*Model) (*Model, error) {
	b, err := n.Bundle(ctx)
	if err != nil {
		return nil, err
	}
	name, announced, fleet := fl.o.ServedModelName, cmp.Or(n.Model(), b.Model), fl.Nodes.Now()
	// An absent model of the same name is replaced.
	next = slices.DeleteFunc(slices.Clone(next), func(m *Model) bool {
		return slices.Contains(m.announced, announced) && m.absent(fleet) && m.Fingerprint != b.Fingerprint
	})
	for _, m := range next {
		if m.Fingerprint == b.Fingerprint {
			return nil, nil
		}
		if slices.Contains(m.announced, announced) {
			fl.pendingModels[pendingModel{b.Fingerprint, n.Model()}] = announced
			fl.Log.Info("newer model of the same name waits until no node serves the current one", "model", announced, "node", n.Name,
				"fingerprint", strconv.FormatUint(b.Fingerprint, 16))
			return nil, nil
		}
		if m.Name == name {
			name = ""
			fl.Log.Warn("several models are served: --served-model-name names the first; give NAME=MODEL for others", "first", m.bundle.Model, "other", announced)
		}
	}
	m, err := NewModel(b, name, fl.o.ChatTemplate, time.Now())
	if err != nil {
		fl.failedModels[b.Fingerprint] = time.Now()
		fl.Log.Warn("a node's model cannot be loaded", "node", n.Name, "error", err)
		return nil, err
	}
	format := parse.Choice{Format: &parse.Format{}}
	if m.Text != nil {
		m.Text.RejectSpecial, m.Text.TrustTemplates = fl.o.RejectSpecialTokens, fl.o.TrustTemplates
		if format, err = m.Text.ChooseFormat(fl.o.ToolCallParser, fl.o.ReasoningParser); err != nil {
			return nil, err // New has checked the names
		}
	}
	// Each model has a queue of its own, so that requests of one do not block those of another.
	if m.queue = fl.Queue; slices.ContainsFunc(next, func(o *Model) bool { return o.queue == fl.Queue }) {
		m.queue = fl.QueueOf(m.Fingerprint, math.MaxInt64)
	}
	fl.Log.Info("model added", "model", m.Name, "node", n.Name, "fingerprint", strconv.FormatUint(m.Fingerprint, 16),
		"max_model_len", b.MaxModelLen, "vocab", b.VocabSize, "tokenizer", m.Text != nil, "chat_template", m.Text != nil && m.Text.HasTemplate(),
		"tool_call_parser", cmp.Or(format.Tools(), parse.None), "tool_call_parser_reason", format.ToolsBecause,
		"reasoning_parser", cmp.Or(format.Reasoning(), parse.None), "reasoning_parser_reason", format.ReasoningBecause)
	return m, nil
}

// FollowRoom updates the room of the models' queues. The queue of a model that is gone is dropped
// when it is empty.
func (fl *Fleet) FollowRoom() {
	all, l := fl.Models.All(), fl.Limits()
	for _, m := range all {
		r := fl.Nodes.Now().Room(m.Fingerprint, l.NodeBacklog, l.NodeBacklogTime)
		if fl.o.KeepModels && fl.Nodes.Now().Usable(m.Fingerprint) == 0 {
			r = nodes.Room{}
		}
		m.queue.SetRoom(r.Requests, r.Tokens)
	}
	find := func(print uint64) *Model {
		if at := slices.IndexFunc(all, func(m *Model) bool { return m.Fingerprint == print }); at >= 0 {
			return all[at]
		}
		return nil
	}
	fl.EachQueue(func(key any, a *exchange.Admission) {
		var m *Model
		switch key := key.(type) {
		case uint64:
			m = find(key)
		case vectorsOf:
			if m = find(uint64(key)); m != nil {
				r := fl.Nodes.Now().VectorRoom(m.Fingerprint, nodes.VectorVersion, l.NodeBacklog, l.NodeBacklogTime, m.queue.Running())
				a.SetRoom(r.Requests, r.Tokens)
			}
		default:
			return
		}
		if m == nil && a.Idle() {
			fl.DropQueue(key)
		}
	})
}

// Run follows which models the members serve until ctx ends. It calls refresh at once, when the
// members change, and in between.
func (fl *Fleet) Run(ctx context.Context) {
	tick := time.NewTicker(nodes.DefaultProbeInterval / 2)
	defer tick.Stop()
	logged := ""
	for {
		if err := fl.refresh(ctx); err == nil {
			logged = ""
		} else if why := err.Error(); why != logged && ctx.Err() == nil && !fl.o.Quiet {
			fl.Log.Info("no model to serve yet", "error", err)
			logged = why
		}
		select {
		case <-ctx.Done():
			return
		case <-fl.membersChanged:
		case <-tick.C:
		}
	}
}

// Find returns the model that a request names, by one of its own or further names, or by the name
// of an adapter. If there is one model, its name may be empty.
func (fl *Fleet) Find(name string) (*Model, *openai.Error) {
	all := fl.Models.All()
	switch {
	case len(all) == 0:
		return nil, openai.Unavailable(exchange.RetryAfter, "no model is loaded yet: no decode node is ready")
	case name == "" && len(all) > 1:
		return nil, openai.BadRequest("model", "several models are served here: name one of /v1/models")
	case name == "" || name == all[0].Name:
		return all[0], nil
	}
	own := fl.o.Names[name]
	for _, m := range all {
		if m.Name == name {
			return m, nil
		}
		if slices.Contains(m.names, name) || slices.Contains(m.names, own) {
			return m.as(name), nil
		}
	}
	fleet := fl.Nodes.Now()
	for _, m := range all {
		for _, a := range fleet.Adapters(m.Fingerprint) {
			if a.Name == name {
				return m.with(a), nil
			}
		}
	}
	var served []string
	for _, m := range all {
		for _, name := range m.names {
			served = append(served, strconv.Quote(name))
		}
	}
	return nil, &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model",
		Message: fmt.Sprintf("the model %q does not exist; this gateway serves %s", openai.Clip(name, 200), openai.Clip(strings.Join(served, ", "), 1000))}
}

// Cards returns the entries of /v1/models: the models under all names, and their adapters.
func (fl *Fleet) Cards() (list []openai.Model) {
	fleet := fl.Nodes.Now()
	for _, m := range fl.Models.All() {
		list = append(list, m.Card())
		for _, name := range m.names {
			if name != m.Name {
				list = append(list, m.as(name).Card())
			}
		}
		for _, name := range slices.Sorted(maps.Keys(fl.o.Names)) {
			if slices.Contains(m.names, fl.o.Names[name]) && !slices.Contains(m.names, name) {
				list = append(list, m.as(name).Card())
			}
		}
		for _, a := range fleet.Adapters(m.Fingerprint) {
			list = append(list, m.with(a).Card())
		}
	}
	return list
}

// as returns the model under a further name.
func (m *Model) as(name string) *Model {
	w := *m
	w.Name = name
	return &w
}

// Model is what the gateway needs to serve a model, made from a node's bundle. It is not changed
// once made.
type Model struct {
	render.Model
	created     int64 // seconds since 1970, when this gateway loaded it
	bundle      *nodepb.Bundle
	names       []string        // in the API, sorted, without further names; Name is one
	announced   []string        // names that its decode nodes announce, sorted
	renamed     bool            // the gateway's operator gave the name
	groups      []kvcache.Group // of the nodes' caches
	systemPrint string          // system_fingerprint of weights and numerics

	queue *exchange.Admission // of its requests, unless vectorQueue has them

	adapter *nodepb.Adapter // nil: none
	parent  string          // of a model with an adapter: the model without
	grammar uint32          // version that its nodes must have; 0: any
	vectors uint32          // likewise
}

// NewModel returns the model of a bundle. servedName and template replace the bundle's unless they
// are empty.
func NewModel(b *nodepb.Bundle, servedName, template string, now time.Time) (*Model, error) {
	m := &Model{created: now.Unix(), bundle: b}
	m.Model = render.Model{Name: servedName, Fingerprint: b.Fingerprint, MaxLen: int(b.MaxModelLen), Vocab: int(b.VocabSize), BlockTokens: int(b.BlockTokens)}
	if m.renamed = servedName != ""; !m.renamed {
		m.Name = b.Model
	}
	m.names, m.announced = []string{m.Name}, []string{b.Model}
	if m.BlockTokens == 0 {
		m.BlockTokens = kvcache.DefaultBlockTokens
	}
	for _, g := range b.Groups {
		if g.BlockTokens == 0 || int(g.BlockTokens)%m.BlockTokens != 0 || int64(g.Window) > 1<<31-1 {
			return nil, fmt.Errorf("gateway: bundle of model %q: KV blocks of %d tokens and a window of %d, in units of %d", b.Model, g.BlockTokens, g.Window, m.BlockTokens)
		}
		m.groups = append(m.groups, kvcache.Group{BlockTokens: int(g.BlockTokens), Window: int(g.Window), Every: int(g.Every)})
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

// forGrammar returns the model on nodes that can constrain outputs by the grammar; nil: on any.
func (m *Model) forGrammar(g *openai.Grammar) *Model {
	if g == nil {
		return m
	}
	w := *m
	w.grammar = grammar.Version
	return &w
}

// TokenizerInfo returns the configuration of the model's tokenizer.
func (m *Model) TokenizerInfo() (*openai.TokenizerInfo, error) {
	given := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	info := &openai.TokenizerInfo{Class: "PreTrainedTokenizerFast", MaxLen: m.MaxLen, Bos: given(m.bundle.BosToken), Eos: given(m.bundle.EosToken),
		Template: given(m.Text.Template())}
	return info, info.SetAdded(m.bundle.TokenizerJson)
}

// Queue returns the queue of the model's requests.
func (m *Model) Queue() *exchange.Admission { return m.queue }

// Card returns the model's entry of /v1/models.
func (m *Model) Card() openai.Model {
	return openai.Model{ID: m.Name, Created: m.created, MaxModelLen: m.MaxLen, Parent: m.parent}
}
