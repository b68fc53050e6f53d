package openai

import (
	"encoding/base64"
	"encoding/binary"
	"math"
	"strconv"
)

// EmbeddingsPath is the path of OpenAI's embeddings.
const EmbeddingsPath = "/v1/embeddings"

// AppendEmbeddings appends the answer of EmbeddingsPath. created is in seconds since 1970. Each
// vector is a list of numbers or, with inBase64, its little-endian float32 in base64.
func AppendEmbeddings(dst []byte, id string, created int64, model string, vectors [][]float32, inBase64 bool, u Usage) []byte {
	dst = AppendString(append(dst, `{"id":`...), id)
	dst = strconv.AppendInt(append(dst, `,"object":"list","created":`...), created, 10)
	dst = append(AppendString(append(dst, `,"model":`...), model), `,"data":[`...)
	for i, v := range vectors {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendInt(dst, `{"index":`, i), `,"object":"embedding","embedding":`...)
		if inBase64 {
			dst = appendBase64(dst, v)
		} else {
			dst = appendList(dst, v, appendFloat)
		}
		dst = append(dst, '}')
	}
	return append(u.Append(append(dst, `],"usage":`...)), '}')
}

// appendFloat appends the shortest number that is this float32.
func appendFloat(dst []byte, f *float32) []byte {
	return strconv.AppendFloat(dst, float64(*f), 'g', -1, 32)
}

func appendBase64(dst []byte, v []float32) []byte {
	raw := make([]byte, 0, 4*len(v))
	for _, f := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(f))
	}
	return append(base64.StdEncoding.AppendEncode(append(dst, '"'), raw), '"')
}
