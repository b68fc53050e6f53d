package trace

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

const (
	otlpPath        = "/v1/traces"
	otlpTimeout     = 10 * time.Second // of one request
	firstRetry      = 5 * time.Second  // the waits and their sum are OpenTelemetry's defaults
	longestRetry    = 30 * time.Second
	retriesTogether = time.Minute
	maxReply        = 64 << 10 // bytes of an answer that are read
)

// uploader posts spans to a collector as protobuf over HTTP, and retries while the
// collector is busy (https://opentelemetry.io/docs/specs/otlp/#otlphttp).
// OpenTelemetry's own client links gRPC for the type of this request. TracesData has the
// same encoding.
type uploader struct {
	url     *url.URL
	header  http.Header
	gzip    bool
	client  http.Client
	retry   time.Duration // first wait
	closing context.Context
	close   context.CancelFunc
}

// newUploader returns an uploader to the URL of the flag, or else of OpenTelemetry's
// variables, which also have all other settings
// (https://opentelemetry.io/docs/specs/otel/protocol/exporter/). Errors are an ErrOption
// that names the variable.
func newUploader(endpoint, version string, getenv func(string) string) (*uploader, error) {
	u := &uploader{header: http.Header{}, retry: firstRetry}
	var err error
	if u.url, err = collectorURL(endpoint, getenv); err != nil {
		return nil, err
	}
	u.header.Set("User-Agent", "tandem/"+version)
	u.header.Set("Content-Type", "application/x-protobuf")
	name, value := setting(getenv, "HEADERS")
	for pair := range strings.SplitSeq(value, ",") {
		key, v, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if key == "" && !ok {
			continue
		}
		if v, err = url.PathUnescape(strings.TrimSpace(v)); err != nil || !ok {
			return nil, fmt.Errorf("%w: %s: %q is no header; give name=value, with commas between", ErrOption, name, strings.TrimSpace(key))
		}
		u.header.Set(strings.TrimSpace(key), v)
	}
	switch name, value = setting(getenv, "COMPRESSION"); value {
	case "gzip":
		u.gzip = true
		u.header.Set("Content-Encoding", "gzip")
	case "", "none":
	default:
		return nil, fmt.Errorf("%w: %s=%s: give gzip or none", ErrOption, name, value)
	}
	u.client.Timeout = otlpTimeout
	if name, value = setting(getenv, "TIMEOUT"); value != "" {
		ms, err := strconv.Atoi(value)
		if err != nil || ms < 1 || ms > int(time.Hour/time.Millisecond) {
			return nil, fmt.Errorf("%w: %s=%s: give milliseconds, 1 to 3600000", ErrOption, name, value)
		}
		u.client.Timeout = time.Duration(ms) * time.Millisecond
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if transport.TLSClientConfig, err = collectorTLS(getenv); err != nil {
		return nil, err
	}
	u.client.Transport = transport
	u.closing, u.close = context.WithCancel(context.Background())
	return u, nil
}

// setting returns a setting of OpenTelemetry's exporters: the variable for traces, or else
// the variable for all signals. name is the variable that is set.
func setting(getenv func(string) string, what string) (name, value string) {
	for _, name = range []string{"OTEL_EXPORTER_OTLP_TRACES_" + what, "OTEL_EXPORTER_OTLP_" + what} {
		if value = getenv(name); value != "" {
			return name, value
		}
	}
	return name, ""
}

// collectorURL returns the URL of the collector. The path of the flag and of the variable for
// all signals is a prefix; the path of the variable for traces is complete.
func collectorURL(endpoint string, getenv func(string) string) (*url.URL, error) {
	name := "--otlp-traces-endpoint"
	if endpoint == "" {
		name, endpoint = setting(getenv, "ENDPOINT")
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%w: %s %q: give a URL such as http://127.0.0.1:4318", ErrOption, name, endpoint)
	}
	switch {
	case name == "OTEL_EXPORTER_OTLP_ENDPOINT":
		u = u.JoinPath(otlpPath)
	case u.Path == "" || u.Path == "/":
		u.Path = otlpPath
	}
	return u, nil
}

// collectorTLS returns the TLS configuration with the certificates that variables name.
func collectorTLS(getenv func(string) string) (*tls.Config, error) {
	c := new(tls.Config)
	var err error
	if name, path := setting(getenv, "CERTIFICATE"); path != "" {
		if c.RootCAs, err = tlsconf.Pool(path); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrOption, name, err)
		}
	}
	name, path := setting(getenv, "CLIENT_CERTIFICATE")
	keyName, keyPath := setting(getenv, "CLIENT_KEY")
	switch {
	case path == "" && keyPath == "":
		return c, nil
	case path == "" || keyPath == "":
		return nil, fmt.Errorf("%w: %s and %s: set both or none", ErrOption, name, keyName)
	}
	pair, err := tlsconf.KeyPair(path, keyPath)
	if err != nil {
		return nil, fmt.Errorf("%w: %s, %s: %w", ErrOption, name, keyName, err)
	}
	c.Certificates = []tls.Certificate{pair}
	return c, nil
}

// Start does nothing: the first spans open the connection.
func (u *uploader) Start(context.Context) error { return nil }

// Stop aborts running requests.
func (u *uploader) Stop(context.Context) error {
	u.close()
	u.client.CloseIdleConnections()
	return nil
}

// UploadTraces returns when the collector has the spans, or when they cannot be sent.
func (u *uploader) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if u.gzip {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		w.Write(body) // a bytes.Buffer takes all
		w.Close()
		body = b.Bytes()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(u.closing, cancel)()
	var waited time.Duration
	for wait := u.retry; ; wait = min(longestRetry, 2*wait) {
		busy, after, err := u.post(ctx, body)
		if !busy {
			return err
		}
		// Half of the wait is random, so that a fleet's processes do not retry together.
		next := max(after, wait/2+rand.N(wait))
		if waited += next; waited > retriesTogether {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w, then %w", err, context.Cause(ctx))
		case <-time.After(next):
		}
	}
}

// post sends one request. busy reports whether the spans may be sent again, after the Retry-After
// if there is one.
func (u *uploader) post(ctx context.Context, body []byte) (busy bool, after time.Duration, err error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, u.url.String(), bytes.NewReader(body))
	if err != nil {
		return false, 0, err
	}
	q.Header = u.header.Clone()
	reply, err := u.client.Do(q)
	if err != nil {
		return false, 0, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, maxReply))
	if err != nil {
		return false, 0, err
	}
	if reply.StatusCode/100 == 2 {
		if reply.Header.Get("Content-Type") != u.header.Get("Content-Type") {
			return false, 0, nil
		}
		return false, 0, rejected(text)
	}
	reason := string(bytes.ToValidUTF8(bytes.TrimSpace(text[:min(len(text), 500)]), nil))
	err = fmt.Errorf("trace: %s answers %s: %s", u.url.Redacted(), reply.Status, cmp.Or(reason, "(no body)"))
	switch reply.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		seconds, _ := strconv.Atoi(reply.Header.Get("Retry-After")) // 0: none in seconds
		return true, time.Duration(min(seconds, int(retriesTogether/time.Second)+1)) * time.Second, err
	}
	return false, 0, err
}

// rejected parses an ExportTraceServiceResponse. Its field 1 has the number of rejected spans
// (field 1) and the reason (field 2).
func rejected(reply []byte) error {
	partial, _ := field(reply, 1)
	_, n := field(partial, 1)
	why, _ := field(partial, 2)
	if n == 0 && len(why) == 0 {
		return nil
	}
	return fmt.Errorf("trace: the collector rejected %d spans: %s", n, bytes.ToValidUTF8(why[:min(len(why), 500)], nil))
}

// field returns the last value of a message's field, bytes or a varint; nothing if the
// message has none or is malformed.
func field(message []byte, number protowire.Number) (b []byte, v uint64) {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return b, v
		}
		message = message[size:]
		if size = protowire.ConsumeFieldValue(n, kind, message); size < 0 {
			return b, v
		}
		if n == number {
			switch kind {
			case protowire.BytesType:
				b, _ = protowire.ConsumeBytes(message)
			case protowire.VarintType:
				v, _ = protowire.ConsumeVarint(message)
			}
		}
		message = message[size:]
	}
	return b, v
}
