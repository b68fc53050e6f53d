package main

import (
	"fmt"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// kvTransport reads --kv-transport.
func kvTransport(n *config.Node) (kvtransfer.Transport, error) {
	t, err := kvtransfer.ParseTransport(n.KVTransport)
	if err != nil {
		return "", fmt.Errorf("%w: --kv-transport: %w", config.ErrValue, err)
	}
	return t, nil
}

// kvFile is where a prefill node's KV blocks lie so that decode nodes on its host can copy them; nil: they cannot. It outlives the engine.
func kvFile(d *process.Process, t kvtransfer.Transport) (*kvtransfer.Shared, error) {
	if t == kvtransfer.OverTCP {
		return nil, nil
	}
	s, err := kvtransfer.NewShared()
	if err == nil {
		d.OnEnd(func() { d.Report("shared KV memory", s.Close()) })
		return s, nil
	}
	if t == kvtransfer.OverShared {
		return nil, err
	}
	d.Log.Info("no shared memory: KV blocks travel over TCP", "error", err)
	return nil, nil
}
