// Package profile has the measured or estimated speed of a kind of node: the durations of its
// steps, its KV memory, and the durations of transfers, of the gateway's part and of a start.
//
// A step's duration is interpolated between measured points where the shape of the batch is
// within them, and follows coefficients elsewhere. A Model counts which of the two was used.
//
// Invariant: a profile that Read returns is complete and within bounds. More work never takes less
// time between the points of a full grid, and never by the coefficients.
//
// The package measures nothing. Estimates of GPUs by their peak numbers are in roofline.go.
package profile

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Version is the version of the file that this package reads and writes.
const Version = 1

// ErrProfile means that a profile cannot be used. The text has the wrong value and the remedy.
var ErrProfile = errors.New("profile: bad profile")

// Sources of step times.
const (
	Measured = "measured" // by the engine, on such a node
	Estimate = "estimate" // computed from peak numbers
	Imported = "imported" // from the measurements of another program
)

// Profile is the content of a profile file. Durations are in seconds.
type Profile struct {
	Version  int      `yaml:"version"`
	Node     Node     `yaml:"node,flow"`
	Model    Model    `yaml:"model,flow"`
	Memory   Memory   `yaml:"memory,flow"`
	Step     Step     `yaml:"step"`
	Transfer Transfer `yaml:"transfer,flow"`
	Gateway  Gateway  `yaml:"gateway,flow"`
	Start    Start    `yaml:"start,flow"`
	Measured Origin   `yaml:"measured,flow,omitempty"`
}

// Node is the kind of machine.
type Node struct {
	Name   string  `yaml:"name"`
	Device string  `yaml:"device"`
	TP     int     `yaml:"tp"`                       // devices that compute one model
	Price  float64 `yaml:"price_per_hour,omitempty"` // of the node in US dollars; 0: not known
	Watts  float64 `yaml:"watts,omitempty"`
}

// Model is the model that the node computes.
type Model struct {
	Name        string  `yaml:"name"`
	Fingerprint string  `yaml:"fingerprint,omitempty"`
	Class       string  `yaml:"class,omitempty"` // numerics class
	Layers      int     `yaml:"layers"`
	Weights     float64 `yaml:"weights_bytes,omitempty"`
	KVBytes     float64 `yaml:"kv_bytes_per_token"`
	MaxLen      int     `yaml:"max_model_len,omitempty"` // tokens of a sequence; 0: what KV memory holds
}

// Memory is the node's KV memory.
type Memory struct {
	Blocks      int `yaml:"blocks"`
	BlockTokens int `yaml:"block_tokens"`
}

// Step has the durations of steps.
type Step struct {
	Source   string   `yaml:"source"`
	Error    float64  `yaml:"error,omitempty"` // likely relative error, such as 0.25
	Decode   Decode   `yaml:"decode"`
	Prefill  Prefill  `yaml:"prefill"`
	Mixed    Mixed    `yaml:"mixed,flow"`
	Overhead Overhead `yaml:"overhead,flow"`
}

// Decode has the durations of steps in which each sequence gets one token.
type Decode struct {
	Fixed  float64     `yaml:"fixed"`
	PerCtx float64     `yaml:"per_ctx_token"` // for each token that a sequence attends to
	PerSeq float64     `yaml:"per_seq"`
	MAPE   float64     `yaml:"mape,omitempty"`        // mean relative error of the coefficients
	Points [][]float64 `yaml:"points,flow,omitempty"` // sequences, context tokens of each, seconds, and optionally the interquartile range
}

// Prefill has the durations of steps that compute prompt tokens.
type Prefill struct {
	Floor    float64     `yaml:"floor"`
	Fixed    float64     `yaml:"fixed"`
	PerToken float64     `yaml:"per_token"`
	PerPair  float64     `yaml:"per_token_ctx"` // for each pair of a computed token and a token before it
	MAPE     float64     `yaml:"mape,omitempty"`
	Points   [][]float64 `yaml:"points,flow,omitempty"` // tokens, tokens before them, seconds, and optionally the interquartile range
}

// Mixed is how both kinds of work add up in one step: the longer one, and Gamma of the shorter one
// less the fixed part of decoding, which a step has once.
type Mixed struct {
	Gamma float64 `yaml:"gamma"`
}

// Overhead is the time of a step in addition to its computation.
type Overhead struct {
	Between float64 `yaml:"between_steps"` // from the end of a step's computation to the start of the next
	Emit    float64 `yaml:"emit"`          // from the end of a step's computation to its tokens' frame
}

// Transfer has the durations of KV transfers.
type Transfer struct {
	Setup          float64 `yaml:"setup"` // of one transfer
	BytesPerSecond float64 `yaml:"bytes_per_second"`
	Link           float64 `yaml:"link_bytes_per_second,omitempty"` // of a node, whose transfers share it; 0: not a limit
	PerLayer       bool    `yaml:"per_layer"`                       // each layer leaves while the next one computes
	Checksum       bool    `yaml:"checksum"`
	Over           string  `yaml:"over,omitempty"` // what was measured, such as loopback
}

// Gateway has the durations of the gateway's part.
type Gateway struct {
	PerRequest  float64 `yaml:"per_request"`
	PerToken    float64 `yaml:"per_token"`
	Heartbeat   float64 `yaml:"heartbeat"`    // between two reports of a node
	ReportDelay float64 `yaml:"report_delay"` // of block events and heartbeats
}

// DefaultGateway returns the durations of a gateway that was not measured.
func DefaultGateway() Gateway {
	return Gateway{PerRequest: 180e-6, PerToken: 20e-6, Heartbeat: 0.1, ReportDelay: 0.02}
}

// Start has the durations until a new node is ready.
type Start struct {
	Process float64 `yaml:"process"`
	Load    float64 `yaml:"load"`
	Warm    float64 `yaml:"warm"`
}

// Total returns the duration of a start.
func (s Start) Total() time.Duration { return duration(s.Process + s.Load + s.Warm) }

// Origin is where and when the profile was measured.
type Origin struct {
	Commit  string  `yaml:"commit,omitempty"`
	At      string  `yaml:"at,omitempty"`
	Seconds float64 `yaml:"seconds,omitempty"`
	Noise   float64 `yaml:"noise,omitempty"`
}

// duration converts seconds.
func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// Basis returns the source of the step times with the name of the profile and the likely error,
// such as "estimate ±25 %".
func (p *Profile) Basis() string {
	if p.Step.Error > 0 {
		return fmt.Sprintf("%s ±%.0f %%", p.Step.Source, 100*p.Step.Error)
	}
	return p.Step.Source
}

// CheckPools returns an error if KV cannot move from prefill nodes of one profile to decode nodes
// of another, because the nodes do not compute the same model in the same way.
func CheckPools(prefill, decode *Profile) error {
	a, b := &prefill.Model, &decode.Model
	switch {
	case a.Layers != b.Layers || a.KVBytes != b.KVBytes:
		return fmt.Errorf("%w: profile %s is of a model of %d layers with %.0f bytes of KV a token, and %s of %d with %.0f: give profiles of one model", ErrProfile, prefill.Node.Name, a.Layers, a.KVBytes, decode.Node.Name, b.Layers, b.KVBytes)
	case a.Fingerprint != b.Fingerprint && a.Fingerprint != "" && b.Fingerprint != "":
		return fmt.Errorf("%w: profile %s is of a model with weights %s, and %s of one with %s: give profiles of one model", ErrProfile, prefill.Node.Name, a.Fingerprint, decode.Node.Name, b.Fingerprint)
	case prefill.Node.TP != decode.Node.TP:
		return fmt.Errorf("%w: %s computes a model with %d GPUs and %s with %d: KV moves between nodes of one --tensor-parallel-size only, so give profiles of one", ErrProfile, prefill.Node.Name, prefill.Node.TP, decode.Node.Name, decode.Node.TP)
	case a.Class != b.Class && a.Class != "" && b.Class != "":
		return fmt.Errorf("%w: %s is of numerics class %s and %s of %s: KV moves between nodes of one class only, so give profiles of nodes with one kind of device and kernels", ErrProfile, prefill.Node.Name, a.Class, decode.Node.Name, b.Class)
	}
	return nil
}

// Bounds of a profile's figures. They are far from every machine and keep sums finite.
const (
	maxSeconds = 1e5
	maxBytes   = 1e15
	maxTokens  = 1 << 28 // of KV memory
	maxPoints  = 1000
)

// Check returns an error for the first figure that is missing or out of bounds.
func (p *Profile) Check() error {
	for _, f := range []struct {
		key         string
		value       float64
		least, most float64
		do          string
	}{
		{"version", float64(p.Version), Version, Version, "write version: 1, or use the release of tandem that wrote the file"},
		{"node.tp", float64(p.Node.TP), 1, 1024, "write the number of devices of a node, at least 1"},
		{"node.price_per_hour", p.Node.Price, 0, 1e6, "write the price in US dollars, or leave it out"},
		{"node.watts", p.Node.Watts, 0, 1e6, "write the power in watts, or leave it out"},
		{"model.layers", float64(p.Model.Layers), 1, 1e4, "write the number of the model's layers"},
		{"model.weights_bytes", p.Model.Weights, 0, maxBytes, "write the size of the weights, or leave it out"},
		{"model.kv_bytes_per_token", p.Model.KVBytes, 1, maxBytes, "write the bytes of KV of one token in all layers; `tandem plan memory` prints them"},
		{"model.max_model_len", float64(p.Model.MaxLen), 0, maxTokens, "write the longest sequence in tokens, or leave it out"},
		{"memory.blocks", float64(p.Memory.Blocks), 2, maxTokens, "write the number of KV blocks, which `tandem plan memory` prints"},
		{"memory.block_tokens", float64(p.Memory.BlockTokens), 1, 1 << 16, "write the tokens of a KV block, such as 16"},
		{"step.error", p.Step.Error, 0, 10, "write a share such as 0.25, or leave it out"},
		{"step.decode.fixed", p.Step.Decode.Fixed, 0, maxSeconds, "write seconds"},
		{"step.decode.per_ctx_token", p.Step.Decode.PerCtx, 0, maxSeconds, "write seconds"},
		{"step.decode.per_seq", p.Step.Decode.PerSeq, 0, maxSeconds, "write seconds"},
		{"step.decode.mape", p.Step.Decode.MAPE, 0, 10, "write a share such as 0.02"},
		{"step.prefill.floor", p.Step.Prefill.Floor, 0, maxSeconds, "write seconds"},
		{"step.prefill.fixed", p.Step.Prefill.Fixed, 0, maxSeconds, "write seconds"},
		{"step.prefill.per_token", p.Step.Prefill.PerToken, 0, maxSeconds, "write seconds"},
		{"step.prefill.per_token_ctx", p.Step.Prefill.PerPair, 0, maxSeconds, "write seconds"},
		{"step.prefill.mape", p.Step.Prefill.MAPE, 0, 10, "write a share such as 0.02"},
		{"step.mixed.gamma", p.Step.Mixed.Gamma, 0, 1, "write 1, or less where both kinds of work overlap"},
		{"step.overhead.between_steps", p.Step.Overhead.Between, 0, maxSeconds, "write seconds"},
		{"step.overhead.emit", p.Step.Overhead.Emit, 0, maxSeconds, "write seconds"},
		{"transfer.setup", p.Transfer.Setup, 0, maxSeconds, "write seconds"},
		{"transfer.bytes_per_second", p.Transfer.BytesPerSecond, 1, maxBytes, "write the speed of KV transfer, which `tandem bench transfer` measures"},
		{"transfer.link_bytes_per_second", p.Transfer.Link, 0, maxBytes, "write the speed of a node's network link in bytes per second, or leave it out"},
		{"gateway.per_request", p.Gateway.PerRequest, 0, maxSeconds, "write seconds"},
		{"gateway.per_token", p.Gateway.PerToken, 0, maxSeconds, "write seconds"},
		{"gateway.heartbeat", p.Gateway.Heartbeat, 0, maxSeconds, "write seconds"},
		{"gateway.report_delay", p.Gateway.ReportDelay, 0, maxSeconds, "write seconds"},
		{"start.process", p.Start.Process, 0, maxSeconds, "write seconds"},
		{"start.load", p.Start.Load, 0, maxSeconds, "write seconds"},
		{"start.warm", p.Start.Warm, 0, maxSeconds, "write seconds"},
		{"measured.seconds", p.Measured.Seconds, 0, 1e9, "write seconds, or leave it out"},
		{"measured.noise", p.Measured.Noise, 0, 10, "write a share such as 0.01, or leave it out"},
	} {
		if !(f.value >= f.least && f.value <= f.most) {
			return fmt.Errorf("%w: %s is %g, want %g to %g: %s", ErrProfile, f.key, f.value, f.least, f.most, f.do)
		}
	}
	if s := p.Step.Source; s != Measured && s != Estimate && s != Imported {
		return fmt.Errorf("%w: step.source is %q: write %s, %s or %s", ErrProfile, s, Measured, Estimate, Imported)
	}
	if float64(p.Memory.Blocks)*float64(p.Memory.BlockTokens) > maxTokens {
		return fmt.Errorf("%w: memory has %d blocks of %d tokens: write at most %d tokens in all", ErrProfile, p.Memory.Blocks, p.Memory.BlockTokens, maxTokens)
	}
	if d, r := &p.Step.Decode, &p.Step.Prefill; d.Fixed+d.PerCtx+d.PerSeq == 0 || r.Floor+r.Fixed+r.PerToken == 0 {
		return fmt.Errorf("%w: step.decode or step.prefill has no coefficients: write those of a fit, which are used outside of the points", ErrProfile)
	}
	if err := checkPoints("step.decode.points", p.Step.Decode.Points, 1, 1); err != nil {
		return err
	}
	return checkPoints("step.prefill.points", p.Step.Prefill.Points, 1, 0)
}

// checkPoints checks a list of points: the least first and second coordinates, and seconds.
func checkPoints(key string, points [][]float64, first, second float64) error {
	if len(points) > maxPoints {
		return fmt.Errorf("%w: %s has %d points: leave at most %d", ErrProfile, key, len(points), maxPoints)
	}
	seen := map[[2]float64]bool{}
	for i, p := range points {
		if len(p) != 3 && len(p) != 4 {
			return fmt.Errorf("%w: %s: point %d has %d numbers: write 3 or 4, such as [64, 1024, 0.0076]", ErrProfile, key, i+1, len(p))
		}
		at := [2]float64{p[0], p[1]}
		switch {
		case !(p[0] >= first && p[0] <= maxTokens && p[1] >= second && p[1] <= maxTokens && p[2] > 0 && p[2] <= maxSeconds),
			len(p) == 4 && !(p[3] >= 0 && p[3] <= maxSeconds):
			return fmt.Errorf("%w: %s: point %d is %v: write counts of at least %g and %g, and seconds above 0", ErrProfile, key, i+1, p, first, second)
		case seen[at]:
			return fmt.Errorf("%w: %s: point %d repeats %g, %g: leave one of them out", ErrProfile, key, i+1, p[0], p[1])
		}
		seen[at] = true
	}
	return nil
}

// finite reports whether a duration in seconds is a number that a time.Duration holds.
func finite(seconds float64) float64 {
	if math.IsNaN(seconds) || seconds > maxSeconds {
		return maxSeconds
	}
	return max(0, seconds)
}
