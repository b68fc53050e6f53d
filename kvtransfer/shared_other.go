//go:build !linux

package kvtransfer

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
)

// Shared requires Linux.
type Shared struct{}

var errShared = errors.New("kvtransfer: shared memory needs Linux")

// NewShared returns an error: shared memory requires Linux.
func NewShared() (*Shared, error) { return nil, errShared }

// Map returns an error.
func (*Shared) Map(int) ([]byte, error) { return nil, errShared }

// File returns nil.
func (*Shared) File() *os.File { return nil }

// Place returns false.
func (*Shared) Place([]byte) (int64, bool) { return 0, false }

// Close does nothing.
func (*Shared) Close() error { return nil }

func (*Shared) seal() error                 { return errShared }
func (*Shared) readOnly() (*os.File, error) { return nil, errShared }

type flag struct {
	*Shared
	word *atomic.Uint32
}

func (*flag) close() {}

func newFlag() (*flag, error) { return nil, errShared }

type mapping struct {
	nPages int
	users  atomic.Int32
}

func mapShared(Layout, *memoryMessage, []*os.File) (*mapping, error) { return nil, errShared }

func (*mapping) revoked() bool                { return true }
func (*mapping) page(Layout, int, int) []byte { return nil }
func (*mapping) unmap()                       {}

func sendFiles(net.Conn, []byte, ...*os.File) error          { return errShared }
func receiveFiles(net.Conn, []byte) (int, []*os.File, error) { return 0, nil, errShared }
func samePeer(net.Conn) error                                { return errShared }
func listenMemory(string) (net.Listener, error)              { return nil, errShared }
