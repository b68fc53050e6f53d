package parse

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
)

// scripted is a sample as nodes of internal/e2e/clients answer it.
type scripted struct {
	Tools, Reasoning string
	Open             bool // the prompt ends within reasoning
	Text             string
	Calls            []scriptedCall
}

type scriptedCall struct {
	Name      string
	Arguments json.RawMessage
}

// internal/e2e/clients has a sample with two calls of each row. One with reasoning is preferred.
func TestScripted(t *testing.T) {
	const file = "../../../internal/e2e/clients/testdata/formats.json"
	var all []scripted
	for _, r := range rows {
		var best *sample
		for i := range samples {
			s := &samples[i]
			if s.tools == r.name && len(s.want.Calls) == 2 && !s.want.Calls[0].Incomplete && !s.want.Calls[1].Incomplete && (best == nil || best.reasoning == "" && s.reasoning != "") {
				best = s
			}
		}
		if best == nil {
			t.Fatalf("%s: no sample has two calls", r.name)
		}
		s := scripted{Tools: best.tools, Reasoning: best.reasoning, Open: best.open, Text: best.text}
		for _, c := range best.want.Calls {
			s.Calls = append(s.Calls, scriptedCall{c.Name, json.RawMessage(c.Args)})
		}
		all = append(all, s)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "\t")
	if err := e.Encode(all); err != nil {
		t.Fatal(err)
	}
	was, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	if bytes.Equal(was, b.Bytes()) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the samples: run go test ./gateway/render/parse -run TestScripted -update", file)
	}
	if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
