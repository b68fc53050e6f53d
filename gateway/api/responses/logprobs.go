package responses

import "github.com/tandem-serving/tandem/gateway/api/openai"

// The events at the end of a message, and of the response, repeat the log-probabilities of all its
// tokens: four times what its deltas had. They are kept once, and the events share them.

const (
	// maxKept bounds the log-probabilities that a response keeps, in bytes. Those of later tokens are
	// in deltas only.
	maxKept = 64 << 20
	// minSplice is the size from which log-probabilities are shared, in bytes. Fewer are copied.
	minSplice = 16 << 10
	// Sizes of a piece, in bytes.
	minPiece, maxPiece = 512, 32 << 10
)

// pieces are log-probabilities as JSON objects separated by commas. A piece does not move when
// others follow it.
type pieces [][]byte

// add adds JSON.
func (p *pieces) add(text []byte) {
	n := len(*p)
	if n == 0 || len((*p)[n-1])+len(text) > cap((*p)[n-1]) {
		size := minPiece
		if n > 0 {
			size = min(2*cap((*p)[n-1]), maxPiece)
		}
		*p = append(*p, make([]byte, 0, max(size, len(text))))
		n++
	}
	(*p)[n-1] = append((*p)[n-1], text...)
}

// keepLogprobs adds the log-probabilities of a text to the open item.
func (r *Response) keepLogprobs(text []byte) {
	i := &r.item
	if r.kept += len(text); len(text) == 0 || r.kept > maxKept {
		return
	}
	if len(i.logprobs) > 0 {
		i.logprobs.add([]byte{','})
	}
	i.logprobs.add(text)
}

// appendKept appends the log-probabilities of the open item. If there are many, it adds a splice
// for them instead.
func (r *Response) appendKept(dst []byte) []byte {
	if r.whole != nil {
		return appendLogprobs(dst, r.whole)
	}
	size := 0
	for _, piece := range r.item.logprobs {
		size += len(piece)
	}
	if size >= minSplice {
		r.splices = append(r.splices, openai.Splice{At: len(dst), Parts: r.item.logprobs})
		return dst
	}
	for _, piece := range r.item.logprobs {
		dst = append(dst, piece...)
	}
	return dst
}

// Splices returns the splices of what was appended since the last call, by their places in the
// buffer.
func (r *Response) Splices() []openai.Splice {
	s := r.splices
	r.splices = nil
	return s
}
