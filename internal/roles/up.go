package roles

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/launch"
	"github.com/tandem-serving/tandem/internal/process"
)

// runUp starts the cluster's processes from this same binary.
func runUp(v *cli.Invocation) error {
	var m cli.Model
	var g gatewayFlags
	var p processFlags
	m.Register(v.Set)
	g.register(v.Set, gateway.DefaultMinRemotePrefillTokens)
	g.planner.register(v.Set)
	p.register(v.Set)
	v.Section("Cluster")
	nPrefill := v.Int("prefill", 1, "prefill nodes")
	nDecode := v.Int("decode", 1, "decode nodes")
	stateDir := v.String("state-dir", "", "folder of the cluster's certificates; default: $XDG_STATE_HOME/tandem or ~/.local/state/tandem")
	v.First("model", "prefill", "decode", "port", "max-model-len", "api-key")
	v.Check(func() error {
		if *nDecode < 1 || *nPrefill < 0 || *nDecode+*nPrefill > 64 {
			return fmt.Errorf("%w: --prefill %d --decode %d: want at least one decode node and at most 64 nodes", config.ErrValue, *nPrefill, *nDecode)
		}
		if last := g.Port + *nPrefill + *nDecode; g.Port == 0 || last > 65535 {
			return fmt.Errorf("%w: --port %d: the nodes' metrics take the ports up to %d after it; want --port 1 to %d", config.ErrValue, g.Port, last, 65535-*nPrefill-*nDecode)
		}
		return nil
	})
	// The processes would refuse these, too, each after its start.
	v.Check(func() error { return errors.Join(g.check(), p.check()) })
	m.CheckIn(v, checkModel)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	log, _, err := process.Logger(p.LogLevel, p.LogFormat, v.ErrOut)
	if err != nil {
		return err
	}
	certs, err := launch.LocalCerts(*stateDir)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	local := launch.Local{
		Prefill: *nPrefill, Decode: *nDecode, Port: g.Port, Threads: m.Threads, Certs: certs,
		KVMemory: sharedKV(&m, *nPrefill+*nDecode),
		Flags: map[string][]string{
			"gateway": v.Forward(newGatewayCommand(v.Out).Set),
			"prefill": v.Forward(newNodeCommand("prefill", v.Out).Set),
			"decode":  v.Forward(newNodeCommand("decode", v.Out).Set),
		},
	}
	if err := local.PortsFree(g.Host); err != nil {
		return err
	}
	processes, err := local.Processes()
	if err != nil {
		return err
	}
	ctx, second, stop := process.Signals()
	defer stop()
	// Once, before the nodes start and find it in the cache.
	if err := m.Download(ctx, v.Environ, log); err != nil {
		return err
	}
	key := ""
	if len(g.APIKeys) > 0 {
		key = g.APIKeys[0]
	}
	scheme := "http"
	if g.clients.Cert != "" {
		scheme = "https"
	}
	url := fmt.Sprintf("%s://%s", scheme, net.JoinHostPort(g.Host, strconv.Itoa(g.Port)))
	began := time.Now()
	return launch.Run(ctx, launch.Options{
		Binary: self, Processes: processes, Out: v.ErrOut, Logger: log,
		Grace: p.shutdownTimeout + 10*time.Second,
		Started: func(ctx context.Context) error {
			return local.Announce(ctx, v.Out, url, key, g.clients.Cert, began)
		},
	}, second)
}

// sharedKV returns the KV memory of each of n nodes on this machine if the memory limit is too
// small for their default and the weights: they share a quarter of it. Otherwise it returns 0,
// for the flag or the default.
func sharedKV(m *cli.Model, n int) int64 {
	if limit := process.MemoryLimit(os.DirFS("/")); m.KVMemory == 0 && limit > 0 && limit/4 < int64(n)<<30 {
		return max(1, limit/4/int64(n))
	}
	return 0
}
