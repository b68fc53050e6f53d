package discover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/tandem-serving/tandem/gateway/proxy/discover/discovertest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/kubernetes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const soon = time.Minute

// told is what a source has told.
type told struct {
	mu   sync.Mutex
	last []string
	n    int
}

func (l *told) tell(ts []upstream.Target) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last, l.n = nil, l.n+1
	for _, t := range ts {
		l.last = append(l.last, t.URL)
	}
}

func (l *told) now() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.last, " ")
}

func (l *told) until(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(soon); l.now() != want; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("told %q, want %q", l.now(), want)
		}
	}
}

func TestParse(t *testing.T) {
	for spec, source := range map[string]bool{
		"http://a:1": false, "https://a": false, "dns:a:8000": true, "dns+https:a:8000": true, "dns://a:8000": true, "srv:_http._tcp.a": true, "k8s:ns/svc:http": true, "k8s:ns/svc": true,
	} {
		s, target, err := Parse(spec, upstream.Decode, 7, Options{Kubernetes: kubernetes.Options{API: "http://127.0.0.1:1"}})
		if err != nil || (s != nil) != source || target.Role != upstream.Decode || target.Bootstrap != 7 || s != nil && s.String() != spec+" (decode)" {
			t.Errorf("%s: %v %v %v", spec, s, target, err)
		}
	}
	for _, spec := range []string{"", "a", "ftp:a", "dns:a", "dns:a:0", "dns:a:x", "dns+ftp:a:1", "srv:", "srv:a:1", "k8s:", "k8s:NS/x", "k8s:ns/a b"} {
		if s, _, err := Parse(spec, 0, 0, Options{Kubernetes: kubernetes.Options{API: "x"}}); !errors.Is(err, ErrSpec) {
			t.Errorf("%q: %v %v", spec, s, err)
		}
	}
	if _, _, err := Parse("k8s:ns/svc", 0, 0, Options{}); !errors.Is(err, ErrSpec) {
		t.Error(err)
	}
}

// phone is a resolver.
type phone struct {
	mu    sync.Mutex
	addrs []netip.Addr
	srv   []*net.SRV
	err   error
}

func (p *phone) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if network != "ip" || host != "pool.example" {
		return nil, errors.New("wrong question")
	}
	return slices.Clone(p.addrs), p.err
}

func (p *phone) LookupSRV(_ context.Context, service, proto, name string) (string, []*net.SRV, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if service != "" || proto != "" || name != "_http._tcp.pool.example" {
		return "", nil, errors.New("wrong question")
	}
	return name, p.srv, p.err
}

// Names are asked again and again; what fails changes nothing.
func TestNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &phone{addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}, srv: []*net.SRV{{Target: "a.pool.example.", Port: 81}}}
		var l, m told
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for spec, l := range map[string]*told{"dns+https:pool.example:8000": &l, "srv:_http._tcp.pool.example": &m} {
			s, _, err := Parse(spec, 0, 0, Options{Resolver: p})
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() { s.Watch(ctx, l.tell) })
		}
		expect := func(names, srv string) {
			t.Helper()
			time.Sleep(resolveEvery + time.Millisecond)
			synctest.Wait()
			if l.now() != names || m.now() != srv {
				t.Fatalf("%q and %q", l.now(), m.now())
			}
		}
		expect("https://10.0.0.1:8000 https://10.0.0.2:8000 https://[fd00::1]:8000", "http://a.pool.example:81")
		p.mu.Lock()
		p.err = errors.New("no answer")
		p.mu.Unlock()
		expect("https://10.0.0.1:8000 https://10.0.0.2:8000 https://[fd00::1]:8000", "http://a.pool.example:81")
		p.mu.Lock()
		p.err, p.addrs, p.srv = nil, p.addrs[1:2], append(p.srv, &net.SRV{Target: "b.pool.example.", Port: 82})
		p.mu.Unlock()
		expect("https://10.0.0.1:8000", "http://a.pool.example:81 http://b.pool.example:82")
		if l.n != 2 || m.n != 2 {
			t.Fatalf("told %d and %d times", l.n, m.n)
		}
		stop()
		wg.Wait()
	})
}

// A Service's endpoints are listed, watched, and listed anew when the API has
// forgotten where the watch was.
func TestEndpointSlices(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("first\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api := discovertest.New(t, "first", "ns", "llm")
	api.Set("llm-a", 8000, []string{"10.0.0.1", "10.0.0.2"}, nil)
	server := httptest.NewServer(api)
	defer server.Close()
	defer api.End()
	s, _, err := Parse("k8s:ns/llm:http", 0, 0, Options{Kubernetes: kubernetes.Options{API: server.URL, TokenFile: token}})
	if err != nil {
		t.Fatal(err)
	}
	var l told
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.Watch(ctx, l.tell) })
	defer wg.Wait()
	defer stop()
	l.until(t, "http://10.0.0.1:8000 http://10.0.0.2:8000")
	api.Set("llm-b", 8001, []string{"10.0.0.3"}, nil)
	l.until(t, "http://10.0.0.1:8000 http://10.0.0.2:8000 http://10.0.0.3:8001")
	api.Set("llm-a", 8000, []string{"10.0.0.2"}, []string{"10.0.0.1"}) // terminating
	l.until(t, "http://10.0.0.2:8000 http://10.0.0.3:8001")
	api.Bookmark()
	api.Delete("llm-b")
	l.until(t, "http://10.0.0.2:8000")
	if lists, _ := api.Counts(); lists != 1 {
		t.Fatalf("%d lists", lists)
	}
	api.End() // the watch goes on where it was
	api.Set("llm-b", 8001, []string{"10.0.0.4"}, nil)
	l.until(t, "http://10.0.0.2:8000 http://10.0.0.4:8001")
	if lists, watches := api.Counts(); lists != 1 || watches != 2 {
		t.Fatalf("%d lists, %d watches", lists, watches)
	}
	api.Forget()
	api.Set("llm-b", 8001, []string{"10.0.0.5"}, nil)
	api.End()
	l.until(t, "http://10.0.0.2:8000 http://10.0.0.5:8001")
	if lists, _ := api.Counts(); lists < 2 {
		t.Fatalf("%d lists", lists)
	}
}

// apiFunc answers requests to the API without a network.
type apiFunc func(http.ResponseWriter, *http.Request)

// RoundTrip implements http.RoundTripper.
func (f apiFunc) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	f(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

// Errors of the API are logged once each, with its message, and what was found stays until the API
// answers again. An API that forgot the version of the watch is asked for a new list.
func TestEndpointSlicesErrors(t *testing.T) {
	const list = `{"metadata":{"resourceVersion":"%d"%s},"items":[{"metadata":{"name":"%s"},"ports":[{"name":"http","port":8000}],"endpoints":[{"addresses":["10.0.0.%d"],"conditions":{"ready":true}}]}]}`
	answers := []func(http.ResponseWriter){
		func(w http.ResponseWriter) { http.Error(w, `{"message":"no permission"}`, http.StatusForbidden) },
		func(w http.ResponseWriter) { http.Error(w, `{"message":"no permission"}`, http.StatusForbidden) },
		func(w http.ResponseWriter) { io.WriteString(w, "no JSON") },
		func(w http.ResponseWriter) { io.WriteString(w, `{"items":[]}`) },
		func(w http.ResponseWriter) { fmt.Fprintf(w, list, 7, `,"continue":"more"`, "a", 1) },
		func(w http.ResponseWriter) { fmt.Fprintf(w, list, 7, "", "b", 2) },
		func(w http.ResponseWriter) {
			io.WriteString(w, `{"type":"ERROR","object":{"code":500,"message":"broken watch"}}`)
		},
		func(w http.ResponseWriter) { io.WriteString(w, `{"type":"ADDED","object":3}`) },
		func(w http.ResponseWriter) { w.WriteHeader(http.StatusGone) },
		func(w http.ResponseWriter) { fmt.Fprintf(w, list, 9, "", "b", 3) },
	}
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder // written by Watch alone
		var asked []string      // likewise
		api := apiFunc(func(w http.ResponseWriter, r *http.Request) {
			n := len(asked)
			asked = append(asked, r.URL.Query().Get("continue")+"/"+r.URL.Query().Get("resourceVersion"))
			if n < len(answers) {
				answers[n](w)
				return
			}
			<-r.Context().Done()
		})
		s, _, err := Parse("k8s:ns/llm:http", 0, 0, Options{Kubernetes: kubernetes.Options{API: "http://api", Transport: api}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		var l told
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { s.Watch(ctx, l.tell) })
		l.until(t, "http://10.0.0.1:8000 http://10.0.0.2:8000")
		l.until(t, "http://10.0.0.3:8000")
		stop()
		wg.Wait()
		for _, text := range []string{
			"answers 403 for endpointslices of ns/llm: no permission", "list of endpointslices: invalid character", "has no version", "broken watch", "watching Kubernetes' endpointslices: json",
		} {
			if n := strings.Count(log.String(), text); n != 1 {
				t.Errorf("%q is logged %d times, want once:\n%s", text, n, &log)
			}
		}
		if want := []string{"/", "/", "/", "/", "/", "more/", "/7", "/7", "/7", "/", "/9"}; !slices.Equal(asked, want) {
			t.Errorf("asked %q, want %q", asked, want)
		}
	})
}
