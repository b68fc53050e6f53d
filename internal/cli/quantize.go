package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/quantize"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/regular"
)

// maxCalibration bounds a --calibration file, in bytes.
const maxCalibration = 64 << 20

// quantizeModel writes a model with matrices of 4 bits.
func quantizeModel(v *Invocation) (err error) {
	var o quantize.Options
	var out, file, revision string
	v.First("out", "calibration", "group-size")
	v.StringVar(&out, "out", "", "folder to write, which must not exist")
	v.StringVar(&file, "calibration", "", "text like that which the model will read and write; default: the model writes it, at random")
	v.CountVar(&o.Group, "group-size", quantize.Group, 8, "inputs that share a scale; 32 is the most exact and takes 4.5 bits a weight, 128 takes 4.125")
	wide := v.String("int8", quantize.Sensitive.String(), "regular expression: matrices whose names match get 8 bits; empty: none; for vLLM give "+forVLLM)
	v.CountVar(&o.Sequences, "calibration-sequences", quantize.Sequences, 1, "sequences that run through each layer at once; more need more memory")
	v.CountVar(&o.Length, "calibration-length", quantize.Length, 2, "tokens of a sequence")
	v.Uint64Var(&o.Seed, "seed", 0, "of the text that the model writes")
	v.CountVar(&o.Threads, "threads", 0, 0, "CPU threads; 0: one per core, within the cgroup's quota")
	v.StringVar(&revision, "revision", "", "branch, tag or commit of ORG/NAME; default: main")
	args, err := v.Parse(1)
	if err != nil {
		return err
	}
	if len(args) == 0 || out == "" {
		return fmt.Errorf("%w: name the model and the folder to write, such as in `%s`", config.ErrValue, v.Table.Find("quantize").Example)
	}
	if o.Wide, err = regexp.Compile(cmp.Or(*wide, "^$")); err != nil {
		return fmt.Errorf("%w: --int8: %w", config.ErrValue, err)
	}
	name, _, err := findModel(args[0], revision, v.Environ, nil)
	if err != nil {
		return err
	}
	if o.Text, err = readText(file); err != nil {
		return err
	}
	src, err := engine.OpenModel(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: there is no folder %s; give the one that holds the model's config.json and *.safetensors", config.ErrValue, name)
	} else if err != nil {
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	log, _, err := process.Logger("info", "text", v.ErrOut)
	if err != nil {
		return err
	}
	converting(&o, os.Stderr, log)
	o.Memory = process.MemoryLimit(os.DirFS("/")) / 2
	o.Start = func(n quantize.Need) {
		log.Info("quantizing", "memory", memory.Bytes(n.Memory), "disk", memory.Bytes(n.Disk), "free", memory.Bytes(n.Free), "tokens", n.Tokens, "layers", n.Layers)
	}
	ctx, _, stop := process.Signals()
	defer stop()
	began := time.Now()
	r, err := quantize.Write(ctx, src, out, o)
	switch {
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, quantize.ErrOption):
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	case err != nil:
		return err
	}
	_, err = fmt.Fprintf(v.Out, "Wrote %s: %d matrices of %.2f million weights, %.3f bits each, calibrated with %d tokens in %s\n",
		out, r.Matrices, float64(r.Weights)/1e6, r.Bits(), r.Tokens, time.Since(began).Round(100*time.Millisecond))
	if r.Apart[0] != "" {
		remedy := "--int8 " + forVLLM
		if *wide != quantize.Sensitive.String() {
			remedy = "an --int8 that matches all or none of what it computes together"
		}
		_, other := fmt.Fprintf(v.Out, "vLLM cannot load this folder, because it computes %s and %s together and needs them in equal bits. For vLLM run the command again with %s\n",
			r.Apart[0], r.Apart[1], remedy)
		err = errors.Join(err, other)
	}
	return err
}

// forVLLM is the --int8, as in a shell, that differs from the default in the values. vLLM computes
// them together with queries and keys, which have 4 bits.
const forVLLM = `'layers\.0\.self_attn\.o_proj\.'`

// readText returns the content of a file of text; empty: of none.
func readText(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	f, err := regular.Open(path)
	if err != nil {
		return "", fmt.Errorf("%w: --calibration: %w", config.ErrValue, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxCalibration+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("--calibration: %w", err)
	case len(text) > maxCalibration:
		return "", fmt.Errorf("%w: --calibration %s is larger than %d MiB", config.ErrValue, path, maxCalibration>>20)
	case len(text) == 0:
		return "", fmt.Errorf("%w: --calibration %s is empty; leave it out, or give a text", config.ErrValue, path)
	}
	return string(text), nil
}

// converting shows the progress of o: matrices as a bar on a terminal, else a log line for each
// layer. From the first layer on it has the time that is left.
func converting(o *quantize.Options, w *os.File, log *slog.Logger) {
	if Draws(w) {
		count := func(n int64) string { return strconv.FormatInt(n, 10) }
		show := progress(w, true, "quantizing matrices", false, count, log, time.Now)
		o.Progress = func(done, total int) { show(int64(done), int64(total)) }
		return
	}
	var began time.Time // of the first layer
	o.Calibrating = func() { began = time.Now() }
	o.Layer = func(done, total int) {
		took := time.Since(began)
		left := took / time.Duration(done) * time.Duration(total-done)
		log.Info("quantized a layer", "done", done, "of", total, "took", took.Round(time.Second), "left", left.Round(time.Second))
	}
}
