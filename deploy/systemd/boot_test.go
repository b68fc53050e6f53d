//go:build deploy

// These tests need root and Debian's packages: make test-deploy installs them and sets the variables.
package systemd

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// bootTimeout bounds a whole boot with its checks.
const bootTimeout = 5 * time.Minute

// The package's units boot under a real systemd: they start in any order, restart after a kill and
// by the watchdog, drain at a stop, and leave nothing behind when the package is purged.
func TestUnitsBoot(t *testing.T) {
	base, deb := os.Getenv("TANDEM_SYSTEMD_ROOT"), os.Getenv("TANDEM_DEB")
	if base == "" || deb == "" {
		t.Fatal("TANDEM_SYSTEMD_ROOT and TANDEM_DEB are not set: run make test-deploy")
	}
	root := filepath.Join(t.TempDir(), "root")
	run(t, "cp", "-a", "--reflink=auto", base, root)
	run(t, "cp", deb, filepath.Join(root, "root/tandem.deb"))
	run(t, "cp", "testdata/check.sh", filepath.Join(root, "root/check.sh"))
	inside, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run(t, "cp", inside, filepath.Join(root, "root/inside"))
	run(t, "cp", "-r", "../../engine/builtin/model", filepath.Join(root, "root/model"))
	if err := os.WriteFile(filepath.Join(root, "root/hub.conf"), hubOptions(t), 0o644); err != nil {
		t.Fatal(err)
	}
	units := filepath.Join(root, "etc/systemd/system")
	unit := "[Service]\nExecStart=/root/check.sh\n"
	if err := os.WriteFile(filepath.Join(units, "check.service"), []byte(unit), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(units, "multi-user.target.wants"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../check.service", filepath.Join(units, "multi-user.target.wants/check.service")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	boot := exec.CommandContext(ctx, "systemd-nspawn", "-q", "-D", root, "--machine=tandem-"+strconv.Itoa(os.Getpid()),
		"--register=no", "--keep-unit", "--private-network", "-b", "--console=read-only")
	// A kill would leave its first process behind.
	boot.Cancel = func() error { return boot.Process.Signal(syscall.SIGTERM) }
	boot.WaitDelay = 30 * time.Second
	out, err := boot.CombinedOutput()
	results, rerr := os.Open(filepath.Join(root, "result"))
	if rerr != nil {
		t.Fatalf("no check ran: %v, %v\n%s", rerr, err, out)
	}
	defer results.Close()
	if text, err := os.ReadFile(filepath.Join(root, "asked")); err == nil {
		t.Logf("requests while the gateway restarts: %s", text)
	}
	ended, checks := false, 0
	for lines := bufio.NewScanner(results); lines.Scan(); {
		line := lines.Text()
		if line == "end" {
			ended = true
			continue
		}
		failed, isFailed := strings.CutPrefix(line, "not ok ")
		name, reason, _ := strings.Cut(strings.TrimPrefix(failed, "ok "), ": ")
		checks++
		t.Run(name, func(t *testing.T) {
			if isFailed {
				t.Error(reason)
			}
		})
	}
	if !ended || t.Failed() {
		journal, _ := os.ReadFile(filepath.Join(root, "journal")) // missing where the checks did not end
		t.Fatalf("ended: %v after %d checks; %v\n%s\n%s", ended, checks, err, journal, out)
	}
}

// hubOptions returns the options of docs/systemd.md for models of a hub.
func hubOptions(t *testing.T) []byte {
	t.Helper()
	page, err := os.ReadFile("../../docs/systemd.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "```ini\n")
	text, _, ended := strings.Cut(text, "```")
	if !found || !ended || !strings.Contains(text, "HF_HUB_CACHE=") {
		t.Fatal("docs/systemd.md lacks the options for models of a hub")
	}
	return []byte(text)
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}
