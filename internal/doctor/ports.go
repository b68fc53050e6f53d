package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"syscall"
)

// ports tries to listen on each port.
func ports(_ context.Context, o *Options) (lines []Line) {
	for _, p := range o.Ports {
		name := fmt.Sprintf("%s --%s %d", p.Role, p.Flag, p.Number)
		if p.Number == 0 {
			lines = append(lines, ok(name, "any free one"))
			continue
		}
		err := try(p)
		switch {
		case err == nil:
			lines = append(lines, ok(name, "free on %s", p.Host))
		case errors.Is(err, syscall.EADDRINUSE):
			lines = append(lines, taken(o, p, name))
		case errors.Is(err, syscall.EACCES):
			lines = append(lines, ok(name, "%v", err).but(Problem, "ports below 1024 need root or CAP_NET_BIND_SERVICE: choose another one"))
		default:
			lines = append(lines, ok(name, "%v", err).but(Problem, "is --host an address of this machine?"))
		}
	}
	return lines
}

// try listens and closes again.
func try(p Port) error {
	address := net.JoinHostPort(p.Host, strconv.Itoa(p.Number))
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	err = l.Close()
	if p.UDP && err == nil {
		c, udpErr := net.ListenPacket("udp", address)
		if udpErr != nil {
			return udpErr
		}
		err = c.Close()
	}
	return err
}

// taken is the line of a port that a process has.
func taken(o *Options, p Port, name string) Line {
	pid, program := holder(o.System, p.Number)
	switch {
	case program == "tandem":
		return ok(name, "tandem has it (pid %d)", pid)
	case program == "":
		program = "a process of another user or container"
	default:
		program = fmt.Sprintf("%s (pid %d)", program, pid)
	}
	l := ok(name, "%s has it", program)
	do := fmt.Sprintf("end it, or choose another --%s", p.Flag)
	if o.PortsNeeded {
		return l.but(Problem, do)
	}
	return l.but(Warning, do)
}

// maxProcesses bounds the processes whose descriptors are looked at.
const maxProcesses = 50_000

// holder returns the process that has a port, as far as this user may see it.
func holder(system fs.FS, port int) (pid int, program string) {
	sockets := map[string]bool{}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		for line := range strings.Lines(read(system, "proc/net/"+table)) {
			f := strings.Fields(line)
			if len(f) < 10 || strings.HasPrefix(table, "tcp") && f[3] != "0A" { // listening
				continue
			}
			_, hex, found := strings.Cut(f[1], ":")
			if n, err := strconv.ParseUint(hex, 16, 16); found && err == nil && int(n) == port {
				sockets["socket:["+f[9]+"]"] = true
			}
		}
	}
	if len(sockets) == 0 {
		return 0, ""
	}
	processes, err := fs.ReadDir(system, "proc")
	if err != nil {
		return 0, ""
	}
	for _, p := range processes[:min(len(processes), maxProcesses)] {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		files, err := fs.ReadDir(system, "proc/"+p.Name()+"/fd")
		if err != nil { // another user's
			continue
		}
		for _, f := range files {
			if to, err := fs.ReadLink(system, "proc/"+p.Name()+"/fd/"+f.Name()); err == nil && sockets[to] {
				return pid, read(system, "proc/"+p.Name()+"/comm")
			}
		}
	}
	return 0, ""
}
