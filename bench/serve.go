// Package bench is the load tester: tandem bench serve, compare and sweep. It takes the
// flags of vLLM's benchmark, loads any server with the OpenAI API and prints the same
// block of results.
//
// A run makes all requests first (bench/dataset), draws their arrivals, sends them in an
// open loop (bench/load) and computes figures from the outcomes (bench/report).
// Invariant: the figures are valid for the server only if the client kept up, and a line
// after the block reports whether it did. The package uses no internals of any server,
// except for the backend tandem, which loads a decode node.
package bench

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// ErrNotReady means that the server did not answer in time.
var ErrNotReady = errors.New("bench: the server is not ready")

// ErrFailed means that no request succeeded.
var ErrFailed = errors.New("bench: no request succeeded")

// run is one benchmark run.
type run struct {
	*Options
	out, errOut      io.Writer
	model, tokenizer string
	client           loader
	bundle           *nodepb.Bundle // of the backend tandem
	requests         []dataset.Request
	at               []time.Duration
	changes          []load.Change
	bodies           [][]byte
	encode           func(string) []int32
	goodput          map[string]float64
	meta             report.Object
	readyBy          time.Time // the end of the ready check; zero: not begun
}

// Result is a finished run.
type Result struct {
	Summary *report.Summary
	Head    *report.Head
	Self    load.Self
	Record  *load.Record // with the requests in the order of Summary's

	Nodes []report.Node // of the server, if they have metrics

	RequestID func(i int) string // of request i
}

// Serve runs bench serve. The report goes to out, progress and notes to errOut.
func Serve(ctx context.Context, o *Options, out, errOut io.Writer) (*Result, error) {
	r := &run{Options: o, out: out, errOut: errOut}
	err := r.prepare(ctx)
	if r.client != nil {
		defer r.client.Close()
	}
	if err != nil {
		return nil, err
	}
	if err := r.ready(ctx); err != nil {
		return nil, err
	}
	if err := r.warmUp(ctx); err != nil {
		return nil, err
	}
	r.announce()
	if err := r.profile(ctx, "start"); err != nil {
		return nil, err
	}
	before := r.specCounters(ctx)
	stopProbes, stopObserving := r.probes(ctx), observe(ctx, r.metrics)
	rec, err := load.Run(ctx, r.client, load.Plan{
		At: r.at, Body: r.body, ID: r.requestID, MaxConcurrency: r.MaxConcurrency, Progress: r.progress(),
	})
	probe, nodes := stopProbes(), stopObserving()
	after := r.specCounters(ctx)
	r.endProgress()
	if err := errors.Join(err, r.profile(ctx, "stop")); err != nil {
		return nil, err
	}
	res, err := r.finish(rec, probe, specDuring(before, after))
	if res != nil {
		res.Nodes = nodes
	}
	return res, err
}

func (r *run) requestID(i int) string { return r.IDPrefix + strconv.Itoa(i) }

// prepare checks everything and makes the requests.
func (r *run) prepare(ctx context.Context) error {
	if err := r.complete(); err != nil {
		return err
	}
	var err error
	if r.goodput, err = r.Options.goodput(); err != nil {
		return err
	}
	if r.meta, err = r.metadata(); err != nil {
		return err
	}
	prepare := r.prepareHTTP
	if r.native() {
		prepare = r.prepareNative
	}
	if err := prepare(ctx); err != nil {
		return err
	}
	r.encode = r.Data.Vocabulary.Encode
	if r.requests, err = dataset.Make(r.Data); err != nil {
		return err
	}
	if err := r.template(ctx); err != nil {
		return err
	}
	if r.selfTimed() {
		r.at = make([]time.Duration, len(r.requests))
		for i := range r.at {
			r.at[i] = r.requests[i].At
		}
	} else if r.at, r.changes, err = r.arrivals().Times(len(r.requests)); err != nil {
		return err
	}
	if r.IDPrefix == "" {
		var b [4]byte
		if _, err := rand.Read(b[:]); err != nil {
			return err
		}
		r.IDPrefix = "bench-" + hex.EncodeToString(b[:]) + "-"
	}
	return r.encodeBodies()
}

// prepareHTTP determines model and vocabulary and makes the client.
func (r *run) prepareHTTP(ctx context.Context) error {
	header, err := r.header()
	if err != nil {
		return err
	}
	s := newServer(r.BaseURL, header, r.Insecure)
	defer s.close()
	if r.model = r.ServedModel; r.model == "" {
		r.model = r.Model
	}
	if r.ReadyTimeout > 0 {
		var failed *url.Error
		err := r.await(ctx, r.BaseURL, func(ctx context.Context) error {
			_, err := s.firstModel(ctx)
			switch {
			case errors.As(err, &failed):
				return failed.Err
			case r.model == "" && errors.Is(err, ErrOption): // the list is empty while models load
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if r.model == "" {
		if r.model, err = s.firstModel(ctx); err != nil {
			return err
		}
	}
	if r.Data.Vocabulary, err = r.vocabulary(ctx, s); err != nil {
		return err
	}
	c, err := load.NewClient(load.Target{
		URL: r.BaseURL + r.Endpoint, Chat: r.chat(), Header: header, Insecure: r.Insecure, KeepText: r.SaveDetailed || r.Data.Vocabulary.Encode != nil,
	})
	if err == nil {
		r.client = c
	}
	return err
}

// keptBodies bounds the bodies that are encoded before the run, in bytes. Later ones
// are encoded while it runs.
const keptBodies = 256 << 20

func (r *run) encodeBodies() error {
	b, err := r.encoder()
	if err != nil {
		return err
	}
	r.bodies = make([][]byte, len(r.requests))
	for i, kept := 0, 0; i < len(r.requests) && kept < keptBodies; i++ {
		if r.bodies[i], err = b.body(i, &r.requests[i]); err != nil {
			return err
		}
		kept += len(r.bodies[i])
	}
	return nil
}

// body returns the body of request i. Encoding again cannot fail, because the same
// fields were encoded before.
func (r *run) body(i int) []byte {
	if r.bodies[i] != nil {
		return r.bodies[i]
	}
	b, err := r.encoder()
	if err != nil {
		panic(err)
	}
	out, err := b.body(i, &r.requests[i])
	if err != nil {
		panic(err)
	}
	return out
}

// ready waits for a first answer.
func (r *run) ready(ctx context.Context) error {
	if r.ReadyTimeout == 0 {
		fmt.Fprintln(r.out, "Skipping endpoint ready check.")
		return nil
	}
	fmt.Fprintln(r.out, "Starting initial single prompt test run...")
	err := r.await(ctx, r.BaseURL+r.Endpoint, func(ctx context.Context) error {
		var o load.Outcome
		r.client.Do(ctx, time.Now(), r.body(0), "", &o)
		return o.Err
	})
	if err == nil {
		fmt.Fprintln(r.out, "Initial test run completed.")
	}
	return err
}

// await calls ask once a second until it returns nil. All calls of await together end after
// --ready-check-timeout-sec, with ErrNotReady. The first error is printed.
func (r *run) await(ctx context.Context, what string, ask func(context.Context) error) error {
	if r.readyBy.IsZero() {
		r.readyBy = time.Now().Add(time.Duration(r.ReadyTimeout) * time.Second)
	}
	ctx, cancel := context.WithDeadline(ctx, r.readyBy)
	defer cancel()
	for first := true; ; first = false {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		if first && ctx.Err() == nil {
			fmt.Fprintf(r.errOut, "No answer yet, which is repeated for %d s: %v\n", r.ReadyTimeout, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w after %d s: %s: %w", ErrNotReady, r.ReadyTimeout, what, err)
		case <-time.After(time.Second):
		}
	}
}

// warmUp sends requests that are not counted.
func (r *run) warmUp(ctx context.Context) error {
	if r.Warmups == 0 {
		return nil
	}
	fmt.Fprintf(r.out, "Warming up with %d requests...\n", r.Warmups)
	rec, err := load.Run(ctx, r.client, load.Plan{
		At: make([]time.Duration, r.Warmups), Body: func(i int) []byte { return r.body(i % len(r.requests)) }, MaxConcurrency: r.MaxConcurrency,
	})
	if err != nil {
		return err
	}
	for i := range rec.Outcomes {
		if err := rec.Outcomes[i].Err; err != nil {
			return fmt.Errorf("warm-up request %d: %w", i, err)
		}
	}
	fmt.Fprintln(r.out, "Warmup run completed.")
	return nil
}

// announce prints the settings of the run.
func (r *run) announce() {
	if !r.set.Changed("temperature") {
		fmt.Fprintln(r.errOut, "note: --temperature is not set: the server's default applies, which need not be 0")
	}
	fmt.Fprintln(r.out, "Starting main benchmark run...")
	process := "Poisson process"
	if r.Burstiness != 1 {
		process = "Gamma distribution"
	}
	switch {
	case r.selfTimed():
		fmt.Fprintln(r.out, "Traffic request rate: that of the trace")
	case r.Ramp != "":
		fmt.Fprintf(r.out, "Traffic ramp-up strategy: %s.\nWill increase RPS from %d to %d RPS over the duration of the benchmark.\n", r.Ramp, r.RampStart, r.RampEnd)
	default:
		rate := pythonFloat(r.RequestRate)
		fmt.Fprintf(r.out, "Traffic request rate: %s\n", rate)
	}
	if !r.selfTimed() {
		fmt.Fprintf(r.out, "Burstiness factor: %s (%s)\n", pythonFloat(r.Burstiness), process)
	}
	limit := "None"
	if r.MaxConcurrency > 0 {
		limit = strconv.Itoa(r.MaxConcurrency)
	}
	fmt.Fprintf(r.out, "Maximum request concurrency: %s\n", limit)
}

// pythonFloat formats a number as vLLM's output does: 4.0, 0.5, inf.
func pythonFloat(f float64) string {
	if math.IsInf(f, 1) {
		return "inf"
	}
	if f == math.Trunc(f) && math.Abs(f) < 1e15 {
		return strconv.FormatFloat(f, 'f', 1, 64)
	}
	return strconv.FormatFloat(f, 'g', -1, 64)
}

// shownErrors bounds the errors that are printed.
const shownErrors = 10

// finish computes, prints and saves the figures.
func (r *run) finish(rec *load.Record, probe *report.Probe, spec *report.Spec) (*Result, error) {
	guessed := false
	s := report.Summarize(rec, report.Options{
		Metrics: r.PercentileMetrics, Percentiles: r.Percentiles, Goodput: r.goodput, RequestRate: r.configuredRate(), Concurrency: r.MaxConcurrency,
	}, func(i int) int {
		if n := r.requests[i].PromptTokens; n > 0 {
			return n
		}
		return max(0, rec.Outcomes[i].Prompt)
	}, func(i int) int {
		o := &rec.Outcomes[i]
		switch {
		case o.Output >= 0:
			return o.Output
		case r.encode != nil:
			return len(r.encode(o.Decoded()))
		}
		guessed = true
		return o.Chunks
	})
	if s.Failed > 0 {
		fmt.Fprintf(r.out, "Failed requests during benchmark run detected (capping to %d):\n", shownErrors)
		shown := 0
		for i := range rec.Outcomes {
			if err := rec.Outcomes[i].Err; err != nil && shown < shownErrors {
				fmt.Fprintf(r.out, "Error %d: %v\n", shown, err)
				shown++
			}
		}
	}
	if err := s.Print(r.out, probe, spec); err != nil {
		return nil, err
	}
	r.remarks(rec, s, guessed)
	res := &Result{Summary: s, Self: rec.Self, Record: rec, RequestID: r.requestID, Head: &report.Head{
		Date: time.Now(), Backend: r.Backend, Label: r.Label, Model: r.model, Tokenizer: r.tokenizer, NumPrompts: len(r.requests), Metadata: r.meta,
		Burstiness: r.Burstiness, Ramp: r.Ramp, RampStart: r.RampStart, RampEnd: r.RampEnd, Changes: r.changes, Start: rec.Start, Probe: probe, Spec: spec,
	}}
	err := r.save(res)
	if err == nil && s.Completed == 0 {
		err = fmt.Errorf("%w: all %d failed", ErrFailed, s.Failed)
	}
	return res, err
}

// configuredRate returns the configured rate that the block prints.
func (r *run) configuredRate() float64 {
	if r.selfTimed() {
		return math.Inf(1)
	}
	return r.RequestRate
}

// remarks prints notes for which the block has no line.
func (r *run) remarks(rec *load.Record, s *report.Summary, guessed bool) {
	if guessed {
		fmt.Fprintln(r.errOut, "note: the server reported no usage and there is no tokenizer: chunks are counted as output tokens")
	}
	if s.Completed > 0 {
		ttft, e2el := s.Samples("ttft_from_schedule"), s.Samples("e2el_including_client_queue")
		slices.Sort(ttft)
		slices.Sort(e2el)
		fmt.Fprintf(r.errOut, "From each request's scheduled arrival: TTFT median %.2f ms, P99 %.2f ms; E2EL median %.2f ms, P99 %.2f ms.\n",
			report.Quantile(ttft, 50), report.Quantile(ttft, 99), report.Quantile(e2el, 50), report.Quantile(e2el, 99))
	}
	self := rec.Self
	state := "it kept up"
	if self.Overloaded != "" {
		state = "IT WAS THE LIMIT, not the server: " + self.Overloaded
	}
	fmt.Fprintf(r.errOut, "This client: %s (%.2f of %d cores, sending late by P99 %.2f ms, timers by P99 %.2f ms).\n", state,
		self.Cores, self.Available, self.Lag.Seconds()*1e3, self.TimerLag.Seconds()*1e3)
}

// save writes the JSON and the plots next to it, if requested.
func (r *run) save(res *Result) error {
	name := r.ResultFile
	if name == "" {
		label := r.Label
		if label == "" {
			label = r.Backend
		}
		name = fmt.Sprintf("%s-%sqps-%s-%s.json", label, pythonFloat(r.configuredRate()), path.Base(r.model), res.Head.Date.Format("20060102-150405"))
	}
	if r.ResultDir != "" {
		if err := os.MkdirAll(r.ResultDir, 0o755); err != nil {
			return fmt.Errorf("--result-dir: %w", err)
		}
		name = filepath.Join(r.ResultDir, name)
	}
	if err := r.plots(res.Summary, name); err != nil {
		return err
	}
	if !r.SaveResult && !r.SaveDetailed && !r.Append {
		return nil
	}
	data, err := json.Marshal(res.Summary.Result(res.Head, r.SaveDetailed))
	if err != nil {
		return err
	}
	if !r.Append {
		return os.WriteFile(name, data, 0o644)
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	var line bytes.Buffer
	if info, err := f.Stat(); err == nil && info.Size() > 0 {
		line.WriteByte('\n')
	}
	line.Write(data)
	_, err = f.Write(line.Bytes())
	return errors.Join(err, f.Close())
}
