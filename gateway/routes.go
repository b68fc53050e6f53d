package gateway

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// endpoint is one route.
type endpoint struct {
	openai.Operation
	handle func(*Gateway, *fasthttp.RequestCtx)
	who    audience
}

// audience is who may use an endpoint, and on which port.
type audience uint8

const (
	clients    audience = iota // clients' port; with a key if Operation requires one
	anyone                     // probes: on both ports
	operators                  // admin port; without one, on the clients' port by the rules of operates
	overseers                  // on both ports; on the clients' port by the rules of operates, for reading as well
	requesters                 // on both ports; clients act on their own requests, operators on all
)

const (
	modelsPath = "/v1/models/"
	docsPath   = "/docs"
)

// routes is the table of all endpoints, from which /openapi.json is made. HEAD is served where GET
// is, and OPTIONS everywhere.
var routes = []endpoint{
	{openai.Operation{Method: "POST", Path: "/v1/chat/completions", Summary: "Continue a chat", Body: openai.Chat,
		Answer: "ChatCompletion", Events: "ChatChunk", Key: true, Errors: generateErrors}, func(g *Gateway, ctx *fasthttp.RequestCtx) { g.native.Serve(ctx, pathOf(ctx), openai.Chat) }, clients},
	{openai.Operation{Method: "POST", Path: "/v1/completions", Summary: "Continue a prompt", Body: openai.Completions,
		Answer: "Completion", Events: "CompletionChunk", Key: true, Errors: generateErrors}, func(g *Gateway, ctx *fasthttp.RequestCtx) { g.native.Serve(ctx, pathOf(ctx), openai.Completions) }, clients},
	{openai.Operation{Method: "POST", Path: openai.TokensPath, Summary: "Continue tokens by tokens, as vLLM has it", Takes: "TokensRequest",
		Answer: "Tokens", Events: "TokensChunk", Key: true, Errors: append([]int{404}, generateErrors...)}, func(g *Gateway, ctx *fasthttp.RequestCtx) { g.native.Serve(ctx, pathOf(ctx), openai.Completions) }, clients},
	{openai.Operation{Method: "POST", Path: messages.Path, Summary: "Continue a chat, as Anthropic has it", Takes: "MessagesRequest", Fails: "MessagesError",
		Answer: "Message", Events: "MessageEvent", Key: true, Errors: generateErrors}, (*Gateway).messages, clients},
	{openai.Operation{Method: "POST", Path: messages.CountPath, Summary: "The number of tokens of a prompt, as Anthropic has it", Takes: "CountTokensRequest", Fails: "MessagesError",
		Answer: "TokenCount", Key: true, Errors: []int{429, 503}}, (*Gateway).countTokens, clients},
	{openai.Operation{Method: "POST", Path: responses.Path, Summary: "Create a response: items in, items out; nothing is stored", Takes: "ResponseRequest",
		Answer: "Response", Events: "ResponseEvent", Typed: true, Key: true, Errors: append([]int{404}, generateErrors...)}, (*Gateway).respond, clients},
	{openai.Operation{Method: "POST", Path: openai.EmbeddingsPath, Summary: "The vectors of texts", Body: openai.Embeddings,
		Answer: "EmbeddingList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Embeddings), clients},
	{openai.Operation{Method: "POST", Path: "/pooling", Summary: "The vectors of texts, as vLLM has them", Body: openai.Pooling,
		Answer: "PoolingList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Pooling), clients},
	{openai.Operation{Method: "POST", Path: "/v2/embed", Summary: "The vectors of texts, as Cohere has them", Body: openai.Embed,
		Answer: "EmbedByType", Key: true, Errors: generateErrors}, nodesAnswer(openai.Embed), clients},
	{openai.Operation{Method: "POST", Path: "/score", Summary: "How similar pairs of texts are, as vLLM has it", Body: openai.Scores,
		Answer: "ScoreList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Scores), clients},
	{openai.Operation{Method: "POST", Path: "/v1/score", Summary: "How similar pairs of texts are, as vLLM has it", Body: openai.Scores,
		Answer: "ScoreList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Scores), clients},
	{openai.Operation{Method: "POST", Path: "/rerank", Summary: "Documents by their similarity to a query, as vLLM has it", Body: openai.Ranks,
		Answer: "RankList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Ranks), clients},
	{openai.Operation{Method: "POST", Path: "/v1/rerank", Summary: "Documents by their similarity to a query, as vLLM has it", Body: openai.Ranks,
		Answer: "RankList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Ranks), clients},
	{openai.Operation{Method: "POST", Path: "/v2/rerank", Summary: "Documents by their similarity to a query, as vLLM has it", Body: openai.Ranks,
		Answer: "RankList", Key: true, Errors: generateErrors}, nodesAnswer(openai.Ranks), clients},
	{openai.Operation{Method: "GET", Path: "/v1/models", Summary: "The models served here", Answer: "Models", Key: true}, (*Gateway).models, clients},
	{openai.Operation{Method: "GET", Path: modelsPath + "{model}", Summary: "One model", Answer: "Model", Key: true, Errors: []int{503}}, (*Gateway).oneModel, clients},
	{openai.Operation{Method: "POST", Path: "/tokenize", Summary: "The tokens of a prompt or a chat", Body: openai.Tokenize,
		Answer: "Tokenized", Key: true, Errors: []int{503}}, (*Gateway).tokenize, clients},
	{openai.Operation{Method: "POST", Path: "/detokenize", Summary: "The text of tokens", Body: openai.Detokenize,
		Answer: "Detokenized", Key: true, Errors: []int{503}}, (*Gateway).detokenize, clients},

	{openai.Operation{Method: "POST", Path: "/v1/chat/completions/render", Summary: "The tokens and the sampling of a chat, as vLLM has it: a request of " + openai.TokensPath, Body: openai.Chat,
		Answer: "Rendered", Key: true, Errors: []int{429, 503}}, rendered(openai.Chat), clients},
	{openai.Operation{Method: "POST", Path: "/v1/completions/render", Summary: "The same for each prompt of a completion", Body: openai.Completions,
		Answer: "RenderedList", Key: true, Errors: []int{429, 503}}, rendered(openai.Completions), clients},
	{openai.Operation{Method: "POST", Path: "/v1/chat/completions/derender", Summary: "The answer of a chat that an answer of " + openai.TokensPath + " is", Takes: "DerenderChat",
		Answer: "DerenderedChat", Key: true, Errors: []int{429, 503}}, derendered(openai.Chat), clients},
	{openai.Operation{Method: "POST", Path: "/v1/completions/derender", Summary: "The same for a completion, with an answer for each prompt", Takes: "DerenderCompletion",
		Answer: "DerenderedCompletion", Key: true, Errors: []int{429, 503}}, derendered(openai.Completions), clients},

	{openai.Operation{Method: "GET", Path: proxy.StoredPath + "{response}", Summary: "A response that an upstream stores", Answer: "Object", Key: true, Errors: []int{429, 503}}, (*Gateway).stored, clients},
	{openai.Operation{Method: "DELETE", Path: proxy.StoredPath + "{response}", Summary: "Delete it", Answer: "Object", Key: true, Errors: []int{429, 503}}, (*Gateway).stored, clients},
	{openai.Operation{Method: "POST", Path: proxy.StoredPath + "{response}", Summary: "Cancel it: {response} is ID/cancel", Answer: "Object", Key: true, Errors: []int{429, 503}}, (*Gateway).stored, clients},
	{openai.Operation{Method: "POST", Path: openai.BatchPath, Summary: "Continue several chats at once; messages has a list of messages for each, and the answer a choice", Takes: "ChatBatch",
		Answer: "ChatCompletion", Key: true, Errors: generateErrors}, func(g *Gateway, ctx *fasthttp.RequestCtx) { g.native.Serve(ctx, pathOf(ctx), openai.Chat) }, clients},
	{openai.Operation{Method: "POST", Path: openai.InvocationsPath, Summary: "Continue a chat or a prompt, by the members of the body, as SageMaker asks", Takes: "Invocation",
		Answer: "Object", Key: true, Errors: append([]int{404}, generateErrors...)}, (*Gateway).invoke, clients},
	{openai.Operation{Method: "GET", Path: openai.TokenizerInfoPath, Summary: "The tokenizer's configuration and chat template, with --enable-tokenizer-info-endpoint", Answer: "Object", Key: true,
		Errors: []int{400, 404, 503}}, (*Gateway).tokenizerInfo, clients},
	{openai.Operation{Method: "POST", Path: openai.AbortPath, Summary: "End requests by their ids; those of other keys, and all, for operators only", Takes: "Abort",
		Answer: "Aborted", Key: true, Errors: []int{403, 429}}, (*Gateway).abort, requesters},

	{openai.Operation{Method: "GET", Path: "/livez", Summary: "The process runs"}, func(_ *Gateway, ctx *fasthttp.RequestCtx) { ctx.SetBodyString("ok\n") }, anyone},
	{openai.Operation{Method: "GET", Path: "/readyz", Summary: "Requests are welcome", Errors: []int{503}}, (*Gateway).health, anyone},
	{openai.Operation{Method: "GET", Path: "/health", Summary: "As /readyz", Errors: []int{503}}, (*Gateway).health, anyone},
	{openai.Operation{Method: "GET", Path: "/ping", Summary: "As /readyz", Errors: []int{503}}, (*Gateway).health, anyone},
	{openai.Operation{Method: "POST", Path: "/ping", Summary: "As /readyz", Errors: []int{503}}, (*Gateway).health, anyone},
	{openai.Operation{Method: "GET", Path: "/version", Key: true, Summary: "The program's version", Answer: "Version"}, (*Gateway).version, anyone},
	{openai.Operation{Method: "GET", Path: "/load", Key: true, Summary: "Requests being answered", Answer: "Load"}, (*Gateway).load, clients},
	{openai.Operation{Method: "GET", Path: "/metrics", Key: true, Summary: "Prometheus metrics", Errors: []int{401}}, (*Gateway).exposition, operators},
	{openai.Operation{Method: "GET", Path: "/debug/targets", Key: true, Summary: "The fleet's addresses of metrics, for Prometheus' http_sd_configs", Answer: "Targets", Errors: []int{401}}, (*Gateway).targets, operators},
	{openai.Operation{Method: "GET", Path: metrics.LevelPath, Key: true, Summary: "The log level", Errors: []int{401, 403}}, (*Gateway).level, operators},
	{openai.Operation{Method: "PUT", Path: metrics.LevelPath, Key: true, Summary: "Set the log level", Words: logs.Levels, Errors: []int{400, 401, 403}}, (*Gateway).level, operators},
	{openai.Operation{Method: "GET", Path: "/admin/desired", Key: true, Summary: "The number of nodes that the fleet should have, with --planner-profile", Answer: "Object", Errors: []int{401, 404, 503}}, (*Gateway).desired, operators},
	{openai.Operation{Method: "GET", Path: "/admin/record", Query: "session", Key: true, Summary: "Lengths, times and keyed block hashes of the requests that ended since the last call with this ?session", Answer: "Object", Errors: []int{400, 401, 403, 409}}, (*Gateway).record, overseers},
	{openai.Operation{Method: "POST", Path: drainPath + "{node}", Key: true, Summary: "Drain a node, by name or address; streams that run after ?timeout=30s resume on other nodes", Answer: "Object",
		Errors: []int{400, 401, 403, 409, 503}}, (*Gateway).drainNode, operators},
	{openai.Operation{Method: "DELETE", Path: drainPath + "{node}", Key: true, Summary: "Let it take work again", Answer: "Object", Errors: []int{401, 403, 409, 503}}, (*Gateway).drainNode, operators},
	{openai.Operation{Method: "POST", Path: openai.LoadAdapterPath, Key: true, Takes: "LoadAdapter", Summary: "Load an adapter (LoRA) on every node, from a folder that it can read",
		Errors: []int{401, 403, 503, 504}}, (*Gateway).loadAdapter, operators},
	{openai.Operation{Method: "POST", Path: openai.UnloadAdapterPath, Key: true, Takes: "UnloadAdapter", Summary: "Remove an adapter's name; running requests keep the adapter",
		Errors: []int{401, 403, 503, 504}}, (*Gateway).unloadAdapter, operators},
	{openai.Operation{Method: "GET", Path: "/openapi.json", Key: true, Summary: "This document", Answer: "Object"}, (*Gateway).openAPI, clients},
	{openai.Operation{Method: "GET", Path: docsPath, Key: true, Page: true, Summary: "This document as a page"}, (*Gateway).docs, clients},
	{openai.Operation{Method: "GET", Path: "/debug/nodes", Summary: "The fleet as this gateway sees it", Answer: "Object", Key: true, Errors: []int{401, 403}}, (*Gateway).nodes, overseers},
	{openai.Operation{Method: "GET", Path: "/debug/route", Summary: "Where a prompt (?prompt=TEXT) would go, and why", Answer: "Object", Key: true, Errors: []int{400, 401, 403, 404, 503}}, (*Gateway).explain, overseers},
}

// nodesAnswer returns a handler that lets decode nodes answer.
func nodesAnswer(on openai.Endpoint) func(*Gateway, *fasthttp.RequestCtx) {
	return func(g *Gateway, ctx *fasthttp.RequestCtx) { g.native.Serve(ctx, pathOf(ctx), on) }
}

var generateErrors = []int{429, 500, 503, 504}

// at reports whether a path is the endpoint's. {name} matches a rest that is not empty.
func (r *endpoint) at(path string) bool {
	if i := strings.IndexByte(r.Path, '{'); i >= 0 {
		return len(path) > i && path[:i] == r.Path[:i]
	}
	return r.Path == path
}

// dispatch finds the route of a request on the port of clients or of operators, and serves it.
func (g *Gateway) dispatch(ctx *fasthttp.RequestCtx, path string, port audience) {
	if g.browser(ctx, path, port) {
		return
	}
	method := string(ctx.Method())
	var here *endpoint
	var allowed []string
	for i := range routes {
		if r := &routes[i]; g.serves(r, path, port) && (r.Method == method || r.Method == "GET" && method == "HEAD") {
			here = r
		}
	}
	if here == nil {
		allowed = g.allowed(path, port)
	}
	// Unknown paths and OPTIONS also require a key, so that unauthenticated clients cannot
	// enumerate routes.
	if port == clients && (here == nil || here.Key) && !(method == "OPTIONS" && probe(path)) && !g.keys.Allow(g.keyOf(ctx)) {
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
		g.fail(ctx, &openai.Error{Status: 401, Type: openai.TypeUnauthorized,
			Message: "the API key is missing or wrong, or there are two that differ: send it as Authorization: Bearer KEY, x-api-key or api-key"})
		g.LogRefusal(ctx, ctx.Time())
		return
	}
	if method == "OPTIONS" && len(allowed) > 1 {
		ctx.Response.Header.Set("Allow", strings.Join(allowed, ", "))
		ctx.SetStatusCode(fasthttp.StatusNoContent)
		return
	}
	if fault := g.operates(ctx, here, method, port); fault != nil {
		g.fail(ctx, fault)
		return
	}
	var envelope *upstream.Envelope
	switch {
	case port == clients && g.proxy != nil && method == "POST" && proxy.Relays(path) && (here == nil || !g.ownModel(ctx, &envelope)):
		g.proxy.Serve(ctx, path, invoked(ctx, path), envelope)
	case here == nil && len(allowed) == 1:
		g.nothing(ctx, path, meant(path, port), port)
	case here == nil:
		ctx.Response.Header.Set("Allow", strings.Join(allowed, ", "))
		g.fail(ctx, &openai.Error{Status: 405, Type: openai.TypeMethod,
			Message: fmt.Sprintf("%s takes %s, not %s", path, strings.Join(allowed, ", "), method)})
	default:
		if here.Body != 0 || here.Takes != "" {
			if fault := exchange.CheckJSON(&ctx.Request.Header); fault != nil {
				g.fail(ctx, fault)
				return
			}
		}
		here.handle(g, ctx)
	}
}

// meant returns the route of clients that an unknown path is likely to mean; empty: none. Clients
// append paths to a base URL that lacks /v1, or to one that has it when the path has it as well.
func meant(path string, port audience) string {
	for _, p := range [...]string{"/v1" + path, strings.TrimPrefix(path, "/v1")} {
		if port == clients && p != path && routed(p) {
			return p
		}
	}
	return ""
}

// nothing answers a request for an unknown path. meant is the path that is likely to be meant, or
// empty. Browsers that open / are sent to the page of all routes, which the operators' port does
// not have.
func (g *Gateway) nothing(ctx *fasthttp.RequestCtx, path, meant string, port audience) {
	fault := &openai.Error{Status: 404, Type: openai.TypeNotFound, Message: fmt.Sprintf("there is nothing at %s", openai.Clip(path, 100))}
	if path == "/" && port == clients {
		if (ctx.IsGet() || ctx.IsHead()) && bytes.Contains(ctx.Request.Header.Peek("Accept"), []byte("text/html")) {
			ctx.Response.Header.Set("Location", docsPath)
			ctx.SetStatusCode(fasthttp.StatusFound)
			return
		}
		fault.Message += ": " + docsPath + " lists what is served"
	}
	if meant != "" {
		fault.Message += ": the path is " + meant
	}
	g.fail(ctx, fault)
}

// probe reports whether a path is a health check, which needs no key.
func probe(path string) bool {
	return path == "/livez" || path == "/readyz" || path == "/health" || path == "/ping"
}

// serves reports whether the path is the endpoint's on that port.
func (g *Gateway) serves(r *endpoint, path string, port audience) bool {
	return r.at(path) && !(port == operators && r.who == clients || port == clients && r.who == operators && g.o.AdminListener != nil)
}

// allowed returns the methods of a path. An unknown path has only OPTIONS.
func (g *Gateway) allowed(path string, port audience) (methods []string) {
	for i := range routes {
		if r := &routes[i]; g.serves(r, path, port) {
			if methods = append(methods, r.Method); r.Method == "GET" {
				methods = append(methods, "HEAD")
			}
		}
	}
	return append(methods, "OPTIONS")
}

// operations returns the routes for the document.
func operations() []openai.Operation {
	all := make([]openai.Operation, len(routes))
	for i := range routes {
		all[i] = routes[i].Operation
	}
	return all
}

func (g *Gateway) openAPI(ctx *fasthttp.RequestCtx) {
	sendJSON(ctx, g.document())
}

// pathOf returns the request's decoded path, by which its route is found. One slash at the end is
// dropped, unless the path ends in a name: the name is all that follows the route's part, with its
// own slashes, encoded or not.
func pathOf(ctx *fasthttp.RequestCtx) string {
	for _, prefix := range [...]string{modelsPath, drainPath} {
		if name, ok := bytes.CutPrefix(ctx.URI().PathOriginal(), []byte(prefix)); ok && len(name) > 0 && !httpserver.DotSegments(string(name)) {
			return prefix + httpserver.Unescape(name)
		}
	}
	path := string(ctx.Path())
	if len(path) > 1 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	return path
}

// routed reports whether a path is that of a route of the gateway.
func routed(path string) bool {
	return slices.ContainsFunc(routes, func(r endpoint) bool { return r.Path == path })
}
