package decode

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// However many streams ask for however many best tokens, a frame of their
// log-probabilities stays below rpc's bound, and none is left out.
func TestLogProbsFitTheirFrames(t *testing.T) {
	const bound = 4 << 20
	for _, c := range []struct{ tokens, tops int }{{2048, 256}, {1, 262_144}, {2112, 0}, {3, 200_000}, {40_000, 20}} {
		left := c.tokens
		for left > 0 {
			n := frameful(left, func(int) int { return c.tops })
			if n < 1 || n > left {
				t.Fatalf("%+v: %d of %d", c, n, left)
			}
			m := &nodepb.LogProbs{}
			p := &nodepb.TokenLogProbs{Stream: 1 << 60, Attempt: 1 << 31, Position: 1 << 31, Logprob: -1, Rank: 1 << 31}
			for range c.tops {
				p.TopTokens, p.TopLogprobs = append(p.TopTokens, 1<<30), append(p.TopLogprobs, -1)
			}
			for range n {
				m.Tokens = append(m.Tokens, p)
			}
			if size := proto.Size(m); size >= bound {
				t.Errorf("%+v: a frame of %d tokens has %d bytes", c, n, size)
			}
			left -= n
		}
	}
}
