package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/profiler"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/transfer"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// profileFlags are the flags of tandem profile.
type profileFlags struct {
	m            Model
	o            profiler.Options
	out, peer    string
	accept       bool
	price, watts float64
	live         profiler.LiveOptions
	from         []string
	base         string
}

// Budgets of a measurement.
const (
	builtinBudget = 45 * time.Second
	modelBudget   = 4 * time.Minute
)

func (f *profileFlags) register(v *Invocation) {
	v.First("out", "name", "budget", "peer", "price-per-hour")
	f.m.Register(v.Set)
	v.Section("Profile")
	v.StringVar(&f.out, "out", "", "file to write the profile to, which tandem sim --profile reads; empty: the standard output")
	v.StringVar(&f.o.Name, "name", "", "name of this kind of node in the profile; default: its kernels and threads")
	v.SecondsVar(&f.o.Budget, "budget", false, "time for the measurement of steps; 0: 45s for the built-in model, 4m for others")
	v.StringVar(&f.peer, "peer", "", "HOST:PORT of tandem bench transfer --listen on another machine, to measure KV transfer to it; default: the loopback interface of this machine")
	v.Float64Var(&f.price, "price-per-hour", 0, "US dollars for an hour of the node; 0: no cost is computed")
	v.Float64Var(&f.watts, "watts", 0, "power of the node; 0: not known")
	v.Uint64Var(&f.o.Seed, "seed", 0, "seed of the tokens")
	f.live.For, f.live.Every = 2*time.Minute, 2*time.Second
	v.StringSliceVar(&f.from, "from", nil, "HOST:PORT or URL of the metrics of a node that serves, instead of a measurement: step times are fitted to its counters; several of the same kind with commas")
	v.StringVar(&f.base, "base", "", "with --from: profile, or name of an estimate as for tandem sim, that has everything but the step times")
	v.SecondsVar(&f.live.For, "for", false, "with --from: how long the counters are read")
	v.SecondsVar(&f.live.Every, "every", false, "with --from: time between two readings")
	v.BoolVar(&f.accept, "accept", false, fmt.Sprintf("write the profile even if its predictions are off by more than %.0f %%", 100*profiler.MaxFitError))
}

// check returns errors of flags that belong to this command only.
func (f *profileFlags) check() error {
	var errs []error
	for _, x := range []struct {
		flag  string
		value float64
	}{{"price-per-hour", f.price}, {"watts", f.watts}} {
		if !(x.value >= 0 && x.value <= 1e6) {
			errs = append(errs, fmt.Errorf("%w: --%s %g: give 0 to 1,000,000", config.ErrValue, x.flag, x.value))
		}
	}
	if (len(f.from) > 0) != (f.base != "") {
		errs = append(errs, fmt.Errorf("%w: --from and --base: give both: --base has the memory, transfer and start of the nodes, such as --base h200:llama-8b", config.ErrValue))
	}
	if f.m.speculation.Tokens > 0 {
		errs = append(errs, fmt.Errorf("%w: --speculative-config: the simulator does not model drafts: leave it out", config.ErrValue))
	}
	return errors.Join(errs...)
}

// unused returns an error for each flag of a measurement that was given together with --from.
func (f *profileFlags) unused(v *Invocation) error {
	var errs []error
	for _, name := range []string{"budget", "peer", "seed"} {
		if len(f.from) > 0 && v.Changed(name) {
			errs = append(errs, fmt.Errorf("%w: --%s: --from measures no steps of its own: leave one of them out", config.ErrValue, name))
		}
	}
	return errors.Join(errs...)
}

// profileNode measures the profile of a node, and writes it.
func profileNode(v *Invocation) error {
	var f profileFlags
	process0 := profiler.SinceStart()
	f.register(v)
	v.Check(func() error { return errors.Join(f.check(), f.unused(v)) })
	f.m.CheckIn(v, func(o engine.LoadOptions) error {
		if len(f.from) > 0 {
			return nil
		}
		_, err := engine.Check(o)
		return err
	})
	if _, err := v.Parse(1); err != nil {
		return err
	}
	log, _, err := process.Logger("warning", "text", v.ErrOut)
	if err != nil {
		return err
	}
	if err := f.reach(); err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	out, err := createProfile(f.out, v.Out)
	if err != nil {
		return err
	}
	r, err := f.measure(ctx, v, log)
	if err != nil && r != nil {
		printProfile(v.ErrOut, r)
	}
	if err != nil && !(errors.Is(err, profiler.ErrFit) && f.accept) {
		return errors.Join(asValue(interrupted(ctx, err)), out.discard())
	}
	p := r.Profile
	p.Measured.Commit, p.Measured.At = commit(), time.Now().UTC().Format(time.DateOnly)
	if len(f.from) == 0 {
		p.Start.Process = round4(process0.Seconds())
		if p.Transfer, err = f.transfer(ctx, p); err != nil {
			return errors.Join(asValue(interrupted(ctx, err)), out.discard())
		}
	}
	if err := errors.Join(p.Check(), p.Write(out)); err != nil {
		return errors.Join(err, out.discard())
	}
	if err := out.Close(); err != nil {
		return err
	}
	printProfile(v.ErrOut, r)
	if f.out != "" {
		fmt.Fprintf(v.Out, "Wrote %s: tandem sim --profile %s reads it\n", f.out, f.out)
	}
	return nil
}

// reachTimeout bounds the connection to the peer before the measurement.
const reachTimeout = 5 * time.Second

// reach returns an error if the peer cannot be reached, before minutes of measurement.
func (f *profileFlags) reach() error {
	if f.peer == "" || len(f.from) > 0 {
		return nil
	}
	conn, err := net.DialTimeout("tcp", f.peer, reachTimeout)
	if err != nil {
		return fmt.Errorf("%w: --peer %s: %w: start tandem bench transfer --listen there first", config.ErrValue, f.peer, err)
	}
	return conn.Close()
}

// measure measures the steps of a model in this process, or of nodes that serve.
func (f *profileFlags) measure(ctx context.Context, v *Invocation, log *slog.Logger) (*profiler.Result, error) {
	var err error
	if len(f.from) > 0 {
		if f.live.Base, err = profile.Load(f.base); err != nil {
			return nil, err
		}
		if f.live.URLs, err = MetricsURLs(f.from); err != nil {
			return nil, err
		}
		fmt.Fprintf(v.ErrOut, "Reading the counters of %s for %v\n", strings.Join(masked(f.from), ", "), f.live.For)
		r, err := profiler.Live(ctx, f.live)
		if r != nil {
			n := &r.Profile.Node
			n.Name, n.Price, n.Watts = cmp.Or(f.o.Name, n.Name), cmp.Or(f.price, n.Price), cmp.Or(f.watts, n.Watts)
		}
		return r, err
	}
	if f.o.Load, err = f.m.Options(ctx, v.Environ, log); err != nil {
		return nil, err
	}
	f.o.Model, f.o.Log, f.o.Price, f.o.Watts = cmp.Or(f.m.ServedName, f.m.Model), v.ErrOut, f.price, f.watts
	if f.o.Budget <= 0 {
		f.o.Budget = modelBudget
		if f.m.Model == engine.Builtin {
			f.o.Budget = builtinBudget
		}
	}
	return profiler.Measure(ctx, f.o)
}

// MetricsURLs returns the URLs of nodes' metrics from the values of --from.
func MetricsURLs(from []string) (urls []string, err error) {
	for _, text := range from {
		full := text
		if !strings.Contains(full, "://") {
			full = "http://" + full
		}
		u, err := url.Parse(full)
		if err != nil || u.Host == "" {
			return nil, fmt.Errorf("%w: --from %s: give a node's metrics such as 10.0.0.2:7301", config.ErrValue, profiler.Masked(text))
		}
		if u.Path == "" || u.Path == "/" {
			u.Path = "/metrics"
		}
		urls = append(urls, u.String())
	}
	return urls, nil
}

// masked returns URLs without users and passwords.
func masked(urls []string) []string {
	list := make([]string, len(urls))
	for i := range urls {
		list[i] = profiler.Masked(urls[i])
	}
	return list
}

// asValue returns an error about options as one that the user can correct.
func asValue(err error) error {
	for _, sentinel := range []error{profiler.ErrOption, profiler.ErrFit, profiler.ErrLive, profile.ErrProfile, transfer.ErrOption} {
		if errors.Is(err, sentinel) {
			return fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(err.Error(), sentinel.Error()+": "))
		}
	}
	return err
}

// profileFile is the file of a profile, or the standard output.
type profileFile struct {
	io.Writer
	file *os.File // nil: the standard output
}

// createProfile opens the file before the measurement, so that a wrong name costs no time. The file
// gets its name only when it is complete.
func createProfile(name string, out io.Writer) (*profileFile, error) {
	if name == "" {
		return &profileFile{Writer: out}, nil
	}
	f, err := os.Create(name + ".part")
	if err != nil {
		return nil, fmt.Errorf("%w: --out: %w: give a file in a folder that can be written", config.ErrValue, err)
	}
	return &profileFile{f, f}, nil
}

// Close gives the file its name.
func (f *profileFile) Close() error {
	if f.file == nil {
		return nil
	}
	part := f.file.Name()
	return errors.Join(f.file.Close(), os.Rename(part, strings.TrimSuffix(part, ".part")))
}

// discard removes the file.
func (f *profileFile) discard() error {
	if f.file == nil {
		return nil
	}
	return errors.Join(f.file.Close(), os.Remove(f.file.Name()))
}

// transferBytes is the size of a measured transfer.
const transferBytes = 32 << 20

// transfer measures KV transfer with pages of the model's size.
func (f *profileFlags) transfer(ctx context.Context, p *profile.Profile) (profile.Transfer, error) {
	perPage := int(p.Model.KVBytes) * p.Memory.BlockTokens / p.Model.Layers
	o := transfer.Options{
		Peer: f.peer, Transport: "tcp", Layers: p.Model.Layers, PageBytes: max(8, perPage/8*8), Streams: 2, Rounds: 5, Smalls: 40,
		SmallPages: p.Model.Layers, Seed: f.o.Seed, MemoryBytes: 2 * transferBytes, Out: io.Discard,
	}
	positions := max(1, transferBytes/o.PageBytes/o.Layers)
	o.Pages, o.MemoryBytes = positions*o.Layers, max(o.MemoryBytes, int64(2*positions*o.Layers*o.PageBytes))
	measure, over := transfer.Measure, f.peer
	if f.peer == "" {
		measure, over = transfer.Loopback, "loopback"
	}
	r, err := measure(ctx, o)
	if err != nil {
		return profile.Transfer{}, err
	}
	median := r.SmallMillis[1] / 1e3
	return profile.Transfer{Setup: round4(median), BytesPerSecond: round4(r.GBps * 1e9), PerLayer: true, Checksum: true, Over: over}, nil
}

// round4 rounds to four digits.
func round4(x float64) float64 {
	if x == 0 {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(x))))
	return math.Round(x*scale) / scale
}

// printProfile prints the fit and the shapes that were not fitted.
func printProfile(w io.Writer, r *profiler.Result) {
	p := r.Profile
	fmt.Fprintf(w, "Decoding: %d points; coefficients off by %.1f %% on average. Prompts: %d points, %.1f %%\n",
		len(p.Step.Decode.Points), 100*p.Step.Decode.MAPE, len(p.Step.Prefill.Points), 100*p.Step.Prefill.MAPE)
	fmt.Fprintf(w, "%-70s %12s %12s %7s\n", "Shapes that were not fitted", "predicted ms", "measured ms", "error")
	for i := range r.HeldOut {
		c := &r.HeldOut[i]
		fmt.Fprintf(w, "%-70s %12.4g %12.4g %+6.1f%%\n", c.Shape, 1e3*c.Predicted, 1e3*c.Measured, 100*c.Error())
	}
	mean, most := r.Errors()
	fmt.Fprintf(w, "Error of these predictions: %.1f %% on average, %.1f %% at most\n", 100*mean, 100*most)
	for _, n := range r.Notes {
		fmt.Fprintf(w, "Note: %s\n", n)
	}
}
