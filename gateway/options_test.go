package gateway

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/render/parse"
)

// Check names the flag of each setting that New would refuse.
func TestOptionsCheck(t *testing.T) {
	for want, o := range map[string]Options{
		"":                                    {},
		"--node-silence 10ms":                 {NodeSilence: 10 * time.Millisecond},
		"--max-n 129: want 1 to 128":          {Limits: Limits{MaxN: 129}},
		"--max-logprobs 257":                  {Limits: Limits{MaxLogprobs: 257}},
		"--max-grammar-bytes":                 {Limits: Limits{MaxGrammarBytes: 1 << 40}},
		`--tool-call-parser: unknown`:         {ToolCallParser: "luck", ReasoningParser: parse.None},
		`reasoning parser "luck": known are `: {ToolCallParser: parse.None, ReasoningParser: "luck"},
	} {
		errs := o.Check()
		if want == "" != (len(errs) == 0) || len(errs) > 1 || !strings.Contains(errors.Join(append(errs, errors.New(""))...).Error(), want) {
			t.Errorf("%q: %v", want, errs)
		}
	}
	all := Options{NodeSilence: time.Millisecond, Limits: Limits{MaxN: 1000}, ToolCallParser: "luck", ReasoningParser: "luck"}
	if errs := all.Check(); len(errs) != 4 {
		t.Errorf("%d refusals: %v", len(errs), errs)
	}
}
