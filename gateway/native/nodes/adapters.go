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

// Adapter is a low-rank adapter in a node's heartbeat.
type Adapter struct {
	Name   string
	Digest uint64 // of its weights
}

// maxAdapters bounds how many of a node's adapters are kept.
const maxAdapters = 256

func adaptersOf(sent []*nodepb.Adapter) (all []Adapter) {
	for _, a := range sent[:min(len(sent), maxAdapters)] {
		all = append(all, Adapter{a.GetName(), a.GetDigest()})
	}
	return all
}

// Adapters returns the adapters in the node's last heartbeat.
func (n *Node) Adapters() []Adapter { return n.link.Load().last().adapters }

// Adapters returns the adapters of decode nodes that serve the model, by name. If nodes disagree
// about a name, the adapter that most of them have counts.
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

// LoadAdapter lets every connected node load an adapter from a folder that it can read, under a
// name. With replace, the name may belong to another adapter. The error joins the refusals as
// CodeErrors with the nodes' names: CODE_INVALID if the folder, the name or the room is at fault.
// Nodes that loaded it keep it although others refuse, because a request is sent only to nodes with
// its adapter.
func (f *Fleet) LoadAdapter(ctx context.Context, name, path string, replace bool) error {
	return f.askAll(ctx, rpc.FrameLoadAdapter, &nodepb.LoadAdapter{Name: name, Path: path, Replace: replace})
}

// UnloadAdapter lets every connected node remove an adapter's name. It returns an error if no node
// had it.
func (f *Fleet) UnloadAdapter(ctx context.Context, name string) error {
	return f.askAll(ctx, rpc.FrameUnloadAdapter, &nodepb.UnloadAdapter{Name: name})
}

// askAll asks all nodes at once and joins their refusals. That only some do not know the adapter is
// no error.
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

// askAdapter asks one node, and waits for its answer until ctx ends.
func (n *Node) askAdapter(ctx context.Context, t rpc.Type, m proto.Message) error {
	d, err := ask[*nodepb.AdapterDone](ctx, n, t, m, "an adapter")
	if err == nil && d.Code != 0 {
		err = &adapterError{n.Name, CodeError{d.Code, d.Message}}
	}
	return err
}

// adapterError is a node's refusal of an adapter, in words for operators: without the code.
type adapterError struct {
	node string
	code CodeError
}

// Error implements error.
func (e *adapterError) Error() string { return e.node + ": " + e.code.Message }

// Unwrap returns the code.
func (e *adapterError) Unwrap() error { return &e.code }
