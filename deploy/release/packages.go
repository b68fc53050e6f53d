package main

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

const (
	homepage    = "https://github.com/tandem-serving/tandem"
	maintainer  = "The Tandem authors <maintainers@tandem-serving.dev>"
	summary     = "LLM serving on a fleet, with prefill and decode on nodes of their own"
	description = summary + `
Tandem serves large language models on one machine or many. A gateway
speaks the OpenAI API and routes by prompt prefix, prefill nodes turn
prompts into KV blocks, and decode nodes stream tokens. It has its own
engine for CPUs and NVIDIA GPUs and needs neither Python nor Kubernetes.`
)

// pack writes a Debian or RPM package. Its layout is the Filesystem Hierarchy Standard's: the
// program below /usr, settings below /etc/tandem, which an upgrade keeps.
func (r *release) pack(format, arch string) error {
	contents, err := r.contents(format, arch)
	if err != nil {
		return err
	}
	scripts := func(name string) string { return filepath.Join(r.root, "deploy/packages", name) }
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: "tandem", Arch: arch, Platform: "linux", Version: r.version, VersionSchema: "semver",
		Section: "net", Priority: "optional", Maintainer: maintainer, Description: description,
		Homepage: homepage, License: "Apache-2.0", MTime: r.epoch,
		Overridables: nfpm.Overridables{
			Contents: contents,
			Scripts: nfpm.Scripts{
				PostInstall: scripts("postinstall.sh"), PreRemove: scripts("preremove.sh"), PostRemove: scripts("postremove.sh"),
			},
		},
	})
	switch format {
	case "deb":
		info.Depends, info.Recommends = []string{"libc6 (>= " + oldestGlibc + ")"}, []string{"libfabric1"}
	case "rpm":
		info.Depends, info.Recommends = []string{"glibc >= " + oldestGlibc}, []string{"libfabric"}
		info.RPM.Summary = summary
	}
	p, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return err
	}
	return r.create(p.ConventionalFileName(info), func(w io.Writer) error { return p.Package(info, w) })
}

// contents lists a package's files.
func (r *release) contents(format, arch string) (files.Contents, error) {
	add := func(src, dst string, mode os.FileMode) *files.Content {
		return &files.Content{Source: src, Destination: dst, FileInfo: &files.ContentFileInfo{Mode: mode, MTime: r.epoch}}
	}
	all := files.Contents{add(r.path(arch, "tandem"), "/usr/bin/tandem", 0o755)}
	for _, p := range pages {
		src := filepath.Join(r.work, p.file)
		if strings.HasSuffix(p.file, ".1") { // both formats want manual pages compressed
			zipped, err := r.gzip(src)
			if err != nil {
				return nil, err
			}
			all = append(all, add(zipped, p.installed+".gz", 0o644))
			continue
		}
		dst := p.installed
		if format == "rpm" {
			dst = strings.Replace(dst, "/zsh/vendor-completions/", "/zsh/site-functions/", 1)
		}
		all = append(all, add(src, dst, 0o644))
	}
	type folder struct{ from, glob, to string }
	folders := []folder{{"deploy/packages", "*.yaml", "/etc/tandem"}}
	for _, glob := range unitFiles {
		to, ok := map[string]string{"*.sysusers": "/usr/lib/sysusers.d", "*.tmpfiles": "/usr/lib/tmpfiles.d"}[glob]
		if !ok {
			to = "/usr/lib/systemd/system"
		}
		folders = append(folders, folder{"deploy/systemd", glob, to})
	}
	for _, dir := range folders {
		found, err := filepath.Glob(filepath.Join(r.root, dir.from, dir.glob))
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s has no %s", filepath.Join(r.root, dir.from), dir.glob)
		}
		for _, src := range found {
			name := filepath.Base(src)
			for _, suffix := range []string{".sysusers", ".tmpfiles"} {
				if base, ok := strings.CutSuffix(name, suffix); ok {
					name = base + ".conf"
				}
			}
			c := add(src, dir.to+"/"+name, 0o644)
			if dir.to == "/etc/tandem" {
				c.Type = files.TypeConfigNoReplace
			}
			all = append(all, c)
		}
	}
	log, err := r.gzip(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return nil, err
	}
	if format == "deb" {
		return append(all, add(filepath.Join(r.root, "deploy/packages/copyright"), "/usr/share/doc/tandem/copyright", 0o644),
			add(log, "/usr/share/doc/tandem/changelog.gz", 0o644)), nil
	}
	license := add(filepath.Join(r.root, "LICENSE"), "/usr/share/licenses/tandem/LICENSE", 0o644)
	license.Type = files.TypeRPMLicense
	return append(all, license), nil
}

// gzip compresses a file into the work folder, without a name or a time, and returns its path.
func (r *release) gzip(src string) (string, error) {
	text, err := os.ReadFile(src)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return "", err
	}
	if _, err := z.Write(text); err != nil {
		return "", err
	}
	if err := z.Close(); err != nil {
		return "", err
	}
	to := filepath.Join(r.work, filepath.Base(src)+".gz")
	return to, os.WriteFile(to, b.Bytes(), 0o644)
}
