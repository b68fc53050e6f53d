package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// build runs the steps that need no other programs, with the test's own binary as the program, and
// returns the artifacts by name.
func build(t *testing.T) map[string][]byte {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &release{out: t.TempDir(), version: "1.2.3-dev", python: "python3", epoch: time.Unix(1e9, 0).UTC(), arches: []string{runtime.GOARCH}}
	if r.root, err = filepath.Abs("../.."); err != nil {
		t.Fatal(err)
	}
	r.work = filepath.Join(r.out, ".work")
	program := r.path(runtime.GOARCH, "tandem")
	if err := errors.Join(os.MkdirAll(filepath.Dir(program), 0o755), os.Link(self, program)); err != nil {
		text, rerr := os.ReadFile(self) // another file system
		if err = errors.Join(rerr, os.WriteFile(program, text, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range pages {
		if err := os.WriteFile(filepath.Join(r.work, p.file), []byte(p.file), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range steps {
		if slices.Contains([]string{"binary", "pages", "image"}, s.name) {
			continue
		}
		if err := s.run(r, context.Background(), runtime.GOARCH); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
	}
	all := map[string][]byte{}
	entries, err := os.ReadDir(r.out)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			if all[e.Name()], err = os.ReadFile(r.artifact(e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// Two runs in two folders write the same bytes, and the checksums are those of the files.
func TestReproducible(t *testing.T) {
	first, second := build(t), build(t)
	if len(first) < 6 {
		t.Errorf("%d artifacts: %v", len(first), first)
	}
	for name, text := range first {
		if !bytes.Equal(text, second[name]) {
			t.Errorf("two builds of %s differ", name)
		}
		if line := fmt.Sprintf("%x  %s\n", sha256.Sum256(text), name); name != "SHA256SUMS" && !strings.Contains(string(first["SHA256SUMS"]), line) {
			t.Errorf("SHA256SUMS lacks %q", line)
		}
	}
	t.Run("archive", func(t *testing.T) { checkArchive(t, first) })
	t.Run("wheel", func(t *testing.T) { checkWheel(t, first) })
	t.Run("sbom", func(t *testing.T) {
		var bom struct {
			BOMFormat  string
			Components []struct{ Name, Version, PURL string }
		}
		if err := json.Unmarshal(named(t, first, ".cdx.json"), &bom); err != nil {
			t.Fatal(err)
		}
		if bom.BOMFormat != "CycloneDX" || !slices.ContainsFunc(bom.Components, func(c struct{ Name, Version, PURL string }) bool {
			return c.Name == "github.com/goreleaser/nfpm/v2" && strings.HasPrefix(c.PURL, "pkg:golang/github.com/goreleaser/nfpm/v2@v2")
		}) {
			t.Errorf("the bill lacks a module of the binary: %+v", bom)
		}
	})
}

// named returns the artifact whose name ends so.
func named(t *testing.T, all map[string][]byte, suffix string) []byte {
	t.Helper()
	for name, text := range all {
		if strings.HasSuffix(name, suffix) {
			return text
		}
	}
	t.Fatalf("no artifact ends in %s", suffix)
	return nil
}

// checkArchive holds the archive to one folder, owned by root, with one time.
func checkArchive(t *testing.T, all map[string][]byte) {
	z, err := gzip.NewReader(bytes.NewReader(named(t, all, ".tar.gz")))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.ModTime.Unix() != 1e9 {
			t.Errorf("%s: owner %d:%d %q, time %v", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
	}
	top := "tandem-1.2.3-dev-linux-" + runtime.GOARCH
	for _, want := range []string{"/", "/tandem", "/LICENSE", "/share/tandem.1", "/systemd/tandem-gateway.service"} {
		if !slices.Contains(names, top+want) {
			t.Errorf("the archive lacks %s; it has %q", want, names)
		}
	}
}

// checkWheel holds each file of the wheel to its line of RECORD.
func checkWheel(t *testing.T, all map[string][]byte) {
	text := named(t, all, ".whl")
	z, err := zip.NewReader(bytes.NewReader(text), int64(len(text)))
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) []byte {
		f, err := z.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	rows, err := csv.NewReader(bytes.NewReader(read("tandem_serving-1.2.3.dev0.dist-info/RECORD"))).ReadAll()
	if err != nil || len(rows) != len(z.File) {
		t.Fatalf("RECORD has %d rows for %d files, %v", len(rows), len(z.File), err)
	}
	for _, row := range rows[:len(rows)-1] {
		b := read(row[0])
		sum := sha256.Sum256(b)
		if want := "sha256=" + base64.RawURLEncoding.EncodeToString(sum[:]); row[1] != want || row[2] != fmt.Sprint(len(b)) {
			t.Errorf("RECORD has %q for %s, want %s, %d", row[1:], row[0], want, len(b))
		}
	}
	if mode := z.File[0].Mode(); mode != 0o755 {
		t.Errorf("the program's mode is %v", mode)
	}
}

func TestPythonVersion(t *testing.T) {
	for v, want := range map[string]string{"0.2.0": "0.2.0", "0.2.0-dev": "0.2.0.dev0", "1.0.0-rc.1": "1.0.0rc1"} {
		if got := pythonVersion(v); got != want {
			t.Errorf("%s becomes %s, want %s", v, got, want)
		}
	}
}

// A binary of this machine's own compiler may need a newer glibc than a release: the check has to see that.
func TestCheckGlibc(t *testing.T) {
	if err := checkGlibc("testdata/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := os.Stat("/usr/lib/os-release"); err != nil {
		return
	}
	// Programs of any distribution with glibc 2.34 or later start by a function of that version.
	if err := checkGlibc("/bin/ls"); err == nil || !strings.Contains(err.Error(), "the newest that it may need") {
		t.Errorf("/bin/ls passes: %v", err)
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"-arch amd64", "-version is missing"},
		{"-version 1.0.0 -arch sparc", "want amd64 or arm64"},
		{"-version 1.0.0 -only dmg", "no such step"},
	} {
		if err := run(context.Background(), append(strings.Fields(c.args), "-out", t.TempDir(), "-root", "../..")); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
}
