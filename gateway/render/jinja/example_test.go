package jinja_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

// A chat template renders messages to the prompt that a model was trained with.
func ExampleTemplate_Render() {
	t, err := jinja.Parse("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
	if err != nil {
		panic(err)
	}
	messages := jinja.List{jinja.NewDict("role", "user", "content", " What is prefill? ")}
	prompt, err := t.Render(jinja.Input{Messages: messages, AddGenerationPrompt: true})
	fmt.Println(prompt, err)
	// Output:
	// <|user|>What is prefill?
	// <|assistant|> <nil>
}
