package hub

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// DefaultEndpoint is the hub without HF_ENDPOINT.
const DefaultEndpoint = "https://huggingface.co"

// Bounds of what a hub may send, and of how long it may take.
const (
	maxRedirects   = 5
	maxAnswer      = 8 << 20 // bytes of an answer of the API
	maxHeader      = 64 << 10
	answerTimeout  = time.Minute      // of an answer of the API
	headerTimeout  = 30 * time.Second // of one request until the head of its answer
	stallTimeout   = time.Minute      // without a byte of a file
	minRate        = 64 << 10         // bytes per second of a file, on average
	maxAttempts    = 6                // without progress
	maxRetryAfter  = time.Minute      // that a pull waits for a hub that limits requests
	firstPause     = time.Second      // before a second attempt; doubled before each further one
	connectTimeout = 10 * time.Second
)

// client talks to one hub.
type client struct {
	endpoint *url.URL
	token    string
	agent    string
	log      *slog.Logger
	api      *http.Client // follows redirects to the hub's own origin only, because hashes come from it
	files    *http.Client // follows redirects to storage

	pause, answer, stall time.Duration // firstPause, answerTimeout and stallTimeout
}

// newClient returns a client of an endpoint. A token is never sent unencrypted beyond loopback.
func newClient(endpoint, token, agent string, log *slog.Logger) (*client, error) {
	u, err := url.Parse(strings.TrimRight(endpoint, "/"))
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, refuse("HF_ENDPOINT %q, want the URL of a hub, such as %s", endpoint, DefaultEndpoint)
	}
	c := &client{endpoint: u, token: strings.TrimSpace(token), agent: agent, log: log, pause: firstPause, answer: answerTimeout, stall: stallTimeout}
	if c.token != "" && u.Scheme == "http" && !loopback(u) {
		log.Warn("HF_TOKEN is not sent, because HF_ENDPOINT is not encrypted", "endpoint", u.Redacted())
		c.token = ""
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = (&net.Dialer{Timeout: connectTimeout}).DialContext
	transport.TLSHandshakeTimeout = connectTimeout
	transport.ResponseHeaderTimeout = headerTimeout
	transport.MaxResponseHeaderBytes = maxHeader
	transport.DisableCompression = true // sizes and hashes are those of the stored bytes
	authorized := &bearer{c, transport}
	c.api = &http.Client{Transport: authorized, CheckRedirect: func(r *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects || !c.own(r.URL) {
			return fmt.Errorf("redirected to %s, which is not followed for an answer of the API", r.URL.Host)
		}
		return nil
	}}
	c.files = &http.Client{Transport: authorized, CheckRedirect: func(r *http.Request, via []*http.Request) error {
		switch {
		case len(via) > maxRedirects:
			return errors.New("too many redirects")
		case r.URL.Scheme != "https" && u.Scheme == "https", r.URL.Scheme != "http" && r.URL.Scheme != "https":
			return fmt.Errorf("redirected to %s over %s, which is not followed", r.URL.Host, r.URL.Scheme)
		case loopback(r.URL) && !loopback(u):
			return fmt.Errorf("redirected to %s, which is this machine", r.URL.Host)
		}
		return nil
	}}
	return c, nil
}

// bearer adds the token to requests to the hub's own origin. Requests after a redirect pass here,
// too, and have no token of an earlier request.
type bearer struct {
	c    *client
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Del("Referer") // which may have the signature of storage
	if b.c.token != "" && b.c.own(r.URL) {
		r.Header.Set("Authorization", "Bearer "+b.c.token)
	}
	return b.next.RoundTrip(r)
}

// own reports whether a URL has the hub's scheme, host and port.
func (c *client) own(u *url.URL) bool {
	port := func(u *url.URL) string {
		if p := u.Port(); p != "" || u.Scheme != "https" {
			return p
		}
		return "443"
	}
	return u.Scheme == c.endpoint.Scheme && strings.EqualFold(u.Hostname(), c.endpoint.Hostname()) && port(u) == port(c.endpoint)
}

// loopback reports whether a URL is that of this machine.
func loopback(u *url.URL) bool {
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// at returns a URL below the endpoint. The parts are path elements, which are escaped.
func (c *client) at(query url.Values, parts ...string) *url.URL {
	u := *c.endpoint
	for _, p := range parts {
		u.RawPath = u.EscapedPath() + "/" + url.PathEscape(p)
		u.Path += "/" + p
	}
	u.RawQuery = query.Encode()
	return &u
}

// get sends a request and returns an answer of status 200 or 206, or a *statusError.
func (c *client) get(ctx context.Context, on *http.Client, u *url.URL, from int64) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("User-Agent", c.agent)
	r.Header.Set("Accept-Encoding", "identity")
	if from > 0 {
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-", from))
	}
	resp, err := on.Do(r)
	if err != nil {
		return nil, c.plain(err)
	}
	if resp.StatusCode != http.StatusOK && !(from > 0 && resp.StatusCode == http.StatusPartialContent) {
		_ = resp.Body.Close()
		return nil, newStatusError(c, resp)
	}
	return resp, nil
}

// plain returns the error of a request without its URL, whose query may be a signature of storage.
func (c *client) plain(err error) error {
	var u *url.Error
	if !errors.As(err, &u) {
		return err
	}
	host := c.endpoint.Host
	if at, err := url.Parse(u.URL); err == nil {
		host = at.Host
	}
	return fmt.Errorf("%s: %w", host, u.Err)
}

// object reads an answer of the API into v and returns its head.
func (c *client) object(ctx context.Context, u *url.URL, v any) (head http.Header, err error) {
	err = c.retry(ctx, func() (bool, error) {
		ctx, cancel := context.WithTimeoutCause(ctx, c.answer, fmt.Errorf("%s: no answer within %v", u.Host, c.answer))
		defer cancel()
		var text []byte
		resp, err := c.get(ctx, c.api, u, 0)
		if err == nil {
			defer resp.Body.Close()
			text, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		}
		if err != nil {
			return false, cmp.Or(context.Cause(ctx), err)
		}
		if len(text) > maxAnswer {
			return false, permanent{fmt.Errorf("%s: an answer is larger than %d MiB", u.Host, maxAnswer>>20)}
		}
		if err := json.Unmarshal(text, v); err != nil {
			return false, permanent{fmt.Errorf("%s: not the answer of a hub: %w; check HF_ENDPOINT", u.Host, err)}
		}
		head = resp.Header
		return true, nil
	})
	return head, err
}

// permanent is an error that another attempt does not change.
type permanent struct{ error }

// Unwrap returns the error.
func (p permanent) Unwrap() error { return p.error }

// retry calls f until it succeeds, its error is permanent, ctx ends, or maxAttempts calls in a row
// made no progress. The pause doubles, or is what the hub asks for.
func (c *client) retry(ctx context.Context, f func() (progress bool, err error)) error {
	wait := c.pause
	for attempt := 1; ; attempt++ {
		progress, err := f()
		var status *statusError
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.As(err, new(permanent)):
			return err
		case errors.As(err, &status) && !status.temporary():
			return err
		}
		if progress {
			attempt, wait = 1, c.pause
		}
		d := wait
		if status != nil {
			d = max(d, status.after)
		}
		if attempt >= maxAttempts || d > maxRetryAfter {
			if status == nil {
				return fmt.Errorf("%w; check the network, HTTPS_PROXY and HF_ENDPOINT, and repeat the command: what is done is kept", err)
			}
			return err
		}
		c.log.Warn("the hub failed; the request is repeated", "error", err, "after", d)
		if err := pause(ctx, d); err != nil {
			return err
		}
		wait *= 2
	}
}

// statusError is an answer without the requested content.
type statusError struct {
	code  int
	after time.Duration // of Retry-After
	text  string
}

// Error returns the cause and the remedy.
func (e *statusError) Error() string { return e.text }

// Is makes errors of a name, of a licence and of a token errors that the user can correct.
func (e *statusError) Is(target error) bool {
	return target == ErrModel && e.code/100 == 4 && !e.temporary()
}

// temporary reports whether another attempt may succeed.
func (e *statusError) temporary() bool {
	return e.code == http.StatusRequestTimeout || e.code == http.StatusTooManyRequests || e.code >= 500
}

// newStatusError words an answer's status with the remedy.
func newStatusError(c *client, resp *http.Response) error {
	host := resp.Request.URL.Host
	e := &statusError{code: resp.StatusCode}
	if s, err := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 31); err == nil {
		e.after = time.Duration(s) * time.Second
	} else if t, err := http.ParseTime(resp.Header.Get("Retry-After")); err == nil {
		e.after = max(0, time.Until(t).Round(time.Second))
	}
	kind := resp.Header.Get("X-Error-Code")
	switch {
	case !c.own(resp.Request.URL) && e.code/100 == 4 && e.code != http.StatusRequestedRangeNotSatisfiable && !e.temporary():
		// A signature that has expired: the next attempt starts at the hub.
		e.code = http.StatusBadGateway
		e.text = fmt.Sprintf("%s: the storage of the hub answers %d", host, resp.StatusCode)
	case kind == "GatedRepo" || e.code == http.StatusForbidden:
		e.text = fmt.Sprintf("%s answers %d: the model is gated or private: accept its licence on its page at %s, and set HF_TOKEN to a token of that account that may read it", host, e.code, c.endpoint)
	case e.code == http.StatusUnauthorized && c.token == "":
		e.text = fmt.Sprintf("%s answers 401: it has no model of that name, or the model is private or gated: check the name; if it exists, accept its licence on its page at %s and set HF_TOKEN to a token of that account", host, c.endpoint)
	case e.code == http.StatusUnauthorized:
		e.text = fmt.Sprintf("%s answers 401: HF_TOKEN is not valid, or may not read the model: create a token that may at %s/settings/tokens", host, c.endpoint)
	case kind == "RevisionNotFound":
		e.text = fmt.Sprintf("%s answers 404: the model has no such revision: give a branch, a tag or a full commit", host)
	case e.code == http.StatusNotFound:
		e.text = fmt.Sprintf("%s answers 404: it has no such model or file: check the name, as on the model's page at %s", host, c.endpoint)
	case e.code == http.StatusTooManyRequests:
		e.text = fmt.Sprintf("%s answers 429: too many requests from this address or account: repeat the command in %s, or set HF_TOKEN for a higher limit; finished parts are kept", host, max(e.after, time.Second))
	default:
		e.text = fmt.Sprintf("%s answers %d %s: repeat the command later; finished parts are kept", host, e.code, http.StatusText(e.code))
	}
	return e
}
