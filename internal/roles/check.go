package roles

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// A command checks its settings and the small files that they name before it binds a port or reads
// weights, and in a dry run it does nothing else. All refusals are reported at once.

// checkModel refuses options that the model does not allow, and a model whose config, tokenizer,
// chat template or weights' headers cannot be used.
func checkModel(o engine.LoadOptions) error {
	b, err := engine.Check(o)
	if err != nil {
		return err
	}
	if err := checkTemplate(o.ChatTemplate); err != nil {
		return err
	}
	err = gateway.CheckBundle(&nodepb.Bundle{
		Model: b.ModelName, TokenizerJson: b.TokenizerJSON, ChatTemplate: b.ChatTemplate, BosToken: b.BosToken, EosToken: b.EosToken,
		EosTokenIds: b.EOSTokenIDs, MaxModelLen: uint32(b.MaxModelLen), VocabSize: uint32(b.VocabSize),
	})
	if err != nil {
		return fmt.Errorf("%w %s: %w", engine.ErrModel, o.Model, err)
	}
	return nil
}

// checkTemplate refuses the text of a wrong --chat-template.
func checkTemplate(text string) error {
	if err := gateway.CheckTemplate(text); err != nil {
		return fmt.Errorf("%w: --chat-template: %w", config.ErrValue, err)
	}
	return nil
}

// maxPrice bounds --price-per-hour.
const maxPrice = 1e6

// check refuses settings of the log and of traces.
func (p *processFlags) check() error {
	err := p.Options.Check()
	if !(p.price >= 0 && p.price <= maxPrice) {
		err = errors.Join(err, fmt.Errorf("%w: --price-per-hour %g: want US dollars, 0 to %g", config.ErrValue, p.price, float64(maxPrice)))
	}
	if terr := trace.Check(p.traces); errors.Is(terr, trace.ErrOption) {
		return errors.Join(err, fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(terr.Error(), trace.ErrOption.Error()+": ")))
	}
	return err
}

// checkCluster refuses a process without certificates, or with those of another role.
func (p *processFlags) checkCluster(role string) error {
	switch {
	case p.TLSDir == "" && role == "gateway":
		return fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`, for a cluster of nodes, or --upstream for upstreams", config.ErrValue)
	case p.TLSDir == "":
		return fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`; nodes need certificates to connect", config.ErrValue)
	}
	id, err := tlsconf.FolderIdentity(p.TLSDir)
	if err == nil && role == "gateway" && id.Role == tlsconf.Node {
		return fmt.Errorf("%w: --tls-dir %s has the certificate of node %q, and nodes accept requests from gateways only: `tandem ca DIR gateway/NAME` issues a gateway's",
			config.ErrValue, p.TLSDir, id.Name)
	}
	return nil // processFlags.check refuses a folder that cannot be read
}

// check refuses addresses that no member can have.
func (c *clusterFlags) check() error {
	for _, a := range c.join {
		host, port, err := net.SplitHostPort(a)
		if err != nil { // a host alone
			host, port = strings.Trim(a, "[]"), "7946"
		}
		_, nerr := strconv.ParseUint(port, 10, 16)
		_, ierr := netip.ParseAddr(host)
		if nerr != nil || host == "" || ierr != nil && strings.ContainsAny(host, ":/ ") {
			return fmt.Errorf("%w: --join %q: want host:port of a member's gossip, such as 10.0.0.1:7946 or [fd00::1]:7946", config.ErrValue, a)
		}
	}
	return nil
}

// check refuses settings of a gateway, and sets its listener and its certificate for clients.
func (g *gatewayFlags) check() (err error) {
	g.cert, err = g.open()
	errs := []error{err}
	for _, err := range g.Options.Check() {
		errs = append(errs, fmt.Errorf("%w: %w", config.ErrValue, err))
	}
	if err := gateway.CheckKeys(&g.Options); err != nil {
		errs = append(errs, fmt.Errorf("%w: --api-key-file: %w", config.ErrValue, err))
	}
	if err := gateway.CheckResponseKeys(&g.Options); err != nil {
		errs = append(errs, fmt.Errorf("%w: --response-key-file: %w", config.ErrValue, err))
	}
	return errors.Join(append(errs, g.checkAdmin(), g.planner.check())...)
}

// checkAdmin refuses a malformed --admin-listen, and one that other machines reach.
func (g *gatewayFlags) checkAdmin() error {
	if g.adminListen == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(g.adminListen)
	if err != nil {
		return fmt.Errorf("%w: --admin-listen %q: want host:port, such as 127.0.0.1:9000 or [::1]:9000", config.ErrValue, g.adminListen)
	}
	if !process.Loopback(host) && !g.insecure {
		return fmt.Errorf("%w: --admin-listen %s is reachable from other machines and needs no key: add --insecure if only operators reach it", config.ErrValue, g.adminListen)
	}
	return nil
}

// check refuses settings of the gateway, its cluster and its upstreams, and reads the chat template
// and the tokenizers.
func (f *gatewayCommand) check() error {
	var errs [5]error
	errs[0] = f.g.check()
	errs[1] = f.p.check()
	if !f.alone() {
		errs[2] = errors.Join(f.p.checkCluster("gateway"), f.c.check())
	} else if f.g.planner.file != "" {
		errs[2] = fmt.Errorf("%w: --planner-profile: a gateway without --tls-dir has no nodes to plan: leave it out", config.ErrValue)
	}
	_, err := upstreamServers(&f.u, slog.New(slog.DiscardHandler))
	_, _, nerr := servedNames(f.name)
	errs[3] = errors.Join(err, nerr)
	if f.text, err = cli.ReadTemplate(f.template); err != nil {
		return errors.Join(append(errs[:], err)...)
	}
	if err := checkTemplate(f.text); err != nil {
		return errors.Join(append(errs[:], err)...)
	}
	f.tokenizers, errs[4] = upstreamTokenizers(&f.u, f.text)
	return errors.Join(errs[:]...)
}

// alone reports whether the gateway has upstreams and no cluster.
func (f *gatewayCommand) alone() bool { return f.u.any() && f.p.TLSDir == "" }

// portsFree returns an error for each port that another program uses. It is called before the
// weights are read; the listeners are opened after that, because a port that is open and silent
// looks like a server that hangs.
func (g *gatewayFlags) portsFree() error {
	if g.Listener != nil {
		return nil
	}
	err := process.CheckPort(g.Host, g.Port, "port")
	if host, port, serr := net.SplitHostPort(g.adminListen); serr == nil {
		if n, nerr := strconv.Atoi(port); nerr == nil {
			err = errors.Join(err, process.CheckPort(host, n, "admin-listen"))
		}
	}
	return err
}

// portsFree is as that of a gateway.
func (f *nodeCommand) portsFree() error {
	errs := []error{process.CheckPort(f.n.host, f.n.rpcPort, "rpc-port"), process.CheckPort(f.n.host, f.n.httpPort, "http-port"),
		process.CheckPort(address(f.n.host), f.c.gossipPort, "gossip-port")}
	if f.role == "decode" {
		errs = append(errs, process.CheckPort(f.n.host, f.n.kvPort, "kv-port"))
	}
	return errors.Join(errs...)
}
