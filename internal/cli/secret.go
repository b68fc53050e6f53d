package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/kubernetes"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// KubernetesFlags declares the flags of a cluster's API. purpose is what the API is used for.
func KubernetesFlags(s *config.Set, o *kubernetes.Options, purpose string) {
	s.StringVar(&o.API, "kubernetes-api", "", "URL of the Kubernetes API for "+purpose+", such as kubectl proxy's http://127.0.0.1:8001; default: the pod's cluster")
	s.StringVar(&o.TokenFile, "kubernetes-token-file", "", "file with the bearer token for the Kubernetes API, read for each request; default: that of the pod's service account, and none with --kubernetes-api")
	s.StringVar(&o.CAFile, "kubernetes-ca", "", "certificate authorities of the Kubernetes API, PEM; default: those of the pod's service account, and the system's with --kubernetes-api")
}

// Bounds of the work on a Secret.
const (
	secretTime    = time.Minute
	secretRetries = 5       // after another process has changed the Secret at the same time
	maxSecret     = 4 << 20 // bytes of the API's answer; a Secret has at most 1 MiB
)

// secretObject has the used fields of a Secret.
type secretObject struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Data map[string][]byte `json:"data"`
}

// secretCertificates completes the certificates in a Secret: an authority if there is none, and a
// certificate for each name that lacks one, or whose certificate cannot be used or expires within a
// time. The keys are those of an authority's folder, and NAME.crt and NAME.key.
func secretCertificates(v *Invocation, api kubernetes.Options, secret string, names, hosts []string, within time.Duration) error {
	namespace, name, ok := strings.Cut(secret, "/")
	if !ok || namespace == "" || name == "" || strings.ContainsAny(name, "/?#%") || strings.ContainsAny(namespace, "?#%") {
		return fmt.Errorf("%w: --kubernetes-secret %q: want NAMESPACE/NAME", config.ErrValue, secret)
	}
	if len(names) == 0 {
		return fmt.Errorf("%w: name the certificates, as in `tandem ca --kubernetes-secret %s gateway/gateway node/node`", config.ErrValue, secret)
	}
	taken := map[string]bool{"ca": true} // ca.crt and ca.key are the authority's
	for _, n := range names {
		if err := tlsconf.CheckName(n); err != nil {
			return fmt.Errorf("%w: %w", config.ErrValue, err)
		}
		_, base, ok := strings.Cut(n, "/")
		if !ok || taken[base] {
			return fmt.Errorf("%w: %q: want gateway/NAME or node/NAME, where NAME is not ca and not that of another certificate", config.ErrValue, n)
		}
		taken[base] = true
	}
	client, err := kubernetes.New(api)
	if errors.Is(err, kubernetes.ErrNoCluster) {
		return fmt.Errorf("%w: --kubernetes-secret: %w: set --kubernetes-api", config.ErrValue, err)
	} else if err != nil {
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	defer client.Close()
	signalled, _, stop := process.Signals()
	defer stop()
	ctx, cancel := context.WithTimeout(signalled, secretTime)
	defer cancel()
	path := "/api/v1/namespaces/" + namespace + "/secrets/" + name
	for try := 0; ; try++ {
		var issued []string
		err := func() error {
			o, err := readSecret(ctx, client, path)
			if err != nil {
				return err
			}
			var added map[string][]byte
			if added, issued, err = completeCertificates(o.Data, names, hosts, within); err != nil || len(added) == 0 {
				return err
			}
			var patch secretObject
			patch.Metadata.ResourceVersion, patch.Data = o.Metadata.ResourceVersion, added
			text, err := json.Marshal(patch)
			if err != nil {
				return err
			}
			return client.MergePatch(ctx, path, text)
		}()
		var status *kubernetes.StatusError
		if errors.As(err, &status) && status.Code == http.StatusConflict && try < secretRetries {
			continue // another process has changed it since it was read
		}
		if err != nil {
			return cmp.Or(context.Cause(signalled), fmt.Errorf("secret %s: %w", secret, err))
		}
		for _, n := range issued {
			fmt.Fprintln(v.Out, n)
		}
		if len(issued) == 0 {
			fmt.Fprintf(v.ErrOut, "the certificates in secret %s are valid for more than %v\n", secret, within)
		}
		return nil
	}
}

func readSecret(ctx context.Context, client *kubernetes.Client, path string) (o secretObject, err error) {
	resp, err := client.Get(ctx, path, nil)
	if err != nil {
		return o, err
	}
	defer resp.Body.Close()
	return o, json.NewDecoder(io.LimitReader(resp.Body, maxSecret)).Decode(&o)
}

// completeCertificates returns the keys to be added to a Secret's data or replaced in it, and the
// names of the certificates that they have. The files are in a temporary folder meanwhile.
func completeCertificates(data map[string][]byte, names, hosts []string, within time.Duration) (added map[string][]byte, issued []string, err error) {
	dir, err := os.MkdirTemp("", "tandem-ca-")
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	added = map[string][]byte{}
	authority := []string{tlsconf.CACertFile, tlsconf.CAKeyFile, tlsconf.SecretFile}
	if known, err := writeFiles(dir, data, authority, authority); err != nil {
		return nil, nil, err
	} else if known == 0 {
		if err := tlsconf.CreateCA(dir); err != nil {
			return nil, nil, err
		}
		if err := readFiles(dir, added, authority, authority); err != nil {
			return nil, nil, err
		}
	}
	for _, name := range names {
		role, base, _ := strings.Cut(name, "/")
		folder := filepath.Join(dir, base)
		if err := os.Mkdir(folder, 0o700); err != nil {
			return nil, nil, err
		}
		keys, files := []string{base + ".crt", base + ".key"}, []string{tlsconf.NodeCertFile, tlsconf.NodeKeyFile}
		if _, err := writeFiles(folder, data, keys, files); err != nil {
			return nil, nil, err
		}
		if _, err := writeFiles(folder, data, authority, []string{tlsconf.CACertFile, "", tlsconf.SecretFile}); err != nil {
			return nil, nil, err
		}
		if usable(folder, tlsconf.Role(role), within) {
			continue
		}
		if _, err := tlsconf.IssueNode(dir, name, hosts); err != nil {
			return nil, nil, err
		}
		if err := readFiles(folder, added, keys, files); err != nil {
			return nil, nil, err
		}
		issued = append(issued, name)
	}
	return added, issued, nil
}

// usable reports whether a node's folder has a certificate of the role that is valid for a time.
func usable(folder string, role tlsconf.Role, within time.Duration) bool {
	all, err := tlsconf.Inspect(folder)
	if err != nil {
		return false
	}
	h := all[len(all)-1]
	return !h.Authority && h.Err == nil && h.Role == role && time.Until(h.NotAfter) > within && time.Now().After(h.NotBefore)
}

// writeFiles writes those keys that data has to files, and returns their number. A file without a
// name is left out.
func writeFiles(dir string, data map[string][]byte, keys, files []string) (n int, err error) {
	for i, key := range keys {
		if content, ok := data[key]; ok && files[i] != "" {
			if err := os.WriteFile(filepath.Join(dir, files[i]), content, 0o600); err != nil {
				return n, err
			}
			n++
		}
	}
	return n, nil
}

// readFiles reads files into keys of data.
func readFiles(dir string, data map[string][]byte, keys, files []string) error {
	for i, key := range keys {
		content, err := os.ReadFile(filepath.Join(dir, files[i]))
		if err != nil {
			return err
		}
		data[key] = content
	}
	return nil
}
