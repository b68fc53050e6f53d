package node

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// CheckPrompt refuses the prompt of a Generate, and its pooling, on a node that serves the model
// and whose vectors have vectorSize numbers; 0: the node computes none. Code 0: it does not refuse.
func CheckPrompt(g *nodepb.Generate, vectorSize int, model string) (nodepb.Code, string) {
	_, digest := kvcache.ParseRootDigest(g.PrefixDigest)
	switch p := g.Pooling; {
	case len(g.Prompt) == 0:
		return nodepb.Code_CODE_INVALID, "the prompt is empty"
	case p != nil && (p.Version != rpc.VectorVersion || vectorSize == 0):
		return nodepb.Code_CODE_MISMATCH, fmt.Sprintf("the node has no vectors of version %d", p.Version)
	case p != nil && (Pool(p) == engine.PoolNone || g.MaxTokens != 0 || g.Grammar != nil || g.Logprobs || g.PromptLogprobs != nil):
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("pooling of kind %d, max_tokens %d, or with fields for tokens", p.Kind, g.MaxTokens)
	case !digest:
		return nodepb.Code_CODE_INVALID, fmt.Sprintf("prefix_digest has %d bytes, want 16 or none", len(g.PrefixDigest))
	case g.Model != "" && g.Model != model:
		return nodepb.Code_CODE_NOT_FOUND, fmt.Sprintf("model %q is not served here, %q is", g.Model, model)
	}
	return 0, ""
}

// Pool returns the engine's form of a pooling; PoolNone: there is none, or of no known kind.
func Pool(p *nodepb.Pooling) engine.Pool {
	switch p.GetKind() {
	case nodepb.PoolingKind_POOLING_KIND_LAST:
		return engine.PoolLast
	case nodepb.PoolingKind_POOLING_KIND_MEAN:
		return engine.PoolMean
	case nodepb.PoolingKind_POOLING_KIND_SCORES:
		return engine.PoolScores
	case nodepb.PoolingKind_POOLING_KIND_LOGITS:
		return engine.PoolLogits
	}
	return engine.PoolNone
}
