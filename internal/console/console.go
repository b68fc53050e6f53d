// Package console has clients of the gateway's HTTP API for a terminal: a chat and the state of
// the cluster.
//
// Invariant: an incomplete answer is never shown as complete.
//
// The package knows of nodes and models only what the API returns.
package console

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Errors of the clients.
var (
	ErrAPI     = errors.New("the server refused")
	ErrDenied  = errors.New("the server refused") // with 401 or 403: another key may do
	ErrAborted = errors.New("the answer broke off")
	ErrURL     = errors.New("not a gateway's address")
)

const (
	maxEvent = 1 << 20 // bytes of one SSE line
	maxBody  = 4 << 20 // bytes of an answer that is no stream
)

// Client talks to one gateway.
type Client struct {
	URL  string // such as http://127.0.0.1:8000
	Key  string // bearer token, or empty
	HTTP *http.Client
}

// Shown returns the URL without its user and password, for messages.
func (c *Client) Shown() string {
	u, err := url.Parse(c.URL)
	if err != nil {
		return ""
	}
	u.User = nil
	return u.String()
}

// Message is one turn of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// ChatOptions are a chat's settings. Nil leaves a value to the server.
type ChatOptions struct {
	Model       string
	System      string
	MaxTokens   *int
	Temperature *float64
	Seed        *int64
	Usage       bool // have the server report it
}

// do sends a request. A status other than 200 is an error with the server's message.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.URL, "/")+path, r)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the method and the URL again
		}
		return nil, fmt.Errorf("no answer from %s: %w; %s", c.Shown(), err, c.remedy(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, err
	}
	var e struct {
		Error struct{ Message string }
	}
	switch {
	case json.Unmarshal(text, &e) == nil && e.Error.Message != "":
		text = []byte(e.Error.Message)
	case c.proxied(req):
		text = fmt.Appendf(bytes.TrimSpace(text), "; this answer may be that of %s", proxyRemedy)
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusMethodNotAllowed:
		text = fmt.Appendf(bytes.TrimSpace(text), "; %s%s is no route of a gateway: give --url the address of --port or --admin-listen, not the metrics of a node", c.Shown(), path)
	}
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		text = append(text, "; here by --api-key KEY or TANDEM_API_KEY"...)
	case bytes.Contains(text, []byte("several models are served")):
		text = append(text, "; here by --model NAME, or /model NAME in a conversation"...)
	}
	kind := ErrAPI
	if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden {
		kind = ErrDenied
	}
	return nil, fmt.Errorf("%w: %s: %s", kind, Visible(resp.Status), Visible(string(bytes.TrimSpace(text))))
}

// remedy returns what to do about a request that got no answer.
func (c *Client) remedy(err error) string {
	rest, plain := strings.CutPrefix(c.Shown(), "http://")
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var name x509.HostnameError
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "proxyconnect":
		return "that is " + proxyRemedy
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "renew the gateway's certificate, or set this machine's clock"
	case errors.As(err, &name):
		return "write --url with a name of the gateway's certificate"
	case plain && errors.Is(err, io.EOF):
		return "a gateway with a certificate has the URL https://" + rest
	case errors.As(err, &unknown):
		return "a certificate of your own is trusted by SSL_CERT_FILE=FILE in the environment"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "a gateway without a certificate has the URL http://" + strings.TrimPrefix(c.Shown(), "https://")
	}
	return "start a cluster with `tandem up`, or name its gateway with --url"
}

// proxyRemedy names the proxy that a request went through, with what to do.
const proxyRemedy = "the proxy that HTTP_PROXY or HTTPS_PROXY names: NO_PROXY=HOST in the environment excepts the gateway"

// proxied reports whether a request goes through a proxy of the environment.
func (c *Client) proxied(req *http.Request) bool {
	proxy, err := http.ProxyFromEnvironment(req)
	return c.HTTP == nil && err == nil && proxy != nil
}

// Ready returns nil if the gateway, or a node at c.URL, is ready. It needs no key.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.do(ctx, http.MethodGet, "/readyz", nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Models returns the served models.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	resp, err := c.do(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(&list); err != nil {
		return nil, fmt.Errorf("%s/v1/models: %w", c.Shown(), err)
	}
	ids := make([]string, len(list.Data))
	for i, m := range list.Data {
		ids[i] = m.ID
	}
	return ids, nil
}

// Delta is a part of an answer: of its text, of its reasoning, or of both.
type Delta struct{ Text, Reasoning string }

// Usage counts the tokens of a request.
type Usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
}

// Answer is a finished or interrupted answer.
type Answer struct {
	Model     string
	Text      string
	Reasoning string
	Finish    string        // finish_reason; empty before the last event
	Usage     Usage         // with ChatOptions.Usage; zero where the server does not report it
	First     time.Duration // from the request to the first part
	Total     time.Duration // to the last part
}

// leastSpread is the time from the first part of an answer to the last below which the answer came
// at once, so that the time between its tokens is not known.
const leastSpread = 10 * time.Millisecond

// Rate returns the output tokens per second behind the first, or 0 if it is not known.
func (a *Answer) Rate() float64 {
	if a.Usage.Completion < 2 || a.Total-a.First < leastSpread {
		return 0
	}
	return float64(a.Usage.Completion-1) / (a.Total - a.First).Seconds()
}

// Complete sends a conversation and calls show with each part of the answer.
func (c *Client) Complete(ctx context.Context, o ChatOptions, messages []Message, show func(Delta) error) (Answer, error) {
	began := time.Now()
	body := map[string]any{"messages": messages, "stream": true}
	if o.Model != "" {
		body["model"] = o.Model
	}
	if o.MaxTokens != nil {
		body["max_completion_tokens"] = *o.MaxTokens
	}
	if o.Temperature != nil {
		body["temperature"] = *o.Temperature
	}
	if o.Seed != nil {
		body["seed"] = *o.Seed
	}
	if o.Usage {
		body["stream_options"] = map[string]any{"include_usage": true}
	}
	resp, err := c.do(ctx, http.MethodPost, "/v1/chat/completions", body)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	var first, last time.Duration
	a, err := readStream(resp.Body, func(d Delta) error {
		last = time.Since(began)
		first = cmp.Or(first, last)
		return show(d)
	})
	a.First, a.Total = first, last
	return a, err
}

// readStream calls show with each part of an SSE answer.
func readStream(r io.Reader, show func(Delta) error) (a Answer, err error) {
	var text, reasoning strings.Builder
	defer func() { a.Text, a.Reasoning = text.String(), reasoning.String() }()
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxEvent)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return a, nil
		}
		var chunk struct {
			Model   string
			Choices []struct {
				Delta struct {
					Content   string
					Reasoning string
					Thoughts  string `json:"reasoning_content"` // the older name
				}
				Finish string `json:"finish_reason"`
			}
			Usage *Usage
			Error *struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return a, fmt.Errorf("%w: event %q: %w", ErrAborted, data, err)
		}
		if chunk.Error != nil {
			return a, fmt.Errorf("%w: %s", ErrAborted, Visible(chunk.Error.Message))
		}
		a.Model = cmp.Or(chunk.Model, a.Model)
		if chunk.Usage != nil {
			a.Usage = *chunk.Usage
		}
		for _, choice := range chunk.Choices {
			a.Finish = cmp.Or(choice.Finish, a.Finish)
			d := Delta{choice.Delta.Content, cmp.Or(choice.Delta.Reasoning, choice.Delta.Thoughts)}
			if d == (Delta{}) {
				continue
			}
			text.WriteString(d.Text)
			reasoning.WriteString(d.Reasoning)
			if err := show(d); err != nil {
				return a, err
			}
		}
	}
	return a, errors.Join(ErrAborted, lines.Err())
}

// BaseURL returns the gateway's URL, without a path, of an address as users write it:
// HOST:PORT, a URL, or the /v1 URL of an OpenAI client. Its error wraps ErrURL.
func BaseURL(address string) (string, error) {
	address = strings.TrimSpace(address)
	full := address
	if !strings.Contains(full, "://") {
		full = "http://" + full
	}
	u, err := url.Parse(full)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("%q is %w; write http://HOST:PORT", address[strings.LastIndexByte(address, '@')+1:], ErrURL) // without a password
	}
	u.Path = strings.TrimSuffix(strings.TrimRight(u.Path, "/"), "/v1")
	return u.String(), nil
}
