package native

import (
	"cmp"
	"math/rand/v2"
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Prepare implements exchange.Backend.
func (x *request) Prepare() *openai.Error {
	charge := x.S.Charge(x.Ctx)
	body, fault := x.body(charge)
	if fault != nil {
		return fault
	}
	if fault := x.parse(body, charge); fault != nil {
		if x.surface != nil {
			return x.surface.Fault(fault)
		}
		if fault.Param == "prompt" && x.Path == openai.TokensPath {
			fault.Param, fault.Message = "token_ids", strings.Replace(fault.Message, "prompt: ", "token_ids: ", 1)
		}
		return fault
	}
	x.req.DropRaw()
	httpserver.DropBody(x.Ctx)
	x.WatchClient()
	return nil
}

// parse reads the body of a chat or of completions and makes its choices, whose attempts can start.
func (x *request) parse(body []byte, charge func(bytes int) *openai.Error) *openai.Error {
	m, prompts, fault := x.render(body, charge)
	if fault != nil {
		return fault
	}
	req, meters := x.req, x.fleet.Meters
	if fault := x.LetIn(x.nPrompt); fault != nil {
		return fault
	}
	req.Priority = x.Priority(req.Priority)
	x.makeChoices(m, prompts)
	if arrived := x.fleet.o.Arrived; arrived != nil {
		for i := range x.choices {
			arrived(len(x.choices[i].prompt.Tokens))
		}
	}
	if x.pools() {
		return nil
	}
	meters.Histogram(metrics.RequestParamsN).Observe(float64(req.N))
	if req.MaxTokens > 0 {
		meters.Histogram(metrics.RequestParamsMaxTokens).Observe(float64(req.MaxTokens))
	}
	return nil
}

// render reads and checks the body of a chat or of completions, and returns its model and prompts.
func (x *request) render(body []byte, charge func(bytes int) *openai.Error) (m *Model, prompts []render.Prompt, fault *openai.Error) {
	fl := x.fleet
	var further []*openai.Request // conversations
	if x.Path == openai.BatchPath {
		if further, fault = openai.ParseBatch(body, charge); fault == nil {
			x.req, further = further[0], further[1:]
		}
	} else {
		x.req, fault = openai.ParseWithin(x.On, body, charge)
	}
	if fault != nil {
		return nil, nil, fault
	}
	req := x.req
	_, req.ClipMax = x.surface.(clipper)
	if fault := req.CheckLogprobs(fl.Limits().MaxLogprobs); fault != nil {
		return nil, nil, fault
	}
	if fault := fl.CheckChoices(req.N); fault != nil {
		return nil, nil, fault
	}
	fl.WarnUnknown(req.Unknown)
	if fault := x.ReadHeaders(); fault != nil {
		return nil, nil, fault
	}
	if m, fault = fl.Find(req.Model); fault != nil {
		if unserved := fl.o.Unserved; unserved != nil && fl.Models.Load() == nil {
			unserved(len(body))
		}
		return nil, nil, fault
	}
	if fault := cmp.Or(m.CheckTools(req, fl.o.NoToolCalls), x.checkVectors(m)); fault != nil {
		return nil, nil, fault
	}
	if x.pools() {
		if fault := cmp.Or(x.joinPairs(m, charge), x.addPrefix(m)); fault != nil {
			return nil, nil, fault
		}
	}
	if prompts, fault = m.Prompts(req, charge); fault == nil && x.pools() {
		fault = x.checkLengths(prompts)
	}
	if fault != nil {
		if x.Path == openai.BatchPath {
			fault = fault.InConversation(0)
		}
		return nil, nil, fault
	}
	for i, r := range further {
		more, fault := m.Prompts(r, charge)
		if fault != nil {
			return nil, nil, fault.InConversation(i + 1)
		}
		prompts = append(prompts, more...)
	}
	if fault := m.ConstrainCalls(req, prompts[0].Start); fault != nil {
		return nil, nil, fault
	}
	if fault := m.BoundThinking(req, prompts[0].Start); fault != nil {
		return nil, nil, fault
	}
	for i := range prompts {
		if req.Grammar != nil && prompts[i].Start != prompts[0].Start {
			return nil, nil, openai.BadRequest(req.Grammar.Param, "%s: some conversations continue reasoning and others do not: send them in batches of their own", req.Grammar.Param)
		}
	}
	if req.Grammar != nil && !req.Grammar.Whole && prompts[0].Start == parse.InReasoning { // the grammar constrains what follows the reasoning
		req.Grammar.After = m.Text.Format().ReasoningEnd()
	}
	if fault := x.checkGrammar(m); fault != nil {
		return nil, nil, fault
	}
	for i := range prompts {
		n := len(prompts[i].Tokens)
		if fault := fl.CheckPrompt(req.Endpoint, n); fault != nil {
			return nil, nil, fault
		}
		x.nPrompt += n
	}
	if id := x.Ctx.Request.Header.Peek(exchange.RequestIDHeader); openai.ValidID(id) {
		req.RequestID = string(id)
	} else if req.RequestID == "" {
		req.RequestID = string(x.ID)
	} else {
		x.Ctx.Response.Header.Set(exchange.RequestIDHeader, req.RequestID)
		x.ID = x.Ctx.Response.Header.Peek(exchange.RequestIDHeader)
	}
	return m, prompts, nil
}

// makeChoices sets what the answer needs: a seed, an encoder, and the choices of each prompt.
func (x *request) makeChoices(m *Model, prompts []render.Prompt) {
	req := x.req
	x.model, x.prompts, x.seed = m.forVectors(req.Endpoint).forGrammar(req.Grammar), prompts, rand.Uint64()
	x.queue = x.model.queue
	if x.pools() && x.snapshot().Whole() {
		x.queue = x.fleet.vectorQueue(m)
	}
	if req.Seed != nil {
		x.seed = uint64(*req.Seed)
	}
	x.beginAnswer(m)
	x.choices = make([]choice, len(prompts)*req.N)
	newParser := x.parsers(m)
	for i := range x.choices {
		c := &x.choices[i]
		c.number, c.prompt = i%req.N, &x.prompts[i/req.N]
		c.delta = openai.Delta{Index: i, Begin: true, Finish: openai.NotFinished}
		if m.Text != nil && !x.pools() {
			c.text = m.Text.Output(req)
		}
		if newParser != nil {
			c.parser = newParser(c.prompt)
		}
		if x.echoProbs() { // the answer's tokens follow the prompt's
			for _, id := range c.prompt.Tokens {
				c.textEnd += len(m.TokenText(id))
			}
		}
	}
	x.live = len(x.choices)
	x.in = nodes.NewInbox(x.fleet.o.StreamTokens * len(x.choices))
}

// sampling returns how a choice samples: as the request asks, else as the checkpoint does by
// default, else as the API does.
func (x *request) sampling(c *choice) *nodepb.Sampling {
	r, d := x.req, x.model.bundle.Defaults
	if d == nil {
		d = new(nodepb.GenerationDefaults)
	}
	s := &nodepb.Sampling{
		Seed: x.seed, Choice: uint32(c.number),
		Temperature: first(1, r.Temperature, d.Temperature), TopP: first(1, r.TopP, d.TopP), TopK: first(0, r.TopK, d.TopK),
		MinP: first(0, r.MinP), RepetitionPenalty: first(0, r.RepetitionPenalty), PresencePenalty: r.PresencePenalty, FrequencyPenalty: r.FrequencyPenalty,
		MinTokens: uint32(r.MinTokens), AllowedTokenIds: r.AllowedTokens,
	}
	for _, b := range r.LogitBias {
		s.LogitBias = append(s.LogitBias, &nodepb.LogitBias{Token: b.Token, Value: b.Value})
	}
	for _, w := range r.BadWords {
		for _, ids := range x.model.BadWord(w) {
			s.BadWords = append(s.BadWords, &nodepb.TokenSequence{Tokens: ids})
		}
	}
	return s
}

// first returns the first value that is set, or else otherwise.
func first[T any](otherwise T, values ...*T) T {
	for _, v := range values {
		if v != nil {
			return *v
		}
	}
	return otherwise
}
