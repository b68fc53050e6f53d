//go:build deploy && linux

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// containerVariable has the specification of the container that this process becomes.
const containerVariable = "TANDEM_KUBE_CONTAINER"

// containerSpec is what a container's process needs to know.
type containerSpec struct {
	Network  string // name of the pod's network namespace
	Root     string // an empty folder, on which the container's root is mounted
	Image    string // folder with the image's files; "/" for those of this machine
	Mounts   []bind
	ReadOnly bool // the root is
	Host     string
	User     int
	Group    int
	Groups   []int
	Dir      string
	Args     []string // the first is the program, a path in the container
	Env      []string
}

// bind is a file or folder of this machine that a container has at a path.
type bind struct {
	Source, Target string
	ReadOnly       bool
}

// start starts the container's process, which writes to log.
func (s *containerSpec) start(log io.Writer) (*exec.Cmd, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{containerVariable + "=" + string(text)}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS}
	return cmd, cmd.Start()
}

// A process that start has made becomes the container's program before main.
func init() {
	text, ok := os.LookupEnv(containerVariable)
	if !ok {
		return
	}
	runtime.LockOSThread() // the network namespace and the root are those of the thread that calls exec
	var s containerSpec
	err := json.Unmarshal([]byte(text), &s)
	if err == nil {
		err = s.become()
	}
	fmt.Fprintln(os.Stderr, "container:", err)
	os.Exit(128)
}

// become replaces this process by the container's program.
func (s *containerSpec) become() error {
	if err := enterNetwork(s.Network); err != nil {
		return err
	}
	if err := s.fillRoot(); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(s.Host)); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := syscall.Setgroups(s.Groups); err != nil {
		return err
	}
	if err := syscall.Setgid(s.Group); err != nil {
		return err
	}
	if err := syscall.Setuid(s.User); err != nil {
		return err
	}
	if err := os.Chdir(s.Dir); err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", s.Args[0], syscall.Exec(s.Args[0], s.Args, s.Env))
}

func enterNetwork(name string) error {
	f, err := os.Open("/run/netns/" + name)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
}

// shownOfEtc are the files that a container has of its image's /etc.
var shownOfEtc = []string{"passwd", "group", "nsswitch.conf", "ssl", "ld.so.cache", "ca-certificates", "localtime", "protocols", "services"}

// fillRoot makes the container's root of the image and the mounts, and enters it.
func (s *containerSpec) fillRoot() error {
	var errs []error
	do := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	do("mounts of its own", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	do(s.Root, unix.Mount("tmpfs", s.Root, "tmpfs", 0, "mode=755"))
	for _, d := range []string{"proc", "dev", "etc", "run", "var", "sys"} {
		do(d, os.Mkdir(filepath.Join(s.Root, d), 0o755))
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if to, err := os.Readlink(filepath.Join(s.Image, d)); err == nil {
			do(d, os.Symlink(to, filepath.Join(s.Root, d)))
		}
	}
	do("proc", unix.Mount("proc", filepath.Join(s.Root, "proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""))
	do("dev", unix.Mount("tmpfs", filepath.Join(s.Root, "dev"), "tmpfs", unix.MS_NOSUID, "mode=755"))
	do("shm", os.Mkdir(filepath.Join(s.Root, "dev/shm"), 0o755))
	do("shm", unix.Mount("tmpfs", filepath.Join(s.Root, "dev/shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=64m"))
	all := []bind{{filepath.Join(s.Image, "usr"), "/usr", true}, {"/sys", "/sys", true}}
	for _, d := range []string{"null", "zero", "full", "random", "urandom"} {
		all = append(all, bind{"/dev/" + d, "/dev/" + d, false})
	}
	for _, name := range shownOfEtc {
		if from := filepath.Join(s.Image, "etc", name); exists(from) {
			all = append(all, bind{from, "/etc/" + name, true})
		}
	}
	for _, b := range append(all, s.Mounts...) {
		do(b.Target, b.mount(s.Root))
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	do("root", os.Chdir(s.Root))
	do("root", unix.PivotRoot(".", "."))
	do("root", unix.Unmount(".", unix.MNT_DETACH))
	do("root", os.Chdir("/"))
	if s.ReadOnly {
		do("root", unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	}
	return errors.Join(errs...)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// mount mounts the file or folder below root.
func (b *bind) mount(root string) error {
	source, err := filepath.EvalSymlinks(b.Source)
	if err != nil {
		return err
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	target := filepath.Join(root, b.Target)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if !exists(target) {
		err = os.WriteFile(target, nil, 0o644)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if !b.ReadOnly {
		return nil
	}
	// The flags of the mount below must be kept.
	var have unix.Statfs_t
	if err := unix.Statfs(target, &have); err != nil {
		return err
	}
	const kept = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_RELATIME
	return unix.Mount("", target, "", uintptr(have.Flags&kept)|unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
}

// command returns a command that runs args in the namespaces of a container's process, as its user.
func (s *containerSpec) command(ctx context.Context, pid int, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{
		"--target", strconv.Itoa(pid), "--mount", "--net", "--pid", "--ipc", "--uts", "--root", "--wdns=" + s.Dir,
		"--setuid", strconv.Itoa(s.User), "--setgid", strconv.Itoa(s.Group), "--"}, args...)...)
	cmd.Env = s.Env
	return cmd
}
