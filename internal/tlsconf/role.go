package tlsconf

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path/filepath"
	"strings"
)

// Role is the rights of a certificate's holder at the cluster's nodes.
type Role string

// The roles. A gateway may send every request to nodes. A node may send only the requests
// between nodes (internal/rpc has the table).
const (
	NoRole  Role = "" // issued before roles existed: treated as Gateway, with a warning
	Gateway Role = "gateway"
	Node    Role = "node"
)

// Reissue is the advice for a certificate without a role.
const Reissue = "`tandem ca DIR gateway/NAME` or `tandem ca DIR node/NAME` issues a certificate with a role; the next version refuses certificates without one"

// ErrRole reports a certificate whose tandem:// URI names no role, or not one alone.
var ErrRole = errors.New("tlsconf: unusable role in a certificate")

const roleScheme = "tandem"

// Identity is a certificate's role and name.
type Identity struct {
	Role Role
	Name string // of the URI; without a role the subject's common name
}

func (i Identity) uri() *url.URL {
	return &url.URL{Scheme: roleScheme, Host: string(i.Role), Path: "/" + i.Name}
}

// IdentityOf reads the URI tandem://gateway/NAME or tandem://node/NAME of a certificate.
// URIs of other schemes are ignored. It fails with ErrRole for any other tandem:// URI and
// for two that differ.
func IdentityOf(c *x509.Certificate) (Identity, error) {
	found := Identity{Name: c.Subject.CommonName}
	for _, u := range c.URIs {
		if u.Scheme != roleScheme {
			continue
		}
		i := Identity{Role: Role(u.Host), Name: strings.TrimPrefix(u.Path, "/")}
		switch {
		case i.Role != Gateway && i.Role != Node, !nodeName.MatchString(i.Name), i.uri().String() != u.String():
			return Identity{}, fmt.Errorf("%w: URI %q, want tandem://gateway/NAME or tandem://node/NAME", ErrRole, u)
		case found.Role != NoRole && found != i:
			return Identity{}, fmt.Errorf("%w: URIs %q and %q differ, want one", ErrRole, found.uri(), u)
		}
		found = i
	}
	return found, nil
}

// FolderIdentity reads the identity of the certificate in a node's folder.
func FolderIdentity(nodeDir string) (Identity, error) {
	c, err := certificateOf(filepath.Join(nodeDir, NodeCertFile))
	if err != nil {
		return Identity{}, err
	}
	return IdentityOf(c)
}

// CheckName returns an error that wraps ErrName if s is none of gateway/NAME, node/NAME and NAME.
func CheckName(s string) error {
	role, name, given := strings.Cut(s, "/")
	if !given {
		name = s
	}
	if !nodeName.MatchString(name) || given && Role(role) != Gateway && Role(role) != Node {
		return fmt.Errorf("%w: %q, want gateway/NAME, node/NAME or NAME", ErrName, s)
	}
	return nil
}

// parseIdentity reads gateway/NAME, node/NAME or NAME. NAME alone has the role of the
// certificate in dir/NAME, so that a renewal keeps it, and no role where there is none.
func parseIdentity(dir, s string) (Identity, error) {
	if err := CheckName(s); err != nil {
		return Identity{}, err
	}
	role, name, given := strings.Cut(s, "/")
	if given {
		return Identity{Role: Role(role), Name: name}, nil
	}
	name = s
	i := Identity{Name: name}
	switch old, err := FolderIdentity(filepath.Join(dir, name)); {
	case err == nil:
		i.Role = old.Role
	case !errors.Is(err, fs.ErrNotExist):
		return Identity{}, fmt.Errorf("tlsconf: the role of %s is unknown, give gateway/%s or node/%s: %w", name, name, name, err)
	}
	return i, nil
}
