package transfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// pusher is the writer's side of a measurement.
type pusher struct {
	setup
	l      *lines
	writer *kvtransfer.Writer
	rounds uint64
}

// Push measures against the listener at o.Peer and writes the report.
func Push(ctx context.Context, o Options) error {
	r, err := Measure(ctx, o)
	if err != nil {
		return err
	}
	return r.write(o)
}

// Measure measures against the listener at o.Peer.
func Measure(ctx context.Context, o Options) (r *Report, err error) {
	s, err := o.setup()
	if err != nil {
		return nil, err
	}
	transport, err := kvtransfer.ParseTransport(o.Transport)
	if err != nil {
		return nil, fmt.Errorf("%w: --transport: %w", ErrOption, err)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", o.Peer)
	if err != nil {
		return nil, fmt.Errorf("%w: --peer %s: %w", ErrOption, o.Peer, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if o.ClientTLS != nil {
		c := o.ClientTLS.Clone()
		if c.ServerName == "" {
			c.ServerName, _, _ = net.SplitHostPort(o.Peer) // valid: it was just dialed
		}
		conn = tls.Client(conn, c)
	}
	p := &pusher{setup: s, l: newLines(conn)}
	a, err := p.l.ask(request{Setup: &s})
	if err != nil {
		return nil, err
	}
	m, err := newMemory(&p.setup, transport == kvtransfer.Auto || transport == kvtransfer.OverShared)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.free()) }()
	m.fill()
	wo := kvtransfer.WriterOptions{Node: "writer", Layout: s.layout(), Memory: m, Shared: m.shared, Transport: transport, TLS: o.ClientTLS, Unchecked: o.NoChecksum, Connections: o.Streams}
	if transport == kvtransfer.OverRDMA {
		if wo.Fabric, err = o.fabric(o.Provider, conn.LocalAddr()); err != nil {
			return nil, err
		}
		defer wo.Fabric.Close()
	}
	if p.writer, err = kvtransfer.NewWriter(wo); err != nil {
		return nil, err
	}
	defer p.writer.Close()
	if r, err = p.measure(ctx, o); err != nil {
		return nil, err
	}
	r.Machines = [2]string{report.Machine(), a.Machine}
	return r, nil
}

// measure runs a warm-up, the rounds and the small transfers.
func (p *pusher) measure(ctx context.Context, o Options) (*Report, error) {
	r := &Report{
		Layers: o.Layers, Pages: o.Pages, PageBytes: o.PageBytes, Streams: o.Streams,
		Checksum: !o.NoChecksum, TLS: o.ClientTLS != nil, Bytes: int64(o.Pages) * int64(o.PageBytes),
	}
	for i := range o.Rounds + 1 {
		x, err := p.round(ctx, p.Positions)
		if err != nil {
			return nil, err
		}
		if i > 0 { // the first round dials and touches memory
			r.Rounds = append(r.Rounds, x)
		}
	}
	for range o.Smalls {
		x, err := p.round(ctx, o.SmallPages/o.Layers)
		if err != nil {
			return nil, err
		}
		r.smalls = append(r.smalls, x)
	}
	switch s := p.writer.Stats(); {
	case s.SharedBytes > 0:
		r.Transport = string(kvtransfer.OverShared)
	case s.FabricBytes > 0:
		r.Transport = string(kvtransfer.OverRDMA)
	default:
		r.Transport = string(kvtransfer.OverTCP)
	}
	if o.Transport == string(kvtransfer.OverRDMA) && r.Transport != o.Transport {
		return nil, fmt.Errorf("%w: --transport rdma: the listener has no libfabric provider %q, or another interface", ErrOption, o.Provider)
	}
	r.SmallBytes = int64(o.SmallPages) * int64(o.PageBytes)
	r.sum()
	return r, nil
}

// round moves pages once and asks the listener to compare them.
func (p *pusher) round(ctx context.Context, positions int) (Round, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	p.rounds++
	n := round{p.rounds, positions}
	src, _ := p.pages(n.N, positions)
	a, err := p.l.ask(request{Grant: &n})
	if err != nil {
		return Round{}, err
	}
	cpu, began := load.CPUTime(), time.Now()
	push, err := p.writer.Open(ctx, a.Wire, kvtransfer.PushOptions{})
	if err != nil {
		return Round{}, err
	}
	for layer := range p.Layers {
		if err := push.Send(layer, src, 0); err != nil {
			return Round{}, errors.Join(err, push.Abort(err))
		}
	}
	if err := push.Wait(ctx); err != nil {
		return Round{}, err
	}
	x := Round{Seconds: time.Since(began).Seconds(), WriterCPU: (load.CPUTime() - cpu).Seconds()}
	if a, err = p.l.ask(request{Verify: &n}); err != nil {
		return Round{}, err
	}
	x.ReaderCPU = a.CPU
	return x, nil
}
