package gateway

import (
	"bytes"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/httpserver"
)

// pathOf returns the request's decoded path, by which its route is found. One slash at the end is
// dropped, unless the path ends in a name: the name is all that follows the route's part, with its
// own slashes, encoded or not.
func pathOf(ctx *fasthttp.RequestCtx) string {
	for _, prefix := range [...]string{modelsPath, drainPath} {
		if name, ok := bytes.CutPrefix(ctx.URI().PathOriginal(), []byte(prefix)); ok && len(name) > 0 && !httpserver.DotSegments(name) {
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
	for i := range routes {
		if routes[i].Path == path {
			return true
		}
	}
	return false
}
