//go:build linux

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A gateway with few file descriptors lets 24 streams go on and serves new clients while
// thousands of connections are silent, half of them in the middle of a head. Its nodes,
// whose HTTP ports are attacked too, go on as well.
func TestBinaryHostileFiles(t *testing.T) {
	cases := []struct{ gateway, node, silent, atNode int }{{256, 64, 2000, 100}}
	if soaking() {
		cases = append(cases, []struct{ gateway, node, silent, atNode int }{{256, 256, 2000, 400}, {1024, 1024, 4000, 1500}}...)
	}
	for _, c := range cases {
		t.Run(fmt.Sprintf("%d and %d", c.gateway, c.node), func(t *testing.T) {
			f := startHostileFleet(t, hostileFlags{files: map[string]int{"gw": c.gateway, "p1": c.node, "d1": c.node, "d2": c.node}})
			b := newBystanders(f.cluster, 7)
			var served int
			b.during("silent connections", func() {
				defer silence(t, f.port, c.silent)()
				for _, port := range []int{f.prefillHTTP, f.decodeHTTP[0], f.decodeHTTP[1]} {
					defer silence(t, port, c.atNode)()
				}
				for range 30 {
					if err := freshClient(f.url("/v1/models")); err != nil {
						t.Errorf("new client %d: %v", served, err)
					}
					served++
				}
			})
			for _, d := range []*daemon{f.gateway, f.prefill, f.decode[0], f.decode[1]} {
				if !d.alive() {
					t.Errorf("%s ended:\n%s", d.cmd.Args, d.log.String())
				}
			}
			for _, port := range []int{f.prefillHTTP, f.decodeHTTP[0], f.decodeHTTP[1]} {
				url := fmt.Sprintf("http://127.0.0.1:%d/livez", port)
				f.wait(startBound, "a node serves scrapers again", func() bool { return freshClient(url) == nil })
			}
			most := f.filesMetric("tandem:queue_limit", `queue="connections"`)
			if n := f.filesMetric("tandem:gateway_evicted_connections_total", ""); n < float64(c.silent)-most {
				t.Errorf("%g connections were closed for others, of %d with %g places", n, c.silent, most)
			}
			if !strings.Contains(f.gateway.log.String(), "--max-connections is lowered") {
				t.Errorf("no warning about --max-connections:\n%s", f.gateway.log.String())
			}
			t.Logf("%d streams, the longest %v; %g places", b.served.Load(), time.Duration(b.longest.Load()), most)
		})
	}
}

// A process that cannot have the descriptors for its links ends at start and names what
// is missing.
func TestBinaryHostileFilesTooFew(t *testing.T) {
	path := binary(t)
	for _, c := range []struct {
		limit, want int
		args        []string
	}{
		{64, 96, []string{"gateway", "--insecure", "--port", "0"}},
		{40, 80, []string{"gateway", "--upstream", "http://127.0.0.1:1", "--port", "0"}},
	} {
		args := append([]string{"-c", `ulimit -n ` + strconv.Itoa(c.limit) + ` && exec "$0" "$@"`, path}, c.args...)
		if c.args[1] == "--insecure" {
			dir := t.TempDir()
			if _, errOut, err := tandem(t, nil, "ca", dir, "gateway/gw"); err != nil {
				t.Fatalf("%v\n%s", err, errOut)
			}
			args = append(args, "--node-name", "gw", "--tls-dir", dir+"/gw")
		}
		out, err := exec.CommandContext(t.Context(), "sh", args...).CombinedOutput()
		if says := fmt.Sprintf("limit of %d file descriptors is too low: at least %d", c.limit, c.want); err == nil || !strings.Contains(string(out), says) {
			t.Errorf("%v: %v, want %q:\n%s", c.args, err, says, out)
		}
	}
}

// silence opens connections to a port that send nothing, or half of a head, and returns
// what closes them. The port may close some.
func silence(t *testing.T, port, n int) (end func()) {
	t.Helper()
	var conns []net.Conn
	for i := range n {
		c, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), 10*time.Second)
		if err != nil {
			t.Errorf("silent connection %d: %v", i, err)
			break
		}
		conns = append(conns, c)
		if i%2 == 1 {
			_, _ = io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\n") // it may be closed already
		}
	}
	return func() {
		for _, c := range conns {
			c.Close()
		}
	}
}

// freshClient gets url over a connection of its own.
func freshClient(url string) error {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := c.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, bufio.NewReader(resp.Body)); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return nil
}

// filesMetric reads one metric of the gateway, over a connection of its own.
func (f *hostileFleet) filesMetric(name, label string) float64 {
	f.t.Helper()
	resp, err := f.client().Get(f.url("/metrics"))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	v, found := pick(string(text), name, label)
	if !found {
		f.t.Fatalf("the gateway exposes no %s{%s}", name, label)
	}
	return v
}
