// Package builtin holds the model that ships inside the binary, so that a new cluster answers
// without any download.
//
// It is a Hugging Face folder like any other, embedded as files: a Llama of 3.7 million parameters
// in bf16, trained by the recipe in train/. Invariant: the folder is complete and small (MaxBytes),
// and its weights are exactly those that config.json describes, which the package's test checks.
// The package does not load, parse or run the model. engine/model does that, from FS as from any
// folder.
package builtin

import (
	"embed"
	"io/fs"
)

// Name is the name in the API of the model that `--model builtin` serves.
const Name = "tandem-builtin"

// MaxBytes bounds the whole embedded folder, because it is in every binary and in the history of
// the repository.
const MaxBytes = 12 << 20

//go:embed model/*
var files embed.FS

// FS returns the model's folder: config.json, generation_config.json, model.safetensors,
// tokenizer.json, tokenizer_config.json.
func FS() fs.FS {
	sub, err := fs.Sub(files, "model")
	if err != nil {
		panic(err) // The name is a constant and valid.
	}
	return sub
}
