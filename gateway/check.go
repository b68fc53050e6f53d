package gateway

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// CheckBundle says whether a gateway could serve a node's model: its tokenizer
// and chat template are read as they will be. Nodes ask before they start, so
// that a torn file ends the node and not every gateway's hope.
func CheckBundle(b *nodepb.Bundle) error {
	_, err := native.NewModel(b, "", "", time.Time{})
	return err
}

// Check verifies the gateway's accounts: no count is below zero, and while no
// request is being answered no node has an attempt on its books and no
// connection a stream, nor has admission anything counted as there. Any goroutine may call it at any time.
func (g *Gateway) Check() error {
	attempts := g.Meters.Attempts.Get()
	inFlight := g.InFlight.Load()
	err := g.native.Nodes.Check(inFlight == 0)
	g.EachQueue(func(_ any, a *exchange.Admission) { err = errors.Join(err, a.Check(inFlight == 0)) })
	if inFlight < 0 {
		err = errors.Join(err, fmt.Errorf("gateway: %d requests in flight", inFlight))
	}
	if inFlight == 0 && (g.InFlight.Load() != 0 || g.Meters.Attempts.Get() != attempts) {
		return nil // one has come meanwhile
	}
	return err
}
