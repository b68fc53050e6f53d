package proxy

import (
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// Errors of requests without a model have no empty name in them, and say what is missing.
func TestFaultsWithoutAModel(t *testing.T) {
	x := exchange.Exchange{S: &exchange.Service{}}
	servers := []*upstream.Server{nil, nil}
	for want, fault := range map[string]string{
		"no upstream is available":                                                           x.NoAttempt(nil, "upstream", "", false).Message,
		`no upstream is available for model "m"`:                                             x.NoAttempt(nil, "upstream", "m", false).Message,
		"no upstream is known: the sources that --upstream names have none yet":              noModel(&upstream.Snapshot{}, "").Message,
		"no upstream can be chosen: the models of 1 of 2 upstreams are not known yet":        noModel(&upstream.Snapshot{Servers: servers, Unknown: 1}, "").Message,
		`no upstream serves the model "m": the models of 1 of 2 upstreams are not known yet`: noModel(&upstream.Snapshot{Servers: servers, Unknown: 1}, "m").Message,
		"several models are served here: name one of /v1/models":                             noModel(&upstream.Snapshot{Servers: servers}, "").Message,
		`the model "m" does not exist; /v1/models lists those that do`:                       noModel(&upstream.Snapshot{Servers: servers}, "m").Message,
	} {
		if fault != want || strings.Contains(fault, `""`) {
			t.Errorf("%q, want %q", fault, want)
		}
	}
}
