package gateway

import (
	"crypto/rand"
	"fmt"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/internal/regular"
)

// maxResponseKeyFile bounds the file of ResponseKeyFile, in bytes.
const maxResponseKeyFile = 64 << 10

// loadResponseKeys returns the keys of encrypted reasoning.
func loadResponseKeys(o *Options) (*responses.Keys, error) {
	secrets := [][]byte{o.ResponseSecret}
	switch {
	case o.ResponseKeyFile != "":
		text, err := regular.ReadFile(o.ResponseKeyFile, maxResponseKeyFile)
		if err == nil {
			secrets, err = responses.ReadSecrets(text)
		}
		if err != nil {
			return nil, fmt.Errorf("gateway: bad file of response keys: %s: %w", o.ResponseKeyFile, err)
		}
	case o.ResponseSecret == nil:
		secrets[0] = make([]byte, responses.MinSecret)
		_, _ = rand.Read(secrets[0]) // never fails
	}
	k, err := responses.NewKeys(secrets...)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	return k, nil
}

// respond answers a request for a response.
func (g *Gateway) respond(ctx *fasthttp.RequestCtx) {
	g.native.ServeAs(ctx, pathOf(ctx), responses.New(responses.Options{
		Keys: g.responseKeys, Owner: g.keyOf(ctx).Owner(),
		Dropped: func(n int, field string, err error) {
			g.warnDropped.Do(func() {
				g.Log.Warn("encrypted reasoning dropped", "request", string(ctx.Response.Header.Peek(exchange.RequestIDHeader)), "items", n, "field", field, "reason", err)
			})
		},
	}))
}
