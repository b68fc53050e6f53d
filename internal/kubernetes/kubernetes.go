// Package kubernetes sends requests to the API of a Kubernetes cluster. By default this is the
// cluster of the program's pod, and the account is the pod's.
//
// The token is read for each request, because Kubernetes renews its file.
//
// The package knows no kind of object and retries nothing.
package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/regular"
)

const (
	account = "/var/run/secrets/kubernetes.io/serviceaccount" // where a pod's service account is mounted
	maxFile = 1 << 20                                         // bytes of a file of the account
	timeout = 30 * time.Second                                // until the head of an answer

	maxRedirects = 5 // of one request
)

// ErrNoCluster reports that the process is no pod and has no API.
var ErrNoCluster = errors.New("this is not a pod of a Kubernetes cluster")

// StatusError is an answer of the API other than 200.
type StatusError struct {
	Code    int
	Message string // of the API; may be empty
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("kubernetes: the API answers %d: %s", e.Code, e.Message)
}

// Options name a cluster and its credentials.
type Options struct {
	API       string // URL; empty: that of the pod's cluster
	TokenFile string // bearer token; empty: the pod's for its cluster, none for another API
	CAFile    string // authorities of the API, PEM; empty: the pod's for its cluster, the system's for another API

	Transport http.RoundTripper // nil: over the network
}

// Client sends requests to one API. Any goroutine may use it.
type Client struct {
	api, tokenFile string
	http           *http.Client
}

// Namespace returns the pod's namespace; "" if the process is no pod.
func Namespace() string {
	own, err := regular.ReadFile(filepath.Join(account, "namespace"), maxFile)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(own))
}

// New returns a client. It fails with ErrNoCluster if there is no API. It also fails if the
// authorities cannot be read.
func New(o Options) (*Client, error) {
	api := strings.TrimSuffix(o.API, "/")
	if api == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, ErrNoCluster
		}
		api = "https://" + net.JoinHostPort(host, port)
		if o.TokenFile == "" {
			o.TokenFile = filepath.Join(account, "token")
		}
		if o.CAFile == "" {
			o.CAFile = filepath.Join(account, "ca.crt")
		}
	}
	transport := &http.Transport{ResponseHeaderTimeout: timeout, MaxIdleConnsPerHost: 1}
	if o.CAFile != "" {
		pem, err := regular.ReadFile(o.CAFile, maxFile)
		if err != nil {
			return nil, fmt.Errorf("kubernetes: authorities of the API: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("kubernetes: authorities of the API: %s has no certificate in PEM", o.CAFile)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	c := &Client{api: api, tokenFile: o.TokenFile, http: &http.Client{Transport: transport, CheckRedirect: redirect}}
	if o.Transport != nil {
		c.http.Transport = o.Transport
	}
	return c, nil
}

// redirect follows a redirect of a read. A patch would become a read, whose success means nothing.
func redirect(_ *http.Request, via []*http.Request) error {
	if via[0].Method != http.MethodGet || len(via) > maxRedirects {
		return http.ErrUseLastResponse
	}
	return nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Get requests an object or a list. The caller closes the body of the answer, whose status is 200.
func (c *Client) Get(ctx context.Context, path string, query url.Values) (*http.Response, error) {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return c.do(ctx, http.MethodGet, path, nil)
}

// MergePatch merges a JSON object into the object at path.
func (c *Client) MergePatch(ctx context.Context, path string, patch []byte) error {
	resp, err := c.do(ctx, http.MethodPatch, path, patch)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

func (c *Client) do(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.api+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	if c.tokenFile != "" {
		token, err := regular.ReadFile(c.tokenFile, maxFile)
		if err != nil {
			return nil, fmt.Errorf("kubernetes: the token: %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	var status struct{ Message string }
	_ = json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&status) // the message is optional
	if at := resp.Header.Get("Location"); at != "" && status.Message == "" {
		status.Message = "it redirects to " + at
	}
	return nil, &StatusError{Code: resp.StatusCode, Message: status.Message}
}
