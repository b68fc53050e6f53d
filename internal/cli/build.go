package cli

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
	"sync"
)

// Build returns the release with build metadata of semantic versioning:
// 0.1.0+g4a929253c1d2, with .dirty if the tree had changes. A binary of
// `go install MODULE@VERSION` has that version. A binary without a recorded commit or
// version has a digest of its own file, as in 0.1.0+x8f3b01c2.
func Build(release string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return release + fileDigest()
	}
	return buildOf(release, info, fileDigest)
}

// buildOf is Build of a recorded build; digest is called if it has no commit or version.
func buildOf(release string, info *debug.BuildInfo, digest func() string) string {
	if commit, dirty := vcs(info); commit != "" {
		return release + "+g" + commit[:min(len(commit), 12)] + dirty
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return strings.TrimPrefix(v, "v")
	}
	return release + digest()
}

// vcs returns the commit that a build recorded, and .dirty if the tree had changes.
func vcs(info *debug.BuildInfo) (commit, dirty string) {
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ".dirty"
		}
	}
	return commit, dirty
}

// fileDigest returns +x and 8 digits of the SHA-256 of this program's file, or "" if the
// file cannot be read.
var fileDigest = sync.OnceValue(func() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return ""
	}
	return fmt.Sprintf("+x%x", h.Sum(nil)[:4])
})
