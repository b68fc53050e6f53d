package gateway

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/valyala/fasthttp"
)

// pathOf returns the request's path, decoded, by which its route is found. One slash
// at the end is no part of it, except where the path ends in a name: the name is all
// that follows the route's part, with its own slashes, encoded or not.
func pathOf(ctx *fasthttp.RequestCtx) string {
	for _, prefix := range [...]string{modelsPath, drainPath} {
		if name, ok := bytes.CutPrefix(ctx.URI().PathOriginal(), []byte(prefix)); ok && len(name) > 0 && !dotSegments(name) {
			return prefix + unescape(name)
		}
	}
	path := string(ctx.Path())
	if len(path) > 1 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	return path
}

// dotSegments reports whether a path as it came has a segment . or .., encoded or not.
func dotSegments(path []byte) bool {
	for rest := string(path); rest != ""; {
		var segment string
		segment, rest, _ = strings.Cut(rest, "/")
		if segment = unescape([]byte(segment)); segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

// unescape decodes %XX; what is no escape stays as it is.
func unescape(b []byte) string {
	if bytes.IndexByte(b, '%') < 0 {
		return string(b)
	}
	var out []byte
	for i := 0; i < len(b); i++ {
		if b[i] == '%' && i+2 < len(b) {
			if n, err := strconv.ParseUint(string(b[i+1:i+3]), 16, 8); err == nil {
				out, i = append(out, byte(n)), i+2
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}

// sentPath returns the path of a relayed request as it came, where that decodes to the
// path that its route was found by, and else that path: an upstream never gets dot
// segments or empty ones that were resolved here.
func (r *relay) sentPath() []byte {
	came := r.Ctx.URI().PathOriginal()
	if string(came) == r.Path || bytes.IndexByte(came, '%') >= 0 && unescape(came) == r.Path {
		return came
	}
	if slash := r.Path + "/"; !routed(r.Path) && (string(came) == slash || unescape(came) == slash) {
		return came
	}
	return []byte(r.Path)
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
