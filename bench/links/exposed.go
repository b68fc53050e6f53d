//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/netlab"
)

// A layer is 256 KiB, and the link takes as long for it as a link of 1 Gbit/s for 1 MiB. This
// machine can carry that rate next to its other work, so that the link is the bottleneck and not
// the emulation. The queue holds more than both connections have in flight, so that nothing is
// dropped.
const (
	layerPages = 8
	slowRate   = gigabit / 4
	slowQueue  = 32 << 20
)

// exposed measures how long a request waits after its last layer.
func (o *options) exposed(ctx context.Context, b *strings.Builder) error {
	fmt.Fprintf(b, `## What a request waits for

Layers of 256 KiB, one after the other as they are computed, over a link of 250 Mbit/s and 0.1 ms: from the last layer's end until every byte has landed and matched, over
the time of the whole transfer by itself. The link is so many times as fast as the layers come. Medians of %d.

| layers | link / compute | by itself, ms | exposed, ms | of the whole | at most 2/L | |
|---|---|---|---|---|---|---|
`, o.repeat)
	e, err := newEnds(o.seed)
	if err != nil {
		return err
	}
	defer e.lab.Close()
	e.lab.Both(e.from, e.to, netlab.Shape{Rate: slowRate, Delay: 100 * time.Microsecond, Queue: slowQueue})
	for _, layers := range []int{16, 32, 64} {
		p, err := newPair(e, layers, layerPages, nil)
		if err != nil {
			return err
		}
		err = o.exposedOf(ctx, b, p)
		if err := errors.Join(err, p.close()); err != nil {
			return err
		}
	}
	there, back := e.lab.Count(e.from, e.to), e.lab.Count(e.to, e.from)
	fmt.Fprintf(b, "\nOf %d packets the link dropped %d.\n\n", there.Packets+back.Packets, there.Dropped+back.Dropped)
	return nil
}

func (o *options) exposedOf(ctx context.Context, b *strings.Builder, p *pair) error {
	whole, err := o.median(func() (time.Duration, error) { return p.push(ctx, p.pages, 0) })
	if err != nil {
		return err
	}
	layers := p.layout.Regions
	for _, ratio := range []float64{1.1, 1.5, 2} {
		compute := time.Duration(ratio * float64(whole) / float64(layers))
		waited, err := o.median(func() (time.Duration, error) { return p.push(ctx, p.pages, compute) })
		if err != nil {
			return err
		}
		of, most := waited.Seconds()/whole.Seconds(), 2/float64(layers)
		verdict := "**does not hold**"
		if of <= most {
			verdict = "holds"
		}
		fmt.Fprintf(b, "| %d | %.1f | %.1f | %.2f | %.3f | %.3f | %s |\n", layers, ratio, 1e3*whole.Seconds(), 1e3*waited.Seconds(), of, most, verdict)
	}
	return nil
}

// median returns the median of o.repeat runs, after one that connects.
func (o *options) median(run func() (time.Duration, error)) (time.Duration, error) {
	var all []time.Duration
	for range o.repeat + 1 {
		d, err := run()
		if err != nil {
			return 0, err
		}
		all = append(all, d)
	}
	all = all[1:]
	slices.Sort(all)
	return all[len(all)/2], nil
}
