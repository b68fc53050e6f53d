package tlsconf

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Inspect lists an authority with its nodes, or one node's folder.
func TestInspect(t *testing.T) {
	dir, _ := authority(t)
	if _, err := IssueNode(dir, "gateway/g", nil); err != nil {
		t.Fatal(err)
	}
	all, err := Inspect(dir)
	if err != nil || len(all) != 2 || !all[0].Authority || all[1].Identity != (Identity{Gateway, "g"}) || all[1].Err != nil || all[1].Exposed {
		t.Fatalf("%+v, %v", all, err)
	}
	if left := time.Until(all[1].NotAfter); left > NodeLifetime || left < NodeLifetime-time.Hour {
		t.Errorf("until %v", all[1].NotAfter)
	}
	node := filepath.Join(dir, "g")
	if all, err = Inspect(node); err != nil || len(all) != 2 || all[1].Folder != node {
		t.Fatalf("%+v, %v", all, err)
	}
	if err := os.WriteFile(filepath.Join(node, NodeCertFile), []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err = Inspect(node); err != nil || all[1].Err == nil {
		t.Errorf("a certificate that is none: %+v, %v", all, err)
	}
	if _, err := Inspect(t.TempDir()); err == nil {
		t.Error("an empty folder is accepted")
	}
	if _, err := Inspect(filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that is not there is accepted")
	}
}
