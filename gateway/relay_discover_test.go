package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tandem-serving/tandem/gateway/proxy/discover"
	"github.com/tandem-serving/tandem/gateway/proxy/discover/discovertest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/kubernetes"
)

// A Kubernetes API adds servers and takes them away under load, as it does in a
// rolling restart: a server that leaves is told of as terminating, finishes what
// it has, and only then is gone. No request fails.
func TestRelayKubernetesUnderLoad(t *testing.T) {
	api := discovertest.New(t, "", "ns", "llm")
	api.Token = "" // the API of kubectl proxy
	kube := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Header.Set("Authorization", "Bearer ")
		api.ServeHTTP(w, r)
	}))
	t.Cleanup(kube.Close)
	t.Cleanup(api.End)
	source, _, err := discover.Parse("k8s:ns/llm:http", upstream.Whole, 0, discover.Options{Kubernetes: kubernetes.Options{API: kube.URL}})
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"s1", "s2", "s3", "s4"}
	api.Set("a", 80, names[:1], nil)
	b := newRelayed(t, Options{Policy: "least_load", Upstreams: Upstreams{Options: upstream.Options{Sources: []upstream.Source{source}, Targets: []upstream.Target{}}}}, names...)
	b.until(func() bool { return b.g.proxy.Pool.Now().Up() == 1 })

	var done, wrong atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 8 {
		c := b.dial()
		wg.Go(func() {
			defer c.Close()
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				c.send("POST", "/v1/chat/completions", ask(true, fmt.Sprint(i, n)))
				r := c.receive()
				if r.StatusCode != 200 || r.err != nil || !strings.HasSuffix(r.body, "data: [DONE]\n\n") {
					wrong.Add(1)
					t.Errorf("client %d request %d: %d %q %v", i, n, r.StatusCode, r.body, r.err)
					return
				}
				done.Add(1)
			}
		})
	}
	serving := func(want ...string) {
		b.until(func() bool {
			now := b.g.proxy.Pool.Now()
			if len(now.Servers) != len(want) || now.Up() != len(want) || now.Unknown > 0 {
				return false
			}
			for i, s := range now.Servers {
				if s.Name != "http://"+want[i]+":80" {
					return false
				}
			}
			return true
		})
		n := done.Load()
		b.until(func() bool { return done.Load() >= n+20 || wrong.Load() > 0 })
	}
	for range 2 {
		api.Set("b", 80, []string{"s2", "s3"}, nil)
		serving("s1", "s2", "s3")
		api.Set("a", 80, nil, []string{"s1"})
		serving("s2", "s3")
		b.until(func() bool { return b.far["s1"].running.Load() == 0 })
		b.far["s1"].kill()
		b.far["s1"].start()
		api.Set("a", 80, []string{"s1", "s4"}, nil)
		serving("s1", "s2", "s3", "s4") // without them no server's models would be known for a moment
		api.Delete("b")
		serving("s1", "s4")
		api.Forget()
		api.End()
		api.Set("a", 80, []string{"s1"}, nil)
		serving("s1")
	}
	close(stop)
	wg.Wait()
	t.Logf("%d requests, %d wrong", done.Load(), wrong.Load())
}

// fixed is a source that tells of the same server until it ends.
type fixed struct {
	url   string
	ended chan struct{}
}

func (f *fixed) String() string { return "fixed:" + f.url }

func (f *fixed) Watch(ctx context.Context, tell func([]upstream.Target)) {
	tell([]upstream.Target{{URL: f.url}})
	<-ctx.Done()
	close(f.ended)
}

// Sources come and go while the gateway runs; one that stays is not asked anew.
func TestRelaySourcesChange(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2", "s3")
	source := func(name string) *fixed { return &fixed{b.far[name].url(), make(chan struct{})} }
	set := func(want string, static []upstream.Target, sources ...upstream.Source) {
		t.Helper()
		if err := b.g.SetUpstreams(static, sources); err != nil {
			t.Fatal(err)
		}
		b.until(func() bool {
			var names []string
			for _, s := range b.g.proxy.Pool.Now().Servers {
				names = append(names, s.Name)
			}
			return strings.Join(names, " ") == want && b.g.proxy.Pool.Now().Up() == len(names)
		})
	}
	s1 := []upstream.Target{{URL: b.far["s1"].url()}}
	second, third := source("s2"), source("s3")
	set("http://s1", s1)
	set("http://s1 http://s2", s1, second)
	set("http://s2 http://s3", nil, source("s2"), third) // the first of s2 stays
	select {
	case <-second.ended:
		t.Error("a source that stays was ended")
	default:
	}
	set("http://s1 http://s3", s1, third)
	<-second.ended
	if r := b.post("/v1/chat/completions", ask(true, "x")); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
	set("http://s1", s1)
	<-third.ended
}

// What an operator drains stays drained where a source drops it for a moment; who is
// taken from the list and put back is used again.
func TestRelayDrainOutlastsItsSource(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2")
	set := func(want string, static []upstream.Target, sources ...upstream.Source) {
		t.Helper()
		if err := b.g.SetUpstreams(static, sources); err != nil {
			t.Fatal(err)
		}
		b.until(func() bool {
			var names []string
			for _, s := range b.g.proxy.Pool.Now().Servers {
				names = append(names, fmt.Sprint(s.Name, " ", s.Draining()))
			}
			return strings.Join(names, ", ") == want
		})
	}
	source := func() *fixed { return &fixed{b.far["s2"].url(), make(chan struct{})} }
	s1 := []upstream.Target{{URL: b.far["s1"].url()}}
	set("http://s1 false, http://s2 false", s1, source())
	for _, s := range b.g.proxy.Pool.Now().Servers {
		s.Drain(true)
	}
	set("", nil)
	set("http://s1 false, http://s2 true", s1, source())
	for _, s := range b.g.proxy.Pool.Now().Servers {
		s.Drain(false)
	}
	set("", nil)
	set("http://s1 false, http://s2 false", s1, source())
}
