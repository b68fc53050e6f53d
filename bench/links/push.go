//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/tandem-serving/tandem/internal/netlab"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// network is a kvtransfer.Network within a place.
type network struct{ p *netlab.Place }

func (n network) Listen(addr string) (net.Listener, error) { return n.p.Listen("tcp", addr) }
func (n network) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return n.p.DialContext(ctx, "tcp", addr)
}

// memory is plain memory.
type memory [][]byte

func (m memory) Region(i int) []byte { return m[i] }

func newMemory(l kvtransfer.Layout, nPages int) memory {
	m := make(memory, l.Regions)
	for i := range m {
		m[i] = make([]byte, nPages*l.PageBytes)
		for k := range m[i] {
			m[i][k] = byte(k * 7)
		}
	}
	return m
}

// pair is a reader and a writer at the two ends.
type pair struct {
	reader *kvtransfer.Reader
	writer *kvtransfer.Writer
	layout kvtransfer.Layout
	pages  []int32
}

// newPair returns a pair with room for nPages positions of each layer.
func newPair(e *ends, layers, nPages int, change func(*kvtransfer.ReaderOptions, *kvtransfer.WriterOptions)) (*pair, error) {
	p := &pair{layout: kvtransfer.Layout{Regions: layers, PageBytes: 32 << 10, Hash: 1}}
	for i := range nPages {
		p.pages = append(p.pages, int32(i))
	}
	ro := kvtransfer.ReaderOptions{
		Node: "reader", Layout: p.layout, Memory: newMemory(p.layout, nPages), Network: network{e.reader}, Listen: e.to.String() + ":7000",
		Transport: kvtransfer.OverTCP, OnEvent: func(kvtransfer.Event) {},
	}
	wo := kvtransfer.WriterOptions{Node: "writer", Layout: p.layout, Memory: newMemory(p.layout, nPages), Network: network{e.writer}, Transport: kvtransfer.OverTCP}
	if change != nil {
		change(&ro, &wo)
	}
	var err error
	if p.reader, err = kvtransfer.NewReader(ro); err != nil {
		return nil, err
	}
	if p.writer, err = kvtransfer.NewWriter(wo); err != nil {
		return nil, errors.Join(err, p.reader.Close())
	}
	return p, nil
}

func (p *pair) close() error { return errors.Join(p.writer.Close(), p.reader.Close()) }

// lease is the time without progress after which a push expires.
const lease = time.Minute

func (p *pair) open(ctx context.Context, pages []int32) (*kvtransfer.Push, error) {
	g, err := p.reader.Grant(kvtransfer.GrantRequest{Pages: pages, Duration: lease})
	if err != nil {
		return nil, err
	}
	return p.writer.Open(ctx, g.Wire, kvtransfer.PushOptions{})
}

// push sends pages of all layers, each after its computing time, and returns the wait after the
// last layer.
func (p *pair) push(ctx context.Context, pages []int32, compute time.Duration) (exposed time.Duration, err error) {
	push, err := p.open(ctx, pages)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for layer := range p.layout.Regions {
		time.Sleep(time.Until(began.Add(time.Duration(layer+1) * compute)))
		if err := push.Send(layer, pages, 0); err != nil {
			return 0, errors.Join(err, push.Abort(err))
		}
	}
	last := time.Now()
	if err := push.Wait(ctx); err != nil {
		return 0, fmt.Errorf("pushing %d layers: %w", p.layout.Regions, err)
	}
	return time.Since(last), nil
}

// flood pushes pages repeatedly until ctx ends.
func (p *pair) flood(ctx context.Context, pages []int32) error {
	for {
		if _, err := p.push(ctx, pages, 0); ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
	}
}
