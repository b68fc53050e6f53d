package bench

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/tandem-serving/tandem/bench/dataset"
)

// bodies encodes request bodies. Fields that all bodies share are encoded once.
type bodies struct {
	chat   bool
	common []byte   // fields of every body, each followed by a comma
	models []string // one of them for each request; empty: common has the model
	random bool     // the model is random, not round robin
	seed   uint64
	max    string // name of the field that bounds the output
}

// newBodies encodes the fields that the flags set for every request.
func (o *Options) newBodies(model string) (*bodies, error) {
	fields := map[string]any{"model": model, "stream": true, "stream_options": map[string]bool{"include_usage": true}}
	for name, v := range map[string]float64{
		"temperature": o.Temperature, "top-p": o.TopP, "min-p": o.MinP, "frequency-penalty": o.Frequency,
		"presence-penalty": o.Presence, "repetition-penalty": o.Repetition, "top-k": float64(o.TopK),
	} {
		if o.set.Changed(name) {
			fields[apiName(name)] = v
		}
	}
	if o.BeamSearch {
		fields["use_beam_search"] = true
	}
	if len(o.LoraModules) > 0 {
		delete(fields, "model")
	}
	if o.IgnoreEOS {
		fields["ignore_eos"] = true
	}
	if o.set.Changed("logprobs") {
		fields["logprobs"] = o.LogProbs
		if o.chat() {
			fields["logprobs"], fields["top_logprobs"] = true, o.LogProbs
		}
	}
	if o.ExtraBody != "" {
		var extra map[string]json.RawMessage
		if err := json.Unmarshal([]byte(o.ExtraBody), &extra); err != nil {
			return nil, fmt.Errorf("%w: --extra-body: want a JSON object: %w", ErrOption, err)
		}
		for k, v := range extra {
			fields[k] = v
		}
	}
	b := &bodies{chat: o.chat(), max: "max_tokens", models: o.LoraModules, random: o.LoraAssignment == "random", seed: o.Seed}
	if b.chat {
		b.max = "max_completion_tokens"
	}
	for _, k := range slices.Sorted(maps.Keys(fields)) {
		v, err := json.Marshal(fields[k])
		if err != nil {
			return nil, err
		}
		b.common = append(append(append(strconv.AppendQuote(b.common, k), ':'), v...), ',')
	}
	return b, nil
}

// apiName returns a flag's name in the API.
func apiName(flag string) string {
	b := []byte(flag)
	for i := range b {
		if b[i] == '-' {
			b[i] = '_'
		}
	}
	return string(b)
}

// body returns the body of request i.
func (b *bodies) body(i int, r *dataset.Request) ([]byte, error) {
	out := append([]byte{'{'}, b.common...)
	if n := len(b.models); n > 0 {
		k := i % n
		if b.random {
			k = rand.New(rand.NewPCG(b.seed, uint64(i))).IntN(n)
		}
		model, err := json.Marshal(b.models[k])
		if err != nil {
			return nil, err
		}
		out = append(append(append(out, `"model":`...), model...), ',')
	}
	out = append(append(append(out, '"'), b.max...), `":`...)
	out = strconv.AppendInt(out, int64(r.OutputTokens), 10)
	if !b.chat && r.Text == "" {
		out = append(out, `,"prompt":[`...)
		for _, p := range r.Pieces {
			for _, id := range p {
				out = append(strconv.AppendInt(out, int64(id), 10), ',')
			}
		}
		out[len(out)-1] = ']'
		return append(out, '}'), nil
	}
	text, err := json.Marshal(r.Text)
	if err != nil {
		return nil, err
	}
	if b.chat {
		return append(append(append(out, `,"messages":[{"role":"user","content":`...), text...), "}]}"...), nil
	}
	return append(append(append(out, `,"prompt":`...), text...), '}'), nil
}
