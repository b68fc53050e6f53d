// Package discovertest is a Kubernetes API for tests. It has the EndpointSlices of one Service, and
// fails the test on any other request.
package discovertest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
)

// API is the server's state; it is an http.Handler.
type API struct {
	testing.TB
	Token     string
	Namespace string
	Service   string

	mu      sync.Mutex
	version int
	oldest  int            // version from which changes are kept
	objects map[string]any // by name
	events  []event        // all since oldest
	changed chan struct{}  // closed at the next change
	ended   chan struct{}  // closed to end all watches
	Lists   int            // requests for a list
	Watches int            // requests for a watch
}

type event struct {
	version int
	Type    string `json:"type"`
	Object  any    `json:"object"`
}

// New makes an API without endpoints.
func New(t testing.TB, token, namespace, service string) *API {
	return &API{TB: t, Token: token, Namespace: namespace, Service: service, version: 100, oldest: 100,
		objects: map[string]any{}, changed: make(chan struct{}), ended: make(chan struct{})}
}

// Set sets the hosts of a slice. Terminating hosts are not ready.
func (a *API) Set(name string, port int, hosts, terminating []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var endpoints []any
	for _, h := range hosts {
		endpoints = append(endpoints, map[string]any{"addresses": []string{h}, "conditions": map[string]any{"ready": true, "serving": true}})
	}
	for _, h := range terminating {
		endpoints = append(endpoints, map[string]any{"addresses": []string{h}, "conditions": map[string]any{"ready": false, "serving": true, "terminating": true}})
	}
	kind := "MODIFIED"
	if a.objects[name] == nil {
		kind = "ADDED"
	}
	a.objects[name] = map[string]any{"metadata": map[string]any{"name": name, "resourceVersion": strconv.Itoa(a.version + 1)}, "addressType": "IPv4",
		"endpoints": endpoints, "ports": []any{map[string]any{"name": "metrics", "port": 9}, map[string]any{"name": "http", "port": port}}}
	a.publish(kind, a.objects[name])
}

// Delete removes a slice.
func (a *API) Delete(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.publish("DELETED", a.objects[name])
	delete(a.objects, name)
}

// Bookmark sends a bookmark to all watches.
func (a *API) Bookmark() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.publish("BOOKMARK", map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(a.version + 1)}})
}

// Forget drops all changes so far.
func (a *API) Forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.oldest, a.events = a.version, nil
}

// End ends all watches.
func (a *API) End() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = make(chan struct{})
}

// Counts returns the numbers of requests for lists and for watches.
func (a *API) Counts() (lists, watches int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Lists, a.Watches
}

// publish adds an event of the next version. a.mu must be held.
func (a *API) publish(kind string, object any) {
	a.version++
	a.events = append(a.events, event{a.version, kind, object})
	close(a.changed)
	a.changed = make(chan struct{})
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	switch {
	case r.Header.Get("Authorization") != "Bearer "+a.Token:
		w.WriteHeader(401)
		fmt.Fprint(w, `{"kind":"Status","message":"Unauthorized"}`)
		return
	case r.Method != "GET" || r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/"+a.Namespace+"/endpointslices" || q.Get("labelSelector") != "kubernetes.io/service-name="+a.Service:
		a.Errorf("the API got %s %s", r.Method, r.URL)
		w.WriteHeader(404)
		return
	case q.Get("watch") == "":
		a.list(w)
		return
	case q.Get("allowWatchBookmarks") != "true" || q.Get("timeoutSeconds") == "":
		a.Errorf("a watch without bookmarks or end: %s", r.URL)
	}
	from, err := strconv.Atoi(q.Get("resourceVersion"))
	if err != nil {
		a.Errorf("a watch from version %q", q.Get("resourceVersion"))
	}
	a.watch(w, r, from)
}

func (a *API) list(w http.ResponseWriter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Lists++
	items := []any{}
	for _, name := range slices.Sorted(maps.Keys(a.objects)) {
		items = append(items, a.objects[name])
	}
	a.write(w, map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(a.version)}, "items": items})
}

func (a *API) watch(w http.ResponseWriter, r *http.Request, from int) {
	a.mu.Lock()
	a.Watches++
	ended := a.ended
	a.mu.Unlock()
	for {
		a.mu.Lock()
		if from < a.oldest {
			a.mu.Unlock()
			a.write(w, event{Type: "ERROR", Object: map[string]any{"kind": "Status", "code": 410, "message": "too old resource version"}})
			return
		}
		var due []event
		for _, e := range a.events {
			if e.version > from {
				due, from = append(due, e), e.version
			}
		}
		changed := a.changed
		a.mu.Unlock()
		for _, e := range due {
			a.write(w, e)
		}
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-ended:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func (a *API) write(w http.ResponseWriter, v any) {
	_ = json.NewEncoder(w).Encode(v) // an error means that the client closed the connection
}
