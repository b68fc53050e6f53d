package cli

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// Versions are the versions that decide which releases may serve in one fleet.
type Versions struct {
	Release string `json:"release"`
	RPCMin  uint32 `json:"rpc_min"` // the oldest protocol between nodes that the release speaks
	RPC     uint32 `json:"rpc"`     // the newest one
	KV      uint32 `json:"kv"`      // of KV transfer
	CPU     uint32 `json:"numerics_cpu"`
	CUDA    uint32 `json:"numerics_cuda"`
	Grammar uint32 `json:"grammar"` // 0: the release constrains no outputs
}

// released has the versions of earlier releases, the oldest first. A release adds its row when its
// tag is set.
var released = []Versions{
	{Release: "0.1.0", RPCMin: 1, RPC: 1, KV: 1, CPU: 1, CUDA: 3},
}

// present returns the versions of this build, which is or precedes the release of that name.
func present(release string) Versions {
	return Versions{
		Release: release, RPCMin: rpc.ProtocolMin, RPC: rpc.Protocol, KV: kvtransfer.Version,
		CPU: cpu.KernelVersion, CUDA: cuda.KernelVersion, Grammar: engine.GrammarVersion,
	}
}

// Mixture is what processes of two releases do together.
type Mixture struct {
	Release string `json:"release"`
	// Fleet: they serve in one fleet. Without it nothing else holds.
	Fleet bool `json:"fleet"`
	// KVCPU and KVCUDA: prefill nodes of one release push KV to decode nodes of the other, and a
	// stream that moves between their nodes has bit-identical tokens.
	KVCPU  bool `json:"kv_cpu"`
	KVCUDA bool `json:"kv_cuda"`
	// Grammar: a constrained stream moves between their decode nodes.
	Grammar bool `json:"grammar"`
}

// mix returns what processes of a and b do together. Release is that of b.
func mix(a, b Versions) Mixture {
	fleet := a.RPCMin <= b.RPC && b.RPCMin <= a.RPC
	kv := fleet && a.KV == b.KV
	return Mixture{
		Release: b.Release, Fleet: fleet, KVCPU: kv && a.CPU == b.CPU, KVCUDA: kv && a.CUDA == b.CUDA,
		Grammar: fleet && a.Grammar == b.Grammar && a.Grammar != 0,
	}
}

// mixtures returns the mixtures of this build and each earlier release.
func mixtures(now Versions) []Mixture {
	out := make([]Mixture, len(released))
	for i, r := range released {
		out[i] = mix(now, r)
	}
	return out
}

// versionTables returns the tables of docs/upgrades.md.
func versionTables(now Versions) string {
	var b strings.Builder
	b.WriteString("| release | protocol between nodes | KV transfer | numerics, CPU | numerics, CUDA | grammars |\n|---|---|---|---|---|---|\n")
	for _, v := range append(released[:len(released):len(released)], now) {
		fmt.Fprintf(&b, "| %s | %d to %d | %d | %d | %d | %s |\n", v.Release, v.RPCMin, v.RPC, v.KV, v.CPU, v.CUDA, cmp.Or(strings.TrimPrefix(fmt.Sprint(v.Grammar), "0"), "none"))
	}
	fmt.Fprintf(&b, "\n| %s with | one fleet | prefill and decode nodes pair | a moved stream | a moved constrained stream |\n|---|---|---|---|---|\n", now.Release)
	for _, m := range mixtures(now) {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", m.Release, word(m.Fleet, "yes", "no"), devices(m, "yes", "no"),
			word(m.Fleet, devices(m, "same tokens", "valid tokens"), "no"), word(m.Grammar, "continues", "waits, see below"))
	}
	return b.String()
}

// devices returns the word for CPUs and GPUs, or both words where they differ.
func devices(m Mixture, yes, no string) string {
	if m.KVCPU == m.KVCUDA {
		return word(m.KVCPU, yes, no)
	}
	return fmt.Sprintf("CPU: %s; CUDA: %s", word(m.KVCPU, yes, no), word(m.KVCUDA, yes, no))
}

func word(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}
