package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/native"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// The backend tandem loads a decode node over the protocol between nodes: token ids in,
// token ids out, without a gateway.

// nativeBackend is the name of the backend, nativePort a decode node's usual port.
const (
	nativeBackend = "tandem"
	nativePort    = 7102
)

func (o *Options) native() bool { return o.Backend == nativeBackend }

// unsupportedNative are flags for features that the protocol between nodes, or this client of
// it, does not have.
var unsupportedNative = []string{"endpoint", "header", "insecure", "extra-body", "logprobs", "use-beam-search", "lora-modules", "profile", "served-model-name", "tokenizer", "skip-tokenizer-init"}

// completeNative checks the options and completes the address.
func (o *Options) completeNative() error {
	for _, name := range unsupportedNative {
		if o.set.Changed(name) {
			return fmt.Errorf("%w: --%s: the backend tandem sends token ids to a node and uses its model as it is; omit this flag, or load a gateway with --backend openai", ErrOption, name)
		}
	}
	if o.TLSDir == "" && o.nativeDial == nil {
		return fmt.Errorf("%w: --backend tandem: give --tls-dir, a gateway's folder made by `tandem ca DIR gateway/NAME`: nodes accept requests only from gateways", ErrOption)
	}
	if !o.set.Changed("port") {
		o.Port = nativePort
	}
	if o.BaseURL == "" {
		o.BaseURL = fmt.Sprintf("%s:%d", bracketed(o.Host), o.Port)
	}
	o.BaseURL = strings.TrimPrefix(strings.TrimSuffix(o.BaseURL, "/"), "tandem://")
	o.Endpoint = ""
	return nil
}

// prepareNative connects, and gets model and tokenizer from the node.
func (r *run) prepareNative(ctx context.Context) error {
	no := native.Options{Addr: r.BaseURL, Name: fmt.Sprintf("bench-%d", os.Getpid()), Dial: r.nativeDial}
	if r.TLSDir != "" {
		m, err := tlsconf.Load(r.TLSDir, slog.New(slog.NewTextHandler(io.Discard, nil)))
		if err != nil {
			return fmt.Errorf("%w: --tls-dir: %w", ErrOption, err)
		}
		if id := m.Identity(); id.Role == tlsconf.Node {
			return fmt.Errorf("%w: --tls-dir %s has the certificate of node %q: nodes accept requests only from gateways; `tandem ca DIR gateway/NAME` issues a gateway's", ErrOption, r.TLSDir, id.Name)
		}
		no.TLS = m.Client()
	}
	var t *tokenizer.Tokenizer
	no.KeepText = r.SaveDetailed
	no.Decode = func(ids []int32) string { return t.Decode(ids, true) }
	c := native.New(no)
	r.client = c
	b, err := c.Bundle(ctx)
	if err != nil {
		return err
	}
	if t, err = tokenizer.Load(b.TokenizerJson); err != nil {
		return fmt.Errorf("the node's tokenizer: %w", err)
	}
	if r.model = b.Model; r.Model != "" && r.Model != b.Model {
		return fmt.Errorf("%w: --model %s: the node at %s serves %s", ErrOption, r.Model, r.BaseURL, b.Model)
	}
	r.tokenizer, r.bundle = b.Model, b
	r.Data.Vocabulary = vocabularyOf(t)
	return nil
}

// vocabularyOf returns a tokenizer's tokens that may occur in a prompt.
func vocabularyOf(t *tokenizer.Tokenizer) dataset.Vocabulary {
	v := dataset.Vocabulary{
		Word:   word,
		Encode: func(text string) []int32 { return t.Encode(text, false) },
		Decode: func(ids []int32) string { return t.Decode(ids, false) },
	}
	for id := range int32(t.VocabSize()) {
		if !t.IsSpecial(id) && len(t.TokenBytes(id)) > 0 {
			v.IDs = append(v.IDs, id)
		}
	}
	return v
}

// generate encodes requests for the protocol between nodes.
type generate struct {
	*Options
	bundle *nodepb.Bundle
	encode func(string) []int32
}

func (g *generate) body(i int, r *dataset.Request) ([]byte, error) {
	prompt := slices.Concat(r.Pieces...)
	if r.Text != "" {
		prompt = g.encode(r.Text)
	}
	return proto.Marshal(&nodepb.Generate{
		Prompt: prompt, MaxTokens: uint32(r.OutputTokens), IgnoreEos: g.IgnoreEOS, EosTokenIds: g.bundle.EosTokenIds,
		PrefixRoot: uint64(kvcache.Root(g.bundle.Model, "", "")), Model: g.bundle.Model, Prefill: g.Prefill,
		Sampling: g.sampling(i),
	})
}

// sampling returns the flags' sampling parameters, else the model's defaults, as a gateway does.
func (g *generate) sampling(i int) *nodepb.Sampling {
	s := &nodepb.Sampling{
		Seed: g.Seed + uint64(i), Temperature: 1, MinP: float32(g.MinP), RepetitionPenalty: float32(g.Repetition),
		PresencePenalty: float32(g.Presence), FrequencyPenalty: float32(g.Frequency), TopP: float32(g.TopP), TopK: int32(g.TopK),
	}
	d := g.bundle.GetDefaults()
	switch {
	case g.set.Changed("temperature"):
		s.Temperature = float32(g.Temperature)
	case d != nil && d.Temperature != nil:
		s.Temperature = d.GetTemperature()
	}
	if d != nil && !g.set.Changed("top-p") {
		s.TopP = d.GetTopP()
	}
	if d != nil && !g.set.Changed("top-k") {
		s.TopK = d.GetTopK()
	}
	return s
}

// loader sends requests: over HTTP, or over the nodes' protocol.
type loader interface {
	load.Doer
	Close()
}

// encoder encodes request bodies.
type encoder interface {
	body(i int, r *dataset.Request) ([]byte, error)
}

// encoder returns the encoder of the backend.
func (r *run) encoder() (encoder, error) {
	if r.native() {
		return &generate{r.Options, r.bundle, r.Data.Vocabulary.Encode}, nil
	}
	return r.newBodies(r.model)
}
