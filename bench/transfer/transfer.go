// Package transfer measures KV transfer between two machines, or two processes of one: one side listens and owns the
// memory where pages land, the other pushes scattered pages to it, through the same kvtransfer.Reader and Writer that decode
// and prefill nodes use, with leases, checksums and all.
//
// A round grants random pages, pushes random pages to them and is timed at the writer from opening the push until the reader
// has confirmed the last byte. Then the reader compares every byte with what the writer was to hold, and overwrites them all, so that
// nothing a former round left can pass for this one's. Invariant: a figure is reported only of rounds whose every byte was right.
//
// The two sides talk over a connection of their own, a line of JSON at a time (control.go); no KV travels on it. The package
// knows neither models nor engines, and compares with nobody: bench/kvtransfer does.
package transfer

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// ErrOption is behind every refusal of an option; ErrWrong says that bytes arrived that were not sent.
var (
	ErrOption = errors.New("transfer: bad option")
	ErrWrong  = errors.New("transfer: wrong bytes")
)

// Options say what to measure. Those of the peer hold; the listener takes them from it, within its own bounds.
type Options struct {
	Listen      string // host:port where the reader's side waits for peers
	Peer        string // host:port of it, for the writer's side
	KVPort      int    // listener: port of the pages' connections; 0: any
	MemoryBytes int64  // listener: the most that a peer may ask it to set aside

	Transport  string // one of kvtransfer.Transports
	Pages      int    // pages of a round, over all layers
	PageBytes  int
	Layers     int // regions, each with Pages/Layers pages
	Streams    int // data connections
	Rounds     int
	SmallPages int    // pages of a small transfer, whose latency is measured
	Smalls     int    // how many of those
	NoChecksum bool   // CRC32C is left out
	Provider   string // libfabric's, for --transport rdma
	Address    string // either side: of that provider's interface here; empty: that of the connection beside
	Seed       uint64

	ServerTLS, ClientTLS *tls.Config // nil: plain
	JSON                 bool        // the report as JSON
	Out                  io.Writer
}

// Bounds of what a peer may ask.
const (
	maxLayers  = 1 << 10
	maxStreams = 16
	maxRounds  = 1_000_000
	// leaseDuration is how long a round may be silent.
	leaseDuration = 10 * time.Second
	// stepTimeout bounds each answer on the connection beside; a round's push has it too.
	stepTimeout = 2 * time.Minute
)

// setup is what both sides must agree on, as the peer tells it.
type setup struct {
	Version    int    `json:"version"`
	Transport  string `json:"transport"`
	Provider   string `json:"provider,omitempty"`
	Layers     int    `json:"layers"`
	Positions  int    `json:"positions"`
	PageBytes  int    `json:"page_bytes"`
	NoChecksum bool   `json:"no_checksum,omitempty"`
	Seed       uint64 `json:"seed"`
}

// version of what travels on the connection beside.
const version = 1

func (o *Options) setup() (setup, error) {
	switch {
	case o.Layers < 1 || o.Layers > maxLayers:
		return setup{}, fmt.Errorf("%w: --layers %d, want 1 to %d", ErrOption, o.Layers, maxLayers)
	case o.Pages < o.Layers || o.Pages%o.Layers != 0:
		return setup{}, fmt.Errorf("%w: --pages %d, want a multiple of --layers %d", ErrOption, o.Pages, o.Layers)
	case o.SmallPages < o.Layers || o.SmallPages%o.Layers != 0 || o.SmallPages > o.Pages:
		return setup{}, fmt.Errorf("%w: --small-pages %d, want a multiple of --layers %d, at most --pages %d", ErrOption, o.SmallPages, o.Layers, o.Pages)
	case o.PageBytes < wordBytes || o.PageBytes%wordBytes != 0 || o.PageBytes > kvtransfer.MaxPageBytes:
		return setup{}, fmt.Errorf("%w: --page-bytes %d, want a multiple of %d up to %d", ErrOption, o.PageBytes, wordBytes, kvtransfer.MaxPageBytes)
	case o.Streams < 1 || o.Streams > maxStreams:
		return setup{}, fmt.Errorf("%w: --streams %d, want 1 to %d", ErrOption, o.Streams, maxStreams)
	case o.Rounds < 1 || o.Rounds > maxRounds || o.Smalls < 0 || o.Smalls > maxRounds:
		return setup{}, fmt.Errorf("%w: --rounds %d, --small-rounds %d, want at least 1 and 0, at most %d", ErrOption, o.Rounds, o.Smalls, maxRounds)
	}
	return setup{
		Version: version, Transport: o.Transport, Provider: o.Provider, Layers: o.Layers, Positions: o.Pages / o.Layers, PageBytes: o.PageBytes,
		NoChecksum: o.NoChecksum, Seed: o.Seed,
	}, nil
}

// fabric opens a libfabric provider on the interface of a connection, or the one that was named.
func (o *Options) fabric(provider string, on net.Addr) (*fabric.Device, error) {
	address := o.Address
	if address == "" && provider != "shm" {
		address, _, _ = net.SplitHostPort(on.String()) // it is TCP
	}
	d, err := fabric.Open(fabric.Options{Provider: provider, Address: address})
	if err != nil {
		return nil, fmt.Errorf("%w: --fabric-provider: %w", ErrOption, err)
	}
	return d, nil
}

// check is the listener's look at what a peer asks.
func (s *setup) check(memory int64) error {
	most := memory / int64(max(s.PageBytes, 1)) / int64(max(s.Layers, 1))
	switch {
	case s.Version != version:
		return fmt.Errorf("%w: the peer speaks version %d of bench transfer, this is %d", ErrOption, s.Version, version)
	case s.Layers < 1 || s.Layers > maxLayers || s.PageBytes < wordBytes || s.PageBytes%wordBytes != 0 || s.Positions < 1:
		return fmt.Errorf("%w: %d layers of %d pages of %d bytes", ErrOption, s.Layers, s.Positions, s.PageBytes)
	case int64(s.Positions) > most:
		return fmt.Errorf("%w: %d layers of %d pages of %d bytes are more than the listener's --memory of %d bytes",
			ErrOption, s.Layers, s.Positions, s.PageBytes, memory)
	}
	return nil
}

func (s *setup) layout() kvtransfer.Layout {
	return kvtransfer.Layout{Regions: s.Layers, PageBytes: s.PageBytes, Hash: 0x62656e6368}
}

// pages draws which pages a round moves: n of each side, scattered over the whole memory.
func (s *setup) pages(round uint64, n int) (src, dst []int32) {
	rng := rand.New(rand.NewPCG(s.Seed, round))
	for _, to := range []*[]int32{&src, &dst} {
		*to = make([]int32, n)
		for i, p := range rng.Perm(s.Positions)[:n] {
			(*to)[i] = int32(p)
		}
	}
	return src, dst
}
