package gateway

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

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
	prompts, fault := m.Prompts(req, charge)
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
		j.nPrompt += len(prompts[i].Tokens)
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
	j.answer = openai.NewAnswer(j.on, j.answerID, now(), m.Name, m.systemPrint)
	if j.path == tokensPath {
		j.answer = openai.NewTokensAnswer(req.RequestID)
	}
	j.choices = make([]choice, len(prompts)*req.N)
	for i := range j.choices {
		c := &j.choices[i]
		c.index, c.number, c.prompt, c.finish = i, i%req.N, &j.prompts[i/req.N], openai.NotFinished
		if m.Text != nil {
			c.text = m.Text.Output(req)
		}
		if j.echoProbs() { // the answer's tokens stand behind the prompt's
			for _, id := range c.prompt.Tokens {
				c.textEnd += len(m.TokenText(id))
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
		return 0, openai.BadRequest("", "the header %s is %q: want seconds above 0, or a time such as 500ms", timeoutHeader, openai.Clip(string(given), 50))
	}
	return min(d, g.lim().RequestTimeout), nil
}

// maxTimeout keeps a header's number within what a duration holds.
const maxTimeout = 365 * 24 * time.Hour

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
