package native

import "github.com/tandem-serving/tandem/gateway/api/openai"

// Memory of answers, in bytes. It is counted within the memory of large bodies, because both grow
// with what one request may ask for, and no choice's pace bounds either.
const (
	numberBytes = 4 // a number of a vector, as the node sent it
	// textCopies is how often the answer's repetition of a text takes its bytes: the text, and the
	// encoded answer while its buffer grows.
	textCopies = 4
	// pairBytes is an encoded score.
	pairBytes = 128
	// logprobBytes is a log-probability of a prompt's token, or of one of the best tokens in its
	// place: as the node sent it, as a part of the answer, and encoded while the buffer grows.
	logprobBytes = 256
)

// chargeAnswer reserves memory for the parts of the answer whose size follows from the request:
// vectors, repeated texts, and log-probabilities of prompts. The memory is reserved while the
// request runs and until its answer is sent, not while the request waits in the queue.
func (x *request) chargeAnswer() *openai.Error {
	n := x.answerBytes()
	if n == 0 {
		return nil
	}
	return x.S.Charge(x.Ctx)(n)
}

// answerBytes returns how many bytes chargeAnswer reserves.
func (x *request) answerBytes() (n int) {
	if x.pools() {
		return x.vectorBytes()
	}
	copies := x.req.N // a completion repeats a prompt's log-probabilities in each choice
	if x.req.Endpoint == openai.Chat {
		copies = 1
	}
	for i := range x.choices {
		c := &x.choices[i]
		best, scored := x.scores(c)
		if !scored {
			continue
		}
		each := logprobBytes * (1 + int(best))
		for _, id := range c.prompt.Tokens {
			n += copies * (each + textCopies*len(x.model.TokenText(id)))
		}
	}
	return n
}

// vectorBytes returns the bytes of an answer of vectors or scores.
func (x *request) vectorBytes() (n int) {
	req := x.req
	_, size := x.pooling()
	n = numberBytes * size * len(x.choices)
	repeats := req.Endpoint == openai.Embed || req.Endpoint == openai.Ranks
	if req.Endpoint&(openai.Scores|openai.Ranks) != 0 {
		n += pairBytes * len(req.Second)
	} else {
		if req.Dimensions > 0 {
			size = req.Dimensions
		}
		n += req.VectorBytes(size) * len(x.choices)
	}
	for i := range req.Second {
		if repeats {
			n += textCopies * len(req.Second[i])
		}
	}
	return n
}
