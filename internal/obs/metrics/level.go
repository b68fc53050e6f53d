package metrics

import (
	"log/slog"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/obs/logs"
)

// LevelPath is where a process tells its log level, and changes it.
const LevelPath = "/log-level"

// ServeLevel answers GET with the level and sets it to what PUT brings: debug,
// info, warning or error. Who may do that is the caller's to say.
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
