package roles

import (
	"fmt"
	"net"
	"time"

	"github.com/coreos/go-systemd/v22/activation"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// loopTimeout is how long the engine's step goroutine may take to answer before /livez fails and
// systemd's watchdog is no longer fed. No step that a model has been seen to need comes near it.
const loopTimeout = time.Minute

// responsive returns the check that the step goroutine answers.
func (n *node) responsive() func() error {
	return process.Responsive(loopTimeout, time.Now, n.eng.Ping)
}

// inherited returns the listener for clients that systemd passed (sd_listen_fds(3)), or nil without
// one. Its address replaces that of the flags, so that the rules for addresses that other machines
// reach hold for it, too.
func inherited(g *gatewayFlags) (net.Listener, error) {
	all, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("the sockets that systemd passed: %w", err)
	}
	if len(all) == 0 {
		return nil, nil
	}
	var addr *net.TCPAddr
	if all[0] != nil { // nil: a socket that does not listen
		addr, _ = all[0].Addr().(*net.TCPAddr)
	}
	if len(all) > 1 || addr == nil {
		return nil, fmt.Errorf("%w: systemd passed %d sockets; the unit needs exactly one ListenStream, with a TCP port", config.ErrValue, len(all))
	}
	g.Host, g.Port = addr.IP.String(), addr.Port
	return all[0], nil
}
