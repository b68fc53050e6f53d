package tokenizer

import (
	"bytes"
	"encoding/json"
	"hash/maphash"
	"maps"
	"strings"
)

// maxTokenID bounds the ids a file may use, because tables are indexed by id.
// The largest public vocabularies have about 262,000 tokens.
const maxTokenID = 1 << 22

// file is a tokenizer.json as far as it decides ids. Truncation and padding are
// left out on purpose: the server bounds prompts itself.
type file struct {
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// component is any normalizer, pre-tokenizer, post-processor or decoder: the
// union of their fields.
type component struct {
	Type string `json:"type"`

	Normalizers   []json.RawMessage `json:"normalizers"`
	PreTokenizers []json.RawMessage `json:"pretokenizers"`
	Processors    []json.RawMessage `json:"processors"`
	Decoders      []json.RawMessage `json:"decoders"`

	Pattern          json.RawMessage `json:"pattern"`
	Content          string          `json:"content"` // of Replace and Strip
	Prepend          string          `json:"prepend"`
	Charsmap         []byte          `json:"precompiled_charsmap"`
	StripLeft        *bool           `json:"strip_left"`
	StripRight       *bool           `json:"strip_right"`
	Start            int             `json:"start"` // of Strip: how many at most
	Stop             int             `json:"stop"`
	Behavior         string          `json:"behavior"`
	Invert           bool            `json:"invert"`
	AddPrefixSpace   *bool           `json:"add_prefix_space"`
	UseRegex         *bool           `json:"use_regex"`
	IndividualDigits bool            `json:"individual_digits"`
	Replacement      string          `json:"replacement"` // of Metaspace, as are the next two
	PrependScheme    string          `json:"prepend_scheme"`
	Split            *bool           `json:"split"`

	Single        []templatePiece          `json:"single"`
	SpecialTokens map[string]templateToken `json:"special_tokens"`
}

type templatePiece struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

type templateToken struct {
	IDs []int32 `json:"ids"`
}

// modelJSON is the "model" of a tokenizer.json.
type modelJSON struct {
	Type                    string          `json:"type"`
	Dropout                 *float64        `json:"dropout"`
	UnkToken                *string         `json:"unk_token"`
	ContinuingSubwordPrefix *string         `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string         `json:"end_of_word_suffix"`
	FuseUnk                 bool            `json:"fuse_unk"`
	ByteFallback            bool            `json:"byte_fallback"`
	IgnoreMerges            bool            `json:"ignore_merges"`
	Tokens                  json.RawMessage `json:"vocab"`
	Merges                  json.RawMessage `json:"merges"`
	UnkID                   *int32          `json:"unk_id"` // of Unigram

	Vocab  map[string]int32 `json:"-"` // Tokens
	scores []float64        // of Unigram, by id
}

// Load reads a Hugging Face tokenizer.json. A setting that this package cannot
// reproduce exactly gives an error that wraps ErrUnsupported and names the
// setting. A file that is incomplete or contradicts itself gives an error that
// wraps ErrInvalid.
func Load(tokenizerJSON []byte) (*Tokenizer, error) {
	var f file
	if err := json.Unmarshal(tokenizerJSON, &f); err != nil {
		return nil, invalid("%v", err)
	}
	var m modelJSON
	if err := decodePart(f.Model, "model", &m); err != nil {
		return nil, err
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	t := &Tokenizer{chars: chars(), cache: new(cache), growth: 1}
	t.scratch.New = func() any { return new(scratch) }
	if err := t.loadNormalizer(f.Normalizer); err != nil {
		return nil, err
	}
	loadPreTokenizer, loadMerges, loadDecoder := t.loadPreTokenizer, t.loadMerges, checkDecoder
	switch {
	case m.Type == "Unigram":
		loadPreTokenizer, loadMerges, loadDecoder = t.loadSplits, t.loadUnigram, t.loadCharacterDecoder
		t.bpe.seed = maphash.MakeSeed()
	case m.ByteFallback:
		loadPreTokenizer, loadMerges, loadDecoder = t.loadSplits, t.loadFallback, t.loadFallbackDecoder
	}
	if err := loadPreTokenizer(f.PreTokenizer); err != nil {
		return nil, err
	}
	if err := loadDecoder(f.Decoder); err != nil {
		return nil, err
	}
	fresh, err := t.loadVocab(&m, f.AddedTokens)
	if err != nil {
		return nil, err
	}
	if err := loadMerges(&m); err != nil {
		return nil, err
	}
	maps.Copy(t.ids, fresh)
	if err := t.loadPostProcessor(f.PostProcessor); err != nil {
		return nil, err
	}
	return t, nil
}

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(raw, []byte("null"))
}

func decodePart(raw json.RawMessage, part string, into any) error {
	if isNull(raw) {
		return invalid("%q is missing", part)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return invalid("%s: %v", part, err)
	}
	return nil
}

func (m *modelJSON) check() error {
	if m.Type == "Unigram" {
		return m.readUnigram()
	}
	if m.Type != "BPE" {
		return &UnsupportedError{"model.type", m.Type}
	}
	if !isNull(m.Tokens) {
		if err := json.Unmarshal(m.Tokens, &m.Vocab); err != nil {
			return invalid("model: vocab: %v", err)
		}
	}
	if m.Dropout != nil && *m.Dropout != 0 {
		return &UnsupportedError{"model.dropout", "not null"}
	}
	if s := m.ContinuingSubwordPrefix; s != nil && *s != "" {
		return &UnsupportedError{"model.continuing_subword_prefix", *s}
	}
	if s := m.EndOfWordSuffix; s != nil && *s != "" {
		return &UnsupportedError{"model.end_of_word_suffix", *s}
	}
	return nil
}

// loadMerges prepares merging the bytes of a word.
func (t *Tokenizer) loadMerges(m *modelJSON) error {
	b := &t.bpe
	b.unk, b.fuseUnk = -1, m.FuseUnk
	if m.UnkToken != nil {
		// As in the reference, a name that is not in the vocabulary matters
		// only when a byte is missing too.
		if id, ok := m.Vocab[*m.UnkToken]; ok {
			b.unk = id
		}
	}
	for i, r := range byteAlphabet {
		id, ok := m.Vocab[string(r)]
		if !ok {
			if m.UnkToken != nil && b.unk < 0 {
				return invalid("unk_token %q is not in the vocabulary, nor is the byte %#02x", *m.UnkToken, i)
			}
			id = b.unk
		}
		b.byteID[i] = id
	}
	if err := b.loadPairs(m, func(_, _ string, _, _ int32) error { return nil }); err != nil {
		return err
	}
	b.loadWords(m, &t.bytes, rawBytes)
	return nil
}

// loadPairs fills the merge table and shows every merge to see.
func (b *bpe) loadPairs(m *modelJSON, see func(left, right string, leftID, rightID int32) error) error {
	pairs, err := parseMerges(m.Merges)
	if err != nil {
		return err
	}
	b.seed = maphash.MakeSeed()
	b.pairs = newPairTable(len(pairs))
	for rank, pair := range pairs {
		left, okLeft := m.Vocab[pair[0]]
		right, okRight := m.Vocab[pair[1]]
		merged, okMerged := m.Vocab[pair[0]+pair[1]]
		if !okLeft || !okRight || !okMerged {
			return invalid("merge %d (%q, %q) uses or makes a token that the vocabulary lacks", rank, pair[0], pair[1])
		}
		if err := see(pair[0], pair[1], left, right); err != nil {
			return err
		}
		b.pairs.set(left, right, uint64(rank)<<32|uint64(uint32(merged)))
	}
	return nil
}

// loadWords finds the words that are one token. texts holds by id what raw returns for a token:
// the text that it is looked up by, and whether it has one.
func (b *bpe) loadWords(m *modelJSON, texts *tokenBytes, raw func(token string) (string, bool)) {
	b.words = newWordTable(len(m.Vocab), texts)
	var w scratch
	var ids []int32
	for token, id := range m.Vocab {
		text, ok := raw(token)
		if !ok || text == "" {
			continue
		}
		if !m.IgnoreMerges {
			if ids = b.merge(ids[:0], text, &w); len(ids) != 1 || ids[0] != id {
				continue
			}
		}
		b.words.set(id, maphash.String(b.seed, text))
	}
}

// parseMerges reads both forms: "a b" and ["a", "b"].
func parseMerges(raw json.RawMessage) ([][2]string, error) {
	if isNull(raw) {
		return nil, invalid("model.merges is missing")
	}
	var pairs [][]string
	if json.Unmarshal(raw, &pairs) == nil {
		out := make([][2]string, len(pairs))
		for i, p := range pairs {
			if len(p) != 2 {
				return nil, invalid("merge %d has %d parts, want 2", i, len(p))
			}
			out[i] = [2]string{p[0], p[1]}
		}
		return out, nil
	}
	var lines []string
	if err := json.Unmarshal(raw, &lines); err != nil {
		return nil, invalid("model.merges: %v", err)
	}
	out := make([][2]string, 0, len(lines))
	for i, line := range lines {
		if strings.HasPrefix(line, "#version") {
			continue
		}
		left, right, ok := strings.Cut(line, " ")
		if !ok || strings.Contains(right, " ") {
			return nil, invalid("merge %d %q is not two tokens with a space between", i, line)
		}
		out = append(out, [2]string{left, right})
	}
	return out, nil
}
