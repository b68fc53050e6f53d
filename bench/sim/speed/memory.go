package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"syscall"
	"time"
)

// cacheLine is what a load brings into the processor's caches.
type cacheLine struct {
	next uint32
	_    [60]byte
}

// chase returns the nanoseconds of a load that depends on the load before, of memory of so many
// bytes.
func chase(bytes int) float64 {
	lines := make([]cacheLine, bytes/64)
	order := rand.New(rand.NewPCG(1, uint64(bytes))).Perm(len(lines))
	for i, at := range order {
		lines[at].next = uint32(order[(i+1)%len(order)])
	}
	const loads = 4 << 20
	at := uint32(order[0])
	run := func() time.Duration {
		start := userTime()
		for range loads {
			at = lines[at].next
		}
		return userTime() - start
	}
	run()
	least := min(run(), run(), run())
	if int(at) >= len(lines) { // uses the result, so that the loads are not left out
		panic("a load outside of the memory")
	}
	return float64(least.Nanoseconds()) / loads
}

// userTime returns the user time of this process, to which other processes do not add.
func userTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano())
}

// measureMemory prints the latency of loads by the size of the memory that they are spread over.
func measureMemory(w io.Writer) error {
	fmt.Fprintln(w, "| MB | ns of a load |\n|---|---|")
	for kb := 256; kb <= 1<<20; kb *= 2 {
		if _, err := fmt.Fprintf(w, "| %.2f | %.1f |\n", float64(kb)/1024, chase(kb<<10)); err != nil {
			return err
		}
	}
	return nil
}

// occupy uses a processor core until the process is ended: "memory" by copying more memory than the
// caches have, "compute" by arithmetic without memory.
func occupy(what string) error {
	switch what {
	case "memory":
		from, to := make([]byte, 256<<20), make([]byte, 256<<20)
		for {
			copy(to, from)
			from, to = to, from
		}
	case "compute":
		for x := uint64(1); ; {
			for range 1 << 20 {
				x = x*6364136223846793005 + 1442695040888963407
			}
			if x == 0 {
				return nil
			}
		}
	}
	return fmt.Errorf("-occupy %q: want memory or compute", what)
}
