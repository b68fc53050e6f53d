package tlsconf

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A folder's files come from whoever copied them. Whatever they hold, they are
// refused as unusable or they fit together.
func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	if err := CreateCA(dir); err != nil {
		f.Fatal(err)
	}
	node, err := IssueNode(dir, "n", nil)
	if err != nil {
		f.Fatal(err)
	}
	var good [4][]byte
	for i, name := range []string{CACertFile, NodeCertFile, NodeKeyFile, SecretFile} {
		if good[i], err = os.ReadFile(filepath.Join(node, name)); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(good[0], good[1], good[2], good[3])
	f.Add(good[1], good[1], good[2], good[3])
	f.Add(good[0], good[0], good[2], good[3])
	f.Add(good[0], good[1], good[2][:40], good[3])
	f.Add(good[0], good[1], good[2], []byte("secret"))
	f.Add([]byte{}, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), good[2], []byte{})
	f.Fuzz(func(t *testing.T, ca, cert, key, secret []byte) {
		m, err := parse("folder", [4][]byte{ca, cert, key, secret})
		if err != nil {
			if !errors.Is(err, ErrMaterial) {
				t.Fatalf("err = %v, not an ErrMaterial", err)
			}
			return
		}
		if len(m.gossip) != GossipKeyBytes || len(m.cert.Certificate) == 0 || m.cert.PrivateKey == nil {
			t.Fatalf("accepted half a folder: %d bytes of gossip key, %d certificates", len(m.gossip), len(m.cert.Certificate))
		}
	})
}
