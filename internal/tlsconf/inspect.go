package tlsconf

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/internal/regular"
)

// Held is a certificate in a folder of a cluster, for people who look after them.
type Held struct {
	Folder              string
	Identity                     // without a role: NoRole
	Hosts               []string // names and addresses for clients other than nodes
	Authority           bool
	NotBefore, NotAfter time.Time
	Exposed             bool  // other users can read the key or the secret
	Err                 error // why the folder cannot be used
}

// maxHeld bounds the folders of an authority that Inspect reads.
const maxHeld = 4096

// Inspect returns the certificates of dir: those of a node's folder, or of an authority's folder
// and of the nodes' folders in it. Certificates that cannot be used are returned with their error.
// It fails if dir has no certificate at all.
func Inspect(dir string) ([]Held, error) {
	var all []Held
	if c, err := certificateOf(filepath.Join(dir, CACertFile)); err == nil {
		all = append(all, Held{Folder: dir, Identity: Identity{Name: c.Subject.CommonName}, Authority: true, NotBefore: c.NotBefore, NotAfter: c.NotAfter,
			Exposed: exposed(filepath.Join(dir, CAKeyFile))})
	}
	if _, err := os.Stat(filepath.Join(dir, NodeCertFile)); err == nil {
		return append(all, holds(dir)), nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMaterial, err)
	}
	for _, e := range entries {
		folder := filepath.Join(dir, e.Name())
		if _, err := os.Stat(filepath.Join(folder, NodeCertFile)); err == nil && len(all) < maxHeld {
			all = append(all, holds(folder))
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: %s has neither %s nor %s", ErrMaterial, dir, CACertFile, NodeCertFile)
	}
	return all, nil
}

// holds returns what a node's folder has. Dates are given even if the certificate has expired.
func holds(dir string) Held {
	h := Held{Folder: dir, Exposed: exposed(filepath.Join(dir, NodeKeyFile)) || exposed(filepath.Join(dir, SecretFile))}
	c, err := certificateOf(filepath.Join(dir, NodeCertFile))
	if err != nil {
		h.Err = err
		return h
	}
	h.NotBefore, h.NotAfter = c.NotBefore, c.NotAfter
	h.Hosts = slices.DeleteFunc(slices.Clone(c.DNSNames), func(name string) bool { return name == NodeDNSName })
	for _, ip := range c.IPAddresses {
		h.Hosts = append(h.Hosts, ip.String())
	}
	if h.Identity, h.Err = IdentityOf(c); h.Err != nil {
		return h
	}
	if now := time.Now(); now.After(c.NotAfter) || now.Before(c.NotBefore) {
		return h // read would refuse it for its dates, which the caller has
	}
	_, h.Err = read(dir)
	return h
}

func exposed(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().Perm()&0o006 != 0
}

// certificateOf reads the first certificate of a PEM file.
func certificateOf(path string) (*x509.Certificate, error) {
	b, err := regular.ReadFile(path, MaxFile)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMaterial, err)
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, fmt.Errorf("%w: no PEM in %s", ErrMaterial, path)
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrMaterial, path, err)
	}
	return c, nil
}
