package gateway

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// completionsMaxTokens is the API's default for /v1/completions.
const completionsMaxTokens = 16

// generate has decode nodes answer a request for tokens.
func (g *Gateway) generate(ctx *fasthttp.RequestCtx, on openai.Endpoint) {
	g.answer(ctx, pathOf(ctx), on, new(job))
}

// generateTokens serves requests of tokens: a completion's, in other words.
func (g *Gateway) generateTokens(ctx *fasthttp.RequestCtx) { g.generate(ctx, openai.Completions) }

// prepare implements backend.
func (j *job) prepare() *openai.Error {
	fault := j.parse()
	if fault != nil {
		if fault.Param == "prompt" && j.path == tokensPath {
			fault.Param, fault.Message = "token_ids", strings.Replace(fault.Message, "prompt: ", "token_ids: ", 1)
		}
		return fault
	}
	j.req.DropRaw()
	httpserver.DropBody(j.ctx)
	j.watchClient()
	return nil
}

// parse turns the request's body into choices whose attempts can start.
func (j *job) parse() (fault *openai.Error) {
	g, charge, body := j.g, j.g.charge(j.ctx), j.ctx.PostBody()
	if j.path == tokensPath {
		if fault := charge(len(body)); fault != nil {
			return fault
		}
		if body, fault = openai.CompletionOfTokens(body); fault != nil {
			return fault
		}
		j.ctx.Request.SetBodyRaw(body)
	}
	if j.req, fault = openai.ParseWithin(j.on, body, charge); fault != nil {
		return fault
	}
	req := j.req
	if fault := g.checkLimits(req); fault != nil {
		return fault
	}
	g.warnUnknown(req.Unknown)
	if fault := j.headers(); fault != nil {
		return fault
	}
	m, fault := g.find(req.Model)
	if fault != nil {
		return fault
	}
	prompts, fault := m.prompts(req, charge)
	if fault == nil {
		fault = g.checkPrompts(req, prompts)
	}
	if fault != nil {
		return fault
	}
	if id := j.ctx.Request.Header.Peek(requestIDHeader); openai.ValidID(id) {
		req.RequestID = string(id)
	} else if req.RequestID == "" {
		req.RequestID = string(j.id)
	} else {
		j.ctx.Response.Header.Set(requestIDHeader, req.RequestID)
		j.id = j.ctx.Response.Header.Peek(requestIDHeader)
	}
	for i := range prompts {
		j.nPrompt += len(prompts[i].tokens)
	}
	if fault := j.letIn(j.nPrompt); fault != nil {
		return fault
	}
	req.Priority = j.priority(req.Priority)
	j.model, j.prompts, j.seed = m, prompts, rand.Uint64()
	if req.Seed != nil {
		j.seed = uint64(*req.Seed)
	}
	prefix := "cmpl-"
	if j.on == openai.Chat {
		prefix = "chatcmpl-"
	}
	j.answerID = prefix + req.RequestID
	j.answer = openai.NewAnswer(j.on, j.answerID, now(), m.name, m.systemPrint)
	if j.path == tokensPath {
		j.answer = openai.NewTokensAnswer(req.RequestID)
	}
	j.choices = make([]choice, len(prompts)*req.N)
	for i := range j.choices {
		c := &j.choices[i]
		c.index, c.number, c.prompt, c.finish = i, i%req.N, &j.prompts[i/req.N], openai.NotFinished
		if m.text != nil {
			c.text = m.text.output(req)
		}
		if j.echoProbs() { // the answer's tokens stand behind the prompt's
			for _, id := range c.prompt.tokens {
				c.textEnd += len(m.tokenText(id))
			}
		}
	}
	j.live = len(j.choices)
	j.in = nodes.NewInbox(g.o.StreamTokens * len(j.choices))
	g.meters.n.Observe(float64(req.N))
	if req.MaxTokens > 0 {
		g.meters.maxTokens.Observe(float64(req.MaxTokens))
	}
	return nil
}

// timeoutHeader says how long a client gives its whole request, in seconds or as
// in 1m30s.
const timeoutHeader = "X-Tandem-Timeout"

// timeout is how long a request may take.
func (g *Gateway) timeout(h *fasthttp.RequestHeader) (time.Duration, *openai.Error) {
	given := h.Peek(timeoutHeader)
	if len(given) == 0 {
		return g.lim().RequestTimeout, nil
	}
	d, err := time.ParseDuration(string(given))
	if s, bare := strconv.ParseFloat(string(given), 64); bare == nil {
		d, err = time.Duration(min(s, maxTimeout.Seconds())*float64(time.Second)), nil
	}
	if err != nil || d <= 0 {
		return 0, openai.BadRequest("", "the header %s is %q: want seconds above 0, or a time such as 500ms", timeoutHeader, clip(string(given), 50))
	}
	return min(d, g.lim().RequestTimeout), nil
}

// maxTimeout keeps a header's number within what a duration holds.
const maxTimeout = 365 * 24 * time.Hour

// prompt is one prompt of a request, shared by its n choices.
type prompt struct {
	text      string // that was tokenized; for prompts that came as tokens only where it is told
	echo      string // what an answer begins with, with echo
	tokens    []int32
	probs     openai.PromptProbs // as far as they have come; empty: not asked for
	maxTokens int                // of each answer
	key       kvcache.Hash
	hashes    []kvcache.Hash // of its full blocks
}

// prompts renders, tokenizes and checks what the request asks to continue. What that
// takes besides the request is counted by charge, whose error ends it.
func (m *model) prompts(req *openai.Request, charge func(bytes int) *openai.Error) ([]prompt, *openai.Error) {
	out := make([]prompt, 0, max(1, len(req.Prompts)))
	param := "prompt"
	if req.Endpoint == openai.Chat {
		param = "messages"
		p, fault := m.chat(req, charge)
		if fault != nil {
			return nil, fault
		}
		out = append(out, p)
	}
	for _, in := range req.Prompts {
		p := prompt{tokens: in.Tokens}
		switch {
		case in.Tokens == nil && m.text == nil:
			return nil, openai.BadRequest(param, "model %q has no tokenizer: send the prompt as a list of token ids", m.name)
		case in.Tokens == nil:
			if fault := m.fits(in.Text, param); fault != nil {
				return nil, fault
			}
			p.text = in.Text
			var fault *openai.Error
			if p.tokens, fault = m.text.tokensWithin(in.Text, req.AddSpecialTokens == nil || *req.AddSpecialTokens, charge); fault != nil {
				return nil, fault
			}
		case (req.Echo || req.PromptText) && m.text != nil:
			p.text = m.text.decode(in.Tokens, req.SkipSpecial)
		case req.Echo || req.PromptText:
			for _, id := range in.Tokens {
				p.text += bareToken(id)
			}
		}
		p.echo = p.text
		out = append(out, p)
	}
	if m.text == nil && len(req.Stop) > 0 {
		return nil, openai.BadRequest("stop", "model %q has no tokenizer: use stop_token_ids", m.name)
	}
	if fault := m.checkControls(req); fault != nil {
		return nil, fault
	}
	root := m.root(req.CacheSalt)
	told := 0 // log-probabilities of prompts in the answer
	for i := range out {
		m.truncate(&out[i], req)
		if fault := m.fit(&out[i], req, param); fault != nil {
			return nil, fault
		}
		told += len(out[i].tokens) * probsPerToken(req)
		if told > maxPromptProbs {
			return nil, openai.BadRequest(param, "log-probabilities of %d or more prompt tokens are asked for, best ones and choices counted; at most %d are told: send fewer prompts, or ask for less",
				told, maxPromptProbs)
		}
		out[i].hashes = kvcache.AppendHashes(nil, root, out[i].tokens, m.blockTokens)
		out[i].key = route.Key(root, out[i].hashes, out[i].tokens)
	}
	return out, nil
}

// maxPromptProbs bounds the log-probabilities of prompts in one answer, which is
// held whole: each takes some 60 bytes of JSON. A prompt of 32,768 tokens with 20
// best ones each has 688,128.
const maxPromptProbs = 1 << 20

// probsPerToken is how many log-probabilities an answer tells for each token of a
// prompt.
func probsPerToken(req *openai.Request) (n int) {
	if req.PromptLogprobs != nil {
		n += 1 + *req.PromptLogprobs
	}
	if req.Endpoint == openai.Completions {
		if req.Echo && req.Logprobs {
			n += 1 + req.TopLogprobs
		}
		n *= req.N // each choice has them
	}
	return n
}

// chat renders and tokenizes the messages. charge is as in prompts.
func (m *model) chat(req *openai.Request, charge func(bytes int) *openai.Error) (prompt, *openai.Error) {
	switch {
	case m.text == nil:
		return prompt{}, openai.BadRequest("messages", "model %q has no tokenizer: use /v1/completions with token ids", m.name)
	case m.text.chat == nil:
		return prompt{}, openai.BadRequest("messages", "model %q has no chat template: use /v1/completions", m.name)
	}
	text, fault := m.text.render(req)
	if fault != nil {
		return prompt{}, fault
	}
	if fault := m.fits(text, "messages"); fault != nil {
		return prompt{}, fault
	}
	if fault := charge(len(text)); fault != nil {
		return prompt{}, fault
	}
	p := prompt{text: text}
	if p.tokens, fault = m.text.tokensWithin(text, req.AddSpecialTokens != nil && *req.AddSpecialTokens, charge); fault != nil {
		return prompt{}, fault
	}
	if req.Echo {
		p.echo = openai.LastWords(req.Messages, "assistant")
	}
	return p, nil
}

// truncate shortens the prompt to what the request keeps of it.
func (m *model) truncate(p *prompt, req *openai.Request) {
	keep := req.Truncate
	if keep < 0 {
		if m.bundle.MaxModelLen == 0 {
			return
		}
		keep = max(1, int(m.bundle.MaxModelLen)-max(1, req.MaxTokens))
	}
	n := len(p.tokens)
	if keep == 0 || n <= keep {
		return
	}
	if req.TruncateEnd {
		p.tokens = p.tokens[:keep]
	} else {
		p.tokens = p.tokens[n-keep:]
	}
	if m.text != nil && (req.Echo || req.PromptText) { // what was kept is what is told
		p.text = m.text.decode(p.tokens, false)
		if req.Endpoint == openai.Completions {
			p.echo = p.text
		}
	}
}

// fit checks the prompt against vocabulary and context and settles max_tokens.
func (m *model) fit(p *prompt, req *openai.Request, param string) *openai.Error {
	nTokens, most := len(p.tokens), int(m.bundle.MaxModelLen)
	if nTokens == 0 {
		return openai.BadRequest(param, "the prompt is empty: at least one token is needed")
	}
	if fault := m.known(p.tokens, param); fault != nil {
		return fault
	}
	room := most - nTokens
	if most > 0 && room <= 0 {
		return openai.BadRequest(param, "the prompt has %d tokens, which leaves no room in the model's context of %d tokens: shorten it", nTokens, most)
	}
	switch {
	case req.MaxTokens > 0 && most > 0 && req.MaxTokens > room:
		return openai.BadRequest("max_tokens", "the prompt has %d tokens and max_tokens is %d, together more than the model's context of %d tokens: shorten one of them",
			nTokens, req.MaxTokens, most)
	case req.MaxTokens >= 0:
		p.maxTokens = max(1, req.MaxTokens) // one stands for the prompt's end
	case req.Endpoint == openai.Completions && most > 0:
		p.maxTokens = min(completionsMaxTokens, room)
	case most > 0:
		p.maxTokens = room
	default:
		p.maxTokens = completionsMaxTokens
	}
	return nil
}

// known checks that token ids are in the vocabulary.
func (m *model) known(ids []int32, param string) *openai.Error {
	vocab := int32(m.bundle.VocabSize)
	for i, t := range ids {
		if vocab > 0 && t >= vocab {
			return openai.BadRequest(param, "token id %d at position %d is outside the vocabulary of %d tokens", t, i, vocab)
		}
	}
	return nil
}

// sampling is how a choice draws: what the request says, else the checkpoint's
// defaults, else the API's.
func (j *job) sampling(c *choice) *nodepb.Sampling {
	s := &nodepb.Sampling{Seed: j.seed, Choice: uint32(c.number), Temperature: 1, TopP: 1}
	if d := j.model.bundle.Defaults; d != nil {
		if d.Temperature != nil {
			s.Temperature = *d.Temperature
		}
		if d.TopP != nil {
			s.TopP = *d.TopP
		}
		if d.TopK != nil {
			s.TopK = *d.TopK
		}
	}
	if j.req.Temperature != nil {
		s.Temperature = *j.req.Temperature
	}
	if j.req.TopP != nil {
		s.TopP = *j.req.TopP
	}
	if j.req.TopK != nil {
		s.TopK = *j.req.TopK
	}
	j.controls(s)
	return s
}
