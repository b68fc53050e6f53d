package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ErrServer means that a server of the sweep did not start or did not end as it should.
var ErrServer = errors.New("bench: the server did not run")

// Bounds of the servers that a sweep starts.
const (
	readyPoll    = 100 * time.Millisecond
	readyDefault = 120 * time.Second // without --ready-check-timeout-sec
	drainTimeout = 60 * time.Second
	nodesApart   = time.Second // most time between the starts of two nodes of a cluster
	maxNodes     = 64          // whose metrics are read
)

// started is a server process that the sweep has started.
type started struct {
	cmd    *exec.Cmd
	exited chan struct{}
	err    error // after exited
}

// startServer runs a command line with flags appended, by the shell, so that it may be
// quoted as usual. A first word "tandem" is this program.
func startServer(command string, flags []string, log io.Writer) (*started, error) {
	s := &started{exited: make(chan struct{})}
	s.cmd = exec.Command("sh", append([]string{"-c", "exec " + command + ` "$@"`, "sh"}, flags...)...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.WaitDelay = time.Second
	s.cmd.SysProcAttr = ownGroup()
	if self, err := os.Executable(); err == nil && strings.HasPrefix(command, "tandem ") {
		s.cmd.Args[2] = `exec "$TANDEM_SELF"` + strings.TrimPrefix(command, "tandem") + ` "$@"`
		s.cmd.Env = append(os.Environ(), "TANDEM_SELF="+self)
	}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w: %q: %w", ErrServer, command, err)
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.exited)
	}()
	return s, nil
}

// ready waits until the server answers /health with 200, as vLLM's does too.
func (s *started) ready(ctx context.Context, base string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	client := http.Client{Timeout: askTimeout}
	for {
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/health", nil)
		if err != nil {
			return err
		}
		a, err := client.Do(q)
		if err == nil {
			_ = a.Body.Close() // only its status matters
			if a.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-s.exited:
			return fmt.Errorf("%w: it ended before it was ready: %w", ErrServer, s.err)
		case <-ctx.Done():
			return fmt.Errorf("%w: %s/health is not ready after %v", ErrServer, base, timeout)
		case <-time.After(readyPoll):
		}
	}
}

// drain signals the server to end and waits for it.
func (s *started) drain() error {
	select {
	case <-s.exited:
		return fmt.Errorf("%w: it ended during the run: %w", ErrServer, s.err)
	default:
	}
	if err := interrupt(s.cmd.Process); err != nil {
		return err
	}
	select {
	case <-s.exited:
		return nil
	case <-time.After(drainTimeout):
		_ = killGroup(s.cmd.Process) // the wait below shows whether it worked
		<-s.exited
		return fmt.Errorf("%w: it did not end within %v of SIGTERM and was killed", ErrServer, drainTimeout)
	}
}

// nodeMetrics returns the metrics URLs of a server at base: its own and those of a cluster's
// nodes. The nodes of a cluster that the sweep has started are on the ports that follow. A gateway
// is ready as soon as one decode node is; the others may start a moment later. Any other cluster
// lists its nodes.
func nodeMetrics(ctx context.Context, base string, started bool) []string {
	urls := []string{base + "/metrics"}
	if !started {
		return append(urls, listedNodes(ctx, base)...)
	}
	u, err := url.Parse(base)
	if err != nil {
		return urls
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		return urls
	}
	o := &observer{client: http.Client{Timeout: sampleTimeout}}
	for looked := time.Now(); len(urls) <= maxNodes; {
		next := fmt.Sprintf("%s://%s:%d/metrics", u.Scheme, bracketed(u.Hostname()), port+len(urls))
		if _, ok := o.read(ctx, next); ok {
			urls, looked = append(urls, next), time.Now()
			continue
		}
		if time.Since(looked) > nodesApart || ctx.Err() != nil {
			break
		}
		time.Sleep(readyPoll)
	}
	return urls
}

// listedNodes returns the metrics URLs of the nodes in the /debug/targets of a gateway at base that
// answer now. It returns none if base is no gateway, or does not list its nodes to this client.
func listedNodes(ctx context.Context, base string) (urls []string) {
	o := &observer{client: http.Client{Timeout: sampleTimeout}}
	body, err := o.get(ctx, base+"/debug/targets")
	if err != nil {
		return nil
	}
	defer body.Close()
	var groups []struct {
		Targets []string
		Labels  struct{ Role string }
	}
	if err := json.NewDecoder(io.LimitReader(body, maxMetrics)).Decode(&groups); err != nil {
		return nil
	}
	for _, g := range groups {
		for _, target := range g.Targets {
			next := "http://" + target + "/metrics"
			if g.Labels.Role == "gateway" || len(urls) == maxNodes {
				continue
			}
			if _, ok := o.read(ctx, next); ok {
				urls = append(urls, next)
			}
		}
	}
	return urls
}

// serverLog opens the file for a started server's output.
func serverLog(dir string, n int) (*os.File, error) {
	return os.Create(filepath.Join(dir, fmt.Sprintf("server-%d.log", n)))
}
