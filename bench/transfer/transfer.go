// Package transfer measures KV transfer between two machines, or two processes of one. One side
// listens and owns the memory where pages land. The other side pushes scattered pages to it. Both
// use kvtransfer.Reader and Writer as decode and prefill nodes do, with leases and checksums.
//
// A round grants random pages and pushes random pages to them. The writer times it from opening the
// push until the reader has confirmed the last byte. Then the reader compares every byte with the
// writer's pattern and overwrites its pages, so that the contents of an earlier round cannot pass
// for this one's. Invariant: only rounds whose every byte was right have figures.
//
// The two sides exchange lines of JSON on a control connection (control.go), which carries no KV.
// The package knows neither models nor engines, and does not compare programs: bench/kvtransfer
// does.
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

// ErrOption is wrapped by errors about options. ErrWrong means that wrong bytes arrived.
var (
	ErrOption = errors.New("transfer: bad option")
	ErrWrong  = errors.New("transfer: wrong bytes")
)

// Options describe a measurement. The listener takes them from the peer, within its own bounds.
type Options struct {
	Listen      string // host:port on which the reader's side listens
	Peer        string // host:port of the listener, for the writer's side
	KVPort      int    // listener: port of the pages' connections; 0: any
	MemoryBytes int64  // listener: bound on the memory that a peer may request

	Transport  string // one of kvtransfer.Transports
	Pages      int    // pages of a round, over all layers
	PageBytes  int
	Layers     int // regions, each with Pages/Layers pages
	Streams    int // data connections
	Rounds     int
	SmallPages int    // pages of a small transfer, whose latency is measured
	Smalls     int    // number of small transfers
	NoChecksum bool   // omit CRC32C
	Provider   string // libfabric's, for --transport rdma
	Address    string // address of that provider's interface on this side; empty: the control connection's
	Seed       uint64

	ServerTLS, ClientTLS *tls.Config // nil: plain
	JSON                 bool        // the report as JSON
	Out                  io.Writer
}

// Bounds on a peer's requests.
const (
	maxLayers  = 1 << 10
	maxStreams = 16
	maxRounds  = 1_000_000
	// leaseDuration is the time without progress after which a round fails.
	leaseDuration = 10 * time.Second
	// stepTimeout bounds each answer on the control connection, and a round's push.
	stepTimeout = 2 * time.Minute
)

// setup is what both sides must agree on, as the peer sends it.
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

// version is the version of the control connection's protocol.
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

// fabric opens a libfabric provider on the interface of a connection, or on o.Address.
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

// check checks a peer's setup against the listener's bounds.
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

// pages draws the pages of a round: n of each side, scattered over the whole memory.
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
