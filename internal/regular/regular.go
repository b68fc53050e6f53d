// Package regular opens files whose paths come from an operator: models, adapters,
// keys, certificates. It refuses folders, FIFOs, sockets and devices, because opening
// or reading those can block forever. It follows symbolic links.
//
// Invariant: an open never waits for another process.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
)

// ErrKind means that a path is not that of a regular file.
var ErrKind = errors.New("not a regular file")

// ErrSize means that a file is larger than its reader allows.
var ErrSize = errors.New("file is too large")

// Open opens a regular file for reading. Its errors name the path; an ErrKind also names the
// kind of the file.
func Open(path string) (*os.File, error) {
	info, err := os.Stat(path) // opening some devices has effects
	if err == nil {
		err = check(path, info)
	}
	if err != nil {
		return nil, err
	}
	// Without O_NONBLOCK, opening a FIFO that has replaced the file would block.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err = f.Stat(); err == nil {
		err = check(path, info)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// check returns an error unless info is a regular file's.
func check(path string, info fs.FileInfo) error {
	if info.Mode().IsRegular() {
		return nil
	}
	return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("%w but %s", ErrKind, kind(info.Mode()))}
}

// kind returns the name of a file's type.
func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a folder"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO (named pipe)"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "of another kind"
}

// ReadFile returns the content of a regular file of at most limit bytes; a larger
// one is an ErrSize.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: more than %d bytes", ErrSize, limit)}
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

// WarnExposed logs a warning for each file with secrets that all users can read or change.
func WarnExposed(log *slog.Logger, paths ...string) {
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o006 != 0 {
			log.Warn("every user can read or change a file with secrets; run chmod o-rwx on it", "file", path, "mode", info.Mode().Perm())
		}
	}
}

// Dir is like os.DirFS, but opens only regular files, and the folder itself for a list of its
// entries.
type Dir string

// Open implements fs.FS.
func (d Dir) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	if name == "." {
		return os.DirFS(string(d)).Open(name)
	}
	f, err := Open(filepath.Join(string(d), filepath.FromSlash(name)))
	if err != nil {
		return nil, err // a nil *os.File is not a nil fs.File
	}
	return f, nil
}
