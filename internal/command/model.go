package command

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/offspring"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/regular"
)

// errModel is behind refusals of a model's name.
var errModel = errors.New("command: no such model")

// maxTemplate bounds a --chat-template file.
const maxTemplate = 4 << 20

// LoadOptions maps the model's flags. A name of the Hugging Face cache becomes
// the folder there, and the name in the API unless another is given.
func LoadOptions(m *config.Model, environ []string, log *slog.Logger) (engine.LoadOptions, error) {
	path, name, err := findModel(m.Path, m.Revision, environ)
	if err != nil {
		return engine.LoadOptions{}, err
	}
	if m.ServedName == "" {
		m.ServedName = name
	}
	template, err := ReadTemplate(m.ChatTemplate)
	if err != nil {
		return engine.LoadOptions{}, err
	}
	places, err := m.LoRA.Places()
	if err != nil {
		return engine.LoadOptions{}, err
	}
	draft, _, err := findModel(m.Speculation.Model, "", environ)
	if err != nil {
		return engine.LoadOptions{}, fmt.Errorf("--speculative-config: %w", err)
	}
	adapters := engine.Adapters{Places: places, Rank: m.LoRA.MaxRank}
	if m.LoRA.Root != "" {
		if adapters.Root, err = filepath.EvalSymlinks(m.LoRA.Root); err == nil {
			adapters.Root, err = filepath.Abs(adapters.Root)
		}
		if err != nil {
			return engine.LoadOptions{}, fmt.Errorf("%w: --lora-root: %w", config.ErrValue, err)
		}
	}
	for _, a := range m.LoRA.Modules {
		adapters.Modules = append(adapters.Modules, engine.AdapterModule{Name: a.Name, Path: a.Path})
	}
	parallel, err := tensorParallel(m)
	if err != nil {
		return engine.LoadOptions{}, err
	}
	return engine.LoadOptions{
		Adapters: adapters, TensorParallel: parallel,
		Progress: loading(os.Stderr, log),
		Model:    path, Device: m.Device, Kernels: m.Kernels, Quantization: m.Quantization, Threads: m.Threads, Logger: log, ChatTemplate: template,
		KVMemory: int64(m.KVMemory), MemoryLimit: process.MemoryLimit(os.DirFS("/")), KVDType: m.KVDType, BlockTokens: m.BlockTokens,
		MaxModelLen: m.MaxModelLen, MaxSeqs: m.MaxSeqs, MaxBatchedTokens: m.MaxBatchedTokens, MaxQueued: m.MaxQueued,
		CUDALibrary: m.CUDALibrary, NCCLLibrary: m.NCCLLibrary, GPUMemory: m.GPUMemory, EnforceEager: m.EnforceEager, Synchronous: !m.Ahead, BLAS: m.BLAS, OneOrder: m.OneOrder,
		Speculation: engine.Speculation{Tokens: m.Speculation.Tokens, Model: draft, Lookup: engine.Lookup{Min: m.Speculation.Min, Max: m.Speculation.Max}},
	}, nil
}

// RankCommand is the argument that makes this program a rank of a node's.
const RankCommand = "rank"

// tensorParallel has this program started as ranks, which end with this process.
func tensorParallel(m *config.Model) (engine.TensorParallel, error) {
	t := engine.TensorParallel{Size: m.TensorParallel, Timeout: time.Duration(m.RankTimeout)}
	if t.Size <= 1 {
		return t, nil
	}
	if t.Timeout == 0 {
		return t, fmt.Errorf("%w: --distributed-timeout-seconds 0: want a time, such as 60", config.ErrValue)
	}
	self, err := os.Executable()
	t.Command, t.Start = []string{self, RankCommand}, func(c *exec.Cmd) error { return offspring.Start(c, syscall.SIGKILL) }
	return t, err
}

// ReadTemplate is the chat template in the file that --chat-template names; an
// empty path means none.
func ReadTemplate(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	text, err := regular.ReadFile(path, maxTemplate)
	if err != nil {
		return "", fmt.Errorf("%w: --chat-template: %w; want a file with a Jinja template", config.ErrValue, err)
	}
	if len(text) == 0 {
		return "", fmt.Errorf("%w: --chat-template %s: the file is empty; want a Jinja template", config.ErrValue, path)
	}
	return string(text), nil
}

// repository is a model's name on the Hugging Face hub.
var repository = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$`)

// findModel is the folder of a model, and its name if that is not the folder's:
// what exists as a path is the path, and org/name is looked up in the local
// Hugging Face cache. Nothing is downloaded.
func findModel(model, revision string, environ []string) (path, name string, err error) {
	_, err = os.Stat(model)
	if model == "" || model == engine.Builtin || err == nil || !repository.MatchString(model) {
		if revision != "" {
			return "", "", fmt.Errorf("%w: --revision %s: only an ORG/NAME of the Hugging Face cache has revisions, and the model is %s; leave --revision out", config.ErrValue, revision, cmp.Or(model, engine.Builtin))
		}
		return model, "", nil // a path that is not there is refused by who opens it
	}
	cache, err := hubCache(environ)
	if err != nil {
		return "", "", err
	}
	repo := filepath.Join(cache, "models--"+strings.Replace(model, "/", "--", 1))
	if _, err := os.Stat(repo); errors.Is(err, fs.ErrNotExist) {
		return "", "", fmt.Errorf("%w: there is no folder %s here, and the Hugging Face cache %s does not have that model. "+
			"Nothing is downloaded: run `hf download %s` where there is network, or copy a folder with config.json, *.safetensors and tokenizer.json to this machine and give its path",
			errModel, model, cache, model)
	} else if err != nil {
		return "", "", fmt.Errorf("%w: %w", errModel, err)
	}
	dir, err := snapshot(repo, revision)
	if err != nil {
		return "", "", fmt.Errorf("%w: %s: %w", errModel, model, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err != nil {
		return "", "", fmt.Errorf("%w: %s is in the Hugging Face cache without its config.json (%w): download it again by `hf download %s`", errModel, model, err, model)
	}
	return dir, model, nil
}

// hubCache is where the hub's tools keep what they downloaded.
func hubCache(environ []string) (string, error) {
	env := map[string]string{}
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok {
			env[k] = v
		}
	}
	for _, at := range []struct{ variable, below string }{
		{"HF_HUB_CACHE", ""}, {"HUGGINGFACE_HUB_CACHE", ""}, {"HF_HOME", "hub"}, {"XDG_CACHE_HOME", "huggingface/hub"}, {"HOME", ".cache/huggingface/hub"},
	} {
		if dir := env[at.variable]; dir != "" {
			if dir == "~" || strings.HasPrefix(dir, "~/") {
				dir = filepath.Join(env["HOME"], dir[1:])
			}
			return filepath.Join(dir, at.below), nil
		}
	}
	return "", fmt.Errorf("%w: no home folder to look for the Hugging Face cache in; set HF_HUB_CACHE, or give the model's folder", errModel)
}

// snapshot is the folder of a revision: a branch or tag is a file below refs with
// the commit in it. Without either, a single snapshot is the one.
func snapshot(repo, revision string) (string, error) {
	ref := revision
	if ref == "" {
		ref = "main"
	}
	if !filepath.IsLocal(ref) {
		return "", fmt.Errorf("--revision %q is not the name of a branch, tag or commit", revision)
	}
	commit := ref
	if text, err := os.ReadFile(filepath.Join(repo, "refs", ref)); err == nil {
		commit = strings.TrimSpace(string(text))
	}
	dir := filepath.Join(repo, "snapshots", commit)
	if info, err := os.Stat(dir); filepath.IsLocal(commit) && err == nil && info.IsDir() {
		return dir, nil
	}
	var have []string
	entries, err := os.ReadDir(filepath.Join(repo, "snapshots"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	for _, e := range entries {
		have = append(have, e.Name())
	}
	if revision == "" && len(have) == 1 {
		return filepath.Join(repo, "snapshots", have[0]), nil
	}
	return "", fmt.Errorf("%s has no revision %q; it has the commits %q: choose one by --revision, or download again", repo, ref, have)
}
