package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/kubernetes"
)

// Parameters of the Kubernetes API.
const (
	watchFor   = 4 * time.Minute  // after which the API ends a watch, and the next one starts
	apiTimeout = 30 * time.Second // of a list, and of the end of a watch
	minBackoff = 500 * time.Millisecond
	maxBackoff = 15 * time.Second
	maxList    = 64 << 20 // bytes of an answer of the API: slices of some 100,000 endpoints
	pageSize   = 500      // slices in one answer
)

// errExpired reports that the API no longer has the version from which a watch was to resume.
var errExpired = errors.New("discover: the API no longer has that version")

// endpointSlices has the ready endpoints of a Service, from its EndpointSlices. They are listed
// once and then watched from the version of that list on. Bookmarks let the next watch resume where
// the last one ended. When the API no longer has that version, the slices are listed again.
type endpointSlices struct {
	base
	namespace, service, port string
	client                   *kubernetes.Client

	known   map[string][]upstream.Target // the ready endpoints, by slice
	version string
	watched bool // a watch has ended since the last list
}

// slice has the used fields of an EndpointSlice.
type slice struct {
	Metadata struct {
		Name            string
		ResourceVersion string
	}
	Endpoints []struct {
		Addresses  []string
		Conditions struct{ Ready *bool } // nil: ready
	}
	Ports []struct {
		Name string
		Port int
	}
}

type sliceList struct {
	Metadata struct{ ResourceVersion, Continue string }
	Items    []slice
}

type watchEvent struct {
	Type   string
	Object json.RawMessage
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// newSlices parses NAMESPACE/SERVICE:PORT. The default namespace is the pod's. Without a port, the
// Service must have only one.
func newSlices(b base, rest string) (*endpointSlices, error) {
	s := &endpointSlices{base: b, known: map[string][]upstream.Target{}}
	service, port, _ := strings.Cut(rest, ":")
	s.service, s.port = service, port
	if ns, name, ok := strings.Cut(service, "/"); ok {
		s.namespace, s.service = ns, name
	} else {
		s.namespace = kubernetes.Namespace()
	}
	if !dnsLabel.MatchString(s.namespace) || !dnsLabel.MatchString(s.service) || s.port != "" && !dnsLabel.MatchString(s.port) {
		return nil, fmt.Errorf("%w: %q: want k8s:NAMESPACE/SERVICE:PORT", ErrSpec, b.spec)
	}
	var err error
	if s.client, err = kubernetes.New(b.o.Kubernetes); errors.Is(err, kubernetes.ErrNoCluster) {
		return nil, fmt.Errorf("%w: %q: %w: set --kubernetes-api", ErrSpec, b.spec, err)
	} else if err != nil {
		return nil, fmt.Errorf("%w: %q: %w", ErrSpec, b.spec, err)
	}
	return s, nil
}

// Watch implements upstream.Source.
func (s *endpointSlices) Watch(ctx context.Context, update func([]upstream.Target)) {
	defer s.client.Close()
	backoff, logged := minBackoff, ""
	var last []upstream.Target
	for ctx.Err() == nil {
		began, err := time.Now(), error(nil)
		if s.version == "" {
			if err = s.list(ctx); err == nil {
				last = s.targets()
				update(last)
			}
		} else {
			err = s.watch(ctx, func() {
				backoff, logged = minBackoff, ""
				if now := s.targets(); !slices.Equal(now, last) {
					last = now
					update(now)
				}
			})
		}
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errExpired):
			s.version = ""
		case err != nil && err.Error() != logged:
			s.o.Log.Warn("cannot discover upstreams", "source", s.spec, "error", err)
			logged = err.Error()
		}
		if err == nil && (!s.watched || time.Since(began) >= minBackoff) {
			s.watched, backoff = true, minBackoff // a watch starts directly after its list
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// get requests the Service's slices.
func (s *endpointSlices) get(ctx context.Context, query url.Values) (*http.Response, error) {
	query.Set("labelSelector", "kubernetes.io/service-name="+s.service)
	resp, err := s.client.Get(ctx, "/apis/discovery.k8s.io/v1/namespaces/"+s.namespace+"/endpointslices", query)
	var status *kubernetes.StatusError
	switch {
	case errors.As(err, &status) && status.Code == http.StatusGone:
		return nil, errExpired
	case status != nil:
		return nil, fmt.Errorf("discover: Kubernetes' API answers %d for endpointslices of %s/%s: %s", status.Code, s.namespace, s.service, status.Message)
	case err != nil:
		return nil, fmt.Errorf("discover: %w", err)
	}
	return resp, nil
}

// list reads all slices in pages.
func (s *endpointSlices) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	known, next := map[string][]upstream.Target{}, ""
	for {
		q := url.Values{"limit": {strconv.Itoa(pageSize)}}
		if next != "" {
			q.Set("continue", next)
		}
		resp, err := s.get(ctx, q)
		if err != nil {
			return err
		}
		var l sliceList
		err = json.NewDecoder(io.LimitReader(resp.Body, maxList)).Decode(&l)
		resp.Body.Close()
		if err != nil {
			return fmt.Errorf("discover: Kubernetes' list of endpointslices: %w", err)
		}
		for i := range l.Items {
			known[l.Items[i].Metadata.Name] = s.ready(&l.Items[i])
		}
		if next = l.Metadata.Continue; next != "" {
			continue
		}
		if l.Metadata.ResourceVersion == "" {
			return errors.New("discover: Kubernetes' list of endpointslices has no version")
		}
		s.known, s.version, s.watched = known, l.Metadata.ResourceVersion, false
		return nil
	}
}

// watch follows changes until the API ends the watch. changed is called after each.
func (s *endpointSlices) watch(ctx context.Context, changed func()) error {
	ctx, cancel := context.WithTimeout(ctx, watchFor+apiTimeout)
	defer cancel()
	resp, err := s.get(ctx, url.Values{
		"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {s.version}, "timeoutSeconds": {strconv.Itoa(int(watchFor.Seconds()))},
	})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for in := json.NewDecoder(resp.Body); ; {
		var e watchEvent
		if err := in.Decode(&e); errors.Is(err, io.EOF) {
			return nil // after watchFor
		} else if err != nil {
			return fmt.Errorf("discover: watching Kubernetes' endpointslices: %w", err)
		}
		if e.Type == "ERROR" {
			var status struct {
				Code    int
				Message string
			}
			if err := json.Unmarshal(e.Object, &status); err == nil && status.Code == http.StatusGone {
				return errExpired
			}
			return fmt.Errorf("discover: watching Kubernetes' endpointslices: %s", status.Message)
		}
		var o slice
		if err := json.Unmarshal(e.Object, &o); err != nil {
			return fmt.Errorf("discover: watching Kubernetes' endpointslices: %w", err)
		}
		switch e.Type {
		case "ADDED", "MODIFIED":
			s.known[o.Metadata.Name] = s.ready(&o)
		case "DELETED":
			delete(s.known, o.Metadata.Name)
		}
		if o.Metadata.ResourceVersion != "" {
			s.version = o.Metadata.ResourceVersion
		}
		changed()
	}
}

// ready returns a slice's ready endpoints. Terminating endpoints are not ready: they only finish
// their requests.
func (s *endpointSlices) ready(o *slice) (found []upstream.Target) {
	port := 0
	for _, p := range o.Ports {
		if s.port == "" || p.Name == s.port || strconv.Itoa(p.Port) == s.port {
			port = p.Port
			break
		}
	}
	if port == 0 {
		return nil
	}
	for _, e := range o.Endpoints {
		if len(e.Addresses) > 0 && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
			found = append(found, s.targetAt(e.Addresses[0], strconv.Itoa(port), s.service+"."+s.namespace+".svc"))
		}
	}
	return found
}

// targets returns the ready endpoints of all slices, sorted.
func (s *endpointSlices) targets() []upstream.Target {
	return sorted(slices.Concat(slices.Collect(maps.Values(s.known))...))
}
