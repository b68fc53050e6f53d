package openai

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// EmbeddingsPath is the path of OpenAI's embeddings.
const EmbeddingsPath = "/v1/embeddings"

// embeddingTypes are the types of vectors in Cohere's form.
var embeddingTypes = []string{"float", "base64", "binary", "ubinary"}

func setTypes(r *Request, v []byte) error {
	if err := isList(v, "a list of strings", false); err != nil {
		return err
	}
	return elements(v, func(i int, e []byte) error {
		at := slices.IndexFunc(embeddingTypes, func(name string) bool { return string(e) == `"`+name+`"` })
		if at < 0 {
			return fmt.Errorf("[%d] must be one of %s, not %s", i, strings.Join(embeddingTypes, ", "), quote(e, 40))
		}
		if !slices.Contains(r.Types, embeddingTypes[at]) {
			r.Types = append(r.Types, embeddingTypes[at])
		}
		return nil
	})
}

// setCut takes the end of texts that are too long.
func setCut(r *Request, v []byte) error {
	r.truncates = true
	switch string(v) {
	case `"NONE"`:
	case `"START"`:
		r.Truncate = -1
	case `"END"`:
		r.Truncate, r.TruncateEnd = -1, true
	default:
		return errKind(`"NONE", "START" or "END"`, v)
	}
	return nil
}

// VectorBytes returns how many bytes a vector of size numbers takes in the request's answer, at
// most.
func (r *Request) VectorBytes(size int) (n int) {
	if r.Types == nil {
		return typedBytes(listOr64(r.Base64), size)
	}
	for _, name := range r.Types {
		n += typedBytes(name, size)
	}
	return n
}

// listOr64 returns the type of vectors in OpenAI's form.
func listOr64(inBase64 bool) string {
	if inBase64 {
		return "base64"
	}
	return "float"
}

// typedBytes returns how many bytes a vector of size numbers takes in a type of embeddingTypes, at
// most, with its object.
func typedBytes(name string, size int) int {
	const object = 64 // around the vector, with its index
	switch name {
	case "base64":
		return object + base64.StdEncoding.EncodedLen(4*size)
	case "binary", "ubinary":
		return object + size/8*len(",-128")
	}
	return object + size*len(",-1.00000012e-20") // a float32 has up to nine digits
}

// AppendEmbeddings appends the answer of Embeddings or Pooling. created is in seconds since 1970.
// Each vector is a list or, with inBase64, its little-endian float32 in base64.
func AppendEmbeddings(dst []byte, on Endpoint, id string, created int64, model string, vectors [][]float32, inBase64 bool, u Usage) []byte {
	head := `,"object":"embedding","embedding":`
	if on == Pooling {
		head = `,"object":"pooling","data":`
	}
	dst = growFor(dst, vectors, listOr64(inBase64))
	dst = AppendString(append(dst, `{"id":`...), id)
	dst = strconv.AppendInt(append(dst, `,"object":"list","created":`...), created, 10)
	dst = append(AppendString(append(dst, `,"model":`...), model), `,"data":[`...)
	for i, v := range vectors {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendInt(dst, `{"index":`, i), head...)
		if inBase64 {
			dst = appendBase64(dst, &v)
		} else {
			dst = appendFloats(dst, &v)
		}
		dst = append(dst, '}')
	}
	return append(u.Append(append(dst, `],"usage":`...)), '}')
}

// growFor returns dst with room for the vectors in each type, so that a large answer is not copied
// while it is encoded.
func growFor(dst []byte, vectors [][]float32, types ...string) []byte {
	n := 0
	for _, name := range types {
		for _, v := range vectors {
			n += typedBytes(name, len(v))
		}
	}
	return slices.Grow(dst, n+512)
}

// AppendTypedEmbeddings appends the answer of Embed: the vectors in each type.
func AppendTypedEmbeddings(dst []byte, id string, texts []string, vectors [][]float32, types []string, u Usage) []byte {
	if types == nil {
		types = embeddingTypes[:1]
	}
	dst = growFor(dst, vectors, types...)
	dst = append(AppendString(append(dst, `{"id":`...), id), `,"embeddings":{`...)
	for i, name := range types {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(AppendString(dst, name), ':')
		switch name {
		case "base64":
			dst = appendList(dst, vectors, appendBase64)
		case "binary":
			dst = appendList(dst, vectors, func(dst []byte, v *[]float32) []byte { return appendSigns(dst, *v, 128) })
		case "ubinary":
			dst = appendList(dst, vectors, func(dst []byte, v *[]float32) []byte { return appendSigns(dst, *v, 0) })
		default:
			dst = appendList(dst, vectors, appendFloats)
		}
	}
	dst = appendList(append(dst, `},"texts":`...), texts, func(dst []byte, s *string) []byte { return AppendString(dst, *s) })
	dst = appendInt(append(dst, `,"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":`...), "", u.Prompt)
	dst = appendInt(append(dst, `},"tokens":{"input_tokens":`...), "", u.Prompt)
	return append(dst, `}},"response_type":"embeddings_by_type"}`...)
}

// CheckTypes refuses vectors of bits that fill no whole bytes.
func (r *Request) CheckTypes(size int) *Error {
	if (slices.Contains(r.Types, "binary") || slices.Contains(r.Types, "ubinary")) && size%8 != 0 {
		return BadRequest("embedding_types", "Embedding dimension must be a multiple of 8 for binary embedding types, but got %d.", size)
	}
	return nil
}

// appendSigns appends a bit for each number, 1 if it is not negative, as bytes less minus.
func appendSigns(dst []byte, v []float32, minus int) []byte {
	packed := make([]byte, len(v)/8)
	for i, f := range v {
		if f >= 0 {
			packed[i/8] |= 1 << (7 - i%8)
		}
	}
	return appendList(dst, packed, func(dst []byte, b *byte) []byte { return appendInt(dst, "", int(*b)-minus) })
}

func appendFloats(dst []byte, v *[]float32) []byte { return appendList(dst, *v, appendFloat) }

// appendFloat appends the shortest number that is this float32.
func appendFloat(dst []byte, f *float32) []byte {
	return strconv.AppendFloat(dst, float64(*f), 'g', -1, 32)
}

func appendBase64(dst []byte, v *[]float32) []byte {
	raw := make([]byte, 0, 4*len(*v))
	for _, f := range *v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(f))
	}
	return append(base64.StdEncoding.AppendEncode(append(dst, '"'), raw), '"')
}
