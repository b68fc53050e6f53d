package gateway

import "context"

// LoadAdapter has every connected node load a low-rank adapter from a folder that
// the node can read; replace allows that the name stood for another one. An error
// joins what nodes refused, as *upstream.CodeError each with the node's address:
// CODE_INVALID where the folder, the name or the room is at fault. Heartbeats tell
// of the adapter within their interval.
func (g *Gateway) LoadAdapter(ctx context.Context, name, path string, replace bool) error {
	return g.fleet.LoadAdapter(ctx, name, path, replace)
}

// UnloadAdapter takes an adapter's name away on every connected node; what runs
// goes on. CODE_NOT_FOUND where none had it.
func (g *Gateway) UnloadAdapter(ctx context.Context, name string) error {
	return g.fleet.UnloadAdapter(ctx, name)
}
