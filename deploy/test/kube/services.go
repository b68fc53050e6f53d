//go:build deploy && linux

package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

const (
	serviceNetwork    = "10.96.0.0/16"
	apiServiceAddress = "10.96.0.1"
	dnsAddress        = "10.96.0.10"
)

// services answers names of Services and forwards connections to their addresses.
type services struct {
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
	delay    time.Duration // between a change of endpoints and its effect on new connections, as kube-proxy's
	logf     func(format string, args ...any)
	silent   atomic.Bool // no name is known

	mu        sync.Mutex
	listening map[string]net.Listener // by address and port
	addresses map[string]bool
	ready     map[string][]string // endpoints by namespace/name/port, older than delay
}

// run serves until ctx ends. The informers of shared must be started after it returns.
func (s *services) run(ctx context.Context, shared informers.SharedInformerFactory) error {
	s.listening, s.addresses, s.ready = map[string]net.Listener{}, map[string]bool{}, map[string][]string{}
	s.services, s.slices = shared.Core().V1().Services().Lister(), shared.Discovery().V1().EndpointSlices().Lister()
	changed := func(any) { time.AfterFunc(s.delay, func() { s.update(ctx) }) }
	handler := cache.ResourceEventHandlerFuncs{AddFunc: changed, DeleteFunc: changed, UpdateFunc: func(_, o any) { changed(o) }}
	for _, i := range []cache.SharedIndexInformer{shared.Core().V1().Services().Informer(), shared.Discovery().V1().EndpointSlices().Informer()} {
		if _, err := i.AddEventHandler(handler); err != nil {
			return err
		}
	}
	if err := s.address(dnsAddress); err != nil {
		return err
	}
	conn, err := net.ListenPacket("udp", dnsAddress+":53")
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	go s.serveDNS(conn)
	return nil
}

// address gives this machine the address of a Service.
func (s *services) address(ip string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addresses[ip] {
		return nil
	}
	s.addresses[ip] = true
	return batch("", "addr add "+ip+"/32 dev lo")
}

// endpoints returns the addresses of a Service's port: of pods that are ready, or where there is
// none, of pods that end and still serve. name "" is every port.
func (s *services) endpoints(namespace, service, name string, all bool) (found []string) {
	list, err := s.slices.EndpointSlices(namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: service}))
	if err != nil {
		return nil
	}
	var ending []string
	for _, slice := range list {
		if slice.AddressType != discoveryv1.AddressTypeIPv4 {
			continue
		}
		for _, port := range slice.Ports {
			if !all && (port.Name == nil || *port.Name != name) {
				continue
			}
			for _, e := range slice.Endpoints {
				for _, a := range e.Addresses {
					at := net.JoinHostPort(a, fmt.Sprint(*port.Port))
					switch c := e.Conditions; {
					case c.Ready == nil || *c.Ready:
						found = append(found, at)
					case c.Serving != nil && *c.Serving:
						ending = append(ending, at)
					}
				}
			}
		}
	}
	if len(found) == 0 && !all {
		return ending
	}
	return found
}

// update listens at the addresses of all Services, and lets new connections see the endpoints.
func (s *services) update(ctx context.Context) {
	if ctx.Err() != nil {
		return
	}
	list, err := s.services.List(labels.Everything())
	if err != nil {
		return
	}
	for _, v := range list {
		if v.Spec.ClusterIP == "" || v.Spec.ClusterIP == corev1.ClusterIPNone {
			continue
		}
		if err := s.address(v.Spec.ClusterIP); err != nil {
			s.logf("service %s: %v", v.Name, err)
			continue
		}
		for _, p := range v.Spec.Ports {
			if p.Protocol != corev1.ProtocolTCP {
				continue
			}
			key := fmt.Sprintf("%s/%s/%s", v.Namespace, v.Name, p.Name)
			at := net.JoinHostPort(v.Spec.ClusterIP, fmt.Sprint(p.Port))
			found := s.endpoints(v.Namespace, v.Name, p.Name, false)
			s.mu.Lock()
			s.ready[key] = found
			if s.listening[at] == nil {
				if l, err := net.Listen("tcp", at); err != nil {
					s.logf("service %s: %v", v.Name, err)
				} else {
					s.listening[at] = l
					context.AfterFunc(ctx, func() { l.Close() })
					go s.accept(l, key)
				}
			}
			s.mu.Unlock()
		}
	}
}

// accept forwards the connections of a Service's port to its endpoints.
func (s *services) accept(l net.Listener, key string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		to := s.ready[key]
		s.mu.Unlock()
		if len(to) == 0 {
			reset(c)
			continue
		}
		go forward(c, to[rand.IntN(len(to))])
	}
}

// reset closes a connection as a machine does on which nothing listens.
func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// forward copies both directions of a connection to an endpoint. A direction that ends is closed
// alone; an error resets both, as their ends would see it without a proxy.
func forward(client net.Conn, to string) {
	server, err := net.DialTimeout("tcp", to, 5*time.Second)
	if err != nil {
		reset(client)
		return
	}
	var wg sync.WaitGroup
	half := func(to, from net.Conn) {
		if _, err := io.Copy(to, from); err != nil && !errors.Is(err, net.ErrClosed) {
			reset(to)
			reset(from)
			return
		}
		_ = to.(*net.TCPConn).CloseWrite()
	}
	wg.Go(func() { half(server, client) })
	wg.Go(func() { half(client, server) })
	wg.Wait()
	client.Close()
	server.Close()
}

// serveDNS answers questions for addresses of Services.
func (s *services) serveDNS(conn net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		addresses, ok := s.lookup(q.Name.String())
		answer := dnsmessage.Message{
			Header:    dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true, RecursionDesired: m.RecursionDesired, RecursionAvailable: true},
			Questions: m.Questions,
		}
		if !ok {
			answer.RCode = dnsmessage.RCodeNameError
		}
		for _, a := range addresses {
			if q.Type == dnsmessage.TypeA {
				answer.Answers = append(answer.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 5}, Body: &dnsmessage.AResource{A: a.As4()}})
			}
		}
		if out, err := answer.Pack(); err == nil {
			_, _ = conn.WriteTo(out, from)
		}
	}
}

// lookup returns the addresses of a name. The name of a headless Service without endpoints is not
// known.
func (s *services) lookup(name string) (found []netip.Addr, ok bool) {
	base, ok := strings.CutSuffix(name, ".svc.cluster.local.")
	service, namespace, two := strings.Cut(base, ".")
	if !ok || !two || s.silent.Load() {
		return nil, false
	}
	v, err := s.services.Services(namespace).Get(service)
	if err != nil {
		return nil, false
	}
	if v.Spec.ClusterIP != corev1.ClusterIPNone {
		a, err := netip.ParseAddr(v.Spec.ClusterIP)
		return []netip.Addr{a}, err == nil
	}
	seen := map[netip.Addr]bool{}
	for _, e := range s.endpoints(namespace, service, "", true) {
		if at, err := netip.ParseAddrPort(e); err == nil && !seen[at.Addr()] {
			seen[at.Addr()] = true
			found = append(found, at.Addr())
		}
	}
	return found, len(found) > 0
}
