package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Adapter is a low-rank adapter that a node has told that it has loaded.
type Adapter struct {
	Name   string
	Digest uint64 // of what it computes
}

// maxAdapters bounds how many of a node's adapters are kept.
const maxAdapters = 256

func adaptersOf(told []*nodepb.Adapter) (all []Adapter) {
	for _, a := range told[:min(len(told), maxAdapters)] {
		all = append(all, Adapter{a.GetName(), a.GetDigest()})
	}
	return all
}

// Adapters are what the node has told of on its present connection.
func (n *Node) Adapters() []Adapter { return n.link.Load().last().adapters }

// Adapters are those that decode nodes which serve the model have loaded, by name.
// Where nodes disagree on what a name stands for, the one that most have counts.
func (s *Snapshot) Adapters(fingerprint uint64) []Adapter {
	count := map[Adapter]int{}
	for _, n := range s.Decode {
		if n.serves(fingerprint) {
			for _, a := range n.Adapters() {
				count[a]++
			}
		}
	}
	best := map[string]Adapter{}
	for a, nodes := range count {
		b, ok := best[a.Name]
		if more := nodes - count[b]; !ok || more > 0 || more == 0 && a.Digest < b.Digest {
			best[a.Name] = a
		}
	}
	return slices.SortedFunc(maps.Values(best), func(a, b Adapter) int { return cmp.Compare(a.Name, b.Name) })
}

// LoadAdapter has every connected node of the fleet load an adapter from a folder
// that it can read, under a name; replace says that the name may stand for another
// one. What has been loaded stays where other nodes refuse: a request goes only
// where its adapter is.
func (f *Fleet) LoadAdapter(ctx context.Context, name, path string, replace bool) error {
	return f.askAll(ctx, rpc.FrameLoadAdapter, &nodepb.LoadAdapter{Name: name, Path: path, Replace: replace})
}

// UnloadAdapter has every connected node take an adapter's name away. It is an
// error when none had it.
func (f *Fleet) UnloadAdapter(ctx context.Context, name string) error {
	return f.askAll(ctx, rpc.FrameUnloadAdapter, &nodepb.UnloadAdapter{Name: name})
}

// askAll asks all nodes at once and joins what they refuse. What only some do not
// know is no error.
func (f *Fleet) askAll(ctx context.Context, t rpc.Type, m proto.Message) error {
	now := f.Now()
	nodes := slices.DeleteFunc(slices.Concat(now.Decode, now.Prefill), func(n *Node) bool { return !n.connected() })
	if len(nodes) == 0 {
		return fmt.Errorf("%w: no node is connected", ErrNode)
	}
	answers := make(chan error, len(nodes))
	for _, n := range nodes {
		go func() { answers <- n.askAdapter(ctx, t, m) }()
	}
	var refused, unknown []error
	for range nodes {
		err := <-answers
		var code *CodeError
		switch {
		case err == nil:
		case errors.As(err, &code) && code.Code == nodepb.Code_CODE_NOT_FOUND:
			unknown = append(unknown, err)
		default:
			refused = append(refused, err)
		}
	}
	if len(refused) == 0 && len(unknown) == len(nodes) {
		return unknown[0]
	}
	return errors.Join(refused...)
}

// askAdapter asks one node, and waits for its answer while ctx lasts.
func (n *Node) askAdapter(ctx context.Context, t rpc.Type, m proto.Message) error {
	reply, err := n.ask(ctx, t, m, "an adapter")
	if err != nil {
		return err
	}
	switch d, ok := reply.(*nodepb.AdapterDone); {
	case !ok:
		return fmt.Errorf("%w: %s gave no answer", ErrNode, n.Name)
	case d.Code != 0:
		return fmt.Errorf("%s: %w", n.Name, &CodeError{d.Code, d.Message})
	}
	return nil
}
