package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
)

// ErrOption is wrapped by every error about an option.
var ErrOption = errors.New("bench: bad option")

// Options are the flags of bench serve, with the names and defaults of vLLM's.
type Options struct {
	Backend, Label, BaseURL, Host, Endpoint, Model, ServedModel, Tokenizer string
	Port, NumPrompts, Warmups, ReadyTimeout, MaxConcurrency                int
	Headers, Metadata, GoodputSpec, RandomMix                              []string
	Insecure, SkipTokenizer, DisableProgress                               bool
	Seed                                                                   uint64
	RequestRate, Burstiness, ProbeRate                                     float64
	Ramp                                                                   string
	RampStart, RampEnd                                                     int
	SelfTimed, NoSelfTimed                                                 bool
	IDPrefix                                                               string

	InputLen, OutputLen, LogProbs, TopK                      int
	IgnoreEOS                                                bool
	ExtraBody                                                string
	Temperature, TopP, MinP, Frequency, Presence, Repetition float64

	PercentileMetrics                []string
	Percentiles                      []float64
	SaveResult, SaveDetailed, Append bool
	ResultDir, ResultFile            string
	RangeRatio                       string
	SkipChatTemplate                 bool
	PlotTimeline, PlotStats          bool
	TimelineThresholds               string
	LoraModules                      []string
	LoraAssignment                   string
	BeamSearch, Profile              bool
	TLSDir                           string
	Prefill                          []string
	Data                             dataset.Options

	nativeDial func(ctx context.Context, addr string) (net.Conn, error) // for tests; nil: TCP

	metrics []string       // URLs to read during the run
	set     *pflag.FlagSet // shows which of the flags without a default were given
}

// Register declares the flags.
func (o *Options) Register(s *pflag.FlagSet) {
	o.set = s
	s.StringVar(&o.Backend, "backend", "openai", "API of the server: openai (completions; also called vllm), openai-chat, or tandem: a decode node directly, token ids in and out, without a gateway (--port is then 7102)")
	s.StringVar(&o.Label, "label", "", "prefix of the result's file name; default: the backend")
	s.StringVar(&o.BaseURL, "base-url", "", "server's base URL, instead of --host and --port")
	s.StringVar(&o.TLSDir, "tls-dir", "", "a gateway's folder made by `tandem ca DIR gateway/NAME`; for --backend tandem")
	s.StringArrayVar(&o.Prefill, "prefill-node", nil, "HOST:PORT of a prefill node that the decode node may ask, best first; for --backend tandem; default: none, it prefills itself")
	s.StringVar(&o.Host, "host", "127.0.0.1", "server's host")
	s.IntVar(&o.Port, "port", 8000, "server's port")
	s.StringVar(&o.Endpoint, "endpoint", "/v1/completions", "API path; with --backend openai-chat the default is /v1/chat/completions")
	s.StringArrayVar(&o.Headers, "header", nil, "KEY=VALUE header of each request; may be repeated")
	s.BoolVar(&o.Insecure, "insecure", false, "do not check the server's certificate")
	s.StringVar(&o.Model, "model", "", "model's name, or a folder with its tokenizer; default: the first that the server lists")
	s.StringVar(&o.ServedModel, "served-model-name", "", "model's name in the API; default: --model")
	s.StringVar(&o.Tokenizer, "tokenizer", "", "tokenizer.json, a folder with one, or builtin; default: --model, else the server's /tokenize")
	s.BoolVar(&o.SkipTokenizer, "skip-tokenizer-init", false, "no tokenizer here: token counts are the server's")
	s.Uint64Var(&o.Seed, "seed", 0, "seed of prompts, lengths and arrivals")
	s.IntVar(&o.NumPrompts, "num-prompts", 1000, "requests to send")
	s.IntVar(&o.Warmups, "num-warmups", 0, "requests to send before the run, which are not counted")
	s.IntVar(&o.ReadyTimeout, "ready-check-timeout-sec", 0, "wait this many seconds for a first answer; 0: no check")
	s.IntVar(&o.MaxConcurrency, "max-concurrency", 0, "most requests in flight; the wait for a slot is reported as queue time; 0: no bound")
	s.Float64Var(&o.RequestRate, "request-rate", math.Inf(1), "requests per second; inf: all at once")
	s.Float64Var(&o.Burstiness, "burstiness", 1, "shape of the gamma distributed gaps: 1 a Poisson process, less burstier, more even")
	s.StringVar(&o.Ramp, "ramp-up-strategy", "", "linear or exponential: the rate grows over the run")
	s.IntVar(&o.RampStart, "ramp-up-start-rps", 0, "the ramp's first rate")
	s.IntVar(&o.RampEnd, "ramp-up-end-rps", 0, "the ramp's last rate")
	s.Float64Var(&o.ProbeRate, "probe-request-rate", 0, "one-token requests per second in addition to the load, reported separately; 0: none")
	s.BoolVar(&o.SelfTimed, "self-timed", false, "use the arrivals of the trace; the default for timed_trace")
	s.BoolVar(&o.NoSelfTimed, "no-self-timed", false, "a trace's requests arrive at --request-rate")
	s.StringVar(&o.IDPrefix, "request-id-prefix", "", "start of X-Request-Id; default: bench- and eight random hex digits")
	s.BoolVar(&o.DisableProgress, "disable-tqdm", false, "no progress line")
	s.BoolVar(&o.Profile, "profile", false, "start the server's profiler before the load and stop it after (/start_profile, /stop_profile)")
	o.registerBody(s)
	o.registerResults(s)
	o.registerData(s)
	refuseOthers(s)
}

func (o *Options) registerBody(s *pflag.FlagSet) {
	s.IntVar(&o.InputLen, "input-len", 0, "the dataset's input length, instead of its own flag")
	s.IntVar(&o.OutputLen, "output-len", 0, "the dataset's output length")
	s.BoolVar(&o.IgnoreEOS, "ignore-eos", false, "generate up to the output length, past end-of-sequence tokens")
	s.IntVar(&o.LogProbs, "logprobs", 0, "log probabilities per token")
	s.Float64Var(&o.Temperature, "temperature", 0, "sampling temperature; default: the server's")
	s.Float64Var(&o.TopP, "top-p", 0, "nucleus sampling")
	s.IntVar(&o.TopK, "top-k", 0, "sample from this many tokens")
	s.Float64Var(&o.MinP, "min-p", 0, "least probability relative to the best token's")
	s.Float64Var(&o.Frequency, "frequency-penalty", 0, "penalty on tokens by their number of occurrences")
	s.Float64Var(&o.Presence, "presence-penalty", 0, "penalty on tokens that have occurred")
	s.Float64Var(&o.Repetition, "repetition-penalty", 0, "penalty factor on tokens that have occurred")
	s.BoolVar(&o.BeamSearch, "use-beam-search", false, "set use_beam_search in the request")
	s.StringArrayVar(&o.LoraModules, "lora-modules", nil, "adapters, one of which is each request's model; may be repeated")
	s.StringVar(&o.LoraAssignment, "lora-assignment", "random", "how adapters are assigned: random or round-robin")
	s.StringVar(&o.ExtraBody, "extra-body", "", "JSON object whose keys go into each request's body")
}

func (o *Options) registerResults(s *pflag.FlagSet) {
	s.StringSliceVar(&o.PercentileMetrics, "percentile-metrics", []string{"ttft", "tpot", "itl"}, "latencies to report: "+strings.Join(report.MetricNames(), ", "))
	s.Float64SliceVar(&o.Percentiles, "metric-percentiles", []float64{99}, "percentiles to report")
	s.StringArrayVar(&o.GoodputSpec, "goodput", nil, "KEY:VALUE objectives in milliseconds, of ttft, tpot and e2el; goodput counts the requests that meet all")
	s.BoolVar(&o.SaveResult, "save-result", false, "write the figures as JSON")
	s.BoolVar(&o.SaveDetailed, "save-detailed", false, "include each request's own figures")
	s.BoolVar(&o.Append, "append-result", false, "append to the file, one object a line")
	s.StringArrayVar(&o.Metadata, "metadata", nil, "KEY=VALUE copied into the JSON; may be repeated")
	s.BoolVar(&o.PlotTimeline, "plot-timeline", false, "draw each request's tokens over the run, as HTML next to the JSON")
	s.StringVar(&o.TimelineThresholds, "timeline-itl-thresholds", "25,50", "milliseconds: gaps below the first are green, from the second on red")
	s.BoolVar(&o.PlotStats, "plot-dataset-stats", false, "draw the lengths of prompts and outputs, as HTML next to the JSON")
	s.StringVar(&o.ResultDir, "result-dir", "", "folder of the JSON")
	s.StringVar(&o.ResultFile, "result-filename", "", "its name; default: LABEL-RATEqps-MODEL-DATE.json")
}

func (o *Options) registerData(s *pflag.FlagSet) {
	d := &o.Data
	s.StringVar(&d.Name, "dataset-name", "random", "random, sharegpt, custom, prefix_repetition or timed_trace")
	s.StringVar(&d.Path, "dataset-path", "", "the dataset's file")
	s.BoolVar(&d.NoRepeat, "no-oversample", false, "do not repeat samples when there are fewer than --num-prompts")
	s.BoolVar(&d.NoShuffle, "disable-shuffle", false, "keep the dataset's order")
	s.BoolVar(&o.SkipChatTemplate, "skip-chat-template", false, "send custom prompts to /v1/completions as they are, without the chat template that the server's /tokenize applies")
	s.IntVar(&d.Random.Input, "random-input-len", 1024, "prompt's tokens after the prefix")
	s.IntVar(&d.Random.Output, "random-output-len", 128, "output tokens")
	s.StringVar(&o.RangeRatio, "random-range-ratio", "0.0", `lengths vary by this share; one number, or {"input": 0.3, "output": 0.5}`)
	s.StringArrayVar(&o.RandomMix, "random-mix", nil, "SHARE:INPUT:OUTPUT, such as 0.8:64:64 0.2:1024:16: kinds of requests instead of --random-input-len and --random-output-len; may be repeated")
	s.IntVar(&d.Random.Prefix, "random-prefix-len", 0, "tokens of a prefix that all prompts share")
	s.IntVar(&d.Prefix.Prefix, "prefix-repetition-prefix-len", 256, "tokens of a prefix")
	s.IntVar(&d.Prefix.Suffix, "prefix-repetition-suffix-len", 256, "tokens after it")
	s.IntVar(&d.Prefix.Prefixes, "prefix-repetition-num-prefixes", 10, "prefixes")
	s.IntVar(&d.Prefix.Output, "prefix-repetition-output-len", 128, "output tokens")
	s.IntVar(&d.Trace.ChunkTokens, "timed-trace-chunk-hash-size", 16, "tokens per hash id: Mooncake 512, Qwen 16")
	s.Float64Var(&d.Trace.Seconds, "timed-trace-sec-multiplier", 1, "a timestamp times this is seconds; 0.001 for milliseconds")
	s.StringVar(&d.Trace.Timestamp, "timed-trace-label-timestamp", "timestamp", "key of the arrival")
	s.StringVar(&d.Trace.Input, "timed-trace-label-input-length", "input_length", "key of the prompt's tokens")
	s.StringVar(&d.Trace.Output, "timed-trace-label-output-length", "output_length", "key of the output's tokens")
	s.StringVar(&d.Trace.HashIDs, "timed-trace-label-hash-ids", "hash_ids", "key of the prompt's hash ids")
	s.IntVar(&d.ShareGPTOutput, "sharegpt-output-len", 0, "output tokens instead of the dataset's")
	s.IntVar(&d.CustomOutput, "custom-output-len", 256, "output tokens; -1: the dataset's")
}

// RegisterOffline declares only the flags that choose the requests.
func (o *Options) RegisterOffline(s *pflag.FlagSet) {
	o.set = s
	o.registerData(s)
	s.IntVar(&o.NumPrompts, "num-prompts", 1000, "prompts to process")
	s.IntVar(&o.InputLen, "input-len", 0, "the dataset's input length, instead of its own flag")
	s.IntVar(&o.OutputLen, "output-len", 0, "the dataset's output length")
	s.IntVar(&o.Data.Random.Prefix, "prefix-len", 0, "tokens of a prefix that all random prompts share; also called --random-prefix-len")
	s.StringVar(&o.Data.Path, "dataset", "", "the dataset's file; older name of --dataset-path")
}

// Requests makes the requests that the flags describe.
func (o *Options) Requests(v dataset.Vocabulary, seed uint64) ([]dataset.Request, error) {
	o.Seed = seed
	if err := o.completeData(); err != nil {
		return nil, err
	}
	o.Data.Vocabulary = v
	return dataset.Make(o.Data)
}

// lists are the flags that take several words: --goodput ttft:100 tpot:20.
var lists = []string{"--header", "--goodput", "--metadata", "--random-mix", "--lora-modules", "--bfcl-categories"}

// JoinLists rewrites flags of several words as one flag per word.
func JoinLists(args []string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		if !slices.Contains(lists, args[i]) {
			out = append(out, args[i])
			continue
		}
		flag := args[i]
		if i+1 == len(args) || strings.HasPrefix(args[i+1], "-") {
			out = append(out, flag)
		}
		for i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			i++
			out = append(out, flag+"="+args[i])
		}
	}
	return out
}

// chat reports whether the API is chat completions.
func (o *Options) chat() bool { return o.Backend == "openai-chat" }

// complete checks the options and fills in those that depend on others.
func (o *Options) complete() error {
	if why := otherBackends[o.Backend]; why != "" {
		return fmt.Errorf("%w: --backend %s: %s", ErrOption, o.Backend, why)
	}
	if o.LoraAssignment != "random" && o.LoraAssignment != "round-robin" {
		return fmt.Errorf("%w: --lora-assignment %q: want random or round-robin", ErrOption, o.LoraAssignment)
	}
	if _, _, err := o.thresholds(); err != nil {
		return err
	}
	if !slices.Contains([]string{"openai", "vllm", "openai-chat", nativeBackend}, o.Backend) {
		return fmt.Errorf("%w: --backend %q: want openai, vllm, openai-chat or tandem", ErrOption, o.Backend)
	}
	if o.native() {
		if err := o.completeNative(); err != nil {
			return err
		}
	} else if o.TLSDir != "" || len(o.Prefill) > 0 {
		return fmt.Errorf("%w: --tls-dir and --prefill-node: only --backend tandem loads nodes", ErrOption)
	}
	if o.chat() && !o.set.Changed("endpoint") {
		o.Endpoint = "/v1/chat/completions"
	}
	if !o.native() && !strings.HasPrefix(o.Endpoint, "/") {
		return fmt.Errorf("%w: --endpoint %q: want a path that begins with /", ErrOption, o.Endpoint)
	}
	if o.BaseURL == "" {
		o.BaseURL = fmt.Sprintf("http://%s:%d", bracketed(o.Host), o.Port)
	}
	o.BaseURL = strings.TrimSuffix(o.BaseURL, "/")
	if o.MaxConcurrency < 0 || o.Warmups < 0 || o.ReadyTimeout < 0 || o.ProbeRate < 0 {
		return fmt.Errorf("%w: --max-concurrency, --num-warmups, --ready-check-timeout-sec and --probe-request-rate: want 0 or more", ErrOption)
	}
	if o.Ramp != "" && !math.IsInf(o.RequestRate, 1) {
		return fmt.Errorf("%w: --ramp-up-strategy and --request-rate: give one of the two", ErrOption)
	}
	if o.SelfTimed && o.NoSelfTimed || o.SelfTimed && o.Data.Name != "timed_trace" {
		return fmt.Errorf("%w: --self-timed: only the timed_trace dataset has times", ErrOption)
	}
	if err := report.CheckFigures(o.PercentileMetrics, o.Percentiles); err != nil {
		return fmt.Errorf("%w: %w", ErrOption, err)
	}
	return o.completeData()
}

func bracketed(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}

// completeData maps the general lengths to the dataset's own flags.
func (o *Options) completeData() error {
	d := &o.Data
	if why := otherDatasets[d.Name]; why != "" {
		return fmt.Errorf("%w: --dataset-name %s: %s", ErrOption, d.Name, why)
	}
	d.N, d.Seed, d.AsText = o.NumPrompts, o.Seed, o.chat()
	if o.set.Changed("input-len") {
		switch d.Name {
		case "random":
			d.Random.Input = o.InputLen
		case "prefix_repetition":
			d.Prefix.Suffix = o.InputLen - d.Prefix.Prefix
		}
	}
	for _, m := range o.RandomMix {
		var k dataset.Kind
		if n, err := fmt.Sscanf(m, "%g:%d:%d", &k.Share, &k.Input, &k.Output); err != nil || n != 3 {
			return fmt.Errorf("%w: --random-mix %q: want SHARE:INPUT:OUTPUT, such as 0.2:1024:16", ErrOption, m)
		}
		d.Random.Mix = append(d.Random.Mix, k)
	}
	if o.set.Changed("output-len") {
		d.Random.Output, d.Prefix.Output, d.ShareGPTOutput, d.CustomOutput = o.OutputLen, o.OutputLen, o.OutputLen, o.OutputLen
	}
	if r, err := strconv.ParseFloat(o.RangeRatio, 64); err == nil {
		d.Random.InputRatio, d.Random.OutputRatio = r, r
		return nil
	}
	var ratio struct{ Input, Output float64 }
	if err := json.Unmarshal([]byte(o.RangeRatio), &ratio); err != nil {
		return fmt.Errorf(`%w: --random-range-ratio %q: want a number or {"input": 0.3, "output": 0.5}`, ErrOption, o.RangeRatio)
	}
	d.Random.InputRatio, d.Random.OutputRatio = ratio.Input, ratio.Output
	return nil
}

// selfTimed reports whether the trace sets the arrivals.
func (o *Options) selfTimed() bool { return o.Data.Name == "timed_trace" && !o.NoSelfTimed }

// goodput returns the objectives in milliseconds.
func (o *Options) goodput() (map[string]float64, error) {
	slo, err := report.ParseGoodput(o.GoodputSpec)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOption, err)
	}
	return slo, nil
}

// header returns the headers of each request. Clients of this API read the key from the
// environment variable OPENAI_API_KEY.
func (o *Options) header() (http.Header, error) {
	h := http.Header{}
	if key := os.Getenv("OPENAI_API_KEY"); key != "" {
		h.Set("Authorization", "Bearer "+key)
	}
	for _, s := range o.Headers {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("%w: --header %q: want KEY=VALUE", ErrOption, s)
		}
		h.Set(k, v)
	}
	return h, nil
}

// metadata returns the extra fields of the JSON.
func (o *Options) metadata() (report.Object, error) {
	var m report.Object
	for _, s := range o.Metadata {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("%w: --metadata %q: want KEY=VALUE", ErrOption, s)
		}
		m = append(m, report.Field{Key: k, Value: v})
	}
	return m, nil
}

// arrivals returns the arrival process of the flags.
func (o *Options) arrivals() load.Arrivals {
	return load.Arrivals{Rate: o.RequestRate, Burstiness: o.Burstiness, Ramp: o.Ramp, From: float64(o.RampStart), To: float64(o.RampEnd), Seed: o.Seed}
}
