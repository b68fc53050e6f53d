package console

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"
)

// Fleet is a gateway's view of its cluster, GET /debug/nodes.
type Fleet struct {
	Version string `json:"version"`
	Ready   bool   `json:"ready"`
	Reason  string `json:"reason,omitempty"` // why not ready
	Nodes   []Node `json:"nodes"`

	Upstreams []Upstream `json:"upstreams,omitempty"`
}

// Upstream is one OpenAI-compatible server of a Fleet.
type Upstream struct {
	Name     string   `json:"name"` // its URL
	Role     string   `json:"role"` // task: serve, prefill or decode
	Models   []string `json:"models,omitempty"`
	Up       bool     `json:"up"`
	Reason   string   `json:"reason,omitempty"` // why not up
	Breaker  string   `json:"breaker"`
	Draining bool     `json:"draining,omitempty"`
	Requests int64    `json:"requests"` // of the gateway, in flight
}

// State returns the state in a few words.
func (u *Upstream) State() string {
	switch {
	case u.Draining:
		return "draining"
	case !u.Up && u.Reason == "":
		return "starting"
	case !u.Up:
		return "down: " + u.Reason
	case u.Breaker == "open" || u.Breaker == "half-open":
		return "breaker " + u.Breaker
	}
	return "ready"
}

// Node is one member of a Fleet.
type Node struct {
	ID        string  `json:"id"`
	Role      string  `json:"role"`
	RPC       string  `json:"rpc"`
	HTTP      string  `json:"http,omitempty"` // of /metrics
	Model     string  `json:"model"`
	Version   string  `json:"version,omitempty"` // with build
	Class     string  `json:"class"`
	Ready     bool    `json:"ready"`
	Draining  bool    `json:"draining"`
	Connected bool    `json:"connected"`
	Running   int     `json:"running"`
	Waiting   int     `json:"waiting"`
	KVUsage   float64 `json:"kv_usage"` // share of blocks in use
	// CacheBlocks is how many blocks of its prefix cache the gateway knows.
	CacheBlocks int `json:"cache_blocks"`

	QueuedTokens     int     `json:"queued_tokens,omitempty"` // of prompts
	PromptTokensPerS float64 `json:"prompt_tokens_per_s,omitempty"`
	OutputTokensPerS float64 `json:"output_tokens_per_s,omitempty"`
}

// State returns the state in one word.
func (n *Node) State() string {
	switch {
	case n.Draining:
		return "draining"
	case !n.Ready:
		return "starting"
	case n.Role == "decode" && !n.Connected:
		return "unreachable"
	}
	return "ready"
}

// shownModels bounds the models of an upstream in Status.
const shownModels = 4

// models returns the first models, and how many more there are.
func (u *Upstream) models() string {
	n := min(len(u.Models), shownModels)
	list := cmp.Or(strings.Join(u.Models[:n], ","), "-")
	if more := len(u.Models) - n; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return list
}

// Printable replaces what a terminal would take for a control, such as in a node's name.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// Nodes returns the gateway's view of the cluster.
func (c *Client) Nodes(ctx context.Context) (*Fleet, error) {
	resp, err := c.do(ctx, http.MethodGet, "/debug/nodes", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	f := new(Fleet)
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(f); err != nil {
		return nil, fmt.Errorf("%s/debug/nodes: %w", c.Shown(), err)
	}
	return f, nil
}

// fit removes columns from rows of cells until the rows fit the width of a terminal; 0: all fit.
// The first row is the head. It returns the heads of the removed columns.
func fit(rows [][]string, width int) (removed []string) {
	for _, head := range []string{"VERSION", "METRICS", "RPC", "MODEL", "QUEUED TOKENS", "WAITING", "PROMPT TOKENS/S"} {
		sum := 0
		for column := range rows[0] {
			widest := 0
			for _, row := range rows {
				widest = max(widest, utf8.RuneCountInString(row[column]))
			}
			sum += widest + 2
		}
		if width == 0 || sum-2 <= width {
			break
		}
		at := slices.Index(rows[0], head)
		for i, row := range rows {
			rows[i] = slices.Delete(row, at, at+1)
		}
		removed = append(removed, head)
	}
	slices.Reverse(removed)
	return removed
}

// Status prints the nodes and load of the cluster, at most width columns wide; 0: without a bound.
func (c *Client) Status(ctx context.Context, asJSON bool, width int, w io.Writer) error {
	f, err := c.Nodes(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(w).Encode(f)
	}
	state := "ready"
	if !f.Ready {
		state = "not ready: " + f.Reason
	}
	var view strings.Builder
	fmt.Fprintf(&view, "gateway %s (version %s): %s\n\n", c.Shown(), f.Version, state)
	t := tabwriter.NewWriter(&view, 0, 8, 2, ' ', 0)
	if len(f.Upstreams) > 0 {
		fmt.Fprintln(t, "UPSTREAM\tTASK\tREQUESTS\tMODELS\tSTATE")
		for i := range f.Upstreams {
			u := &f.Upstreams[i]
			fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\n", u.Name, u.Role, u.Requests, Printable(u.models()), Printable(u.State()))
		}
		if len(f.Nodes) > 0 {
			fmt.Fprintln(t)
		}
	}
	rows := [][]string{{"NODE", "ROLE", "STATE", "RUNNING", "WAITING", "QUEUED TOKENS", "KV USED", "PROMPT TOKENS/S", "OUTPUT TOKENS/S", "MODEL", "RPC", "METRICS", "VERSION"}}
	for i := range f.Nodes {
		n := &f.Nodes[i]
		load, outputs := []string{"-", "-", "-", "-", "-"}, "-" // no heartbeat; prefill nodes sample no tokens
		if n.Connected {
			load = []string{strconv.Itoa(n.Running), strconv.Itoa(n.Waiting), strconv.Itoa(n.QueuedTokens), fmt.Sprintf("%.1f%%", 100*n.KVUsage), fmt.Sprintf("%.1f", n.PromptTokensPerS)}
		}
		if n.Connected && n.Role != "prefill" {
			outputs = fmt.Sprintf("%.1f", n.OutputTokensPerS)
		}
		row := append([]string{n.ID, n.Role, n.State()}, load...)
		rows = append(rows, append(row, outputs, n.Model, n.RPC, cmp.Or(n.HTTP, "-"), cmp.Or(n.Version, "unknown")))
	}
	removed := fit(rows, width)
	if len(f.Nodes) > 0 {
		for _, row := range rows {
			fmt.Fprintln(t, strings.Join(row, "\t"))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	switch {
	case len(removed) > 0 && len(f.Nodes) > 0:
		fmt.Fprintf(&view, "\nNot shown: %s (see --json).\n", strings.Join(removed, ", "))
	case len(f.Nodes) == 0 && len(f.Upstreams) == 0 && f.Ready:
		fmt.Fprintln(&view, "The engine runs in the process of the gateway, which has no other nodes.")
	case len(f.Nodes) == 0 && len(f.Upstreams) == 0:
		fmt.Fprintln(&view, "No node has joined.")
	}
	_, err = io.WriteString(w, Visible(view.String()))
	return err
}

// LocalHTTP returns a client for a gateway on this machine, whose certificate may name
// another host.
func LocalHTTP() *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // this machine's own gateway, on loopback
	}}
}

// WaitFleet polls until the gateway is ready and lists len(nodes) ready nodes. If the key may
// not list nodes, it polls the readiness probes of the gateway and of each node instead. It
// returns the served models, or none if the key may not list them. nodes are the URLs of the
// nodes' metrics.
func (c *Client) WaitFleet(ctx context.Context, nodes []string) ([]string, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := c.fleetReady(ctx, nodes)
		if err == nil {
			models, err := c.Models(ctx)
			if errors.Is(err, ErrDenied) {
				return nil, nil
			}
			return models, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: %w", c.Shown(), err)
		case <-tick.C:
		}
	}
}

// fleetReady is one poll of WaitFleet; nil: all are ready.
func (c *Client) fleetReady(ctx context.Context, nodes []string) error {
	f, err := c.Nodes(ctx)
	if errors.Is(err, ErrDenied) {
		for _, url := range nodes {
			if err := (&Client{URL: url, HTTP: c.HTTP}).Ready(ctx); err != nil {
				return err
			}
		}
		return c.Ready(ctx)
	}
	if err != nil {
		return err
	}
	ready := 0
	for i := range f.Nodes {
		if f.Nodes[i].State() == "ready" {
			ready++
		}
	}
	if !f.Ready || ready < len(nodes) {
		return fmt.Errorf("%d of %d nodes are ready", ready, len(nodes))
	}
	return nil
}
