package sample

// Params is how one choice of a request draws its tokens. The zero value is
// greedy.
type Params struct {
	Seed        uint64  // drawn by the gateway at accept when the client gave none
	Choice      uint32  // index of the choice, for n > 1
	Temperature float32 // 0: greedy
	TopP        float32 // in (0, 1]; 0 and 1: off
	TopK        int32   // 0 and -1: off
	MinP        float32 // in [0, 1], of the best token's probability; 0: off

	// Controls change the logits first; nil: nothing does. They belong to one
	// choice and follow its output.
	Controls *Controls
}
