package transfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// Listen serves peers, one at a time, until ctx ends.
func Listen(ctx context.Context, o Options) error {
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return fmt.Errorf("%w: --listen %s: %w", ErrOption, o.Listen, err)
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	fmt.Fprintf(o.Out, "listening on %s\n", l.Addr())
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if o.ServerTLS != nil {
			conn = tls.Server(conn, o.ServerTLS)
		}
		unhook := context.AfterFunc(ctx, func() { conn.Close() })
		err = o.serve(newLines(conn))
		unhook()
		conn.Close()
		if ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
			fmt.Fprintf(o.Out, "%v: %v\n", conn.RemoteAddr(), err)
		}
	}
}

// Loopback measures between two halves of this process, over the loopback interface.
func Loopback(ctx context.Context, o Options) (*Report, error) {
	ctx, cancel := context.WithCancel(ctx)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		cancel()
		return nil, err
	}
	var served sync.WaitGroup
	served.Go(func() {
		conn, err := l.Accept()
		if err != nil {
			return // Measure has failed before it connected
		}
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		_ = o.serve(newLines(conn)) // Measure returns the error, too
	})
	o.Peer = l.Addr().String()
	r, err := Measure(ctx, o)
	cancel()
	l.Close()
	served.Wait()
	return r, err
}

// side is the listener's half of one peer's measurement.
type side struct {
	setup
	mem    *memory
	reader *kvtransfer.Reader
	fabric *fabric.Device // nil: not requested
	events chan kvtransfer.Event
	ended  chan struct{} // closed when events are no longer received

	granted  round
	began    float64 // CPU seconds at the grant
	src, dst []int32
}

// serve handles one peer's requests.
func (o *Options) serve(l *lines) error {
	var r request
	if err := l.read(&r, true); err != nil {
		return err
	}
	if r.Setup == nil {
		return fmt.Errorf("%w: the first line is no setup", ErrOption)
	}
	s, err := o.open(l, r.Setup)
	if err != nil {
		_ = l.send(reply{Error: err.Error()}) // this function returns the error, too
		return err
	}
	defer s.close()
	err = l.send(reply{Machine: report.Machine()})
	for err == nil {
		r = request{}
		if err = l.read(&r, true); err != nil {
			break
		}
		var a reply
		var failed error
		switch {
		case r.Grant != nil:
			a.Wire, failed = s.grant(*r.Grant)
		case r.Verify != nil:
			a, failed = s.verify(*r.Verify)
		default:
			failed = fmt.Errorf("%w: a line asks nothing", ErrOption)
		}
		if failed != nil {
			a.Error = failed.Error()
		}
		err = l.send(a)
	}
	return err
}

// open allocates memory and listens for its pages.
func (o *Options) open(l *lines, s *setup) (*side, error) {
	if err := s.check(o.MemoryBytes); err != nil {
		return nil, err
	}
	transport, err := kvtransfer.ParseTransport(s.Transport)
	if err != nil {
		return nil, fmt.Errorf("%w: --transport: %w", ErrOption, err)
	}
	host, _, err := net.SplitHostPort(l.conn.LocalAddr().String())
	if err != nil {
		return nil, err
	}
	d := &side{setup: *s, events: make(chan kvtransfer.Event, 4), ended: make(chan struct{})}
	if d.mem, err = newMemory(&d.setup, false); err != nil {
		return nil, err
	}
	all := make([]int32, s.Positions)
	for i := range all {
		all[i] = int32(i)
	}
	d.mem.spoil(all)
	ro := kvtransfer.ReaderOptions{
		Node: "reader", Layout: s.layout(), Memory: d.mem, Transport: transport, Listen: net.JoinHostPort(host, strconv.Itoa(o.KVPort)), TLS: o.ServerTLS,
		Unchecked: s.NoChecksum,
		OnEvent: func(e kvtransfer.Event) {
			select {
			case d.events <- e:
			case <-d.ended:
			}
		},
	}
	if transport == kvtransfer.OverRDMA {
		if d.fabric, err = o.fabric(s.Provider, l.conn.LocalAddr()); err != nil {
			return nil, errors.Join(err, d.mem.free())
		}
		ro.Fabric = d.fabric
	}
	if d.reader, err = kvtransfer.NewReader(ro); err != nil {
		return nil, errors.Join(err, d.closeFabric(), d.mem.free())
	}
	return d, nil
}

func (d *side) close() {
	close(d.ended)
	_ = errors.Join(d.reader.Close(), d.closeFabric(), d.mem.free()) // the process serves the next peer, or ends
}

func (d *side) closeFabric() error {
	if d.fabric == nil {
		return nil
	}
	return d.fabric.Close()
}

// grant leases a round's pages.
func (d *side) grant(r round) ([]byte, error) {
	if r.Positions < 1 || r.Positions > d.Positions {
		return nil, fmt.Errorf("%w: %d positions of %d", ErrOption, r.Positions, d.Positions)
	}
	d.granted = r
	d.src, d.dst = d.pages(r.N, r.Positions)
	g, err := d.reader.Grant(kvtransfer.GrantRequest{Pages: d.dst, Duration: leaseDuration})
	if err != nil {
		return nil, err
	}
	d.began = load.CPUTime().Seconds()
	return g.Wire, nil
}

// verify checks the round that was granted last.
func (d *side) verify(r round) (reply, error) {
	if d.src == nil || r != d.granted {
		return reply{}, fmt.Errorf("%w: round %d was not granted last", ErrOption, r.N)
	}
	a := reply{CPU: load.CPUTime().Seconds() - d.began}
	var e kvtransfer.Event
	select {
	case e = <-d.events: // the writer has the confirmation, so the event follows at once
	case <-time.After(stepTimeout):
		return a, fmt.Errorf("round %d: %w", r.N, kvtransfer.ErrTimeout)
	}
	if e.Kind != kvtransfer.Arrived {
		return a, fmt.Errorf("round %d: %w", r.N, e.Err)
	}
	err := d.mem.compare(d.src, d.dst)
	d.mem.spoil(d.dst)
	d.src = nil
	return a, err
}
