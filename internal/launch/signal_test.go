package launch

import (
	"bytes"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func ignoreTerm() { signal.Ignore(syscall.SIGTERM) }

// onTerm has the function that it returns wait for a SIGTERM from now on.
func onTerm() (wait func(stubborn bool)) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	return func(stubborn bool) { waitTerm(c, stubborn) }
}

// waitTerm returns at SIGTERM; a stubborn node outlives it for a while.
func waitTerm(c <-chan os.Signal, stubborn bool) {
	if stubborn {
		time.Sleep(time.Minute)
		return
	}
	select {
	case <-c:
	case <-time.After(time.Minute):
	}
}

// killOne kills one of this process's own children that is a node.
func killOne(t *testing.T) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || len(all) == 0 {
		t.Fatalf("no processes in /proc: %v", err)
	}
	for _, path := range all {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // ended in between
		}
		// pid (name) state ppid …; the name may hold anything but the last ')'.
		rest := string(stat[bytes.LastIndexByte(stat, ')')+1:])
		if fields := strings.Fields(rest); len(fields) < 2 || fields[1] != strconv.Itoa(os.Getpid()) {
			continue
		}
		args, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if err != nil || !strings.Contains(string(args), "node-ok") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatal("no child to kill")
}
