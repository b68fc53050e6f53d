package sample

// Params is how one choice of a request samples its tokens. The zero value is greedy.
type Params struct {
	Seed        uint64  // chosen by the gateway at accept if the client gave none
	Choice      uint32  // index of the choice, for n > 1
	Temperature float32 // 0: greedy
	TopP        float32 // in (0, 1]; 0 and 1: off
	TopK        int32   // 0 and -1: off
	MinP        float32 // in [0, 1], of the best token's probability; 0: off

	// Controls change the logits first; nil: no changes. They belong to one choice
	// and follow its output.
	Controls *Controls

	// Mask has the tokens that may be sampled, bit id%64 of word id/64, after Controls and
	// before Temperature; nil: all. Tokens beyond it may not. Pick only reads it.
	Mask []uint64
}
