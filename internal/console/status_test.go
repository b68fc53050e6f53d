package console

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// Who may not see the fleet waits for the probes of its processes instead, all of them.
func TestWaitWithoutRights(t *testing.T) {
	var mu sync.Mutex
	asked := map[string]int{}
	process := func(name string, after int) *httptest.Server {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case r.URL.Path != "/readyz":
				w.WriteHeader(http.StatusForbidden)
			case asked[name] < after:
				asked[name]++
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}))
		t.Cleanup(s.Close)
		return s
	}
	gateway, p, d := process("gateway", 1), process("p", 0), process("d", 2)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	models, err := (&Client{URL: gateway.URL}).WaitFleet(ctx, []string{p.URL, d.URL})
	if err != nil || len(models) != 0 {
		t.Fatal(models, err)
	}
	if asked["gateway"] != 1 || asked["d"] != 2 {
		t.Errorf("it did not wait for all: %v", asked)
	}
	d.Close()
	short, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := (&Client{URL: gateway.URL}).WaitFleet(short, []string{p.URL, d.URL}); err == nil {
		t.Error("a node that is not there was not missed")
	}
}
