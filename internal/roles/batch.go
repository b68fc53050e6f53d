package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/tandem-serving/tandem/internal/batch"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// batchPatience is how long a batch waits for a server that has no room or does not answer.
const batchPatience = 10 * time.Minute

// runBatch answers the requests of a file, by a gateway or by the roles of serve in this process.
func runBatch(v *cli.Invocation) error {
	f := serveFlags(v.Set)
	o := batch.Options{Patience: batchPatience}
	var in, out string
	v.Section("Batch")
	v.StringVarP(&in, "input-file", "i", "", "file with a request a line: custom_id, method, url and body, as OpenAI and vLLM have it")
	v.StringVarP(&out, "output-file", "o", "", "file for an answer a line, in the order in which they arrive; requests that have one there are not sent again")
	v.StringVar(&o.URL, "url", "", "gateway that answers: HOST:PORT, or a URL; default: the model is loaded in this process. --api-key is its key")
	v.CountVar(&o.Concurrency, "max-concurrency", 256, 1, "requests at once")
	v.First("input-file", "output-file", "url", "model", "api-key", "max-concurrency", "max-model-len", "config")
	v.Check(func() (err error) {
		if in == "" || out == "" {
			return fmt.Errorf("%w: give --input-file (-i) and --output-file (-o)", config.ErrValue)
		}
		if o.URL != "" {
			o.URL, err = console.BaseURL(o.URL)
			if err != nil {
				err = fmt.Errorf("%w: --url: %w", config.ErrValue, err)
			}
		}
		return errors.Join(err, f.g.check(), f.p.check())
	})
	f.m.CheckIn(v, checkModel)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if len(f.g.APIKeys) > 0 {
		o.Key = f.g.APIKeys[0]
	}
	if cli.Draws(os.Stderr) && !v.Changed("log-level") {
		f.p.LogLevel = "warning" // lines would break the bar
	}
	b, err := batch.Open(in, out) // before the model is loaded
	if err != nil {
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	defer b.Close()
	if o.URL != "" {
		log, _, err := process.Logger(f.p.LogLevel, f.p.LogFormat, v.ErrOut)
		if err != nil {
			return err
		}
		ctx, _, stop := process.Signals()
		defer stop()
		o.Log, o.Client = log, &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: o.Concurrency}}
		c := console.Client{URL: o.URL, Key: o.Key}
		if err := c.Ready(ctx); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		return runRequests(ctx, v, b, o)
	}
	d, err := begin(v, &f.p, "serve")
	if err != nil {
		return err
	}
	defer d.End()
	inside := rpc.NewNetwork()
	if f.g.Listener, err = inside.Listen("gateway"); err != nil {
		return err
	}
	f.g.DrainDelay = -1 // no balancer sends requests here
	s, err := f.start(v, d, inside)
	if err != nil {
		return err
	}
	o.URL, o.Log = "http://127.0.0.1", d.Log
	o.Client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Concurrency,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return inside.Dial(ctx, "gateway") }}}
	return s.n.whileStepping(d.Ctx, func(ctx context.Context) error {
		return whileServing(ctx, s.gw.Run, s.gw.Ready, func(ctx context.Context) error { return runRequests(ctx, v, b, o) })
	}, s.leave)
}

// errGatewayEnded is the cause of a batch that ends with its gateway.
var errGatewayEnded = errors.New("the gateway in this process ended")

// whileServing calls f once serve, which is a gateway's Run, is ready, and ends serve after f. f's
// context ends with ctx, or when serve ends by itself.
func whileServing(ctx context.Context, serve func(context.Context) error, ready func() error, f func(context.Context) error) error {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ctx, end := context.WithCancelCause(ctx)
	served := make(chan error, 1)
	go func() {
		err := serve(serving)
		end(errGatewayEnded)
		served <- err
	}()
	for ready() != nil && ctx.Err() == nil {
		time.Sleep(drainPoll)
	}
	err := f(ctx)
	stop()
	return errors.Join(err, <-served)
}

// runRequests runs a batch and prints its result. Its errors name the command that continues the
// run.
func runRequests(ctx context.Context, v *cli.Invocation, b *batch.Batch, o batch.Options) error {
	began := time.Now()
	o.Progress = cli.Requests(os.Stderr, o.Log)
	r, err := b.Run(ctx, o)
	if err != nil {
		return fmt.Errorf("%w; %d of %d requests are answered: the same command continues with the others", err, r.Skipped+r.Answered, r.Total)
	}
	_, err = fmt.Fprintf(v.Out, "%d requests: %d answered in %v, %d of them with an error, %d answered before\n",
		r.Total, r.Answered, time.Since(began).Round(time.Second/10), r.Failed, r.Skipped)
	return err
}
