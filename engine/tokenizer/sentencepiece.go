package tokenizer

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Kinds of pieces in a SentencePiece model.
const (
	pieceUnknown     = 2
	pieceControl     = 3
	pieceUserDefined = 4
)

// Values of model_type: vocabularies with scores, and with merges.
const (
	spmUnigram = 1
	spmBPE     = 2
)

// spm is the part of a SentencePiece ModelProto that decides ids.
type spm struct {
	pieces       []spmPiece
	modelType    uint64
	byteFallback bool
	unk, eos     int32
	bos          int32
	charsmap     []byte // replaces characters; empty: does not
	suffix       bool   // spaces end words

	// The normalizer puts a space before a text, removes spaces around it and repeated ones, and
	// writes them as marks.
	prefix, trim, escape bool
}

type spmPiece struct {
	text  string
	kind  uint64
	score float32
}

// FromSentencePiece returns the tokenizer.json that transformers makes of a tokenizer.model for
// the class LlamaTokenizer with merges and byte fallback, or for a class without code with scores.
// config is tokenizer_config.json, or nil. Others give an error that wraps ErrUnsupported.
func FromSentencePiece(model, config []byte) ([]byte, error) {
	var c struct {
		Llama
		Legacy *bool `json:"legacy"`
		AddBOS bool  `json:"add_bos_token"`
		AddEOS bool  `json:"add_eos_token"`
	}
	if config != nil {
		if err := json.Unmarshal(config, &c); err != nil {
			return nil, invalid("tokenizer_config.json: %v", err)
		}
	}
	llama := strings.TrimSuffix(c.Class, "Fast") == "LlamaTokenizer"
	if !llama && !slices.Contains([]string{"", "PreTrainedTokenizerFast", "TokenizersBackend"}, c.Class) {
		return nil, &UnsupportedError{"tokenizer_class with tokenizer.model alone", c.Class}
	}
	m, err := parseSPM(model)
	if err != nil {
		return nil, err
	}
	switch {
	case m.modelType == spmUnigram && !llama:
		return m.unigramJSON(c.Legacy == nil || *c.Legacy, c.AddBOS, c.AddEOS)
	case !llama:
		return nil, &UnsupportedError{"tokenizer_class with a tokenizer.model with merges alone", c.Class}
	case m.modelType != spmBPE:
		return nil, &UnsupportedError{"tokenizer.model: model_type", fmt.Sprint(m.modelType)}
	case !m.byteFallback:
		return nil, &UnsupportedError{"tokenizer.model: byte_fallback", "false"}
	case len(m.charsmap) > 0:
		return nil, &UnsupportedError{"tokenizer.model: precompiled_charsmap", "not empty"}
	}
	c.Llama.Legacy = c.Legacy != nil && *c.Legacy
	return m.json(m.pieces, &c.Llama, c.AddBOS, c.AddEOS)
}

// unigramJSON returns the tokenizer.json of a vocabulary with scores, whose ids are those of
// SentencePiece. legacy is whether a space is put behind added tokens, too.
func (m *spm) unigramJSON(legacy, bos, eos bool) ([]byte, error) {
	if m.suffix {
		return nil, &UnsupportedError{"tokenizer.model: treat_whitespace_as_suffix", "true"}
	}
	if m.unk < 0 {
		return nil, invalid("tokenizer.model: unk_id %d", m.unk)
	}
	// Without legacy, the reference puts no space before a text whose beginning was removed.
	if !legacy && (m.trim || len(m.charsmap) > 0) {
		return nil, &UnsupportedError{"tokenizer_config.json: legacy with a tokenizer.model that removes characters", "false"}
	}
	type object = map[string]any
	replace := func(pattern object, content string) object {
		return object{"type": "Replace", "pattern": pattern, "content": content}
	}
	var normalizers, cuts []object
	if len(m.charsmap) > 0 {
		normalizers = append(normalizers, object{"type": "Precompiled", "precompiled_charsmap": m.charsmap})
	}
	if m.trim {
		normalizers = append(normalizers, replace(object{"Regex": `\A +| +\z`}, ""), replace(object{"Regex": " {2,}"}, " "))
	}
	if m.escape {
		normalizers = append(normalizers, replace(object{"String": " "}, "▁"))
	}
	decoders := []object{replace(object{"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}}
	if m.prefix {
		scheme := "first"
		if legacy {
			scheme = "always"
			normalizers = append(normalizers, replace(object{"Regex": `\A▁`}, "▁▁"))
		}
		cuts = append(cuts, object{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false})
		decoders = append(decoders, object{"type": "Strip", "content": " ", "start": 1, "stop": 0})
	}
	added, whole, err := m.apart()
	if err != nil {
		return nil, err
	}
	for _, text := range whole {
		cuts = append(cuts, object{"type": "Split", "pattern": object{"String": text}, "behavior": "Isolated", "invert": false})
	}
	vocab := make([]unigramPiece, len(m.pieces))
	for id, p := range m.pieces {
		score := float64(p.score)
		if math.IsInf(score, 0) || math.IsNaN(score) {
			return nil, invalid("tokenizer.model: piece %q has the score %v", p.text, score)
		}
		vocab[id] = unigramPiece{p.text, score}
	}
	return encode(object{
		"version": "1.0", "added_tokens": added, "normalizer": object{"type": "Sequence", "normalizers": normalizers},
		"pre_tokenizer":  object{"type": "Sequence", "pretokenizers": cuts},
		"post_processor": m.template(bos, eos), "decoder": object{"type": "Sequence", "decoders": decoders},
		"model": object{"type": "Unigram", "unk_id": m.unk, "byte_fallback": m.byteFallback, "vocab": vocab},
	})
}

// apart returns the special tokens, and the user-defined pieces, which are cut out of the
// normalized text.
func (m *spm) apart() (special []addedToken, whole []string, err error) {
	for _, a := range m.added() {
		if a.Special {
			special = append(special, a)
			continue
		}
		if len(whole) == maxWhole {
			return nil, nil, &UnsupportedError{"tokenizer.model: number of user-defined pieces", fmt.Sprintf("more than %d", maxWhole)}
		}
		for _, other := range whole {
			if strings.Contains(other, a.Content) || strings.Contains(a.Content, other) {
				return nil, nil, &UnsupportedError{"tokenizer.model: user-defined pieces of which one is in another", fmt.Sprintf("%s, %s", other, a.Content)}
			}
			if overlap(other, a.Content) || overlap(a.Content, other) {
				return nil, nil, &UnsupportedError{"tokenizer.model: user-defined pieces of which one ends as another begins", fmt.Sprintf("%s, %s", other, a.Content)}
			}
		}
		whole = append(whole, a.Content)
	}
	return special, whole, nil
}

// maxWhole bounds the user-defined pieces, each of which is a pass over a text.
const maxWhole = maxNormalizers - 1 // one pass is Metaspace's

// overlap reports whether a ends with the beginning of b.
func overlap(a, b string) bool {
	for i := 1; i < len(a); i++ {
		if strings.HasPrefix(b, a[i:]) {
			return true
		}
	}
	return false
}

// added returns the pieces that are cut out of the text: control and user-defined ones, and those
// that begin, end or replace a text.
func (m *spm) added() []addedToken {
	var out []addedToken
	for id, p := range m.pieces {
		id := int32(id)
		special := p.kind == pieceControl || p.kind == pieceUnknown || id == m.unk || id == m.bos || id == m.eos
		if special || p.kind == pieceUserDefined {
			out = append(out, addedToken{ID: id, Content: p.text, Special: special})
		}
	}
	return out
}

// template returns the post-processor that adds the tokens which begin and end a text.
func (m *spm) template(bos, eos bool) any {
	type object = map[string]any
	single, special := []object{{"Sequence": object{"id": "A", "type_id": 0}}}, object{}
	token := func(id int32) object {
		text := m.pieces[id].text
		special[text] = object{"id": text, "ids": []int32{id}, "tokens": []string{text}}
		return object{"SpecialToken": object{"id": text, "type_id": 0}}
	}
	if bos && m.bos >= 0 {
		single = slices.Insert(single, 0, token(m.bos))
	}
	if eos && m.eos >= 0 {
		single = append(single, token(m.eos))
	}
	return object{"type": "TemplateProcessing", "single": single, "pair": []object{}, "special_tokens": special}
}

// pieceMerges returns the pairs of pieces whose concatenation is a piece, in the order of pieces
// and, of one piece, of the lengths of the pair.
func pieceMerges(pieces []spmPiece, vocab map[string]int32) ([][2]string, error) {
	var out [][2]string
	size := 0
	for _, p := range pieces {
		from := len(out)
		for i := range p.text {
			if i == 0 {
				continue
			}
			_, left := vocab[p.text[:i]]
			_, right := vocab[p.text[i:]]
			if !left || !right {
				continue
			}
			if size += len(p.text); size > maxMergeBytes {
				return nil, invalid("the merges of the vocabulary take more than %d bytes", maxMergeBytes)
			}
			out = append(out, [2]string{p.text[:i], p.text[i:]})
		}
		slices.SortStableFunc(out[from:], func(a, b [2]string) int {
			return utf8.RuneCountInString(a[0]) - utf8.RuneCountInString(b[0])
		})
	}
	return out, nil
}

// Field numbers of ModelProto and its parts.
const (
	spmPieces, spmTrainer, spmNormalizer = 1, 2, 3
	spmText, spmScore, spmKind           = 1, 2, 3
	spmModelType, spmByteFallback        = 3, 35
	spmUnk, spmBOS, spmEOS               = 40, 41, 42
	spmSuffix                            = 24
	spmCharsmap, spmPrefix               = 2, 3
	spmTrim, spmEscape                   = 4, 5
)

func parseSPM(data []byte) (*spm, error) {
	m := &spm{modelType: spmUnigram, unk: 0, bos: 1, eos: 2, prefix: true, trim: true, escape: true} // ModelProto's defaults
	err := eachField(data, func(number protowire.Number, value uint64, part []byte) error {
		switch number {
		case spmPieces:
			p := spmPiece{kind: 1}
			err := eachField(part, func(number protowire.Number, value uint64, part []byte) error {
				switch number {
				case spmText:
					p.text = string(part)
				case spmScore:
					p.score = math.Float32frombits(uint32(value))
				case spmKind:
					p.kind = value
				}
				return nil
			})
			if len(p.text) > maxTokenBytes { // merges take the square of it
				return invalid("tokenizer.model: piece %d has %d bytes, at most %d", len(m.pieces), len(p.text), maxTokenBytes)
			}
			if m.pieces = append(m.pieces, p); len(m.pieces) > maxTokenID {
				return invalid("tokenizer.model has more than %d pieces", maxTokenID)
			}
			return err
		case spmTrainer:
			return eachField(part, func(number protowire.Number, value uint64, _ []byte) error {
				switch number {
				case spmModelType:
					m.modelType = value
				case spmSuffix:
					m.suffix = value != 0
				case spmByteFallback:
					m.byteFallback = value != 0
				case spmUnk:
					m.unk = int32(value)
				case spmBOS:
					m.bos = int32(value)
				case spmEOS:
					m.eos = int32(value)
				}
				return nil
			})
		case spmNormalizer:
			return eachField(part, func(number protowire.Number, value uint64, part []byte) error {
				switch number {
				case spmCharsmap:
					m.charsmap = part
				case spmPrefix:
					m.prefix = value != 0
				case spmTrim:
					m.trim = value != 0
				case spmEscape:
					m.escape = value != 0
				}
				return nil
			})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, id := range []int32{m.unk, m.bos, m.eos} {
		if id >= int32(len(m.pieces)) {
			return nil, invalid("tokenizer.model: token %d of %d pieces", id, len(m.pieces))
		}
	}
	return m, nil
}

// eachField calls see with each field of a protobuf message: a number, or the bytes of a field
// with a length.
func eachField(data []byte, see func(number protowire.Number, value uint64, part []byte) error) error {
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return invalid("tokenizer.model: %v", protowire.ParseError(n))
		}
		data = data[n:]
		var value uint64
		var part []byte
		switch kind {
		case protowire.VarintType:
			value, n = protowire.ConsumeVarint(data)
		case protowire.BytesType:
			part, n = protowire.ConsumeBytes(data)
		case protowire.Fixed32Type:
			var bits uint32
			bits, n = protowire.ConsumeFixed32(data)
			value = uint64(bits)
		default:
			n = protowire.ConsumeFieldValue(number, kind, data)
		}
		if n < 0 {
			return invalid("tokenizer.model: %v", protowire.ParseError(n))
		}
		data = data[n:]
		if err := see(number, value, part); err != nil {
			return err
		}
	}
	return nil
}
