package gateway

import (
	"context"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// ownModel reports whether own nodes serve the model of a request. They serve a request without a
// model, because theirs is the first of /v1/models. envelope is set if the body was parsed.
func (g *Gateway) ownModel(ctx *fasthttp.RequestCtx, envelope **upstream.Envelope) bool {
	if g.native.Models.Load() == nil {
		return false
	}
	body, err := upstream.ParseEnvelope(ctx.PostBody())
	if err != nil || body.Model == "" {
		return err == nil
	}
	*envelope = &body
	_, fault := g.native.Find(body.Model)
	return fault == nil
}

// explainUpstream answers where a prompt (?prompt=TEXT, or ?messages=JSON) for a model of upstreams
// would be sent, or that no upstream serves the model; false: own nodes answer.
func (g *Gateway) explainUpstream(ctx *fasthttp.RequestCtx) bool {
	if g.proxy == nil {
		return false
	}
	args := ctx.QueryArgs()
	name := string(args.Peek("model"))
	m := g.proxy.Pool.Now().Find(name)
	if own, fault := g.native.Find(name); m == nil && g.native.Models.Load() != nil || fault == nil && own.Name == name {
		return false
	}
	if m == nil {
		g.fail(ctx, g.proxy.NoModel(name))
		return true
	}
	how, fault := g.Routing(&ctx.Request.Header)
	raw, path, member := args.Peek("messages"), "/v1/chat/completions", "messages"
	if text := args.Peek("prompt"); len(text) > 0 {
		raw, path, member = openai.AppendString(nil, string(text)), "/v1/completions", "prompt"
	}
	if fault == nil && len(raw) == 0 {
		fault = openai.BadRequest("prompt", "give a prompt as ?prompt=TEXT or messages as ?messages=JSON (and a policy in the header %s)", exchange.PolicyHeader)
	}
	if fault != nil {
		g.fail(ctx, fault)
		return true
	}
	g.json(ctx, g.proxy.Explain(m, how, path, member, raw))
	return true
}

// roomInterval is how often the fleet's room is updated. A request that ends makes room at once.
const roomInterval = 100 * time.Millisecond

// keepRoom updates the fleet's room until ctx ends.
func (g *Gateway) keepRoom(ctx context.Context) {
	tick := time.NewTicker(roomInterval)
	defer tick.Stop()
	for {
		g.native.FollowRoom()
		if g.proxy != nil {
			g.proxy.FollowRoom()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
