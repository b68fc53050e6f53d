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
	"path/filepath"
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
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc"
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
			"tandem logits ./Llama-3.2-1B-Instruct --tokens 128000,9906,1917 --last 1", untilSignal(logits)},
		{"plan", "KIND [flags]", "Computes properties of a fleet before it exists: how many tokens fit in a node's memory (memory), how many nodes a load needs (pools).", planExample, plan},
		{"plan memory", "CONFIG|MODEL [flags]", "Computes how many tokens of a model fit in a node's memory, with the derivation, from its config.json.", planExample, planMemory},
		{"profile", "[MODEL] [flags]", "Measures the step times of a node with this machine and model, and writes them to a profile, which tandem sim reads.",
			"tandem profile ./Llama-3.2-1B-Instruct --out node.yaml", profileNode},
		{"record", "[flags]", "Records a trace of the requests that a gateway answers: times, lengths and which prompts begin alike, no text and no names.",
			"tandem record --url http://127.0.0.1:8000 --for 1h --out trace.jsonl", record},
		{"quantize", "MODEL --out DIR [flags]", "Writes a model with weights of 4 bits, with error feedback from a calibration text, as a Hugging Face folder in the format of compressed-tensors.",
			"tandem quantize ./Llama-3.2-1B-Instruct --out ./Llama-3.2-1B-Instruct-W4A16", quantizeModel},
		{"ca", "[renew|list] DIR [gateway/NAME ...] [node/NAME ...] [flags]", "Creates a cluster's certificate authority in DIR, and certificates for the named gateways and nodes in DIR/NAME; renews or lists them.",
			"tandem ca ./certs gateway/gw1 node/p1 node/d1", certificates},
		{"doctor", "[flags]", "Checks this machine and, with --url, a fleet: each line has a state, a figure and what to do.",
			"tandem doctor --url http://127.0.0.1:8000 --tls-dir ./certs/d1", examine},
		{"explain-log", "FILE|- [flags]", "Explains a log of vLLM or Tandem: each line, its arithmetic, what is unusual, what to change.",
			"tandem explain-log vllm.log --html explained.html", untilSignal(explainLog)},
		{"completion", "bash|zsh|fish", "Prints a script that completes commands and flags in a shell.",
			"tandem completion bash > /etc/bash_completion.d/tandem", completion},
		{"man", "", "Prints the manual page of all commands, for man(1).", "tandem man | man -l -", man},
		New("bench", "NAME [flags]", "Measures a server, an engine or a network: serve, compare, sweep, throughput, latency, transfer, mock or truth.",
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
		now := present(v.Version)
		return json.NewEncoder(v.Out).Encode(map[string]any{
			"version": v.Version, "commit": commit(), "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
			"kernels": cpu.Variants(), "protocol": rpc.Protocol, "versions": now, "mixes": mixtures(now),
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

// gatewayURL declares the flag --url of a gateway's address, in the forms of console.BaseURL.
func gatewayURL(v *Invocation, url *string, usage string) {
	text := func(url string) string { return url }
	v.Var(config.Value(url, "string", text, console.BaseURL), "url", usage+": HOST:PORT, or a URL with or without /v1")
}

// Client declares the flags of a gateway's address.
func Client(v *Invocation) *console.Client {
	c := &console.Client{URL: "http://127.0.0.1:8000"}
	gatewayURL(v, &c.URL, "the gateway")
	v.StringVar(&c.Key, "api-key", "", "bearer token")
	v.Secret("api-key")
	return c
}

// maxInput bounds a message from a pipe, in bytes. After quietInput a hint names what a chat waits
// for, because an input that stays open looks like a hang.
const (
	maxInput   = 16 << 20
	quietInput = 3 * time.Second
)

// chat asks one message, which is the arguments, then the input if that is no terminal. Without
// either it holds a conversation.
func chat(v *Invocation) error {
	c := Client(v)
	var o console.ChatOptions
	v.StringVar(&o.Model, "model", "", "model; default: the only one served")
	v.StringVar(&o.System, "system", "", "system message")
	maxTokens := v.Int("max-tokens", 0, "tokens of an answer; 0: up to the context's limit")
	temperature := v.Float64("temperature", -1, "0 is greedy; negative: the server's default")
	seed := v.Int64("seed", -1, "of the sampling; negative: drawn by the server")
	var t console.Terminal
	v.BoolVar(&t.Verbose, "verbose", false, "print the time to the first token, tokens and tokens/s of each answer")
	v.BoolVar(&t.JSON, "json", false, "print each answer as one JSON object, with its tokens and times")
	v.StringVar(&t.History, "history", "", "file of the entered messages, for the arrow keys, or none; default: chat.history in $XDG_STATE_HOME/tandem or ~/.local/state/tandem")
	args, err := v.Parse(math.MaxInt)
	if err != nil {
		return err
	}
	switch {
	case *maxTokens > 0:
		o.MaxTokens = maxTokens
	case *maxTokens < 0:
		return fmt.Errorf("%w: --max-tokens %d: want 0 or more", config.ErrValue, *maxTokens)
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
	t.Out, t.Err, t.Interrupt = v.Out, v.ErrOut, interrupt
	setTerminal(&t)
	if interactive {
		err = c.Chat(ctx, o, t)
	} else {
		err = c.Ask(ctx, o, message, t)
	}
	switch {
	case errors.Is(err, console.ErrInterrupted):
		return process.Stopped(syscall.SIGINT)
	case ctx.Err() != nil:
		return process.Stopped(syscall.SIGTERM)
	}
	return err
}

// setTerminal sets the input, what the process's terminal can show, and the default of the history.
func setTerminal(t *console.Terminal) {
	switch t.History {
	case "none":
		t.History = ""
	case "":
		// Without a home directory there is no history.
		if dir, err := process.StateDir(); err == nil {
			t.History = filepath.Join(dir, "chat.history")
		}
	}
	t.In = os.Stdin
	dumb := os.Getenv("TERM") == "dumb"
	colours := !dumb && os.Getenv("NO_COLOR") == ""
	t.ErrStyled = colours && term.IsTerminal(int(os.Stderr.Fd()))
	out := int(os.Stdout.Fd())
	if !term.IsTerminal(out) {
		return
	}
	t.Styled = colours
	t.Width = func() int {
		width, _, err := term.GetSize(out)
		if err != nil {
			return 0
		}
		return width
	}
	if !dumb {
		t.Keyboard = os.Stdin
	}
}

// withInput appends the input to a message, unless the input is a terminal.
func withInput(message string, in *os.File) (string, error) {
	if term.IsTerminal(int(in.Fd())) {
		return message, nil
	}
	hint := time.AfterFunc(quietInput, func() {
		fmt.Fprintln(os.Stderr, "tandem chat: reads the rest of the message from standard input; < /dev/null leaves it out")
	})
	text, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	hint.Stop()
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

// width returns the columns of the terminal that w is, or 0.
func width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

func showStatus(v *Invocation) error {
	c := Client(v)
	asJSON := v.Bool("json", false, "as one JSON object")
	watch := v.Bool("watch", false, "show it again and again, until Ctrl-C")
	interval := v.Duration("interval", 2*time.Second, "with --watch: the time between two")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if *interval < 100*time.Millisecond {
		return fmt.Errorf("%w: --interval %v: want at least 100ms", config.ErrValue, *interval)
	}
	signalled, _, stop := process.Signals()
	defer stop()
	once := func(out io.Writer) error {
		ctx, cancel := context.WithTimeout(signalled, statusTimeout)
		defer cancel()
		return c.Status(ctx, *asJSON, width(v.Out), out)
	}
	if !*watch {
		return interrupted(signalled, once(v.Out))
	}
	clear := Draws(os.Stdout) && !*asJSON
	for {
		var text strings.Builder
		switch err := once(&text); {
		case signalled.Err() != nil:
			return context.Cause(signalled)
		case errors.Is(err, console.ErrDenied):
			return err
		case err != nil:
			fmt.Fprintf(&text, "%s: %v\n", time.Now().Format(time.TimeOnly), err)
		}
		out := text.String()
		if clear {
			// Each line is cleared as it is written, so that the screen does not flicker.
			out = "\x1b[H" + strings.ReplaceAll(out, "\n", "\x1b[K\n") + "\x1b[J"
		}
		if _, err := io.WriteString(v.Out, out); err != nil {
			return err
		}
		select {
		case <-signalled.Done():
			return context.Cause(signalled)
		case <-time.After(*interval):
		}
	}
}

// logitRows bounds the rows of logits in memory at once.
const logitRows = 64

func logits(v *Invocation) error {
	v.First("tokens", "last")
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
