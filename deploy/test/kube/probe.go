//go:build deploy && linux

package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probe asks a container again and again, and calls result for each change of the outcome beyond
// the thresholds, until ctx ends.
func (r *run) probe(ctx context.Context, p *corev1.Probe, result func(ok bool)) {
	if !sleep(ctx, seconds(p.InitialDelaySeconds, 0)) {
		return
	}
	good, bad := int32(0), int32(0)
	for {
		if err := r.ask(ctx, p); ctx.Err() != nil {
			return
		} else if err == nil {
			good, bad = good+1, 0
			if good == max(1, p.SuccessThreshold) {
				result(true)
			}
		} else {
			good, bad = 0, bad+1
			if bad == max(1, p.FailureThreshold) {
				r.pod.kubelet.logf("%s: probe failed %d times: %v", r.pod.spec.Name, bad, err)
				result(false)
			}
		}
		if !sleep(ctx, seconds(p.PeriodSeconds, 10)) {
			return
		}
	}
}

func seconds(n, otherwise int32) time.Duration {
	if n == 0 {
		n = otherwise
	}
	return time.Duration(n) * time.Second
}

// sleep waits, and returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// probeClient connects for each request, as a kubelet does.
var probeClient = http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}

// ask runs a probe once.
func (r *run) ask(ctx context.Context, p *corev1.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, seconds(p.TimeoutSeconds, 1))
	defer cancel()
	return r.act(ctx, &corev1.LifecycleHandler{HTTPGet: p.HTTPGet, TCPSocket: p.TCPSocket, Exec: p.Exec})
}

// act runs the action of a probe or a hook.
func (r *run) act(ctx context.Context, h *corev1.LifecycleHandler) error {
	switch {
	case h.HTTPGet != nil:
		scheme := "http"
		if h.HTTPGet.Scheme == corev1.URISchemeHTTPS {
			scheme = "https"
		}
		req, err := http.NewRequestWithContext(ctx, "GET", scheme+"://"+r.at(h.HTTPGet.Port)+h.HTTPGet.Path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("User-Agent", "kube-probe/1.37")
		for _, header := range h.HTTPGet.HTTPHeaders {
			req.Header.Set(header.Name, header.Value)
		}
		resp, err := probeClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		if resp.StatusCode >= 400 {
			return fmt.Errorf("%s: status %d: %s", h.HTTPGet.Path, resp.StatusCode, text)
		}
		return nil
	case h.TCPSocket != nil:
		c, err := new(net.Dialer).DialContext(ctx, "tcp", r.at(h.TCPSocket.Port))
		if err != nil {
			return err
		}
		return c.Close()
	case h.Exec != nil:
		out, err := r.spec.command(ctx, r.process.Pid, h.Exec.Command).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%q: %w: %s", h.Exec.Command, err, out)
		}
		return nil
	case h.Sleep != nil:
		sleep(ctx, time.Duration(h.Sleep.Seconds)*time.Second)
		return nil
	}
	return fmt.Errorf("no action")
}

// at returns the address of a port of the container, which may have a name.
func (r *run) at(port intstr.IntOrString) string {
	number := port.IntVal
	for _, p := range r.container.Ports {
		if port.Type == intstr.String && p.Name == port.StrVal {
			number = p.ContainerPort
		}
	}
	return net.JoinHostPort(r.pod.address, strconv.Itoa(int(number)))
}
