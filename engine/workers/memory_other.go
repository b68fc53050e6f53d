//go:build !linux

package workers

import (
	"errors"
	"os"
	"sync/atomic"
	"time"
)

var errSystem = errors.New("workers: tensor parallelism needs Linux")

func newMemory(string, int64) (*os.File, error) { return nil, errSystem }

// Map returns an error on this platform.
func Map(*os.File, int64, int) ([]byte, error) { return nil, errSystem }

func unmap([]byte) error { return nil }

func sleep(_ *atomic.Uint32, _ uint32, d time.Duration) { time.Sleep(min(d, time.Millisecond)) }
func wake(*atomic.Uint32)                               {}
