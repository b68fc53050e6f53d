package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/jsonscan"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	// adapterWait bounds how long nodes may read an adapter's files.
	adapterWait = 2 * time.Minute
	// maxAdapterPath bounds a folder's name, and maxAdapterName an adapter's, in bytes. Both are
	// sent in one small frame.
	maxAdapterPath = 4096
	maxAdapterName = 256
	// maxAdapterValues bounds the JSON values in a body.
	maxAdapterValues = 256
)

// adapterBody is the body of the adapters' routes, with vLLM's names.
type adapterBody struct {
	Name    string `json:"lora_name"`
	Path    string `json:"lora_path"`
	InPlace bool   `json:"load_inplace"`
}

// parseAdapter reads the body of an adapters' route.
func parseAdapter(body []byte) (a adapterBody, fault *openai.Error) {
	if _, err := jsonscan.Valid(body, jsonscan.Bounds{Values: maxAdapterValues}); errors.Is(err, jsonscan.ErrValues) {
		return a, openai.BadRequest("", "the body has more than %d values: want lora_name, lora_path and load_inplace", maxAdapterValues)
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return a, openai.BadRequest("", "the body is not valid: %s", openai.Clip(err.Error(), 200))
	}
	if a.Name == "" {
		return a, badAdapter("lora_name", "lora_name is missing: give the adapter's name")
	}
	if len(a.Name) > maxAdapterName {
		return a, badAdapter("lora_name", "lora_name has %d bytes, at most %d may be", len(a.Name), maxAdapterName)
	}
	if len(a.Path) > maxAdapterPath {
		return a, badAdapter("lora_path", "lora_path has %d bytes, at most %d may be", len(a.Path), maxAdapterPath)
	}
	return a, nil
}

func badAdapter(param, format string, args ...any) *openai.Error {
	return &openai.Error{Status: 400, Type: openai.TypeInvalidInput, Param: param, Message: fmt.Sprintf(format, args...)}
}

// loadAdapter lets every node load an adapter, and answers when all have.
func (g *Gateway) loadAdapter(ctx *fasthttp.RequestCtx) {
	a, fault := parseAdapter(ctx.PostBody())
	if fault == nil && a.Path == "" {
		fault = badAdapter("lora_path", "lora_path is missing: give a folder that every node can read")
	}
	if m := g.native.Models.Load(); fault == nil && m != nil {
		if found, unknown := g.native.Find(a.Name); unknown == nil && found.Adapter == "" {
			fault = badAdapter("lora_name", "%q is the model's own name: give the adapter another one", openai.Clip(a.Name, 100))
		} else if unknown == nil && !a.InPlace {
			fault = badAdapter("lora_name", "the adapter %q is loaded already: unload it first, or set load_inplace", openai.Clip(a.Name, 100))
		}
	}
	if fault == nil {
		wait, cancel := context.WithTimeout(context.Background(), adapterWait) // the server uses ctx again
		defer cancel()
		fault = adapterFault("lora_path", g.native.Nodes.LoadAdapter(wait, a.Name, a.Path, a.InPlace))
	}
	g.adapterDone(ctx, a.Name, "added", fault)
}

// unloadAdapter removes an adapter's name on every node.
func (g *Gateway) unloadAdapter(ctx *fasthttp.RequestCtx) {
	a, fault := parseAdapter(ctx.PostBody())
	if fault == nil {
		wait, cancel := context.WithTimeout(context.Background(), adapterWait) // the server uses ctx again
		defer cancel()
		fault = adapterFault("lora_name", g.native.Nodes.UnloadAdapter(wait, a.Name))
	}
	g.adapterDone(ctx, a.Name, "removed", fault)
}

// adapterFault returns the answer for the nodes' refusals. param is the field at fault, if one is.
func adapterFault(param string, err error) *openai.Error {
	if err == nil {
		return nil
	}
	text := openai.Clip(logs.WithoutPackages(strings.ReplaceAll(err.Error(), "\n", "; ")), 600)
	var code *nodes.CodeError
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: "not every node was done in time; ask again: " + text}
	case errors.As(err, &code) && code.Code == nodepb.Code_CODE_NOT_FOUND:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: param, Message: "the adapter cannot be found: " + text}
	case errors.As(err, &code) && code.Code == nodepb.Code_CODE_INVALID:
		return openai.BadRequest(param, "%s", text)
	}
	return openai.Unavailable(exchange.RetryAfter, "the nodes cannot be notified: %s", text)
}

// adapterDone answers as vLLM does.
func (g *Gateway) adapterDone(ctx *fasthttp.RequestCtx, name, done string, fault *openai.Error) {
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	g.Log.Warn("adapters changed by an operator", "adapter", name, "done", done, "peer", ctx.RemoteAddr().String())
	ctx.SetContentType("text/plain; charset=utf-8")
	ctx.SetBodyString("Success: LoRA adapter '" + name + "' " + done + " successfully.")
}
