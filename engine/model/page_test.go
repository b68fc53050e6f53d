package model

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/models.md")

const modelsPage = "../../docs/models.md"

// The page of models is made from the table of architectures.
func TestModelsPage(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Models

What the engine computes, by the name in ` + "`architectures` of `config.json`, or by `model_type`" + `
where that is absent. Anything else is refused by its name when the model is loaded. This page is
made from the table in the code: ` + "`go test ./engine/model -run TestModelsPage -update`" + `.

Every architecture runs on CPUs and GPUs, in fp32, bf16, fp16 and fp8 as stored, from integers of
GPTQ, AWQ and compressed-tensors, from NVFP4, in int8 and int4 made at load, with LoRA adapters of
attention and dense MLP matrices, with tensor parallelism, and with its KV cache shipped between
nodes, unless the last column names an exception.

## Integers

CPUs keep the integers of GPTQ, AWQ, compressed-tensors and GGUF, and the floats of NVFP4, with
their own scales, and round activations to 8 bits in groups of 32, as for int8 and int4. What cannot
be kept is expanded to the type of the scales, of NVFP4 to bfloat16, or to float32:

- groups that differ in size or are neither 32 nor a multiple of 64, and scales in float32
- embeddings outside of GGUF
- matrices of latent attention that are cut by head: queries, ` + "`kv_a_proj_with_mqa` and `kv_b_proj`" + `
- routers, and the gates of states and of shared experts
- parts of a tensor-parallel rank that begin within a group of 64 or more, or a block of 256
- parts of a tensor-parallel rank that are some of the inputs of a matrix with act-order

With act-order (` + "`desc_act`, `g_idx`" + `), the columns of a matrix are sorted by group as it is loaded.
Each row of activations is rounded in that order, once for all matrices with the same order. Experts
are kept, too: each has tensors of its own, and those that share a tensor in GGUF are cut from it.

` + "`--dtype float32`" + ` expands all of them, and so do GPUs and ` + "`--quantization`" + `, except that
` + "`int4`" + ` leaves integers and floats of 4 bits on CPUs.

## Architectures

| architecture | ` + "`model_type`" + ` | models | beyond Llama |
|---|---|---|---|
`)
	for _, name := range slices.Sorted(maps.Keys(architectures)) {
		a := architectures[name]
		if a.models == "" {
			t.Errorf("%s is without models", name)
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", name, strings.Join(a.types, "`, `"), a.models, a.has)
	}
	b.WriteString(`
## GGUF files

A GGUF file is read as the folder that it was made from, by its ` + "`general.architecture`" + `. Files of
other architectures are refused by name. Texts are cut into tokens as transformers does: llama.cpp
puts one space more before a text that begins with a space, and behind a special token, where the
vocabulary is SentencePiece's. Layers that guess the token after next (` + "`nextn`" + `) are not computed.

Matrices in MXFP4 stay in MXFP4 on CPUs and GPUs, also with ` + "`--dtype float32`" + ` and
` + "`--quantization`" + `. Only embeddings, the output projection and latents' matrices are expanded, to
bfloat16, as are a tensor-parallel rank's columns that begin within a group of 32. A matrix with an
exponent of 255, which is not a number, is refused.

What a file's metadata lack is as the model was published:

- ` + "`gpt-oss`: the ramp of yarn ends within a pair of columns (`truncate`" + ` is false), where llama.cpp
  rounds it; ` + "`<|return|>`, `<|call|>` and `<|endoftext|>`" + ` end a text
- ` + "`deepseek2`" + `: read as DeepSeek-V3 where experts are chosen by the logistic function, else as
  DeepSeek-V2. Without ` + "`expert_group_count`" + ` all experts are one group, as in llama.cpp. Both layouts
  of the latents' matrices are read: ` + "`attn_k_b` with `attn_v_b`, and `attn_kv_b`" + `

| ` + "`general.architecture`" + ` | read as |
|---|---|
`)
	for _, name := range slices.Sorted(maps.Keys(ggufArchitectures)) {
		fmt.Fprintf(&b, "| `%s` | `%s` |\n", name, ggufArchitectures[name].name)
	}
	b.WriteString(`
## Multimodal models

Only the text model is loaded and served. Requests with images are refused.

| architecture | text model |
|---|---|
`)
	for _, name := range slices.Sorted(maps.Keys(wrappers)) {
		fmt.Fprintf(&b, "| `%s` | `%s` |\n", name, wrappers[name].text)
	}
	fmt.Fprintf(&b, `
## Rotations

`+"`rope_type`"+` may be %s.
For longrope and dynamic the frequencies are those of the longest
sequence that is served: give `+"`--max-model-len`"+` for the short ones. Nodes on both sides of that
limit exchange no KV.

## States

Layers of Qwen3-Next and Qwen3.5 have a state of fixed size instead of keys and values. The KV
memory holds the state of each running sequence. It keeps a copy after each 1,024 tokens, and one
at the end of the prompt, so that the next turn of a conversation continues from there. Copies are
cached, evicted and shipped as other blocks are. A cached prefix is found again up to its last copy.
States are float32 with every `+"`--kv-cache-dtype`"+`.

`+"`--speculative-config`"+` is refused for these models. `+"`--tensor-parallel-size`"+` must divide the number
of key heads, `+"`linear_num_key_heads`"+`. Adapters have no part for the projections before a state.

## KV in FP8

`+"`--kv-cache-dtype fp8`"+` stores keys and values as E4M3: half the memory, and half the bytes
between prefill and decode nodes, of bfloat16. Scales of a layer, or of each head, are read from
the checkpoint as compressed-tensors, ModelOpt and Quark write them
(`+"`self_attn.k_scale`"+`, `+"`v_scale`"+`); without them they are 1. Answers change: compare them
before you use it. It is never the default, also where the checkpoint has scales. GPUs read KV in
FP8 without tensor cores, so that long contexts are slower than with bfloat16.

## Tokenizers

`+"`tokenizer.json`"+` with BPE, over bytes or over characters with byte fallback, or with Unigram,
also behind SentencePiece's replacements (the normalizer Precompiled); `+"`tekken.json`"+` alone;
`+"`tokenizer.model`"+` alone, with BPE for the class LlamaTokenizer and with Unigram for classes without
code (PreTrainedTokenizerFast); and ranks alone, in `+"`tiktoken.model`"+`, `+"`qwen.tiktoken`"+` or
`+"`tokenizer.model`"+`, of the classes of Kimi K2 (TikTokenTokenizer), GLM-4
(ChatGLM4Tokenizer) and Qwen-1 (QWenTokenizer), and of Llama 3's file. WordPiece vocabularies are
refused.

## Vectors

Every model gives vectors (`+"`/v1/embeddings`"+`), also one without its output projection. An
architecture that ends in `+"`Model`"+`, such as `+"`Qwen3Model`"+`, is the one of the table without it.

`+"`modules.json`"+` and the config of its module Pooling choose the vector: the last token's row
(`+"`lasttoken`"+`, the default) or the mean of all rows (`+"`mean_tokens`"+`), and whether it is normalised.

Models with the module `+"`"+`LogitScore`+"`"+`, and those of an architecture that ends in
`+"`"+`ForSequenceClassification`+"`"+`, score pairs of texts instead (`+"`"+`/score`+"`"+`, `+"`"+`/rerank`+"`"+`).
So does a folder without `+"`"+`modules.json`+"`"+` whose name has Qwen3-Reranker, by the tokens yes and no
behind the prompt of its model card.

## Not served

bitsandbytes and NVFP4 weights; encoders and models with `+"`"+`is_causal: false`+"`"+`; reward models and
classifiers with several labels; vectors by other modules of sentence-transformers, such as Dense;
Mamba layers (Granite 4 hybrids); Llama 4; experts of Qwen3-VL-MoE.
`, ropeTypes)
	if *update {
		if err := os.WriteFile(modelsPage, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	page, err := os.ReadFile(modelsPage)
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != b.String() {
		t.Error("docs/models.md differs from the table of architectures: run go test ./engine/model -run TestModelsPage -update")
	}
}

// The page has no more than is tested: each architecture has goldens.
func TestArchitecturesHaveGoldens(t *testing.T) {
	tested := map[string]bool{}
	for _, name := range goldenFolders(t) {
		tested[openCheckpoint(t, name).Config.Architecture] = true
	}
	// GraniteMoeShared is Granite 4 under the name of Granite 3.
	tested["GraniteMoeSharedForCausalLM"] = tested["GraniteMoeHybridForCausalLM"]
	for name := range architectures {
		if !tested[name] {
			t.Errorf("%s has no goldens", name)
		}
	}
}
