package roles

import (
	"context"
	"errors"
	"testing"
)

// A batch ends with its gateway, and the gateway with its batch.
func TestWhileServing(t *testing.T) {
	broken, notReady := errors.New("broken"), errors.New("not ready")
	waits := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	never := func() error { return notReady }
	err := whileServing(t.Context(), func(context.Context) error { return broken }, never, waits)
	if !errors.Is(err, errGatewayEnded) || !errors.Is(err, broken) {
		t.Errorf("a gateway that ends at once: %v", err)
	}
	ended := make(chan struct{})
	serve := func(ctx context.Context) error { defer close(ended); <-ctx.Done(); return nil }
	if err := whileServing(t.Context(), serve, func() error { return nil }, func(ctx context.Context) error { return ctx.Err() }); err != nil {
		t.Error(err)
	}
	<-ended
	ctx, stop := context.WithCancelCause(t.Context())
	stop(broken)
	ended = make(chan struct{})
	if err := whileServing(ctx, serve, never, waits); !errors.Is(err, broken) || errors.Is(err, errGatewayEnded) {
		t.Errorf("a signal before the gateway is ready: %v", err)
	}
}
