package roles

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-serving/tandem/engine"
)

// rank runs a tensor-parallel worker of a node (--tensor-parallel-size). The node starts it, and
// it ends with the node. It ignores signals, because the node drains first.
func rank(number string) int {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1)
	if err := engine.ServeWorker(); err != nil {
		fmt.Fprintf(os.Stderr, "tandem rank %s: %v\n", number, err)
		return 1
	}
	return 0
}

// whileStepping runs f until its context ends, or until the engine stops by itself because a
// worker is lost. Then it calls stopped, ends f, and returns the engine's error.
func (n *node) whileStepping(ctx context.Context, f func(context.Context) error, stopped func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.Work(func(ended context.Context) {
		select {
		case <-n.eng.Done():
			stopped()
			cancel()
		case <-ended.Done():
		}
	})
	err := f(ctx)
	select {
	case <-n.eng.Done():
		return cmp.Or(n.eng.Err(), err)
	default:
		return err
	}
}
