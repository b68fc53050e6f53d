package tlsconf

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Certificates carry the role that they were issued with; renewing by the name alone
// keeps the role.
func TestIssuedRoles(t *testing.T) {
	ca := newCA(t)
	for _, c := range []struct {
		name, folder string
		want         Identity
		uri          string
	}{
		{"gateway/gw1", "gw1", Identity{Gateway, "gw1"}, "tandem://gateway/gw1"},
		{"gw1", "gw1", Identity{Gateway, "gw1"}, "tandem://gateway/gw1"},
		{"node/d-1.x", "d-1.x", Identity{Node, "d-1.x"}, "tandem://node/d-1.x"},
		{"d-1.x", "d-1.x", Identity{Node, "d-1.x"}, "tandem://node/d-1.x"},
		{"old", "old", Identity{NoRole, "old"}, ""},
		{"node/old", "old", Identity{Node, "old"}, "tandem://node/old"},
		{"gateway/old", "old", Identity{Gateway, "old"}, "tandem://gateway/old"},
	} {
		dir := issue(t, ca, c.name)
		if dir != filepath.Join(ca, c.folder) {
			t.Errorf("%s: in %s", c.name, dir)
		}
		id, err := FolderIdentity(dir)
		if err != nil || id != c.want {
			t.Errorf("%s: %+v, %v, want %+v", c.name, id, err, c.want)
		}
		m := load(t, dir)
		if m.Identity() != c.want {
			t.Errorf("%s: loaded as %+v", c.name, m.Identity())
		}
		var uris []string
		for _, u := range m.now.Load().cert.Leaf.URIs {
			uris = append(uris, u.String())
		}
		if got := strings.Join(uris, " "); got != c.uri {
			t.Errorf("%s: URIs %q, want %q", c.name, got, c.uri)
		}
	}
	for _, name := range []string{"router/a", "/a", "gateway/", "gateway/a/b", "node/..", "Node/a", "gateway//a"} {
		if _, err := IssueNode(ca, name, nil); !errors.Is(err, ErrName) {
			t.Errorf("IssueNode(%q): %v", name, err)
		}
	}
	// A folder whose role cannot be read is not renewed without one.
	if err := os.WriteFile(filepath.Join(ca, "gw1", NodeCertFile), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := IssueNode(ca, "gw1", nil); !errors.Is(err, ErrMaterial) || !strings.Contains(err.Error(), "gateway/gw1") {
		t.Errorf("renewing over a torn certificate: %v", err)
	}
	if _, err := IssueNode(ca, "gateway/gw1", nil); err != nil {
		t.Error(err)
	}
}

// The URIs that give a role, those that give none, and those that no peer accepts.
func TestRolesOfPeers(t *testing.T) {
	ca := newCA(t)
	m := load(t, issue(t, ca, "node/server"))
	for _, c := range []struct {
		uris string
		want Identity
		bad  bool
	}{
		{"", Identity{NoRole, "cn"}, false},
		{"spiffe://example.org/tandem https://example.org", Identity{NoRole, "cn"}, false},
		{"tandem://gateway/a", Identity{Gateway, "a"}, false},
		{"tandem://node/a", Identity{Node, "a"}, false},
		{"spiffe://x/y tandem://node/a tandem://node/a", Identity{Node, "a"}, false},
		{"tandem://gateway/a tandem://node/a", Identity{}, true},
		{"tandem://gateway/a tandem://gateway/b", Identity{}, true},
		{"tandem://gateway/a tandem:x", Identity{}, true},
		{"tandem://router/a", Identity{}, true},
		{"tandem://gateway", Identity{}, true},
		{"tandem://gateway/", Identity{}, true},
		{"tandem://gateway/a/b", Identity{}, true},
		{"tandem://gateway//a", Identity{}, true},
		{"tandem://gateway/a?x=1", Identity{}, true},
		{"tandem://gateway/a#x", Identity{}, true},
		{"tandem://gateway:1/a", Identity{}, true},
		{"tandem://me@gateway/a", Identity{}, true},
		{"tandem://gateway/%61", Identity{}, true},
		{"tandem://GATEWAY/a", Identity{}, true},
		{"tandem:///a", Identity{}, true},
		{"tandem:gateway/a", Identity{}, true},
		{"tandem://gateway/" + strings.Repeat("a", 64), Identity{}, true},
	} {
		cert := signed(t, ca, func(x *x509.Certificate) {
			x.Subject.CommonName = "cn"
			for _, s := range strings.Fields(c.uris) {
				u, err := url.Parse(s)
				if err != nil {
					t.Fatal(err)
				}
				x.URIs = append(x.URIs, u)
			}
		})
		leaf, err := x509.ParseCertificate(cert.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		id, err := IdentityOf(leaf)
		if id != c.want || errors.Is(err, ErrRole) != c.bad {
			t.Errorf("%q: %+v, %v", c.uris, id, err)
		}
		peer := &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequestClientCert, InsecureSkipVerify: true}
		if _, _, serverErr, _ := meet(t, m.Server(), peer); errors.Is(serverErr, ErrStranger) != c.bad || errors.Is(serverErr, ErrRole) != c.bad {
			t.Errorf("%q: the server says %v", c.uris, serverErr)
		}
		if c.bad {
			if _, _, _, clientErr := meet(t, peer, m.Client()); !errors.Is(clientErr, ErrRole) {
				t.Errorf("%q: the client says %v", c.uris, clientErr)
			}
		}
	}
}

// A node logs that its own certificate has no role.
func TestWarnsOfItsOwnRole(t *testing.T) {
	ca := newCA(t)
	for name, want := range map[string]bool{"old": true, "gateway/g": false, "node/n": false} {
		var out bytes.Buffer
		m, err := Load(issue(t, ca, name), slog.New(slog.NewTextHandler(&out, nil)))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil { // ends the goroutine that logs
			t.Error(err)
		}
		if got := strings.Contains(out.String(), "this certificate has no role") && strings.Contains(out.String(), "tandem ca DIR node/NAME"); got != want {
			t.Errorf("%s: %q", name, out.String())
		}
	}
}
