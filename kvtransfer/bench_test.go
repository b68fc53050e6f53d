//go:build unix

package kvtransfer

import (
	"fmt"
	mrand "math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// BenchmarkPush moves scattered 32 KiB pages, both ends in this process; MB/s is payload, cpu-s/GB both ends together.
// The sizes are a short prompt's 1 MiB and a long one's 256 MiB.
func BenchmarkPush(b *testing.B) {
	for _, tr := range allTransports(b) {
		for _, connections := range []int{1, 2} {
			for _, nPages := range []int{2, 512} {
				b.Run(fmt.Sprintf("%s/connections=%d/KiB=%d", tr.name, connections, nPages*16*32), func(b *testing.B) {
					benchmarkPush(b, tr, connections, nPages)
				})
			}
		}
	}
}

func benchmarkPush(b *testing.B, tr transport, connections, nPages int) {
	l := Layout{Regions: 16, PageBytes: 32 << 10, Hash: 1}
	p := newPair(b, tr, l, 512, func(_ *ReaderOptions, w *WriterOptions) { w.Connections = connections })
	rng := mrand.New(mrand.NewPCG(1, 1))
	p.src.randomize(rng)
	p.dst.randomize(rng) // so that no page is fresh from the kernel
	src, dst := make([]int32, nPages), make([]int32, nPages)
	b.SetBytes(int64(nPages * l.Regions * l.PageBytes))
	var cpu, bytes float64
	for b.Loop() {
		b.StopTimer()
		for i, perm := range [][]int{rng.Perm(512), rng.Perm(512)} {
			for j := range src {
				*[]*int32{&src[j], &dst[j]}[i] = int32(perm[j])
			}
		}
		before := cpuSeconds(b)
		b.StartTimer()
		push := p.open(b, p.grant(b, time.Minute, dst...))
		p.sendAll(b, push, src...)
		if err := push.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		cpu += cpuSeconds(b) - before
		bytes += float64(nPages * l.Regions * l.PageBytes)
		b.StartTimer()
	}
	b.ReportMetric(cpu/(bytes/1e9), "cpu-s/GB")
	s := p.reader.Stats()
	if w := p.writer.Stats(); w.PayloadBytes != s.PayloadBytes {
		b.Errorf("%d bytes out, %d in", w.PayloadBytes, s.PayloadBytes)
	}
}

// cpuSeconds is what this process, both ends of the transfer, has used; unlike the time it hardly changes with the load beside it.
func cpuSeconds(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
