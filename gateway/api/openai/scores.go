package openai

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Values of the fields with the texts of pairs. Several fields have one meaning, of which a request
// has one.
var (
	firstTexts  = textsOf(func(r *Request) *[]string { return &r.First })
	secondTexts = textsOf(func(r *Request) *[]string { return &r.Second })
)

var errTwice = errors.New("and another field with its meaning exclude each other")

// textsOf takes a text, or a list of texts.
func textsOf(at func(*Request) *[]string) value {
	return value{
		most:   jsonscan.Bounds{Elements: MaxInputs},
		schema: schema{"anyOf": []schema{{"type": "string"}, listSchema(schema{"type": "string"}, 1, MaxInputs)}},
		check: func(r *Request, v []byte) error {
			all := at(r)
			if *all != nil {
				return errTwice
			}
			if v[0] == '"' {
				*all = []string{jsonscan.Text(v)}
				return nil
			}
			if err := isList(v, "a string or a list of strings", true); err != nil {
				return err
			}
			return elements(v, func(i int, e []byte) error {
				if e[0] != '"' {
					return fmt.Errorf("[%d] must be a string, because only text is scored, not %s", i, quote(e, 40))
				}
				*all = append(*all, jsonscan.Text(e))
				return nil
			})
		},
	}
}

// scorePairs has the names of fields of which a request for scores has one pair.
var scorePairs = [][2]string{{"text_1", "text_2"}, {"data_1", "data_2"}, {"queries", "documents"}, {"queries", "items"}}

// PairMessages returns a query and a document as the messages of a chat, with roles of their names.
func PairMessages(query, document string) []byte {
	b := AppendString([]byte(`[{"role":"query","content":`), query)
	b = AppendString(append(b, `},{"role":"document","content":`...), document)
	return append(b, "}]"...)
}

// AppendScores appends the answer of /score. created is in seconds since 1970.
func AppendScores(dst []byte, id string, created int64, model string, scores []float32, u Usage) []byte {
	dst = AppendString(append(dst, `{"id":`...), id)
	dst = strconv.AppendInt(append(dst, `,"object":"list","created":`...), created, 10)
	dst = append(AppendString(append(dst, `,"model":`...), model), `,"data":[`...)
	for i := range scores {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendInt(dst, `{"index":`, i), `,"object":"score","score":`...)
		dst = append(appendFloat(dst, &scores[i]), '}')
	}
	return append(u.Append(append(dst, `],"usage":`...)), '}')
}

// AppendRanks appends the answer of /rerank: the documents by their scores, the best first and
// equal ones in their order, at most topN if that is not 0.
func AppendRanks(dst []byte, id, model string, documents []string, scores []float32, topN int, u Usage) []byte {
	order := make([]int, len(documents))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(scores[b], scores[a]) })
	if topN > 0 {
		order = order[:min(topN, len(order))]
	}
	dst = AppendString(append(dst, `{"id":`...), id)
	dst = u.Append(append(AppendString(append(dst, `,"model":`...), model), `,"usage":`...))
	dst = appendList(append(dst, `,"results":`...), order, func(dst []byte, i *int) []byte {
		dst = AppendString(append(appendInt(dst, `{"index":`, *i), `,"document":{"text":`...), documents[*i])
		return append(appendFloat(append(dst, `,"multi_modal":null},"relevance_score":`...), &scores[*i]), '}')
	})
	return append(dst, '}')
}
