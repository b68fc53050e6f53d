package rpc

import (
	"crypto/tls"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// sender is the peers that may send a frame type on a connection that they opened, by the
// role in their certificate. It has no effect without TLS and for certificates without a role.
type sender uint8

const (
	undecided sender = iota // refused like gatewayOnly; a test refuses it in the table
	gatewayOnly
	anyNode
)

// Bounds of the warnings about peers' certificates.
const (
	warnInterval = time.Minute // between two about one peer
	maxWarned    = 1024        // peers whose last warning is remembered
)

// warnings limits the warnings about peers' certificates, for all connections of a
// listener.
type warnings struct {
	mu   sync.Mutex
	last map[tlsconf.Identity]time.Time
}

// due reports whether no warning about the peer is younger than warnInterval, and counts
// this one.
func (w *warnings) due(peer tlsconf.Identity) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	last, known := w.last[peer]
	if known && now.Sub(last) < warnInterval {
		return false
	}
	if w.last == nil || !known && len(w.last) >= maxWarned {
		w.last = map[tlsconf.Identity]time.Time{}
	}
	w.last[peer] = now
	return true
}

// identify sets the role of the peer's certificate after the TLS handshake.
// Only Serve calls it, before run.
func (c *Conn) identify(w *warnings) error {
	t, ok := c.nc.(*tls.Conn)
	if !ok {
		return nil
	}
	certs := t.ConnectionState().PeerCertificates
	if len(certs) == 0 {
		return fmt.Errorf("%w: %s showed no certificate", ErrHandshake, c.RemoteAddr())
	}
	id, err := tlsconf.IdentityOf(certs[0])
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrHandshake, c.RemoteAddr(), err)
	}
	c.identity, c.warnings = id, w
	if id.Role == tlsconf.NoRole && w.due(id) {
		c.o.Log.Warn("a peer's certificate has no role", "peer", id.Name, "address", c.RemoteAddr(), "advice", tlsconf.Reissue)
	}
	return nil
}

// mayPeerSend reports whether the peer's role allows the frame type.
func (c *Conn) mayPeerSend(t Type) bool {
	return c.identity.Role != tlsconf.Node || frameTypes[t].from == anyNode
}

// forbid answers a frame that the peer may not send: on its stream, or, for one about the
// connection itself, by closing the connection with the returned error.
func (c *Conn) forbid(t Type, stream uint64, payload []byte) error {
	c.o.Counters.Forbidden.Add(1)
	name := c.identity.Name
	err := fmt.Errorf("%w: %v from node %q; `tandem ca DIR gateway/%s` issues a gateway's certificate", ErrForbidden, t, name, name)
	if c.warnings.due(c.identity) {
		c.o.Log.Warn("a node sent a frame that only gateways may send", "peer", name, "frame", t.String(), "address", c.RemoteAddr(), "error", err)
	}
	end := &nodepb.End{Code: nodepb.Code_CODE_FORBIDDEN, Message: err.Error()}
	// Best effort below: a peer that does not read its answers gets none.
	switch {
	case stream == 0:
		_ = c.Send(FrameEnd, 0, end)
		c.Close(err)
	case t == FrameLoadAdapter, t == FrameUnloadAdapter:
		_ = c.Send(FrameAdapterDone, stream, &nodepb.AdapterDone{Code: end.Code, Message: end.Message})
	default:
		if g := new(nodepb.Generate); t == FrameGenerate && proto.Unmarshal(payload, g) == nil {
			end.Attempt = g.Attempt // the sender ignores an End of another attempt
		}
		_ = c.Send(FrameEnd, stream, end)
	}
	return nil
}
