package main

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// wheel writes a Python wheel, which holds the program as a script: `pip install` puts it on PATH.
// The format is the Python packaging user guide's binary distribution format.
func (r *release) wheel(_ context.Context, arch string) error {
	program, err := os.ReadFile(r.path(arch, "tandem"))
	if err != nil {
		return err
	}
	license, err := os.ReadFile(filepath.Join(r.root, "LICENSE"))
	if err != nil {
		return err
	}
	version := pythonVersion(r.version)
	info := fmt.Sprintf("tandem_serving-%s.dist-info/", version)
	tag := "py3-none-" + targets[arch].wheel
	entries := []struct {
		name string
		text []byte
		mode os.FileMode
	}{
		{fmt.Sprintf("tandem_serving-%s.data/scripts/tandem", version), program, 0o755},
		{info + "METADATA", fmt.Appendf(nil, "Metadata-Version: 2.4\nName: tandem-serving\nVersion: %s\nSummary: %s\nHome-page: %s\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\nRequires-Python: >=3.8\n",
			version, summary, homepage), 0o644},
		{info + "WHEEL", fmt.Appendf(nil, "Wheel-Version: 1.0\nGenerator: tandem-release\nRoot-Is-Purelib: false\nTag: %s\n", tag), 0o644},
		{info + "licenses/LICENSE", license, 0o644},
	}
	return r.create(fmt.Sprintf("tandem_serving-%s-%s.whl", version, tag), func(w io.Writer) error {
		z := zip.NewWriter(w)
		add := func(name string, text []byte, mode os.FileMode) error {
			h := &zip.FileHeader{Name: name, Method: zip.Deflate, Modified: r.epoch}
			h.SetMode(mode)
			f, err := z.CreateHeader(h)
			if err != nil {
				return err
			}
			_, err = f.Write(text)
			return err
		}
		var record strings.Builder
		for _, e := range entries {
			if err := add(e.name, e.text, e.mode); err != nil {
				return err
			}
			sum := sha256.Sum256(e.text)
			fmt.Fprintf(&record, "%s,sha256=%s,%d\n", e.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(e.text))
		}
		fmt.Fprintf(&record, "%sRECORD,,\n", info)
		if err := add(info+"RECORD", []byte(record.String()), 0o644); err != nil {
			return err
		}
		return z.Close()
	})
}

// pythonVersion returns a semantic version as PEP 440 writes it: 0.2.0-dev becomes 0.2.0.dev0 and
// 0.2.0-rc.1 becomes 0.2.0rc1.
func pythonVersion(v string) string {
	base, pre, ok := strings.Cut(v, "-")
	switch {
	case !ok:
		return v
	case pre == "dev":
		return base + ".dev0"
	}
	return base + strings.ReplaceAll(pre, ".", "")
}
