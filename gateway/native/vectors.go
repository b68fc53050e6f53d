package native

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	// maxVectorsAtOnce bounds the inputs of one request that nodes compute at once, so that a request
	// of thousands of inputs leaves room for others.
	maxVectorsAtOnce = 32
	// maxVectorNumbers bounds the numbers of an answer. Each is up to 20 bytes of memory until the
	// answer is sent, which chargeAnswer counts.
	maxVectorNumbers = 1 << 22
)

// vectorIDs has the prefixes of the answers' ids.
var vectorIDs = map[openai.Endpoint]string{openai.Embeddings: "embd-", openai.Pooling: "pooling-", openai.Embed: "embd-", openai.Scores: "score-", openai.Ranks: "score-"}

// pools reports whether the request is for vectors. Each of its choices is an input, whose attempts
// end in a vector instead of tokens.
func (x *request) pools() bool { return x.req.Endpoint.Vectors() }

// means reports whether each vector is a mean of rows that only the decode node can compute.
func (x *request) means() bool {
	return x.pools() && !x.crosses(x.model) && x.model.bundle.Vectors.GetKind() == nodepb.PoolingKind_POOLING_KIND_MEAN
}

// crosses reports whether the model scores pairs of texts that are one prompt. Other models score
// them by the vectors of two prompts.
func (x *request) crosses(m *Model) bool {
	v := m.bundle.Vectors
	return x.req.Endpoint&(openai.Scores|openai.Ranks) != 0 && (v.GetLabels() > 0 || len(v.GetScoreTokens()) > 0)
}

// forVectors returns the model on nodes that compute vectors; for tokens: on any.
func (m *Model) forVectors(on openai.Endpoint) *Model {
	if !on.Vectors() {
		return m
	}
	w := *m
	w.vectors = nodes.VectorVersion
	return &w
}

// vectorsOf is the key of the queue of requests for vectors of the model with this fingerprint.
type vectorsOf uint64

// vectorQueue returns the queue of requests for vectors of a model some of whose prefill nodes
// compute them. So these requests do not wait for places of chats on decode nodes. FollowRoom sets
// the room of the queue.
func (fl *Fleet) vectorQueue(m *Model) *exchange.Admission {
	return fl.QueueOf(vectorsOf(m.Fingerprint), maxVectorsAtOnce)
}

// QueuedTokens returns the prompt tokens of the requests that wait for room.
func (fl *Fleet) QueuedTokens() (sum int) {
	add := func(a *exchange.Admission) {
		_, tokens := a.Queued()
		sum += tokens
	}
	for _, m := range fl.Models.All() {
		add(m.queue)
	}
	fl.EachQueue(func(key any, a *exchange.Admission) {
		if _, ours := key.(vectorsOf); ours {
			add(a)
		}
	})
	return sum
}

// checkVectors refuses what the model cannot answer: with vectors, or with tokens.
func (x *request) checkVectors(m *Model) *openai.Error {
	v, req := m.bundle.Vectors, x.req
	if !x.pools() {
		if v.GetOnly() {
			use := openai.EmbeddingsPath
			if v.Labels > 0 {
				use = "/score or /rerank"
			}
			return openai.BadRequest("model", "model %q gives vectors and no tokens, because its folder has no output projection: use %s", m.Name, use)
		}
		return nil
	}
	size, crosses, dimensions := int(v.GetSize()), x.crosses(m), "dimensions"
	if req.Endpoint == openai.Embed {
		dimensions = "output_dimension"
	}
	switch {
	case v == nil || !x.fleet.Nodes.Now().Pools(m.Fingerprint, nodes.VectorVersion):
		return openai.Unavailable(exchange.RetryAfter, "no node of model %q computes vectors of version %d: upgrade the nodes", openai.Clip(m.Name, 200), nodes.VectorVersion)
	case crosses && v.Labels > 1:
		return openai.BadRequest("model", "Score API is only enabled for num_labels == 1: model %q has %d", m.Name, v.Labels)
	case crosses:
		return nil
	case req.Endpoint&(openai.Scores|openai.Ranks) != 0 && req.Normalize != nil && !*req.Normalize:
		return openai.BadRequest("use_activation", "use_activation: must be true, because a score of model %q is the cosine of two vectors: leave it out", m.Name)
	case v.Refused != "":
		return openai.BadRequest("model", "model %q gives no vectors: %s", m.Name, v.Refused)
	case req.Dimensions > size:
		return openai.BadRequest(dimensions, dimensions+": must be at most %d, the size of the model's vectors, not %d", size, req.Dimensions)
	case req.Dimensions > 0 && req.Dimensions < size && v.Whole:
		return openai.BadRequest(dimensions, "Model %q does not support matryoshka representation, changing output dimensions will lead to poor results: leave %s out", m.Name, dimensions)
	case req.Dimensions > 0 && len(v.Dimensions) > 0 && !slices.Contains(v.Dimensions, uint32(req.Dimensions)):
		return openai.BadRequest(dimensions, "Model %q only supports %v matryoshka dimensions, use other output dimensions will lead to poor results: send one of them, not %d", m.Name, v.Dimensions, req.Dimensions)
	}
	if req.Dimensions > 0 {
		size = req.Dimensions
	}
	if n := len(req.Prompts) * size; n > maxVectorNumbers {
		return openai.BadRequest(openai.PromptParam(req.Endpoint), "%d inputs with vectors of %d numbers: one answer has at most %d numbers: send fewer inputs, or lower dimensions", len(req.Prompts), size, maxVectorNumbers)
	}
	return req.CheckTypes(size)
}

// addPrefix puts the prefix of the request's kind of texts before each.
func (x *request) addPrefix(m *Model) *openai.Error {
	kind, prompts := x.req.InputType, m.bundle.Vectors.GetPrompts()
	prefix, known := prompts[kind]
	switch {
	case kind == "":
		return nil
	case len(prompts) == 0:
		return openai.BadRequest("input_type", "Unsupported input_type %q. This model does not define any input_type task instructions.", openai.Clip(kind, 100))
	case !known:
		return openai.BadRequest("input_type", "Unsupported input_type %q. Supported values: %s", openai.Clip(kind, 100), strings.Join(slices.Sorted(maps.Keys(prompts)), ", "))
	}
	for i := range x.req.Prompts {
		x.req.Prompts[i].Text = prefix + x.req.Prompts[i].Text
	}
	return nil
}

// checkLengths refuses texts of more tokens than the request allows and does not truncate.
func (x *request) checkLengths(prompts []render.Prompt) *openai.Error {
	for i := range prompts {
		if n, most := len(prompts[i].Tokens), x.req.MaxInput; most > 0 && n > most {
			return openai.BadRequest("texts", "Input of %d tokens exceeds max_tokens=%d with truncate=NONE. Set truncate to END or START to allow truncation.", n, most)
		}
	}
	return nil
}

// joinPairs makes one prompt of each pair of texts, if the model scores these: by its chat template
// if that has the roles query and document, else the texts behind each other.
func (x *request) joinPairs(m *Model, charge func(bytes int) *openai.Error) *openai.Error {
	if !x.crosses(m) {
		return nil
	}
	req := x.req
	req.Prompts = nil
	rendered := m.Text != nil && strings.Contains(m.Text.Template(), "query") && strings.Contains(m.Text.Template(), "document")
	for i, document := range req.Second {
		query := req.First[i%len(req.First)]
		if fault := charge(len(query) + len(document)); fault != nil {
			return fault
		}
		if !rendered {
			req.Prompts = append(req.Prompts, openai.Prompt{Text: query + document})
			continue
		}
		chat := &openai.Request{Endpoint: openai.Chat, Messages: openai.PairMessages(query, document), AddGenerationPrompt: true, AddSpecialTokens: req.AddSpecialTokens}
		p, fault := m.Chat(chat, charge)
		if fault != nil {
			fault.Param = ""
			return fault
		}
		req.Prompts = append(req.Prompts, openai.Prompt{Tokens: p.Tokens})
	}
	return nil
}

// pooling returns how nodes make the vectors, and how many numbers each has.
func (x *request) pooling() (p *nodepb.Pooling, size int) {
	v := x.model.bundle.Vectors
	p, size = &nodepb.Pooling{Kind: v.GetKind(), Version: nodes.VectorVersion}, int(v.GetSize())
	switch {
	case !x.crosses(x.model):
	case len(v.ScoreTokens) > 0:
		p.Kind, p.Tokens, size = nodepb.PoolingKind_POOLING_KIND_LOGITS, v.ScoreTokens, len(v.ScoreTokens)
	default:
		p.Kind, size = nodepb.PoolingKind_POOLING_KIND_SCORES, int(v.Labels)
	}
	return p, size
}

// places returns the choices that run at once, which is what the request takes of its queue.
func (x *request) places() int {
	if x.pools() {
		return min(len(x.choices), maxVectorsAtOnce)
	}
	return len(x.choices)
}

// startVectors starts the first inputs. The others follow as these end.
func (x *request) startVectors() *openai.Error {
	for x.started < x.places() {
		if fault := x.startVector(); fault != nil {
			return fault
		}
	}
	return nil
}

// startVector starts the next input.
func (x *request) startVector() *openai.Error {
	x.started++
	return x.attempt(&x.choices[x.started-1])
}

// vector ends a choice with the vector of its input, and starts the next input in its place.
func (x *request) vector(c *choice, v []float32) *openai.Error {
	if _, size := x.pooling(); len(v) != size || slices.ContainsFunc(v, func(f float32) bool { return f-f != 0 }) {
		return &openai.Error{Status: 500, Type: openai.TypeInternal, Message: "the model's vector has numbers that are not finite, or not as many as the model has"}
	}
	c.state.Accepted()
	x.CountPrompt(len(c.prompt.Tokens), c.cached)
	c.vector, c.delta.Finish.Reason = v, metrics.ReasonStop
	x.leave(c)
	c.state.Finish()
	if x.live--; x.started < len(x.choices) {
		return x.startVector()
	}
	x.Release()
	return nil
}

// outputOf returns the number of a choice's tokens; negative: it has none to count.
func (x *request) outputOf(c *choice) int {
	if x.pools() {
		return -1
	}
	return len(c.output)
}

// vectorAnswer returns the whole answer.
func (x *request) vectorAnswer() []byte {
	now := time.Now().Unix()
	switch x.req.Endpoint {
	case openai.Scores:
		return openai.AppendScores(nil, x.answerID, now, x.model.Name, x.pairScores(), x.usage())
	case openai.Ranks:
		return openai.AppendRanks(nil, x.answerID, x.model.Name, x.req.Second, x.pairScores(), x.req.TopN, x.usage())
	}
	if x.req.Endpoint == openai.Embed {
		return openai.AppendTypedEmbeddings(nil, x.answerID, x.req.Second, x.embeddings(), x.req.Types, x.usage())
	}
	return openai.AppendEmbeddings(nil, x.req.Endpoint, x.answerID, now, x.model.Name, x.embeddings(), x.req.Base64, x.usage())
}

// pairScores returns the score of each pair: of the model, or the cosine of two vectors.
func (x *request) pairScores() []float32 {
	scores := make([]float32, len(x.req.Second))
	if x.crosses(x.model) {
		raw := x.req.Normalize != nil && !*x.req.Normalize
		for i := range scores {
			scores[i] = score(x.choices[i].vector, raw)
		}
		return scores
	}
	first := x.choices[:len(x.req.First)]
	for i := range scores {
		scores[i] = cosine(first[i%len(first)].vector, x.choices[len(first)+i].vector)
	}
	return scores
}

// score returns the score of the numbers for and, if there are two, against a pair: between 0 and 1
// unless raw is set.
func score(v []float32, raw bool) float32 {
	x := float64(v[0])
	if len(v) > 1 {
		x -= float64(v[1])
	}
	if raw {
		return float32(x)
	}
	return float32(1 / (1 + math.Exp(-x)))
}

// cosine returns the cosine of the angle between two vectors; 0 if one has no length.
func cosine(a, b []float32) float32 {
	var ab, aa, bb float64
	for i := range a {
		ab, aa, bb = ab+float64(a[i])*float64(b[i]), aa+float64(a[i])*float64(a[i]), bb+float64(b[i])*float64(b[i])
	}
	if aa == 0 || bb == 0 {
		return 0
	}
	return float32(ab / math.Sqrt(aa) / math.Sqrt(bb))
}

// embeddings returns the vectors of the inputs as the client requested them.
func (x *request) embeddings() [][]float32 {
	normal := !x.model.bundle.Vectors.GetRaw()
	if x.req.Normalize != nil {
		normal = *x.req.Normalize
	}
	vectors := make([][]float32, len(x.choices))
	for i := range x.choices {
		v := x.choices[i].vector
		if n := x.req.Dimensions; n > 0 {
			v = v[:n]
		}
		if normal {
			normalize(v)
		}
		vectors[i] = v
	}
	return vectors
}

// normalize divides a vector by its length. A vector of zeros stays.
func normalize(v []float32) {
	sum := 0.0
	for _, f := range v {
		sum += float64(f) * float64(f)
	}
	if sum == 0 {
		return
	}
	length := math.Sqrt(sum)
	for i, f := range v {
		v[i] = float32(float64(f) / length)
	}
}
