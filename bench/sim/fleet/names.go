package fleet

import (
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// Requests have no tokens. A KV block of a prompt has the name of the trace's ids that it covers. A
// block with tokens of an answer has a name that no other request has. Names are chained, so that
// equal blocks after different ones differ.

// nameBlocks returns the names of the request's full blocks in so many tokens. They are valid until
// the next call.
func (f *fleet) nameBlocks(r *Request, tokens int) []kvcache.Hash {
	f.names = f.names[:0]
	size := f.o.BlockTokens
	for end := size; end <= tokens; end += size {
		f.names = append(f.names, r.name(end-size, end))
	}
	return f.names
}

// name returns the name of the request's tokens from start to end.
func (r *Request) name(start, end int) kvcache.Hash {
	const (
		odd      = 0x9e3779b97f4a7c15
		answer   = 1 << 63
		nameless = 1 << 62
	)
	if end > r.Prompt {
		return answer | kvcache.Hash(r.index)<<24 | kvcache.Hash(start)
	}
	first, last := start/r.idTokens, (end-1)/r.idTokens
	if last >= len(r.ids) { // without ids: equal in all prompts
		return nameless | kvcache.Hash(start)
	}
	name := r.ids[first]
	for _, id := range r.ids[first+1 : last+1] {
		name = name*odd + id
	}
	if first < last { // where it begins within the first id
		name += kvcache.Hash(start % r.idTokens)
	}
	return name
}

// hashes appends the hashes of the request's full blocks in so many tokens.
func (f *fleet) hashes(dst []kvcache.Hash, r *Request, tokens int) []kvcache.Hash {
	return f.chain(r).AppendHashes(dst, tokens/f.o.BlockTokens)
}

// chain returns the chain of the full blocks of the request's prompt and answer. It is made once,
// for the request's gateway and all its nodes.
func (f *fleet) chain(r *Request) *kvcache.Chain {
	if r.chain == nil {
		r.chain = new(kvcache.Chain)
		r.chain.Name(f.nameBlocks(r, r.Prompt+r.Output)...)
	}
	return r.chain
}

// key returns the ring key of the request's first tokens, of which hashes are the full blocks.
func (f *fleet) key(hashes []kvcache.Hash, r *Request, tokens int) kvcache.Hash {
	if f.o.Keys != nil {
		return f.o.Keys[r.index]
	}
	root := kvcache.Hash(0)
	if len(hashes) == 0 {
		root = r.name(0, tokens)
	}
	return route.Key(root, hashes, nil)
}
