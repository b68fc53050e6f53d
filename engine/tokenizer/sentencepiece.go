package tokenizer

import (
	"encoding/json"
	"fmt"
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

// spmBPE is the model_type of vocabularies with merges.
const spmBPE = 2

// spm is the part of a SentencePiece ModelProto that decides ids.
type spm struct {
	pieces       []spmPiece
	modelType    uint64
	byteFallback bool
	unk, eos     int32
	bos          int32
	charsmap     bool // the normalizer replaces characters
}

type spmPiece struct {
	text string
	kind uint64
}

// FromSentencePiece returns the tokenizer.json that transformers makes of a tokenizer.model for
// the class LlamaTokenizer. config is tokenizer_config.json, or nil. Vocabularies without merges,
// without byte fallback, or of other classes give an error that wraps ErrUnsupported.
func FromSentencePiece(model, config []byte) ([]byte, error) {
	var c struct {
		Llama
		AddBOS bool `json:"add_bos_token"`
		AddEOS bool `json:"add_eos_token"`
	}
	if config != nil {
		if err := json.Unmarshal(config, &c); err != nil {
			return nil, invalid("tokenizer_config.json: %v", err)
		}
	}
	if strings.TrimSuffix(c.Class, "Fast") != "LlamaTokenizer" {
		return nil, &UnsupportedError{"tokenizer_class with tokenizer.model alone", c.Class}
	}
	m, err := parseSPM(model)
	if err != nil {
		return nil, err
	}
	switch {
	case m.modelType != spmBPE:
		return nil, &UnsupportedError{"tokenizer.model: model_type", fmt.Sprint(m.modelType)}
	case !m.byteFallback:
		return nil, &UnsupportedError{"tokenizer.model: byte_fallback", "false"}
	case m.charsmap:
		return nil, &UnsupportedError{"tokenizer.model: precompiled_charsmap", "not empty"}
	}
	return m.json(m.pieces, &c.Llama, c.AddBOS, c.AddEOS)
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
func pieceMerges(pieces []spmPiece, vocab map[string]int32) [][2]string {
	var out [][2]string
	for _, p := range pieces {
		from := len(out)
		for i := range p.text {
			if i == 0 {
				continue
			}
			_, left := vocab[p.text[:i]]
			_, right := vocab[p.text[i:]]
			if left && right {
				out = append(out, [2]string{p.text[:i], p.text[i:]})
			}
		}
		slices.SortStableFunc(out[from:], func(a, b [2]string) int {
			return utf8.RuneCountInString(a[0]) - utf8.RuneCountInString(b[0])
		})
	}
	return out
}

// Field numbers of ModelProto and its parts.
const (
	spmPieces, spmTrainer, spmNormalizer = 1, 2, 3
	spmText, spmKind                     = 1, 3
	spmModelType, spmByteFallback        = 3, 35
	spmUnk, spmBOS, spmEOS               = 40, 41, 42
	spmCharsmap                          = 2
)

func parseSPM(data []byte) (*spm, error) {
	m := &spm{modelType: 1, unk: 0, bos: 1, eos: 2} // ModelProto's defaults
	err := eachField(data, func(number protowire.Number, value uint64, part []byte) error {
		switch number {
		case spmPieces:
			p := spmPiece{kind: 1}
			err := eachField(part, func(number protowire.Number, value uint64, part []byte) error {
				switch number {
				case spmText:
					p.text = string(part)
				case spmKind:
					p.kind = value
				}
				return nil
			})
			if m.pieces = append(m.pieces, p); len(m.pieces) > maxTokenID {
				return invalid("tokenizer.model has more than %d pieces", maxTokenID)
			}
			return err
		case spmTrainer:
			return eachField(part, func(number protowire.Number, value uint64, _ []byte) error {
				switch number {
				case spmModelType:
					m.modelType = value
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
			return eachField(part, func(number protowire.Number, _ uint64, part []byte) error {
				m.charsmap = m.charsmap || number == spmCharsmap && len(part) > 0
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
