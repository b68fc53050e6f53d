package roles

import (
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner/control"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/config"
)

// plannerFlags are the flags of a gateway's planner.
type plannerFlags struct {
	file      string
	ttft, itl time.Duration
	most      int

	profile *profile.Profile // set by check; nil: there is no planner
}

// check reads the profile.
func (f *plannerFlags) check() (err error) {
	if f.profile = nil; f.file == "" {
		return nil
	}
	if f.profile, err = profile.Load(f.file); err != nil {
		return fmt.Errorf("%w: --planner-profile: %s", config.ErrValue, strings.TrimPrefix(err.Error(), profile.ErrProfile.Error()+": "))
	}
	// The controller's fixed time of a step, as options has it.
	if fixed := f.profile.Step.Decode.Fixed + f.profile.Step.Overhead.Between; f.itl.Seconds() <= fixed {
		return fmt.Errorf("%w: --planner-itl %v: a step of %s takes %.0f ms however few sequences it has: give a longer time", config.ErrValue, f.itl, f.profile.Node.Name, 1e3*fixed)
	}
	return nil
}

// options returns the planner of the gateway with an id; nil: there is none.
func (f *plannerFlags) options(id string) *gateway.Planner {
	p := f.profile
	if p == nil {
		return nil
	}
	d, c := &p.Step.Decode, &p.Step.Prefill
	return &gateway.Planner{ID: id, Model: p.Model.Fingerprint, Options: control.Options{
		Costs: control.Costs{
			PromptToken: c.PerToken, PromptPair: c.PerPair, Fixed: d.Fixed + p.Step.Overhead.Between, PerSeq: d.PerSeq, PerCtx: d.PerCtx,
			KVTokens: float64(p.Memory.Blocks * p.Memory.BlockTokens), Start: p.Start.Total(),
		},
		TTFT: f.ttft, ITL: f.itl, Most: [2]int{f.most, f.most},
	}}
}
