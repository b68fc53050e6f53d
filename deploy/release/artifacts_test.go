//go:build deploy

// These tests use the artifacts of make test-deploy, and Debian's skopeo, umoci and bubblewrap.
package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// artifact returns the path of the artifact that the pattern names.
func artifactOf(t *testing.T, pattern string) string {
	t.Helper()
	dir := os.Getenv("TANDEM_DIST")
	if dir == "" {
		t.Fatal("TANDEM_DIST is not set: run make test-deploy")
	}
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %d artifacts, %v", pattern, len(found), err)
	}
	return found[0]
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// The image runs as its user with a read-only root and without capabilities. It has no shell and no
// program with more rights, it finds certificates, and it opens libfabric, which the linker's cache
// has to list.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	archive := artifactOf(t, "tandem-*-image.tar")
	version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(archive), "tandem-"), "-image.tar")
	output(t, "skopeo", "copy", "-q", "oci-archive:"+archive+":"+version, "oci:"+dir+"/single:x")
	output(t, "umoci", "unpack", "--image", dir+"/single:x", dir+"/bundle")
	root := dir + "/bundle/rootfs"
	sandbox := func(args ...string) *exec.Cmd {
		return exec.Command("bwrap", append([]string{"--ro-bind", root, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
			"--die-with-parent", "--unshare-pid", "--unshare-user", "--uid", "65532", "--gid", "65532", "--cap-drop", "ALL", "/usr/bin/tandem"}, args...)...)
	}
	if out, err := sandbox("version").CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "tandem "+version) {
		t.Errorf("version: %v\n%s", err, out)
	}
	var config struct{ Config struct{ User string } }
	if err := json.Unmarshal([]byte(output(t, "skopeo", "inspect", "--config", "oci:"+dir+"/single:x")), &config); err != nil || config.Config.User != "65532:65532" {
		t.Errorf("the image's user is %q, %v", config.Config.User, err)
	}
	t.Run("nobody", func(t *testing.T) { checkNobody(t, filepath.Dir(dir), dir, sandbox) })
	for _, shell := range []string{"bin/sh", "usr/bin/sh", "usr/bin/bash", "usr/bin/apt"} {
		if _, err := os.Lstat(filepath.Join(root, shell)); err == nil {
			t.Errorf("the image has %s", shell)
		}
	}
	if found := output(t, "find", root, "-perm", "/6000"); found != "" {
		t.Errorf("programs with more rights: %s", found)
	}
	if pem, err := os.ReadFile(filepath.Join(root, "etc/ssl/certs/ca-certificates.crt")); err != nil || bytes.Count(pem, []byte("BEGIN CERTIFICATE")) < 100 {
		t.Errorf("certificates: %v, %d bytes", err, len(pem))
	}

	var log bytes.Buffer
	listener := sandbox("bench", "transfer", "--listen", "127.0.0.1:0", "--transport", "rdma", "--fabric-provider", "tcp")
	pipe, err := listener.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	listener.Stderr = &log
	if err := listener.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Process.Kill(); _ = listener.Wait() }() // it serves until it is killed
	line := make(chan string, 1)
	go func() {
		b := make([]byte, 4096)
		n, _ := pipe.Read(b)
		line <- string(b[:n])
	}()
	var addr string
	select {
	case l := <-line:
		addr = regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(l)
	case <-time.After(20 * time.Second):
	}
	if addr == "" {
		t.Fatalf("the listener gave no address: %s", log.String())
	}
	out, err := sandbox("bench", "transfer", "--peer", addr, "--transport", "rdma", "--fabric-provider", "tcp").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "every byte compared") {
		t.Errorf("transfer through libfabric: %v\n%s", err, out)
	}
}

// checkNobody starts the image's server from an account without rights and sends a chat. The folders
// from top to dir become readable.
func checkNobody(t *testing.T, top, dir string, sandbox func(args ...string) *exec.Cmd) {
	for _, d := range []string{top, dir, dir + "/bundle"} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	listener.Close()
	_, port, _ := net.SplitHostPort(addr)
	serve := sandbox("serve", "--host", "127.0.0.1", "--port", port, "--kv-cache-memory-bytes", "64MiB")
	nobody := uint32(65534)
	serve.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	serve.Stdout, serve.Stderr = &log, &log
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	var answer string
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		resp, err := http.Post("http://"+addr+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"Hi","max_tokens":4}`))
		if err != nil {
			continue
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if answer = string(text); err == nil && resp.StatusCode == 200 {
			break
		}
	}
	_ = serve.Process.Kill() // --die-with-parent ends the server
	_ = serve.Wait()
	if !strings.Contains(answer, `"text"`) {
		t.Errorf("the answer is %q\n%s", answer, log.String())
	}
}

// The wheel installs into a fresh environment and puts the program on its path. auditwheel agrees with
// its platform tag.
func TestWheelInstalls(t *testing.T) {
	dir := t.TempDir()
	wheel := artifactOf(t, "tandem_serving-*_"+targets[runtime.GOARCH].rpm+".whl")
	auditwheel := os.Getenv("TANDEM_AUDITWHEEL")
	if auditwheel == "" {
		t.Fatal("TANDEM_AUDITWHEEL is not set: run make test-deploy")
	}
	tag := `platform tag: "` + targets[runtime.GOARCH].wheel + `"`
	if out := strings.Join(strings.Fields(output(t, auditwheel, "show", wheel)), " "); !strings.Contains(out, tag) {
		t.Errorf("auditwheel: no %s:\n%s", tag, out)
	}
	output(t, "python3", "-m", "venv", dir)
	output(t, dir+"/bin/pip", "install", "-q", "--no-index", wheel)
	if out := output(t, dir+"/bin/tandem", "version"); !strings.Contains(out, "kernels:") {
		t.Errorf("version: %s", out)
	}
	output(t, dir+"/bin/pip", "uninstall", "-q", "-y", "tandem-serving")
	if _, err := os.Stat(dir + "/bin/tandem"); err == nil {
		t.Error("the program stays after pip uninstall")
	}
}

// The program of the archive starts with the oldest glibc that releases promise.
func TestOldestGlibc(t *testing.T) {
	dir := t.TempDir()
	output(t, "tar", "-xzf", artifactOf(t, "tandem-*-linux-*.tar.gz"), "-C", dir, "--strip-components=1")
	found := strings.Fields(output(t, "find", dir, "-name", "tandem", "-type", "f", "-perm", "-100"))
	if len(found) != 1 {
		t.Fatalf("the archive has programs %q", found)
	}
	if err := checkGlibc(found[0]); err != nil {
		t.Error(err)
	}
}

// lintian finds no error in the Debian package, and rpm reads the other.
func TestPackages(t *testing.T) {
	out, _ := exec.Command("lintian", "--fail-on", "none", artifactOf(t, "*.deb")).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "E: ") {
			t.Error(line)
		}
	}
	if files := output(t, "rpm", "-qpl", artifactOf(t, "*.rpm")); !strings.Contains(files, "/usr/bin/tandem\n") {
		t.Errorf("rpm lists %s", files)
	}
}
