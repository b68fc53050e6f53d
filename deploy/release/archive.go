package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// file is one entry of an archive.
type file struct {
	name string // with slashes, below the archive's top
	from string // path of its content; a folder where it ends in a slash
	mode int64
}

// unitFiles are the patterns of deploy/systemd's files for users.
var unitFiles = []string{"*.service", "*.socket", "*.target", "*.sysusers", "*.tmpfiles"}

// archive writes tandem-VERSION-linux-ARCH.tar.gz: the program, its manual page, completions, units
// and licence in one folder.
func (r *release) archive(_ context.Context, arch string) error {
	top := fmt.Sprintf("tandem-%s-linux-%s", r.version, arch)
	files := []file{
		{"tandem", r.path(arch, "tandem"), 0o755},
		{"LICENSE", filepath.Join(r.root, "LICENSE"), 0o644},
		{"README.md", filepath.Join(r.root, "README.md"), 0o644},
		{"CHANGELOG.md", filepath.Join(r.root, "CHANGELOG.md"), 0o644},
	}
	for _, p := range pages {
		files = append(files, file{"share/" + p.file, filepath.Join(r.work, p.file), 0o644})
	}
	for _, glob := range unitFiles {
		units, err := filepath.Glob(filepath.Join(r.root, "deploy/systemd", glob))
		if err != nil {
			return err
		}
		for _, u := range units {
			files = append(files, file{"systemd/" + filepath.Base(u), u, 0o644})
		}
	}
	for i := range files {
		files[i].name = path.Join(top, files[i].name)
	}
	return r.create(top+".tar.gz", func(w io.Writer) error {
		z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
		if err != nil {
			return err
		}
		if err := writeTar(z, r.epoch, files); err != nil {
			return err
		}
		return z.Close()
	})
}

// writeTar writes files in the order of their names, owned by root, with one time for all, after
// the folders that hold them.
func writeTar(w io.Writer, at time.Time, files []file) error {
	t := tar.NewWriter(w)
	files = slices.SortedFunc(slices.Values(files), func(a, b file) int { return strings.Compare(a.name, b.name) })
	seen := map[string]bool{".": true, "/": true}
	for _, f := range files {
		if err := writeFolders(t, at, path.Dir(f.name), seen); err != nil {
			return err
		}
		if err := writeFile(t, at, f); err != nil {
			return err
		}
	}
	return t.Close()
}

func writeFolders(t *tar.Writer, at time.Time, name string, seen map[string]bool) error {
	if seen[name] {
		return nil
	}
	seen[name] = true
	if err := writeFolders(t, at, path.Dir(name), seen); err != nil {
		return err
	}
	return t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: at, Format: tar.FormatPAX})
}

func writeFile(t *tar.Writer, at time.Time, f file) error {
	in, err := os.Open(f.from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := t.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: info.Size(), ModTime: at, Format: tar.FormatPAX}); err != nil {
		return err
	}
	_, err = io.Copy(t, in)
	return err
}

// create writes an artifact.
func (r *release) create(name string, write func(io.Writer) error) error {
	f, err := os.Create(r.artifact(name))
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		return fmt.Errorf("%s: %w", name, errors.Join(err, f.Close()))
	}
	return f.Close()
}

// sums writes SHA256SUMS over all artifacts in out, as sha256sum -c reads it.
func (r *release) sums(context.Context, string) error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, e := range entries {
		if e.IsDir() || e.Name() == "SHA256SUMS" {
			continue
		}
		sum, err := digest(r.artifact(e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sum, e.Name())
	}
	return os.WriteFile(r.artifact("SHA256SUMS"), []byte(b.String()), 0o644)
}

func digest(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}
