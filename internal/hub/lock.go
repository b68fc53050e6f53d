package hub

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// errLocked means that another process has the lock.
var errLocked = errors.New("another process downloads a file of this model")

// lockPoll is how often lock tries again.
const lockPoll = 50 * time.Millisecond

// tryLock takes the lock of a file by flock(2), as huggingface_hub does. The kernel releases it
// when the process ends.
func tryLock(path string) (unlock func(), err error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o664)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		var stat unix.Stat_t
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &stat)
		}
		switch {
		case err == nil && stat.Nlink > 0:
			return func() { _ = f.Close() }, nil
		case errors.Is(err, unix.EWOULDBLOCK):
			err = errLocked
		case err != nil:
			err = fmt.Errorf("lock %s: %w; the file system of the Hugging Face cache has to support flock(2)", path, err)
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		}
		// The file was deleted before it was locked.
	}
}

// lock waits for the lock of a file until ctx ends, and calls waiting once if another process has
// it. That process's own limits bound its download.
func lock(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	for first := true; ; first = false {
		if unlock, err = tryLock(path); !errors.Is(err, errLocked) {
			return unlock, err
		}
		if first {
			waiting()
		}
		if err := pause(ctx, lockPoll); err != nil {
			return nil, err
		}
	}
}

// pause waits, at most until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
