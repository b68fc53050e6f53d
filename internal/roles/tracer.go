package roles

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/process"
)

// traceTimeout bounds sending the last spans when a process ends.
const traceTimeout = 2 * time.Second

// tracer returns the process' tracer, nil if tracing is not configured.
func tracer(d *process.Process, environ []string, p *processFlags, role string) (*trace.Tracer, error) {
	getenv := func(name string) string {
		for _, e := range environ {
			if value, ok := strings.CutPrefix(e, name+"="); ok {
				return value
			}
		}
		return ""
	}
	t, err := trace.New(trace.Options{Endpoint: p.traces, Getenv: getenv, Role: role, Node: d.Name, Version: version, Log: d.Log})
	if errors.Is(err, trace.ErrOption) {
		err = fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	d.OnEnd(func() {
		ctx, cancel := context.WithTimeout(context.Background(), traceTimeout)
		defer cancel()
		if err := t.Close(ctx); err != nil {
			d.Log.Warn("last traces were not sent", "err", err)
		}
	})
	return t, err
}
