package cli

import (
	"fmt"
	"log/slog"

	"github.com/tandem-serving/tandem/bench/transfer"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

func benchTransfer(v *Invocation) error {
	var o transfer.Options
	memory := config.Bytes(4 << 30)
	v.StringVar(&o.Listen, "listen", "", "HOST:PORT: provide the memory that pages are written to, and wait for peers")
	v.StringVar(&o.Peer, "peer", "", "HOST:PORT of a listener: push pages to it and report the time")
	v.StringVar(&o.Transport, "transport", "tcp", "how pages travel: tcp, shm (between processes of one host), rdma (by libfabric, in the clear), or auto")
	v.StringVar(&o.Provider, "fabric-provider", "verbs", "libfabric's provider for --transport rdma: verbs, efa, tcp, shm; the peer's is used")
	v.StringVar(&o.Address, "fabric-address", "", "address of this side's interface for --transport rdma; empty: the one that the two sides talk over")
	v.IntVar(&o.Pages, "pages", 16384, "pages of a round, over all layers")
	v.IntVar(&o.PageBytes, "page-bytes", 32768, "bytes of a page")
	v.IntVar(&o.Layers, "layers", 16, "layers of the pages, pushed one after the other")
	v.IntVar(&o.Streams, "streams", 2, "data connections; nodes have 2")
	v.IntVar(&o.Rounds, "rounds", 5, "rounds; the median is reported")
	v.IntVar(&o.SmallPages, "small-pages", 32, "pages of a small transfer")
	v.IntVar(&o.Smalls, "small-rounds", 200, "small transfers, for their latency; 0: none")
	v.BoolVar(&o.NoChecksum, "no-checksum", false, "leave out CRC32C, to measure its cost; nodes never do")
	v.Uint64Var(&o.Seed, "seed", 1, "seed of which pages are transferred, and where to")
	v.IntVar(&o.KVPort, "kv-port", 0, "listener: port for the pages; 0: any")
	v.Var(&memory, "memory", "listener: the most memory that a peer may request")
	v.BoolVar(&o.JSON, "json", false, "the report as JSON")
	dir := v.String("tls-dir", "", "a node's folder made by `tandem ca`: mutual TLS, as with --kv-tls; the same on both sides")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if (o.Listen == "") == (o.Peer == "") {
		return fmt.Errorf("%w: give --listen HOST:PORT on one machine and --peer HOST:PORT on the other", config.ErrValue)
	}
	o.MemoryBytes, o.Out = int64(memory), v.Out
	if *dir != "" {
		m, err := tlsconf.Load(*dir, slog.New(slog.DiscardHandler))
		if err != nil {
			return fmt.Errorf("%w: --tls-dir: %w", config.ErrValue, err)
		}
		defer m.Close()
		o.ServerTLS, o.ClientTLS = m.Server(), m.Client()
	}
	ctx, _, stop := process.Signals()
	defer stop()
	if o.Listen != "" {
		return ended(ctx, transfer.Listen(ctx, o))
	}
	return interrupted(ctx, transfer.Push(ctx, o))
}
