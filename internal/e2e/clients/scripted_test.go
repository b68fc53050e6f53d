package clients

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

//go:embed testdata/formats.json
var formatsJSON []byte

// format is an answer with two calls in a format of the parser's table.
type format struct {
	Tools, Reasoning string // names of parsers; Reasoning may be empty
	Open             bool   // the prompt ends within reasoning
	Text             string // the answer
	Calls            []call // calls of the answer
}

type call struct {
	Name      string
	Arguments json.RawMessage
}

// readFormats returns the answers in all formats.
func readFormats() (all []format, err error) {
	err = json.Unmarshal(formatsJSON, &all)
	return all, err
}

// Parts of the chat template.
const (
	turnStart, turnEnd = "<|im_start|>", "<|im_end|>"
	toolTurn           = turnStart + "tool\n"
	template           = `{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}: {{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
`
)

// marker matches texts of samples that are special tokens in the models' vocabularies.
var marker = regexp.MustCompile(`<\|[^<>]*>|<[a-z_]+\|>|<｜[^<>｜]*｜>|</?(?:think|tool_call)>|\[(?:/?THINK|TOOL_CALLS|CALL_ID|ARGS)\]`)

// reasoningEnd is the marker behind the reasoning of answers whose prompts end within it.
const reasoningEnd = "</think>"

// player answers a chat: with the format's calls or, if the chat has results of tools, with these
// results.
type player struct {
	format
	tokenizer *tokenizer.Tokenizer

	mu   sync.Mutex
	of   *nodepb.Generate // request of which answer is
	next []int32          // its answer
}

// token returns the token at a position.
func (p *player) token(r *nodepb.Generate, position int) int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of != r {
		p.of, p.next = r, p.tokenizer.Encode(p.answer(p.tokenizer.Decode(r.Prompt, false))+turnEnd, false)
	}
	return p.next[min(position-len(r.Prompt), len(p.next)-1)]
}

// answer returns the text that answers a prompt.
func (p *player) answer(prompt string) string {
	var results []string
	for i, turn := range strings.Split(prompt, toolTurn) {
		if i > 0 {
			result, _, _ := strings.Cut(turn, turnEnd)
			results = append(results, result)
		}
	}
	if len(results) == 0 {
		return p.Text
	}
	text := "Found: " + strings.Join(results, "; ") + "."
	switch {
	case p.Tools == "openai":
		return "<|channel|>final<|message|>" + text
	case p.Open:
		reasoning, _, _ := strings.Cut(p.Text, reasoningEnd)
		return reasoning + reasoningEnd + "\n\n" + text
	}
	return text
}

// served is a gateway of one model.
type served struct {
	Name  string `json:"name"`
	URL   string `json:"url"`
	Model string `json:"model"`
	Calls []call `json:"calls,omitempty"` // of the answer; nil: the model computes
}

// serve answers in a format until the context ends. It returns when requests are answered; ended is then
// called once at the end.
func (f format) serve(ctx context.Context, ended func(error)) (served, error) {
	special := []string{turnStart, turnEnd}
	for _, m := range marker.FindAllString(f.Text, -1) {
		if !slices.Contains(special, m) {
			special = append(special, m)
		}
	}
	chat := template
	if f.Open {
		chat += "<think>\n"
	}
	b := &nodepb.Bundle{
		Model: f.Tools, Fingerprint: 7, NumericsClass: "scripted", TokenizerJson: nodestest.Tokenizer(nil, special...), ChatTemplate: chat + "{% endif %}",
		EosToken: turnEnd, EosTokenIds: []int32{257}, MaxModelLen: 100000, VocabSize: uint32(256 + len(special)), BlockTokens: 16,
	}
	tok, err := tokenizer.Load(b.TokenizerJson)
	if err != nil {
		return served{}, err
	}
	p := &player{format: f, tokenizer: tok}
	network := rpc.NewNetwork()
	node, err := nodestest.Start(network, "d1", nodestest.Options{
		Bundle: b, Token: p.token, Hello: &nodepb.Hello{NodeId: "d1", Role: "decode", Fingerprint: 7, Grammar: grammar.Version},
	})
	if err != nil {
		return served{}, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		node.Stop()
		return served{}, err
	}
	reasoning := f.Reasoning
	if reasoning == "" {
		reasoning = parse.None
	}
	g, err := gateway.New(gateway.Options{
		Listener: listener, RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: network.Dial, BackoffMin: time.Millisecond},
		Members:        []nodes.Member{{ID: "d1", Role: "decode", RPC: "d1", Fingerprint: 7, Class: "scripted", Ready: true}},
		ToolCallParser: f.Tools, ReasoningParser: reasoning, MinRemotePrefillTokens: -1, DrainDelay: -1, QuietStats: true, APIKeys: []string{key},
	})
	if err != nil {
		node.Stop()
		return served{}, errors.Join(err, listener.Close())
	}
	go func() {
		err := g.Run(ctx)
		node.Stop()
		ended(err)
	}()
	s := served{Name: f.Tools, URL: "http://" + listener.Addr().String(), Model: f.Tools, Calls: f.Calls}
	return s, until(ctx, "the gateway of "+f.Tools+" is ready", func() bool { return g.Ready() == nil })
}

// playAll serves formats until stop is called.
func playAll(ctx context.Context, formats []format) (all []served, stop func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, len(formats))
	stop = func() error {
		cancel()
		var errs []error
		for range all {
			errs = append(errs, <-ended)
		}
		return errors.Join(errs...)
	}
	for _, f := range formats {
		s, err := f.serve(ctx, func(err error) { ended <- err })
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("%s: %w", f.Tools, err), stop())
		}
		all = append(all, s)
	}
	return all, stop, nil
}

// startBound bounds the start of a gateway, a node or a program.
const startBound = time.Minute

// until waits for a condition.
func until(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	for !holds() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}
