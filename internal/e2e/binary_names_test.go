//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Nodes are named after their certificates. Two with one certificate do not conflict, a node that
// comes back with other ports is used at once, and a drain never takes a node that it did not mean.
func TestBinaryNames(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.port = freePorts(t, 16)
	certs := t.TempDir()
	n := func(i int) string { return strconv.Itoa(c.port + i) }
	if _, errOut, err := tandem(t, nil, "ca", certs, "gateway/gw1", "node/d1"); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	gateway := daemonOf(t, "gateway", "--tls-dir", filepath.Join(certs, "gw1"), "--port", n(0), "--gossip-port", n(1), "--nats-port", n(2))
	at := func(first int) []string {
		return []string{"decode", "--tls-dir", filepath.Join(certs, "d1"), "--join", "127.0.0.1:" + n(1), "--gossip-port", n(first), "--rpc-port", n(first + 1),
			"--kv-port", n(first + 2), "--http-port", n(first + 3), "--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--shutdown-timeout", "2"}
	}
	shown := func(want ...string) {
		t.Helper()
		c.wait(startBound, fmt.Sprintf("%q are shown", want), func() bool {
			var view struct{ Nodes []seen }
			if err := c.getJSON("/debug/nodes", &view); err != nil {
				return false
			}
			var names []string
			for _, node := range view.Nodes {
				if !node.serves() && !node.Draining {
					return false
				}
				names = append(names, node.ID)
			}
			slices.Sort(names)
			return slices.Equal(names, want)
		})
	}
	drain := func(method, name string, status int, says ...string) {
		t.Helper()
		req, err := http.NewRequest(method, c.url("/admin/drain/"+name), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		got := resp.StatusCode
		for _, s := range append(says, fmt.Sprintf("%d", status)) {
			if !strings.Contains(fmt.Sprintf("%d %s", got, body), s) {
				t.Errorf("%s %s: %d %s, want %d with %q", method, name, got, body, status, says)
			}
		}
	}
	first := daemonOf(t, at(3)...)
	shown("d1")
	drain("POST", "d1", 200, `"node":"d1"`, `"draining":true`) // the line of README, as it is there
	drain("DELETE", "d1", 200, `"draining":false`)
	if s := first.log.String(); !strings.Contains(s, "node=d1") {
		t.Errorf("the log does not name d1:\n%s", s)
	}
	for _, want := range []string{"node drained by an operator node=d1", "drain of a node cancelled by an operator node=d1"} {
		for end := time.Now().Add(10 * time.Second); !strings.Contains(gateway.log.String(), want) && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond) // the answer may precede the line
		}
		if s := gateway.log.String(); strings.Count(s, want) != 1 {
			t.Errorf("want %q once in the log:\n%s", want, s)
		}
	}
	if s := gateway.log.String(); strings.Contains(s, `error="gateway: `) {
		t.Errorf("the log has the name of a package:\n%s", s)
	}
	alone := daemonOf(t, "decode", "--tls-dir", filepath.Join(certs, "d1"), "--gossip-port", "0", "--rpc-port", "0", "--kv-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", "32MiB")
	c.wait(startBound, "a node without --join names it", func() bool {
		return strings.Contains(alone.log.String(), "--join is not set: the node waits until another member joins it")
	})

	file := filepath.Join(c.state, "killed.yaml") // which names the process for the test's end
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(binary(t), append(at(7), "--config", file)...)
	shown("d1", "d1-2")
	addresses := []string{net.JoinHostPort("127.0.0.1", n(4)), net.JoinHostPort("127.0.0.1", n(8))}
	drain("POST", "d1", 409, "2 nodes are called d1", "d1 at "+addresses[0], "d1-2 at "+addresses[1])
	drain("POST", "127.0.0.1", 409, "2 nodes are called 127.0.0.1")
	drain("POST", "d1-2", 200, `"node":"d1-2"`)
	drain("DELETE", addresses[1], 200, `"node":"d1-2"`)
	drain("POST", addresses[0], 200, `"node":"d1"`)
	drain("DELETE", addresses[0], 200, `"node":"d1"`)
	drain("POST", "d1-3", 404, "no node is called d1-3")
	c.wait(startBound, "the shared name is warned of", func() bool { return strings.Contains(gateway.log.String(), "two nodes have the same name") })
	if got := strings.Count(gateway.log.String(), "two nodes have the same name"); got != 1 {
		t.Errorf("warned %d times", got)
	}
	if body := c.body("/debug/targets"); !strings.Contains(body, `"node":"d1-2"`) || !strings.Contains(body, `"node":"gw1"`) {
		t.Error(body)
	}

	// A crash, and a start with other ports, which no member knows yet.
	c.signal(syscall.SIGKILL)
	<-c.ended
	began := time.Now()
	daemonOf(t, at(11)...)
	c.wait(startBound, "the new process is used", func() bool {
		type addressed struct {
			seen
			RPC string
		}
		var view struct{ Nodes []addressed }
		return c.getJSON("/debug/nodes", &view) == nil && slices.ContainsFunc(view.Nodes, func(node addressed) bool {
			return node.RPC == net.JoinHostPort("127.0.0.1", n(12)) && node.serves()
		})
	})
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it was used after %v", took)
	}
	shown("d1", "d1-2")
	// At the ports that a node had, a new process replaces it.
	if err := first.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-first.ended
	daemonOf(t, append(at(3), "--node-name", "renamed")...)
	shown("d1", "renamed")
	// A replica of the gateway has its certificate, and names the nodes alike.
	replica := daemonOf(t, "gateway", "--tls-dir", filepath.Join(certs, "gw1"), "--port", n(15), "--gossip-port", "0", "--nats-port", "0", "--join", "127.0.0.1:"+n(1))
	c.port += 15
	shown("d1", "renamed")
	for _, log := range []string{gateway.log.String(), replica.log.String()} {
		if strings.Contains(log, "uplicate") || strings.Contains(log, "onflict") {
			t.Error(log)
		}
	}
}
