package bench

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"testing"
	"time"
)

// A sweep measures a node that comes up after the gateway is ready.
func TestNodeMetricsFindsLateNode(t *testing.T) {
	gateway, late := portBefore(t)
	base := "http://127.0.0.1:" + strconv.Itoa(gateway)
	ready := time.Now().Add(300 * time.Millisecond)
	go func() {
		_ = http.Serve(late, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { // until the test closes it
			if time.Now().Before(ready) {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}))
	}()
	urls := nodeMetrics(t.Context(), base, true)
	if len(urls) != 2 || urls[1] != "http://"+late.Addr().String()+"/metrics" {
		t.Errorf("metrics are read from %v, want also %v", urls, late.Addr())
	}
}

// portBefore is a free port, and a listener on the port after it.
func portBefore(t *testing.T) (int, net.Listener) {
	for range 100 {
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := free.Addr().(*net.TCPAddr).Port
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port+1))
		_ = free.Close() // it served to find a port
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
			return port, l
		}
	}
	t.Fatal("no two ports in a row are free")
	return 0, nil
}

// A sweep against a cluster that runs already measures the nodes that its gateway lists and that
// answer; of another server, the server alone.
func TestNodeMetricsOfRunningCluster(t *testing.T) {
	t.Setenv("OPENAI_API_KEY", "k")
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer node.Close()
	_, gone := portBefore(t)
	gone.Close()
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/debug/targets" || r.Header.Get("Authorization") != "Bearer k" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		fmt.Fprintf(w, `[{"targets":[%q],"labels":{"role":"gateway"}},{"targets":[%q],"labels":{"role":"decode"}},{"targets":[%q],"labels":{"role":"prefill"}}]`,
			r.Host, node.Listener.Addr(), gone.Addr())
	}))
	defer gateway.Close()
	if urls := nodeMetrics(t.Context(), gateway.URL, false); !slices.Equal(urls, []string{gateway.URL + "/metrics", node.URL + "/metrics"}) {
		t.Errorf("metrics are read from %v", urls)
	}
	if urls := nodeMetrics(t.Context(), node.URL, false); !slices.Equal(urls, []string{node.URL + "/metrics"}) {
		t.Errorf("of a server that lists nothing: %v", urls)
	}
}
