package tokenizer

// tokenBytes holds the bytes of every token in one string.
type tokenBytes struct {
	blob  string
	start []uint32 // start[id] .. start[id+1]; len is the vocabulary size + 1
}

// at returns the bytes of a token of the vocabulary.
func (b *tokenBytes) at(id int32) string {
	return b.blob[b.start[id]:b.start[id+1]]
}

// loadVocab gives every token its id and bytes, and sorts the added tokens into
// those matched before and those matched after normalization. It returns the
// added tokens that the model's vocabulary lacks: to the model they do not exist.
func (t *Tokenizer) loadVocab(m *modelJSON, added []addedToken) (fresh map[string]int32, err error) {
	t.ids = m.Vocab
	if t.ids == nil {
		t.ids = map[string]int32{}
	}
	size := int32(0)
	for token, id := range t.ids {
		if id < 0 || id >= maxTokenID {
			return nil, invalid("token %q has id %d, want 0 to %d", token, id, maxTokenID-1)
		}
		size = max(size, id+1)
	}
	nextID := int32(len(t.ids)) // the reference gives the first new token this id
	var plain, normalized []*addedToken
	fresh = map[string]int32{}
	t.added = map[string]int32{}
	for i := range added {
		a := &added[i]
		if _, again := t.added[a.Content]; again || a.Content == "" {
			continue
		}
		want, ok := t.ids[a.Content]
		if !ok {
			want = nextID
			nextID++
			fresh[a.Content] = want
		} else if want >= nextID {
			nextID = want + 1
		}
		if a.ID != want {
			return nil, invalid("added token %q has id %d, but its place in the vocabulary is %d", a.Content, a.ID, want)
		}
		t.added[a.Content] = want
		size = max(size, want+1)
		if a.Normalized {
			normalized = append(normalized, a)
		} else {
			plain = append(plain, a)
		}
	}
	if size > maxTokenID {
		return nil, invalid("%d tokens, want at most %d", size, maxTokenID)
	}
	t.special = make([]bool, size)
	for i := range added {
		if a := &added[i]; a.Special && a.Content != "" {
			t.special[t.added[a.Content]] = true
		}
	}
	t.raw = newMatcher(plain, func(a *addedToken) string { return a.Content })
	t.normalized = newMatcher(normalized, func(a *addedToken) string { return t.normalize(a.Content) })
	return fresh, t.fillBytes(size, fresh, normalized)
}

// fillBytes builds the bytes of all tokens. Two tokens with one id are refused, because the decoded
// text would depend on the order of a map. The reference decodes a
// normalized added token to its normalized text.
func (t *Tokenizer) fillBytes(size int32, fresh map[string]int32, normalized []*addedToken) error {
	texts := make([]string, size)
	used := make([]bool, size)
	for token, id := range t.ids {
		if used[id] {
			return invalid("two tokens have id %d, one of them is %q", id, token)
		}
		used[id] = true
		texts[id] = token
	}
	for token, id := range fresh {
		if used[id] { // the vocabulary has gaps
			return invalid("two tokens have id %d, one of them is the added %q", id, token)
		}
		texts[id] = token
	}
	for _, a := range normalized {
		texts[a.ID] = t.normalize(a.Content)
	}
	if t.fallback != nil {
		return t.fillFallback(texts)
	}
	for id, token := range texts {
		texts[id], _ = rawBytes(token)
	}
	return t.bytes.fill(texts)
}

// fill lays out the text of every id.
func (b *tokenBytes) fill(texts []string) error {
	total := 0
	for _, s := range texts {
		total += len(s)
	}
	if total > 1<<31 {
		return invalid("the vocabulary has %d bytes of text", total)
	}
	blob := make([]byte, 0, total)
	b.start = make([]uint32, len(texts)+1)
	for id, s := range texts {
		blob = append(blob, s...)
		b.start[id+1] = uint32(len(blob))
	}
	b.blob = string(blob)
	return nil
}
