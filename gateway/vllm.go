package gateway

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/proxy"
)

// invoked returns the path that serves a request: of openai.InvocationsPath, that of its body if
// the gateway knows the form.
func invoked(ctx *fasthttp.RequestCtx, path string) string {
	if path != openai.InvocationsPath {
		return path
	}
	return cmp.Or(openai.InvocationPath(ctx.PostBody()), path)
}

// stored answers a request about a stored response, which only upstreams have.
func (g *Gateway) stored(ctx *fasthttp.RequestCtx) {
	switch path := pathOf(ctx); {
	case ctx.IsPost() && !strings.HasSuffix(path, "/cancel"): // its body may be a request for an own model
		g.nothing(ctx, path, "", clients)
	case g.proxy != nil:
		g.proxy.ServeStored(ctx, path)
	default:
		g.fail(ctx, &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "response_id",
			Message: fmt.Sprintf("there is no response %q: answers are not stored here", openai.Clip(strings.TrimPrefix(path, proxy.StoredPath), 100))})
	}
}

// invoke answers a request of openai.InvocationsPath for an own model.
func (g *Gateway) invoke(ctx *fasthttp.RequestCtx) {
	on := openai.Completions
	switch path := pathOf(ctx); invoked(ctx, path) {
	case "/v1/chat/completions":
		on = openai.Chat
		fallthrough
	case "/v1/completions":
		g.native.Serve(ctx, path, on)
	default:
		g.fail(ctx, openai.NoInvocation(ctx.PostBody()))
	}
}

// tokenizerInfo answers with the configuration of a model's tokenizer, ?model=NAME of several.
func (g *Gateway) tokenizerInfo(ctx *fasthttp.RequestCtx) {
	if !g.o.TokenizerInfo {
		g.fail(ctx, &openai.Error{Status: 404, Type: openai.TypeNotFound, Message: openai.TokenizerInfoPath + " is off: start the gateway with --enable-tokenizer-info-endpoint"})
		return
	}
	m, fault := g.native.Find(string(ctx.QueryArgs().Peek("model")))
	if fault == nil && m.Text == nil {
		fault = openai.BadRequest("model", "model %q has no tokenizer", m.Name)
	}
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	info, err := m.TokenizerInfo()
	if err != nil {
		g.fail(ctx, &openai.Error{Status: 500, Type: openai.TypeInternal, Message: "the model's tokenizer.json: " + openai.Clip(err.Error(), 200)})
		return
	}
	g.json(ctx, info)
}

// abort ends the requests of openai.AbortPath that are the client's own, or any for operators.
func (g *Gateway) abort(ctx *fasthttp.RequestCtx) {
	ids, fault := openai.ParseAbort(ctx.PostBody(), g.Charge(ctx))
	refused, _ := ctx.UserValue(notOperator{}).(*openai.Error)
	if fault == nil && len(ids) == 0 && refused != nil {
		fault = &openai.Error{Status: 403, Type: openai.TypeForbidden, Param: "request_ids",
			Message: "without request_ids all requests of the gateway would end, which is for operators: name the ids of your own (" + refused.Message + ")"}
	}
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	own := g.keyOf(ctx)
	aborted := g.Abort(func(id string, key *auth.Key) bool {
		return (len(ids) == 0 || ids[id]) && (refused == nil || own.Same(key))
	})
	if len(aborted) > 0 {
		g.Log.Info("requests aborted by a client", "requests", len(aborted), "all", len(ids) == 0, "peer", ctx.RemoteAddr().String())
	}
	sendJSON(ctx, openai.AppendAborted(nil, aborted))
}
