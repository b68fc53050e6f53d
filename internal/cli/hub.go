package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/hub"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/process"
)

// repositoryArgument returns the argument ORG/NAME[:REVISION] of a command.
func repositoryArgument(v *Invocation) (name, revision string, err error) {
	args, err := v.Parse(1)
	if err != nil {
		return "", "", err
	}
	if len(args) == 0 {
		return "", "", fmt.Errorf("%w: name the model, such as in `%s`", config.ErrValue, v.Table.Find(strings.Fields(v.Name())[0]).Example)
	}
	return hub.SplitRevision(args[0])
}

// pull downloads a model. Results go to standard output, progress and log lines to standard error.
func pull(v *Invocation) error {
	o := hub.Options{Environ: v.Environ, Agent: "tandem/" + v.Version}
	v.StringSliceVar(&o.Include, "include", nil, "only files that match a pattern, such as '*Q4_K_M.gguf'; default: all files of the kinds safetensors, json, model, txt, jinja, gguf and tiktoken")
	v.CountVar(&o.Workers, "max-workers", hub.DefaultWorkers, 1, "files that are downloaded at once")
	quiet := v.Bool("quiet", false, "no progress and no log lines")
	v.OwnDryRun("list the files and their sizes, and what the cache has of them, without downloading or writing any")
	var err error
	if o.Name, o.Revision, err = repositoryArgument(v); err != nil {
		return err
	}
	if o.Log, _, err = process.Logger("info", "text", v.ErrOut); err != nil {
		return err
	}
	if o.Progress = downloading(os.Stderr, o.Log); *quiet {
		o.Log, o.Progress = slog.New(slog.DiscardHandler), nil
	}
	ctx, _, stop := process.Signals()
	defer stop()
	if v.DryRun() {
		return planned(ctx, v, o)
	}
	dir, err := hub.Pull(ctx, o)
	if ctx.Err() != nil && err != nil {
		if o.Progress != nil && Draws(os.Stderr) {
			fmt.Fprintln(v.ErrOut) // ends the line of the bar
		}
		return context.Cause(ctx)
	} else if err != nil {
		return err
	}
	_, err = fmt.Fprintln(v.Out, dir)
	return err
}

// planned lists the files that a pull would download.
func planned(ctx context.Context, v *Invocation, o hub.Options) error {
	commit, files, err := hub.Plan(ctx, o)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(v.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FILE\tSIZE\tCACHED")
	total, rest := int64(0), int64(0)
	for _, f := range files {
		cached := "no"
		switch f.Cached {
		case f.Size:
			cached = "yes"
		case 0:
		default:
			cached = memory.Bytes(f.Cached)
		}
		total, rest = total+f.Size, rest+f.Size-f.Cached
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Path, memory.Bytes(f.Size), cached)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(v.Out, "%s at %s: %s, of which %s to download\n", o.Name, commit[:12], memory.Bytes(total), memory.Bytes(rest))
	return err
}

// cached is a row of models.
type cached struct {
	hub.Snapshot
	File     string `json:"file,omitempty"` // of GGUF, one of several models in the snapshot
	Complete bool   `json:"complete"`
	Served   bool   `json:"served"`  // this build loads its architecture and its kind of weights
	Refusal  string `json:"refusal"` // why not
}

// models lists the cache.
func models(v *Invocation) error {
	asJSON := v.Bool("json", false, "as one JSON array")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	cache, err := hub.DefaultCache(v.Environ)
	if err != nil {
		return err
	}
	list, err := cache.List()
	if err != nil {
		return err
	}
	rows := []cached{}
	for _, s := range list {
		files := s.GGUF
		if len(files) == 0 {
			files = []string{""}
		}
		for _, file := range files {
			r := cached{Snapshot: s, File: file, Complete: s.Complete(), Served: true}
			model := filepath.Join(s.Dir, file)
			if info, err := os.Stat(model); err == nil && file != "" {
				r.Size = info.Size()
			}
			if err := engine.CheckConfig(model); err != nil {
				r.Served, r.Refusal = false, logs.WithoutPackages(err.Error())
			}
			rows = append(rows, r)
		}
	}
	if *asJSON {
		return json.NewEncoder(v.Out).Encode(rows)
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintf(v.Out, "%s has no models; `tandem pull ORG/NAME` downloads one\n", cache.Dir)
		return err
	}
	w := tabwriter.NewWriter(v.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MODEL\tREVISION\tSIZE\tCOMPLETE\tSERVED")
	for _, r := range rows {
		revision := strings.Join(append(r.Refs, r.Commit[:min(12, len(r.Commit))]), " ")
		complete, served := "yes", "yes"
		if !r.Complete {
			complete = fmt.Sprintf("no: %s missing", r.Missing[0])
			if n := len(r.Missing) - 1; n > 0 {
				complete = fmt.Sprintf("no: %s and %d more missing", r.Missing[0], n)
			}
		}
		if !r.Served {
			served = "no: " + r.Refusal
			if !r.Complete {
				served = "-"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", path.Join(r.Name, r.File), revision, memory.Bytes(r.Size), complete, served)
	}
	return w.Flush()
}

// remove removes a model from the cache, after a question on a terminal.
func remove(v *Invocation) error {
	yes := v.Bool("yes", false, "remove without a question")
	name, revision, err := repositoryArgument(v)
	if err != nil {
		return err
	}
	cache, err := hub.DefaultCache(v.Environ)
	if err != nil {
		return err
	}
	r, err := cache.PlanRemoval(name, revision)
	if err != nil {
		return err
	}
	revisions := "1 revision"
	if n := len(r.Snapshots); n != 1 {
		revisions = fmt.Sprintf("%d revisions", n)
	}
	what := fmt.Sprintf("%s: %s, %s that no other revision uses", name, revisions, memory.Bytes(r.Bytes))
	if !*yes {
		if !term.IsTerminal(int(os.Stdin.Fd())) {
			return fmt.Errorf("%w: %s: standard input is no terminal to confirm the removal; add --yes", config.ErrValue, what)
		}
		fmt.Fprintf(v.ErrOut, "Remove %s? [y/N] ", what)
		answer, err := bufio.NewReader(os.Stdin).ReadString('\n')
		if a := strings.ToLower(strings.TrimSpace(answer)); err != nil || a != "y" && a != "yes" {
			fmt.Fprintln(v.ErrOut, "nothing is removed")
			return nil
		}
	}
	if err := r.Run(); err != nil {
		return err
	}
	_, err = fmt.Fprintln(v.Out, "removed "+what)
	return err
}
