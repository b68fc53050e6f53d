package native

import (
	"math/rand/v2"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Prepare implements exchange.Backend.
func (j *job) Prepare() *openai.Error {
	fault := j.parse()
	if fault != nil {
		if fault.Param == "prompt" && j.Path == openai.TokensPath {
			fault.Param, fault.Message = "token_ids", strings.Replace(fault.Message, "prompt: ", "token_ids: ", 1)
		}
		return fault
	}
	j.req.DropRaw()
	httpserver.DropBody(j.Ctx)
	j.WatchClient()
	return nil
}

// parse turns the request's body into choices whose attempts can start.
func (j *job) parse() (fault *openai.Error) {
	fl, charge, body := j.fleet, j.S.Charge(j.Ctx), j.Ctx.PostBody()
	if j.Path == openai.TokensPath {
		if fault := charge(len(body)); fault != nil {
			return fault
		}
		if body, fault = openai.CompletionOfTokens(body); fault != nil {
			return fault
		}
		j.Ctx.Request.SetBodyRaw(body)
	}
	if j.req, fault = openai.ParseWithin(j.On, body, charge); fault != nil {
		return fault
	}
	req := j.req
	if fault := req.CheckLogprobs(fl.Limits().MaxLogprobs); fault != nil {
		return fault
	}
	if fault := fl.CheckChoices(req.N); fault != nil {
		return fault
	}
	fl.WarnUnknown(req.Unknown)
	if fault := j.ReadHeaders(); fault != nil {
		return fault
	}
	m, fault := fl.Find(req.Model)
	if fault != nil {
		return fault
	}
	prompts, fault := m.Prompts(req, charge)
	if fault != nil {
		return fault
	}
	for i := range prompts {
		n := len(prompts[i].Tokens)
		if fault := fl.CheckPrompt(req.Endpoint, n); fault != nil {
			return fault
		}
		j.nPrompt += n
	}
	if id := j.Ctx.Request.Header.Peek(exchange.RequestIDHeader); openai.ValidID(id) {
		req.RequestID = string(id)
	} else if req.RequestID == "" {
		req.RequestID = string(j.ID)
	} else {
		j.Ctx.Response.Header.Set(exchange.RequestIDHeader, req.RequestID)
		j.ID = j.Ctx.Response.Header.Peek(exchange.RequestIDHeader)
	}
	if fault := j.LetIn(j.nPrompt); fault != nil {
		return fault
	}
	req.Priority = j.Priority(req.Priority)
	j.model, j.prompts, j.seed = m, prompts, rand.Uint64()
	if req.Seed != nil {
		j.seed = uint64(*req.Seed)
	}
	prefix := "cmpl-"
	if j.On == openai.Chat {
		prefix = "chatcmpl-"
	}
	j.answerID = prefix + req.RequestID
	j.encoder = openai.NewEncoder(j.On, j.answerID, now(), m.Name, m.systemPrint)
	if j.Path == openai.TokensPath {
		j.encoder = openai.NewTokensEncoder(req.RequestID)
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
	j.in = nodes.NewInbox(fl.o.StreamTokens * len(j.choices))
	fl.Meters.N.Observe(float64(req.N))
	if req.MaxTokens > 0 {
		fl.Meters.MaxTokens.Observe(float64(req.MaxTokens))
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

// now is the time in whole seconds, as the API gives it.
func now() int64 { return time.Now().Unix() }
