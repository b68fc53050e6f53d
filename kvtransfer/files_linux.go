package kvtransfer

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// listenMemory listens for writers that send their memory. The name is in the network namespace,
// not in the file system.
func listenMemory(name string) (net.Listener, error) { return net.Listen("unix", name) }

// sendFiles writes b with open files attached.
func sendFiles(conn net.Conn, b []byte, files ...*os.File) error {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("%w: files travel over unix sockets, this is %T", ErrArguments, conn)
	}
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	n, _, err := u.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	if err == nil && n < len(b) {
		_, err = u.Write(b[n:])
	}
	return err
}

// receiveFiles reads once into b, and receives at most two attached files.
func receiveFiles(conn net.Conn, b []byte) (int, []*os.File, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, nil, fmt.Errorf("%w: files travel over unix sockets, this is %T", ErrArguments, conn)
	}
	oob := make([]byte, unix.CmsgSpace(2*4))
	n, nOOB, flags, _, err := u.ReadMsgUnix(b, oob)
	if err != nil {
		return 0, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:nOOB])
	if err != nil {
		return 0, nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // another kind of message
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "peer's memory"))
		}
	}
	if flags&unix.MSG_CTRUNC != 0 || n == 0 {
		for _, f := range files {
			f.Close()
		}
		return 0, nil, errors.Join(ErrProtocol, net.ErrClosed)
	}
	return n, files, nil
}

// samePeer rejects processes of other users.
func samePeer(conn net.Conn) error {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("%w: %T does not report its user", ErrArguments, conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	var c *unix.Ucred
	if cErr := raw.Control(func(fd uintptr) { c, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cErr != nil || err != nil {
		return errors.Join(cErr, err)
	}
	if me := os.Geteuid(); int(c.Uid) != me && c.Uid != 0 {
		return fmt.Errorf("%w: a process of user %d, this one is of user %d", ErrRefused, c.Uid, me)
	}
	return nil
}
