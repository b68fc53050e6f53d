package httpserver

import (
	"runtime/debug"
	"testing"
)

// While large bodies are held Go's memory limit leaves room for them and for a share of
// garbage; afterwards it is what it was.
func TestMemoryLimitOfBodies(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	var p gcSettings
	p.tighten(1 << 30)
	if got, least := debug.SetMemoryLimit(-1), int64(1<<30+384<<20); got < least || got > least+p.base || p.base > 1<<30 {
		t.Errorf("a limit of %d MiB with %d MiB of all else, want %d MiB more", got>>20, p.base>>20, least>>20)
	}
	p.tighten(1 << 30)
	p.adjust()
	if got, least := debug.SetMemoryLimit(-1), int64(2<<30+768<<20); got < least {
		t.Errorf("a limit of %d MiB for two gateways, want at least %d MiB", got>>20, least>>20)
	}
	p.tighten(0)
	if got := debug.SetMemoryLimit(-1); got != before {
		t.Errorf("a limit of %d with a gateway that has none, want %d", got, before)
	}
	p.restore(0)
	p.restore(1 << 30)
	p.restore(1 << 30)
	if got := debug.SetMemoryLimit(-1); got != before {
		t.Errorf("a limit of %d afterwards, want %d", got, before)
	}
}
