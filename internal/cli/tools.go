package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Tools returns the commands that need no role.
func Tools() Table {
	return Table{
		{"chat", "[MESSAGE] [flags]", "Talks to a cluster: a message, with the input of a pipe behind it; without one: a conversation.",
			"tandem chat \"What is a KV cache?\" --url http://127.0.0.1:8000", chat},
		{"status", "[flags]", "Shows a cluster's nodes and load.",
			"tandem status --url http://127.0.0.1:8000", showStatus},
		{"pull", "ORG/NAME[:REVISION] [flags]", "Downloads a model from the Hugging Face hub into the local Hugging Face cache, and prints its folder.",
			"tandem pull Qwen/Qwen2.5-0.5B-Instruct", pull},
		{"models", "[flags]", "Lists the models in the local Hugging Face cache.", "tandem models --json", models},
		{"rm", "ORG/NAME[:REVISION] [flags]", "Removes a model from the local Hugging Face cache.", "tandem rm Qwen/Qwen2.5-0.5B-Instruct --yes", remove},
		{"logits", "MODEL_DIR --tokens IDS [flags]", "Prints the logits after each position of a list of token ids, one JSON object a line.",
			"tandem logits ./Llama-3.2-1B-Instruct --tokens 128000,9906,1917 --last 1", logits},
		{"plan", "memory CONFIG|MODEL [flags]", "Computes how many tokens of a model fit in a node's memory, with the derivation, from its config.json.",
			"tandem plan memory ./gpt-oss-120b/config.json --kv-memory 8.9924GiB --max-model-len 98304 --max-num-batched-tokens 8192", plan},
		{"ca", "DIR [gateway/NAME ...] [node/NAME ...] [flags]", "Creates a cluster's certificate authority in DIR, and certificates for the named gateways and nodes in DIR/NAME.",
			"tandem ca ./certs gateway/gw1 node/p1 node/d1", certificates},
		{"doctor", "[flags]", "Checks this machine and, with --url, a fleet: each line has a state, a figure and what to do.",
			"tandem doctor --url http://127.0.0.1:8000 --tls-dir ./certs/d1", examine},
		{"explain-log", "FILE|- [flags]", "Explains a log of vLLM or Tandem: each line, its arithmetic, what is unusual, what to change.",
			"tandem explain-log vllm.log --html explained.html", explainLog},
		{"completion", "bash|zsh|fish", "Prints a script that completes commands and flags in a shell.",
			"tandem completion bash > /etc/bash_completion.d/tandem", completion},
		{"man", "", "Prints the manual page of all commands, for man(1).", "tandem man | man -l -", man},
		New("bench", "serve|compare|sweep [flags]", "Loads a server and reports latencies and throughput.",
			"tandem bench serve --port 8000 --num-prompts 200 --request-rate 4", benchmark),
		{"version", "[--json]", "Prints the version and the features of this build.", "tandem version --json", showVersion},
	}
}

func showVersion(v *Invocation) error {
	asJSON := v.Bool("json", false, "as one JSON object")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(v.Out).Encode(map[string]any{
			"version": v.Version, "commit": commit(), "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
			"kernels": cpu.Variants(), "protocol": rpc.Protocol,
		})
	}
	fmt.Fprintf(v.Out, "tandem %s (commit %s, %s, %s/%s), kernels: %s\n", v.Version, commit(), runtime.Version(),
		runtime.GOOS, runtime.GOARCH, strings.Join(cpu.Variants(), " "))
	if cpu.Variants()[0] == cpu.Portable {
		fmt.Fprintln(v.ErrOut, "tandem version: warning: this build has no C kernels and computes many times slower; build it with gcc, or install a package")
	}
	return nil
}

// commit returns the commit that the binary was built from, or "unknown".
func commit() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		if commit, dirty := vcs(info); commit != "" {
			return commit + dirty
		}
	}
	return "unknown"
}

func certificates(v *Invocation) error {
	hosts := v.StringSlice("host", nil, "further names and addresses in the nodes' certificates")
	args, err := v.Parse(1 << 10)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return fmt.Errorf("%w: give the folder of the authority", config.ErrValue)
	}
	if err := tlsconf.CreateCA(args[0]); err != nil && !errors.Is(err, tlsconf.ErrExists) {
		return err
	}
	for _, name := range args[1:] {
		dir, err := tlsconf.IssueNode(args[0], name, *hosts)
		if errors.Is(err, tlsconf.ErrName) {
			return fmt.Errorf("%w: %w", config.ErrValue, err)
		} else if err != nil {
			return err
		}
		fmt.Fprintln(v.Out, dir)
		switch id, err := tlsconf.FolderIdentity(dir); {
		case err != nil:
			return err
		case id.Role == tlsconf.NoRole:
			fmt.Fprintf(v.ErrOut, "warning: the certificate of %s has no role: %s\n", name, tlsconf.Reissue)
		}
	}
	return nil
}

// gatewayURL declares the flag --url of a gateway's address, in the forms of console.BaseURL.
func gatewayURL(v *Invocation, url *string, usage string) {
	text := func(url string) string { return url }
	v.Var(config.Value(url, "string", text, console.BaseURL), "url", usage+": HOST:PORT, or a URL with or without /v1")
}

// client declares the flags of a gateway's address.
func client(v *Invocation) *console.Client {
	c := &console.Client{URL: "http://127.0.0.1:8000"}
	gatewayURL(v, &c.URL, "the gateway")
	v.StringVar(&c.Key, "api-key", "", "bearer token")
	v.Secret("api-key")
	return c
}

// maxInput bounds a message from a pipe, in bytes.
const maxInput = 16 << 20

// chat asks one message, which is the arguments, then the input if that is no terminal. Without
// either it holds a conversation.
func chat(v *Invocation) error {
	c := client(v)
	var o console.ChatOptions
	v.StringVar(&o.Model, "model", "", "model; default: the only one served")
	v.StringVar(&o.System, "system", "", "system message")
	maxTokens := v.Int("max-tokens", 0, "tokens of an answer; 0: up to the context's limit")
	temperature := v.Float64("temperature", -1, "0 is greedy; negative: the server's default")
	seed := v.Int64("seed", -1, "of the sampling; negative: drawn by the server")
	args, err := v.Parse(math.MaxInt)
	if err != nil {
		return err
	}
	if *maxTokens > 0 {
		o.MaxTokens = maxTokens
	}
	if *temperature >= 0 {
		o.Temperature = temperature
	}
	if *seed >= 0 {
		o.Seed = seed
	}
	interactive := term.IsTerminal(int(os.Stdin.Fd())) && len(args) == 0
	message := strings.Join(args, " ")
	if !interactive {
		// Signals keep their default action until the input is read.
		if message, err = withInput(message, os.Stdin); err != nil {
			return err
		}
		if strings.TrimSpace(message) == "" {
			return fmt.Errorf("%w: the message is empty; write it as `tandem chat \"MESSAGE\"`, or leave it out at a terminal for a conversation", config.ErrValue)
		}
	}
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt)
	defer signal.Stop(interrupt)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	t := console.Terminal{In: os.Stdin, Out: v.Out, Err: v.ErrOut, Interrupt: interrupt}
	if interactive {
		err = c.Chat(ctx, o, t)
	} else {
		err = c.Ask(ctx, o, message, t)
	}
	switch {
	case errors.Is(err, console.ErrInterrupted):
		return stopped(syscall.SIGINT)
	case ctx.Err() != nil:
		return stopped(syscall.SIGTERM)
	}
	return err
}

// withInput appends the input to a message, unless the input is a terminal.
func withInput(message string, in *os.File) (string, error) {
	if term.IsTerminal(int(in.Fd())) {
		return message, nil
	}
	text, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	if err != nil {
		return "", fmt.Errorf("standard input: %w", err)
	}
	if len(text) > maxInput {
		return "", fmt.Errorf("%w: standard input is larger than %d MiB, the limit of a message", config.ErrValue, maxInput>>20)
	}
	return strings.TrimSpace(message + "\n\n" + string(text)), nil
}

// statusTimeout bounds the wait for a gateway's answer.
const statusTimeout = 10 * time.Second

func showStatus(v *Invocation) error {
	c := client(v)
	asJSON := v.Bool("json", false, "as one JSON object")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	return c.Status(ctx, *asJSON, v.Out)
}

// logitRows bounds the rows of logits in memory at once.
const logitRows = 64

func logits(v *Invocation) error {
	var m Model
	m.Register(v.Set)
	m.KVDType = "float32" // for comparison with other engines
	v.Lookup("kv-cache-dtype").DefValue = m.KVDType
	tokens := v.Int32Slice("tokens", nil, "token ids, comma-separated")
	last := v.Int("last", 0, "only the last N positions; 0: all")
	args, err := v.Parse(1)
	if err != nil {
		return err
	}
	if len(args) == 1 {
		m.Model = args[0]
	}
	if len(*tokens) == 0 {
		return fmt.Errorf("%w: give --tokens, such as --tokens 1,2,3", config.ErrValue)
	}
	if *last < 0 {
		return fmt.Errorf("%w: --last %d is negative", config.ErrValue, *last)
	}
	o, err := m.Options(context.Background(), v.Environ, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	o.MaxSeqs, o.Speculation = min(o.MaxSeqs, logitRows), engine.Speculation{}
	l, err := engine.Load(o)
	if err != nil {
		return err
	}
	from := 0
	if *last > 0 {
		from = max(0, len(*tokens)-*last)
	}
	var line []byte
	err = l.Logits(*tokens, from, func(position int, logits []float32) error {
		line = fmt.Appendf(line[:0], `{"position":%d,"logits":[`, position)
		for i, x := range logits {
			if i > 0 {
				line = append(line, ',')
			}
			line = strconv.AppendFloat(line, float64(x), 'g', -1, 32)
		}
		_, err := v.Out.Write(append(line, "]}\n"...))
		return err
	})
	return errors.Join(err, l.Close())
}
