package bench

import (
	"errors"
	"slices"

	"github.com/spf13/pflag"
)

// refusal is the value of a flag of vLLM's that is known and not supported.
type refusal struct {
	why  string
	fine []string // values that need no support
}

func (r *refusal) String() string { return "" }

func (r *refusal) Type() string { return "string" }

// Set returns an error with the reason and the alternative.
func (r *refusal) Set(v string) error {
	if slices.Contains(r.fine, v) {
		return nil
	}
	return errors.New(r.why)
}

// Refuse declares a flag whose values other than fine are errors, with the reason and
// the alternative. Help does not show it.
func Refuse(s *pflag.FlagSet, name, why string, fine ...string) {
	s.Var(&refusal{why: why, fine: fine}, name, why)
	s.Lookup(name).Hidden = true
}

// RefuseSwitch is Refuse for a flag without a value; false is allowed.
func RefuseSwitch(s *pflag.FlagSet, name, why string) {
	f := s.VarPF(&refusal{why: why, fine: []string{"false"}}, name, "", why)
	f.NoOptDefVal, f.Hidden = "true", true
}

// Reasons that several flags share.
const (
	noHub  = "data sets of the Hugging Face hub are not read: write the prompts to a file of JSON lines and give --dataset-name custom --dataset-path FILE"
	noPool = "only generation is measured: give --backend openai or openai-chat"
	noPics = "only text is sent: give --dataset-name random"
)

// refusedFlags are flags of vLLM's benchmark that are not supported.
var refusedFlags = []struct {
	name, why string
	fine      []string
}{
	{"tokenizer-mode", "the tokenizer is read from tokenizer.json: leave this out, or give --skip-tokenizer-init", []string{"auto", "hf", "slow", "fast"}},
	{"chat-template-kwargs", `templates are rendered by the server: give --backend openai-chat --extra-body '{"chat_template_kwargs": {…}}'`, []string{"{}"}},
	{"random-batch-size", noPool, []string{"1"}},
	{"spec-bench-output-len", noHub, nil}, {"spec-bench-category", noHub, nil},
	{"speed-bench-dataset-subset", noHub, nil}, {"speed-bench-output-len", noHub, nil}, {"speed-bench-category", noHub, nil},
	{"hf-subset", noHub, nil}, {"hf-split", noHub, nil}, {"hf-name", noHub, nil}, {"hf-output-len", noHub, nil},
	{"bfcl-categories", noHub, nil}, {"blazedit-min-distance", noHub, nil}, {"blazedit-max-distance", noHub, nil},
	{"asr-max-audio-len-sec", noPics, nil}, {"asr-min-audio-len-sec", noPics, nil},
	{"random-mm-base-items-per-request", noPics, nil}, {"random-mm-num-mm-items-range-ratio", noPics, nil},
	{"random-mm-limit-mm-per-prompt", noPics, nil}, {"random-mm-bucket-config", noPics, nil},
}

// refusedSwitches are unsupported flags without values.
var refusedSwitches = map[string]string{
	"no-reranker":                    noPool,
	"enable-multimodal-chat":         noPics,
	"custom-ensure-client-side-data": noPics,
}

// refuseOthers declares the unsupported flags.
func refuseOthers(s *pflag.FlagSet) {
	for _, f := range refusedFlags {
		Refuse(s, f.name, f.why, f.fine...)
	}
	for name, why := range refusedSwitches {
		RefuseSwitch(s, name, why)
	}
	// These are always satisfied: no code that comes with a tokenizer is run, and a data set
	// is read as a whole.
	for _, name := range []string{"trust-remote-code", "no-stream"} {
		s.Bool(name, false, "no effect")
		s.Lookup(name).Hidden = true
	}
}

// otherBackends and otherDatasets are names of vLLM's for other tasks than generating
// text from text.
var (
	otherBackends = map[string]string{
		"openai-responses":          "the Responses API is not measured: give --backend openai-chat",
		"openai-audio":              noPics,
		"openai-embeddings":         noPool,
		"openai-embeddings-chat":    noPool,
		"openai-embeddings-clip":    noPool,
		"openai-embeddings-vlm2vec": noPool,
		"infinity-embeddings":       noPool,
		"infinity-embeddings-clip":  noPool,
		"vllm-pooling":              noPool,
		"vllm-rerank":               noPool,
	}
	otherDatasets = map[string]string{
		"burstgpt":  "give --dataset-name timed_trace with the lengths as JSON lines of timestamp, input_length and output_length",
		"random-mm": noPics, "custom_audio": noPics, "custom_image": noPics,
		"random-rerank": noPool,
		"hf":            noHub, "spec_bench": noHub, "speed_bench": noHub,
	}
)
