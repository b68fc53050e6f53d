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

// rank is the life of a process that computes a part of a node's model. It is
// started by the node (--tensor-parallel-size) and ends with it: signals are the
// node's alone, which drains first.
func rank(number string) int {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1)
	if err := engine.ServeWorker(); err != nil {
		fmt.Fprintf(os.Stderr, "tandem rank %s: %v\n", number, err)
		return 1
	}
	return 0
}

// whileStepping runs f until its context ends, or until the engine stops by itself
// because a rank is lost: then it calls stopped first, and that is the error.
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
