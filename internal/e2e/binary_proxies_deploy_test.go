//go:build deploy && linux

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// proxySilence is how long streams send no event.
const proxySilence = 90 * time.Second

// startSlowServer is a server whose streams have five events with the time at which each was sent, in
// nanoseconds since 1970. The prompt chooses when: "late" has proxySilence before the first event, "gap" after
// it, and others have none. Half a second passes between the others. Other answers end at once.
func startSlowServer(t *testing.T) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // a client that leaves shows below
		switch {
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
			return
		case r.URL.Path == "/health":
			return
		case !bytes.Contains(body, []byte(`"stream":true`)):
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
			return
		}
		for i := range 6 {
			pause := time.Second / 2
			switch {
			case i == 0 && bytes.Contains(body, []byte(`"late"`)), i == 1 && bytes.Contains(body, []byte(`"gap"`)):
				pause = proxySilence
			case i == 0:
				pause = 0
			}
			select {
			case <-time.After(pause):
			case <-r.Context().Done():
				return
			}
			event := strconv.FormatInt(time.Now().UnixNano(), 10)
			if i == 5 {
				event = "[DONE]"
			}
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: %s\n\n", event)
			w.(http.Flusher).Flush()
		}
	}))
	t.Cleanup(server.Close)
	return server
}

// proxied sends requests to a gateway, or to a proxy in front of gateways.
type proxied struct {
	base   string
	client *http.Client
}

func newProxied(t *testing.T, base string) *proxied {
	p := &proxied{base, &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: "llm.example"}}}}
	t.Cleanup(p.client.CloseIdleConnections)
	return p
}

func (p *proxied) ask(ctx context.Context, method, path, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, p.base+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Host = "llm.example"
	req.Header.Set("Content-Type", "application/json")
	return p.client.Do(req)
}

// once returns an error unless a request is answered with status 200.
func (p *proxied) once(ctx context.Context, method, path, body string) error {
	resp, err := p.ask(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", resp.Status, text)
	}
	return err
}

// stream returns how long after it was sent each event of a stream arrived.
func (p *proxied) stream(ctx context.Context, prompt string) (delays []time.Duration, err error) {
	resp, err := p.ask(ctx, "POST", "/v1/completions", fmt.Sprintf(`{"model":"m","prompt":%q,"stream":true}`, prompt))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	done := false
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		event, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case !ok: // a comment, or the end of an event
		case event == "[DONE]":
			done = true
		default:
			sent, err := strconv.ParseInt(event, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%s, event %q", resp.Status, event)
			}
			delays = append(delays, time.Since(time.Unix(0, sent)))
		}
	}
	if err := lines.Err(); err != nil || !done || len(delays) != 5 {
		return nil, fmt.Errorf("%s, %d events, done: %t, %v", resp.Status, len(delays), done, err)
	}
	return delays, nil
}

// Behind nginx and HAProxy, by the configurations of docs/proxies.md with their own times, the first
// event arrives as early as without a proxy, streams with proxySilence pass, and restarts of gateways in turn
// fail no request.
func TestBinaryProxiesInUse(t *testing.T) {
	for _, name := range []string{"nginx", "haproxy"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			binary(t)
			program := proxyProgram(t, name)
			far := startSlowServer(t)
			begin := func(t *testing.T, gateways int) (direct, through *proxied, restart func(i int)) {
				t.Helper()
				port := freePorts(t, gateways+1)
				gateway := func(i int) *daemon {
					return daemonOf(t, "gateway", "--port", strconv.Itoa(port+i), "--upstream", far.URL, "--allowed-hosts", "llm.example")
				}
				var ports []int
				var running []*daemon
				for i := range gateways {
					ports, running = append(ports, port+i), append(running, gateway(i))
				}
				startProxy(t, program, port+gateways, "", ports...)
				direct, through = newProxied(t, fmt.Sprintf("http://127.0.0.1:%d", port)), newProxied(t, fmt.Sprintf("https://127.0.0.1:%d", port+gateways))
				ready := func(i int) {
					t.Helper()
					own := newProxied(t, fmt.Sprintf("http://127.0.0.1:%d", port+i))
					(&cluster{t: t}).wait(startBound, "a gateway is ready", func() bool { return own.once(t.Context(), "GET", "/readyz", "") == nil })
				}
				for i := range gateways {
					ready(i)
				}
				(&cluster{t: t}).wait(startBound, "the gateways are ready behind "+name, func() bool { return through.once(t.Context(), "GET", "/readyz", "") == nil })
				return direct, through, func(i int) {
					t.Helper()
					if err := running[i].cmd.Process.Signal(syscall.SIGTERM); err != nil {
						t.Fatal(err)
					}
					<-running[i].ended
					running[i] = gateway(i)
					ready(i)
				}
			}
			t.Run("silence", func(t *testing.T) {
				t.Parallel()
				_, through, _ := begin(t, 1)
				var wg sync.WaitGroup
				defer wg.Wait()
				for _, prompt := range []string{"late", "gap"} {
					wg.Go(func() {
						begun := time.Now()
						if _, err := through.stream(t.Context(), prompt); err != nil || time.Since(begun) < proxySilence {
							t.Errorf("a stream whose silence is %s ended after %.0f s: %v", prompt, time.Since(begun).Seconds(), err)
						}
					})
				}
			})
			t.Run("first-event", func(t *testing.T) {
				t.Parallel()
				direct, through, _ := begin(t, 1)
				median := func(p *proxied) time.Duration {
					var first []time.Duration
					for range 5 {
						delays, err := p.stream(t.Context(), "x")
						if err != nil {
							t.Fatal(err)
						}
						first = append(first, delays[0])
					}
					slices.Sort(first)
					return first[len(first)/2]
				}
				without, with := median(direct), median(through)
				t.Logf("the first event arrives after %v, and after %v without %s", with, without, name)
				// A proxy that buffers delays it by half a second or more.
				if with-without > 100*time.Millisecond {
					t.Errorf("%s delays the first event by %v", name, with-without)
				}
			})
			t.Run("restart", func(t *testing.T) {
				t.Parallel()
				_, through, restart := begin(t, 2)
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				var mu sync.Mutex
				asked, streams := 0, 0
				for i := range 8 {
					wg.Go(func() {
						for ctx.Err() == nil {
							var err error
							if i < 4 {
								err = through.once(t.Context(), "POST", "/v1/completions", `{"model":"m","prompt":"x"}`)
							} else {
								_, err = through.stream(t.Context(), "x")
							}
							mu.Lock()
							if asked++; i >= 4 {
								streams++
							}
							if err != nil {
								t.Errorf("request %d: %v", asked, err)
							}
							mu.Unlock()
							time.Sleep(20 * time.Millisecond)
						}
					})
				}
				for i := range 4 {
					time.Sleep(2 * time.Second)
					restart(i % 2)
				}
				time.Sleep(time.Second)
				stop()
				wg.Wait()
				t.Logf("%d requests, %d of them streams, during four restarts", asked, streams)
			})
		})
	}
}
