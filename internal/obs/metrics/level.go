package metrics

import (
	"log/slog"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/obs/logs"
)

// LevelPath is the path of the log level.
const LevelPath = "/log-level"

// ServeLevel answers GET with the level and sets it to the body of a PUT: debug,
// info, warning or error. The caller checks the client's rights.
func ServeLevel(ctx *fasthttp.RequestCtx, v *slog.LevelVar) {
	switch {
	case ctx.IsPut():
		l, err := logs.ParseLevel(strings.TrimSpace(string(ctx.PostBody())))
		if err != nil {
			ctx.Error("log level "+err.Error()+"\n", fasthttp.StatusBadRequest)
			return
		}
		v.Set(l)
		slog.Info("log level changed", "level", logs.LevelName(l), "by", LevelPath)
	case !ctx.IsGet() && !ctx.IsHead():
		ctx.Error("method not allowed\n", fasthttp.StatusMethodNotAllowed)
		ctx.Response.Header.Set("Allow", "GET, HEAD, PUT")
		return
	}
	ctx.SetBodyString(strings.ToLower(logs.LevelName(v.Level())) + "\n")
}
