package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is that of the images. Kubernetes' restricted pod security wants a number that is not 0.
const user = "65532:65532"

// basePackages are Debian's for the images: libfabric for RDMA, the C++ library for GPU kernels,
// certificates for HTTPS, and libc-bin for ldconfig, which the NVIDIA container toolkit runs to add
// the driver's libraries.
const basePackages = "libc6,libc-bin,ca-certificates,tzdata,netbase,libfabric1,libstdc++6"

const suite = "bookworm"

// image writes the container images as archives of the OCI image layout, one for all
// architectures, and one more with the GPU kernels for amd64.
func (r *release) image(ctx context.Context, _ string) error {
	var plain, gpu []mutate.IndexAddendum
	for _, arch := range r.arches {
		base, err := r.base(ctx, arch)
		if err != nil {
			return err
		}
		img, err := r.layered(base, arch, file{"usr/bin/tandem", r.path(arch, "tandem"), 0o755})
		if err != nil {
			return err
		}
		platform := v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}
		plain = append(plain, mutate.IndexAddendum{Add: img, Descriptor: platform})
		if r.cuda != "" && arch == "amd64" {
			// Programs find the kernels next to themselves.
			if img, err = r.layered(base, arch, file{"usr/bin/tandem", r.path(arch, "tandem"), 0o755}, file{"usr/bin/tandem-cuda.so", r.cuda, 0o644}); err != nil {
				return err
			}
			gpu = append(gpu, mutate.IndexAddendum{Add: img, Descriptor: platform})
		}
	}
	if err := r.writeImage("tandem-"+r.version+"-image.tar", r.version, plain); err != nil {
		return err
	}
	if gpu == nil {
		return nil
	}
	return r.writeImage("tandem-"+r.version+"-image-cuda.tar", r.version+"-cuda", gpu)
}

// base makes the root of an image from Debian's packages, without a shell or a package manager.
// The maintainers' scripts do not run, so that what they do is done here: the bundle of
// certificates, accounts, and the linker's cache. It returns the path of a tar archive.
func (r *release) base(ctx context.Context, arch string) (string, error) {
	out := r.path(arch, "base.tar")
	if _, err := os.Stat(out); err == nil {
		return out, nil
	}
	raw, root := r.path(arch, "debian.tar"), r.path(arch, "rootfs")
	env := []string{fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.epoch.Unix())}
	args := []string{"--quiet", "--mode=root", "--variant=extract", "--architectures=" + arch, "--include=" + basePackages, suite, raw}
	if sources := "/etc/apt/sources.list.d/debian.sources"; exists(sources) { // the machine's own mirror
		args = append(args, sources)
	}
	if _, err := command(ctx, r.work, env, "mmdebstrap", args...); err != nil {
		return "", err
	}
	if err := errors.Join(os.RemoveAll(root), os.MkdirAll(root, 0o755)); err != nil {
		return "", err
	}
	if _, err := command(ctx, r.work, nil, "tar", "-C", root, "-xf", raw, "--exclude=./dev/*"); err != nil {
		return "", err
	}
	if err := finishBase(root); err != nil {
		return "", err
	}
	ldconfig := []string{"/sbin/ldconfig", "-X", "-r", root}
	if arch != "amd64" { // the cache's format depends on the architecture
		ldconfig = append([]string{targets[arch].qemu, "-L", root, filepath.Join(root, "sbin/ldconfig")}, ldconfig[1:]...)
	}
	if _, err := command(ctx, r.work, nil, ldconfig[0], ldconfig[1:]...); err != nil {
		return "", err
	}
	_, err := command(ctx, r.work, nil, "tar", "-C", root, "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=posix",
		"--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime", fmt.Sprintf("--mtime=@%d", r.epoch.Unix()), "-cf", out, ".")
	return out, err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// finishBase does what the packages' scripts would have done, and removes what a container does
// not need.
func finishBase(root string) error {
	certs, err := filepath.Glob(filepath.Join(root, "usr/share/ca-certificates/mozilla/*.crt"))
	if err != nil || len(certs) == 0 {
		return fmt.Errorf("the base has no certificates: %v", err)
	}
	var bundle bytes.Buffer
	for _, c := range certs {
		pem, err := os.ReadFile(c)
		if err != nil {
			return err
		}
		bundle.Write(pem)
	}
	write := func(name, text string) error {
		to := filepath.Join(root, name)
		return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, []byte(text), 0o644))
	}
	err = errors.Join(
		write("etc/ssl/certs/ca-certificates.crt", bundle.String()),
		write("etc/passwd", "root:x:0:0:root:/root:/usr/sbin/nologin\ntandem:x:65532:65532::/nonexistent:/usr/sbin/nologin\n"),
		write("etc/group", "root:x:0:\ntandem:x:65532:\n"),
		write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
		write("etc/nsswitch.conf", "hosts: files dns\n"))
	if err != nil {
		return err
	}
	// libfabric's psm provider is chosen by Debian's alternatives, which a script would have set.
	psm, err := filepath.Glob(filepath.Join(root, "usr/lib/libpsm1/libpsm_infinipath.so.1.*"))
	if err != nil {
		return err
	}
	for _, lib := range psm {
		link := filepath.Join(root, "usr/lib/x86_64-linux-gnu/libpsm_infinipath.so.1")
		if err := os.Symlink(strings.TrimPrefix(lib, root), link); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	// Containers mount these, and a root that is read-only cannot make them.
	for _, dir := range []string{"dev", "proc", "sys", "run", "home", "var/lib/tandem"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o777|fs.ModeSticky); err != nil {
		return err
	}
	if err := os.Chown(filepath.Join(root, "var/lib/tandem"), 65532, 65532); err != nil {
		return err
	}
	return slim(root)
}

// kept are the programs that stay: lookups of names for debugging, and what the NVIDIA container
// toolkit runs.
var kept = map[string]bool{"getent": true, "ldconfig": true}

// slim removes what a container does not need: other programs, some of which are setuid, and
// documentation.
func slim(root string) error {
	var gone []error
	for _, dir := range []string{"usr/bin", "usr/sbin", "bin", "sbin"} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if !kept[e.Name()] {
				gone = append(gone, os.RemoveAll(filepath.Join(root, dir, e.Name())))
			}
		}
	}
	for _, dir := range []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/perl5", "usr/share/debconf", "usr/share/bash-completion", "usr/share/gcc", "usr/share/gdb", "var/lib/apt", "var/cache", "var/log", "var/lib/dpkg/info"} {
		gone = append(gone, os.RemoveAll(filepath.Join(root, dir)))
	}
	return errors.Join(gone...)
}

// layered returns an image of the base and one layer of files.
func (r *release) layered(base, arch string, files ...file) (v1.Image, error) {
	var top bytes.Buffer
	if err := writeTar(&top, r.epoch, files); err != nil {
		return nil, err
	}
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	for _, open := range []tarball.Opener{
		func() (io.ReadCloser, error) { return os.Open(base) },
		func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(top.Bytes())), nil },
	} {
		layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, err
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: r.epoch}, CreatedBy: "deploy/release"}}); err != nil {
			return nil, err
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, v1.Time{Time: r.epoch}
	config.Config = containerConfig(r.version)
	return mutate.ConfigFile(img, config)
}

// containerConfig returns the settings of the images' containers. docs/container.md has them.
func containerConfig(version string) v1.Config {
	return v1.Config{
		User: user, WorkingDir: "/", Entrypoint: []string{"/usr/bin/tandem"}, StopSignal: "SIGTERM",
		Env: []string{"PATH=/usr/bin", "TANDEM_LOG_FORMAT=json", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"},
		Labels: map[string]string{
			"org.opencontainers.image.title": "tandem", "org.opencontainers.image.version": version,
			"org.opencontainers.image.source": homepage, "org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
}

// writeImage writes an index of images as an archive of the OCI image layout, which podman, skopeo
// and Docker from 25 on load.
func (r *release) writeImage(name, ref string, images []mutate.IndexAddendum) error {
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), images...)
	dir := filepath.Join(r.work, strings.TrimSuffix(name, ".tar"))
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": ref})); err != nil {
		return err
	}
	var files []file
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		files = append(files, file{filepath.ToSlash(rel), p, 0o644})
		return err
	})
	if err != nil {
		return err
	}
	return r.create(name, func(w io.Writer) error { return writeTar(w, r.epoch, files) })
}
