package native

import (
	"math"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/gateway/route"
)

// stepTokens is the step that KV groups with a window are sized for: nodes
// compute prompts in chunks of about as many tokens.
const stepTokens = 2048

// kvBlocks is how many KV blocks a request of so many tokens holds at most.
func (m *Model) kvBlocks(tokens int) int {
	if len(m.groups) == 0 {
		return (tokens + m.BlockTokens - 1) / m.BlockTokens
	}
	return kvcache.Peak(m.groups, tokens, stepTokens)
}

// demand is what a prompt with n answers of at most maxTokens is expected to take
// of a node's KV memory.
func (m *Model) demand(nPrompt, maxTokens, n int) route.Demand {
	d := route.Demand{Prompt: m.kvBlocks(nPrompt + 1)}
	d.Answer = n * max(0, m.kvBlocks(nPrompt+m.queue.Expect(maxTokens))-d.Prompt)
	return d
}

// query is what a view of the fleet for a prompt asks; n is how many of its
// tokens are computed at most.
func (m *Model) query(p *render.Prompt, n int) nodes.Query {
	return nodes.Query{
		Fingerprint: m.Fingerprint, Adapter: m.adapter.GetDigest(), Hashes: p.Hashes, BlockTokens: m.BlockTokens, Groups: m.groups, Tokens: n,
		Answer: m.kvBlocks(m.queue.Expect(math.MaxInt)),
	}
}

// demand is what the prompt and its answers are expected to take of a node's KV
// memory.
func (j *job) demand(p *render.Prompt) route.Demand {
	return j.model.demand(len(p.Tokens), p.MaxTokens, max(1, j.req.N))
}

// kvRoom is what the request's largest prompt asks of the nodes' KV memory; each
// prompt may go to a node of its own. A prompt that no node could ever hold gets
// an error.
func (j *job) kvRoom() (exchange.Room, *openai.Error) {
	var largest *render.Prompt
	total := int64(0)
	for i := range j.prompts {
		p := &j.prompts[i]
		if largest == nil || len(p.Tokens) > len(largest.Tokens) {
			largest = p
		}
		d := j.demand(p)
		total += int64(d.Prompt + d.Answer)
	}
	if largest == nil {
		return exchange.Room{}, nil
	}
	d := j.demand(largest)
	if !j.fleet.Nodes.Now().Holds(j.model.Fingerprint, d) {
		return exchange.Room{}, openai.BadRequest("prompt", "the prompt has %d tokens, which take %d KV blocks: no decode node of model %q has so many; send a shorter prompt",
			len(largest.Tokens), d.Prompt, j.model.Name)
	}
	return exchange.Room{Blocks: total, On: func(pending int64, avoid any) (bool, any) {
		d, q := d, j.model.query(largest, len(largest.Tokens)-1)
		d.Answer += int(pending)
		if n, ok := avoid.(*nodes.Node); ok {
			q.Avoid = []*nodes.Node{n}
		}
		has, most := j.fleet.Nodes.Now().HasRoom(q, d)
		if most == nil {
			return has, nil
		}
		return has, most
	}}, nil
}

// takes is how many KV blocks an attempt is expected to take of its node: all that
// its prompt is thought to lack there, and an answer.
func (j *job) takes(c *choice) int {
	d := j.model.demand(len(c.prompt.Tokens)+len(c.output), c.prompt.MaxTokens, 1)
	return d.Prompt + d.Answer - j.model.kvBlocks(c.held)
}

// Claim implements exchange.Backend.
func (j *job) Claim() (exchange.Claim, *openai.Error) {
	kv, fault := j.kvRoom()
	return exchange.Claim{Queue: j.model.queue, Priority: j.req.Priority, Choices: int64(len(j.choices)), Tokens: int64(j.nPrompt), Room: kv}, fault
}

// forecast counts the tokens of a prompt that the fleet's news say a node has; the
// node's own word, which comes with its Accepted, is held against it. A node uses
// whole blocks of all but the last token.
func (j *job) forecast(c *choice, node *nodes.Node) {
	bt, n := j.model.BlockTokens, len(c.prompt.Tokens)+len(c.output)
	held := bt * j.fleet.Blocks.Held(node.Member().ID, c.prompt.Hashes, bt, j.model.groups)
	j.S.Meters.Predicted.Add(float64(min(held, (n-1)/bt*bt)))
}
