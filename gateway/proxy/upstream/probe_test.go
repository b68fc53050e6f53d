package upstream

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A server is up if it answers as one: its health path, or a list of models where it lacks the path.
func TestProbe(t *testing.T) {
	const list = `{"data": [{"id": "m"}]}`
	for _, c := range []struct {
		health, models int
		body           string
		down           string // part of the reason; empty: up
	}{
		{200, 404, "", ""},
		{204, 404, "", ""},
		{401, 401, "", ""}, // clients' credentials may be forwarded
		{404, 200, list, ""},
		{404, 403, "", ""},
		{404, 429, "", ""}, // a limit of the rate
		{429, 404, "", ""},
		{404, 404, "", "no OpenAI-compatible server: /health answers 404, /v1/models answers 404"},
		{404, 200, "<html>", "/health answers 404, upstream: models: invalid character"},
		{302, 200, `{"data": []}`, "no model in it"},
		{404, 500, "", "/v1/models answers 500"},
		{503, 200, list, "/health answers 503"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			status, body := c.models, c.body
			if r.URL.Path == "/health" {
				status, body = c.health, ""
			}
			w.WriteHeader(status)
			if status != http.StatusNoContent {
				fmt.Fprint(w, body)
			}
		}))
		p, err := New(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.SetTargets([]Target{{URL: server.URL}}); err != nil {
			t.Fatal(err)
		}
		err = p.now.Load().Servers[0].probe(t.Context())
		if (err == nil) != (c.down == "") || err != nil && !strings.Contains(err.Error(), c.down) {
			t.Errorf("health %d, models %d %s: %v; want %q", c.health, c.models, c.body, err, c.down)
		}
		p.Close()
		server.Close()
	}
}
