package gateway

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// CheckBundle checks whether a gateway could serve a node's model, by parsing its tokenizer and
// chat template. Nodes call it before they start, so that an incomplete file stops the node instead
// of failing on every gateway.
func CheckBundle(b *nodepb.Bundle) error {
	_, err := native.NewModel(b, "", "", time.Time{})
	return err
}

// Check verifies the gateway's counts: none is below zero. While no request is in flight, no node
// has an attempt, no connection a stream, and no admission queue a request. Any goroutine may call
// it at any time.
func (g *Gateway) Check() error {
	attempts := g.Meters.Attempts.Get()
	inFlight := g.InFlight.Load()
	err := g.native.Nodes.Check(inFlight == 0)
	g.EachQueue(func(_ any, a *exchange.Admission) { err = errors.Join(err, a.Check(inFlight == 0)) })
	if inFlight < 0 {
		err = errors.Join(err, fmt.Errorf("gateway: %d requests in flight", inFlight))
	}
	if inFlight == 0 && (g.InFlight.Load() != 0 || g.Meters.Attempts.Get() != attempts) {
		return nil // a request has started since
	}
	return err
}
