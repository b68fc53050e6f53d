package cuda

import "github.com/tandem-serving/tandem/engine/backend"

// DeltaRule panics: engine.Load refuses models with states on a GPU.
func (c *CUDA) DeltaRule(_, _, _, _ backend.Buf, s backend.DeltaSpec) {
	need(false, "DeltaRule: %+v on a GPU", s)
}

// Gate panics, as DeltaRule does.
func (c *CUDA) Gate(dst, _, _ backend.Buf) { need(false, "Gate: into buffer %d on a GPU", dst) }
