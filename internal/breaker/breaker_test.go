package breaker

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A breaker opens after failures in a row, lets one call through after the pause, and closes
// after its success.
func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failed, ignored := errors.New("failed"), errors.New("ignored")
		var changes []string
		b := New(Options{Failures: 2, Pause: time.Second,
			Ignore:  func(err error) bool { return errors.Is(err, ignored) },
			Changed: func(from, to string) { changes = append(changes, from+">"+to) }})
		call := func(result error, want string) {
			t.Helper()
			if err := b.Do(func() error { return result }); err != result || b.State() != want {
				t.Errorf("%v: %v, then %s, want %s", result, err, b.State(), want)
			}
		}
		call(failed, Closed)
		call(nil, Closed)
		call(failed, Closed)
		call(ignored, Closed)
		call(failed, Open)
		if _, err := b.Allow(); !Refused(err) {
			t.Errorf("an open breaker: %v", err)
		}
		time.Sleep(time.Second + time.Millisecond)
		done, err := b.Allow()
		if err != nil || b.State() != HalfOpen {
			t.Fatalf("after the pause: %v, %s", err, b.State())
		}
		if _, err := b.Allow(); !Refused(err) {
			t.Errorf("a second call while half-open: %v", err)
		}
		done(nil)
		if want := []string{"closed>open", "open>half-open", "half-open>closed"}; !slices.Equal(changes, want) || Refused(failed) {
			t.Errorf("%q", changes)
		}
	})
}

// A call that panics counts as failed.
func TestPanic(t *testing.T) {
	b := New(Options{Failures: 1, Pause: time.Minute})
	func() {
		defer func() { _ = recover() }()
		_ = b.Do(func() error { panic("x") })
	}()
	if b.State() != Open {
		t.Error(b.State())
	}
}
