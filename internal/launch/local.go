package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Local is a cluster on this machine: one gateway, prefill and decode nodes.
type Local struct {
	Prefill, Decode int
	Port            int // the gateway's; nodes' /metrics follow it, prefill nodes first
	Threads         int // of each node; 0 divides the cores of this process between them
	// KVMemory is the bytes of each node's KV blocks; 0 leaves it to the nodes.
	KVMemory int64
	Certs    string // folder of the nodes' certificates, see LocalCerts
	// Flags are the user's flags, per command. They come first, so that those of the
	// cluster take precedence.
	Flags map[string][]string
}

// LocalCerts creates the local cluster's authority on the first start and returns
// the folder of a certificate for its nodes. An empty dir means the user's
// state folder.
func LocalCerts(dir string) (string, error) {
	if dir == "" {
		var err error
		if dir, err = process.StateDir(); err != nil {
			return "", fmt.Errorf("no folder for certificates, give --state-dir: %w", err)
		}
	}
	dir = filepath.Join(dir, "certs")
	if err := tlsconf.CreateCA(dir); err != nil && !errors.Is(err, tlsconf.ErrExists) {
		return "", fmt.Errorf("%w; --state-dir names another folder for certificates", err)
	}
	// The gateway and the nodes share this folder, so that it needs the role with all rights.
	return tlsconf.IssueNode(dir, "gateway/local", nil)
}

// Processes returns the processes of the cluster. Only the gateway's port and those after it
// are fixed, because people and scrapers must find them.
func (l Local) Processes() ([]Process, error) {
	gossip, err := freePort()
	if err != nil {
		return nil, err
	}
	threads := l.Threads
	if threads == 0 {
		threads = max(1, runtime.GOMAXPROCS(0)/(l.Prefill+l.Decode))
	}
	var kv []string
	if l.KVMemory > 0 {
		kv = []string{"--kv-cache-memory-bytes", strconv.FormatInt(l.KVMemory, 10)}
	}
	process := func(name, command string, args ...string) Process {
		all := append([]string{command}, l.Flags[command]...)
		return Process{
			Name: name, Args: append(append(all, "--node-name", name, "--tls-dir", l.Certs), args...),
			// Variables for `tandem up` itself.
			Env: []string{"TANDEM_CONFIG=", "TANDEM_DRY_RUN=false"},
		}
	}
	ps := []Process{process("gateway", "gateway", "--advertise", "127.0.0.1", "--gossip-port", strconv.Itoa(gossip), "--nats-port", "0")}
	for i := range l.Prefill + l.Decode {
		role, n := "prefill", i
		if i >= l.Prefill {
			role, n = "decode", i-l.Prefill
		}
		ps = append(ps, process(fmt.Sprintf("%s-%d", role, n), role, append(kv,
			"--join", net.JoinHostPort("127.0.0.1", strconv.Itoa(gossip)), "--host", "127.0.0.1", "--gossip-port", "0",
			"--rpc-port", "0", "--kv-port", "0", "--http-port", strconv.Itoa(l.Port+1+i), "--threads", strconv.Itoa(threads))...))
	}
	return ps, nil
}

// freePort returns a port that is free for TCP and UDP now. It is below the ephemeral ports, so
// that the system gives it to no other process before the gateway binds it.
func freePort() (int, error) {
	const below = 4096 // the range of ports below the ephemeral ones
	var last error
	for range 20 {
		port := 0
		if first := firstEphemeral(); first-below > 1023 {
			port = first - 1 - rand.IntN(below)
		}
		t, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			last = err
			continue
		}
		u, err := net.ListenPacket("udp", t.Addr().String())
		if cerr := t.Close(); cerr != nil {
			return 0, cerr
		}
		if err == nil {
			return t.Addr().(*net.TCPAddr).Port, u.Close()
		}
		last = err
	}
	return 0, fmt.Errorf("%w: no port is free for gossip on 127.0.0.1: %w", ErrStart, last)
}

// firstEphemeral returns the first ephemeral port of the system, or 0 if it is not known.
func firstEphemeral() (first int) {
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(text), &first) // text that is no number leaves first 0
	}
	return first
}

// PortsFree returns an error if a fixed port is in use, because a cluster that answers there
// would be mistaken for this one. host is the gateway's.
func (l Local) PortsFree(host string) error {
	for p := l.Port; p <= l.Port+l.Prefill+l.Decode; p++ {
		if p > l.Port {
			host = "127.0.0.1"
		}
		lis, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(p)))
		if err == nil {
			err = lis.Close()
		}
		if err != nil {
			return fmt.Errorf("%w: --port %d and the %d after it are needed: %w",
				ErrStart, l.Port, l.Prefill+l.Decode, err)
		}
	}
	return nil
}

// Announce waits until the cluster is ready and prints how to use it. cert is the file of the
// certificate for clients; empty: plain HTTP.
func (l Local) Announce(ctx context.Context, out io.Writer, url, key, cert string, began time.Time) error {
	client := console.Client{URL: url, Key: key, HTTP: console.LocalHTTP()}
	var nodes []string
	for i := range l.Prefill + l.Decode {
		nodes = append(nodes, "http://"+net.JoinHostPort("127.0.0.1", strconv.Itoa(l.Port+1+i)))
	}
	models, err := client.WaitFleet(ctx, nodes)
	if err != nil {
		return err
	}
	if len(models) == 0 { // keys are in a file only: the reader has one
		models, key = []string{"MODEL"}, cmp.Or(key, "KEY")
	}
	_, err = io.WriteString(out, l.invite(url, key, cert, strings.Join(models, ", "), time.Since(began)))
	return err
}

// invite returns the text of Announce. A certificate may be self-signed, so that the commands
// name it or skip its verification.
func (l Local) invite(url, key, cert, model string, took time.Duration) string {
	options, flag, env := "", "", ""
	if key != "" {
		options, flag = " -H 'Authorization: Bearer "+key+"'", " --api-key "+key
	}
	if cert != "" {
		options, env = options+" -k", "SSL_CERT_FILE='"+cert+"' "
	}
	return fmt.Sprintf(`
Tandem is up at %[1]s after %.1[2]f s: %[3]d prefill and %[4]d decode processes serve %[5]s. Try:

  curl -sN %[1]s/v1/chat/completions%[6]s -H 'Content-Type: application/json' -d '{"model": "%[5]s", "stream": true, "messages": [{"role": "user", "content": "What is prefill?"}]}'

or %[11]s%[7]s chat --url %[1]s%[8]s. Metrics of the nodes: ports %[9]d to %[10]d. Ctrl-C drains and stops.

`, url, took.Seconds(), l.Prefill, l.Decode, model, options, os.Args[0], flag, l.Port+1, l.Port+l.Prefill+l.Decode, env)
}
