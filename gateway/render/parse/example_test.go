package parse_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/gateway/render/parse"
)

// An answer of Qwen3 comes in two frames.
func ExampleParser() {
	vocabulary := func(text string) (int32, bool) {
		id, ok := map[string]int32{"<think>": 90, "</think>": 91, "<tool_call>": 92, "</tool_call>": 93}[text]
		return id, ok
	}
	f, err := parse.NewFormat("hermes", "qwen3", vocabulary)
	if err != nil {
		fmt.Println(err)
		return
	}
	p := f.NewParser(parse.Options{Reasoning: f.StartsInReasoning("<|im_start|>assistant\n<think>\n")})

	type token struct {
		id   int32
		text string
	}
	frames := [][]token{
		{{1, "It may "}, {2, "rain.\n"}, {91, "</think>"}, {3, "\n\n"}, {92, "<tool_call>"}, {4, "\n{\"name\": \"weather"}},
		{{5, `", "arguments": {"city"`}, {6, `: "Oslo"}}`}, {7, "\n"}, {93, "</tool_call>"}},
	}
	var deltas []parse.Delta
	for _, frame := range frames {
		deltas = deltas[:0]
		for _, t := range frame {
			deltas = p.Push(deltas, t.id, t.text)
		}
		show(p, f, deltas)
	}
	show(p, f, p.Finish(deltas[:0]))
	fmt.Println(p.Calls(), "call,", p.ReasoningTokens(), "tokens of reasoning")
	// Output:
	// reasoning "It may rain."
	// call 0 of weather, id call_gi7aRNZxCsWd6FGmiI0NoT8M
	// arguments "{\"city\": \"Oslo\"}"
	// end, incomplete: false
	// 1 call, 3 tokens of reasoning
}

func show(p *parse.Parser, f *parse.Format, deltas []parse.Delta) {
	for _, d := range deltas {
		switch d.Kind {
		case parse.Content:
			fmt.Printf("content %q\n", d.Text)
		case parse.Reasoning:
			fmt.Printf("reasoning %q\n", d.Text)
		case parse.CallStart:
			id := d.ID
			if id == "" {
				id = string(f.IDs().AppendID(nil, d.Name, 7, d.Call))
			}
			fmt.Printf("call %d of %s, id %s\n", d.Call, d.Name, id)
		case parse.Arguments:
			fmt.Printf("arguments %q\n", d.Text)
		case parse.CallEnd:
			fmt.Printf("end, incomplete: %v\n", d.Incomplete)
		}
	}
}
