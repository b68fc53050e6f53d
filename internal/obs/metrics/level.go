package metrics

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/obs/logs"
)

// LevelPath is the path of the log level.
const LevelPath = "/log-level"

// maxLevel bounds the bytes of a body that may be a level.
const maxLevel = 100

// ServeLevel answers GET with the level and sets it to the body of a PUT: debug,
// info, warning or error. It returns the error of another level, which the caller answers. The
// caller checks the client's rights.
func ServeLevel(ctx *fasthttp.RequestCtx, v *slog.LevelVar) error {
	switch {
	case ctx.IsPut():
		body := ctx.PostBody()
		if len(body) > maxLevel {
			body = append(body[:maxLevel:maxLevel], "..."...) // no level, and short in the error
		}
		l, err := logs.ParseLevel(strings.TrimSpace(string(body)))
		if err != nil {
			return fmt.Errorf("log level %w", err)
		}
		v.Set(l)
		slog.Info("log level changed", "level", logs.LevelName(l), "by", LevelPath)
	case !ctx.IsGet() && !ctx.IsHead():
		ctx.Error("method not allowed\n", fasthttp.StatusMethodNotAllowed)
		ctx.Response.Header.Set("Allow", "GET, HEAD, PUT")
		return nil
	}
	ctx.SetBodyString(strings.ToLower(logs.LevelName(v.Level())) + "\n")
	return nil
}
