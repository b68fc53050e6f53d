//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/netlab"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// gigabit is the links' rate in bytes a second.
const gigabit = 125e6

// links are the links of the throughput measurement.
var links = []struct {
	name  string
	shape netlab.Shape
}{
	{"1 Gbit/s", netlab.Shape{Rate: gigabit}},
	{"and 50 ms each way", netlab.Shape{Rate: gigabit, Delay: 50 * time.Millisecond}},
	{"and 1 % of packets lost", netlab.Shape{Rate: gigabit, Delay: 50 * time.Millisecond, Loss: 0.01}},
}

// underWay is the warm-up of a throughput measurement.
const underWay = 2 * time.Second

// way is a configuration of a pair.
type way struct {
	control     string // congestion control
	connections int
	buffer      int // SocketBuffer
}

func (w way) String() string {
	return fmt.Sprintf("Tandem, %d connections, %s", w.connections, w.control) + map[bool]string{true: ", buffers as the kernel sizes them"}[w.buffer < 0]
}

var ways = []way{{"cubic", 2, 0}, {"bbr", 2, 0}, {"bbr", 8, 0}, {"bbr", 2, -1}}

func (o *options) throughput(ctx context.Context, b *strings.Builder) error {
	fmt.Fprintf(b, "## What arrives, in MB/s\n\nOver %v, behind %v to get under way. The links' way back loses and delays as well.\n\n|", o.seconds, underWay)
	for _, l := range links {
		fmt.Fprintf(b, " | %s", l.name)
	}
	b.WriteString(" |\n|---|---|---|---|\n")
	row := func(name string, run func(*ends) (float64, error)) error {
		fmt.Fprintf(b, "| %s ", name)
		for _, l := range links {
			e, err := newEnds(o.seed)
			if err != nil {
				return err
			}
			e.lab.Both(e.from, e.to, l.shape)
			v, err := run(e)
			e.lab.Close()
			if err != nil {
				return fmt.Errorf("%s over %s: %w", name, l.name, err)
			}
			fmt.Fprintf(b, "| %.1f ", v/1e6)
		}
		b.WriteString("|\n")
		return nil
	}
	for _, control := range []string{"cubic", "bbr"} {
		if err := row("iperf3 -P2, "+control, func(e *ends) (float64, error) { return o.iperf(ctx, e, control) }); err != nil {
			return err
		}
	}
	for _, w := range ways {
		if err := row(w.String(), func(e *ends) (float64, error) { return o.flood(ctx, e, w) }); err != nil {
			return err
		}
	}
	b.WriteString("\n")
	return nil
}

// flood returns the throughput of a configuration, in bytes a second.
func (o *options) flood(ctx context.Context, e *ends, w way) (rate float64, err error) {
	p, err := newPair(e, 16, 64, func(r *kvtransfer.ReaderOptions, wo *kvtransfer.WriterOptions) {
		wo.Connections, wo.CongestionControl, wo.SocketBuffer, r.SocketBuffer = w.connections, w.control, w.buffer, w.buffer
	})
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	floods := make(chan error)
	const nFloods = 2 // so that bytes of the next push are available when one ends
	for i := range nFloods {
		n := len(p.pages) / nFloods
		go func() { floods <- p.flood(ctx, p.pages[i*n:][:n]) }()
	}
	time.Sleep(underWay)
	before, began := p.reader.Stats().PayloadBytes, time.Now()
	time.Sleep(o.seconds)
	rate = float64(p.reader.Stats().PayloadBytes-before) / time.Since(began).Seconds()
	cancel()
	for range nFloods {
		err = errors.Join(err, <-floods)
	}
	return rate, errors.Join(err, p.close())
}

// iperf returns the throughput of iperf3 over two connections.
func (o *options) iperf(ctx context.Context, e *ends, control string) (float64, error) {
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-B", e.to.String())
	if err := e.reader.Within(server.Start); err != nil {
		return 0, err
	}
	defer server.Wait()
	time.Sleep(300 * time.Millisecond) // iperf3 does not report that it listens
	var out strings.Builder
	client := exec.CommandContext(ctx, "iperf3", "-c", e.to.String(), "-P2", "-J", "-C", control, "-O", strconv.Itoa(int(underWay.Seconds())), "-t", strconv.Itoa(int(o.seconds.Seconds())))
	client.Stdout = &out
	if err := e.writer.Within(client.Start); err != nil {
		return 0, errors.Join(err, server.Process.Kill())
	}
	if err := client.Wait(); err != nil {
		return 0, errors.Join(err, server.Process.Kill())
	}
	var r struct {
		End struct {
			Received struct {
				Bits float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil || r.End.Received.Bits == 0 {
		return 0, fmt.Errorf("iperf3 printed no result: %w", errors.Join(err))
	}
	return r.End.Received.Bits / 8, nil
}
