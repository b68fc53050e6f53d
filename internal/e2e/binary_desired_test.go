//go:build linux

package e2e

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"
)

// A gateway with a planner leads where it is alone, and asks for as many nodes as there are: nothing
// has shown that fewer are enough.
func TestBinaryDesired(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.port = freePorts(t, 4)
	c.startUp("--prefill", "1", "--decode", "2", "--planner-profile", "h100:llama-8b")
	c.seen = map[string]bool{}
	g := []int{gatewayNode}
	c.hold("desired nodes", []want{{g, "tandem:desired_nodes", `"prefill"`, 1}, {g, "tandem:desired_nodes", `"decode"`, 2}})
	resp, err := http.Get(c.url("/admin/desired"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Model           string
		Leads           bool
		Prefill, Decode struct{ Desired, Ready, Starting int }
	}
	if err := json.Unmarshal(text, &d); err != nil || !d.Leads || d.Model == "" || d.Prefill.Desired != 1 || d.Decode.Desired != 2 || d.Decode.Ready != 2 || d.Decode.Starting != 0 {
		t.Errorf("%v: %s", err, text)
	}
	holdSeen(t, c.seen)

	// A second gateway with a planner publishes its demand, and this one counts it.
	b := newCluster(t)
	b.start(binary(t), "gateway", "--port", strconv.Itoa(b.port), "--advertise", "127.0.0.1", "--gossip-port", "0", "--nats-port", "0", "--node-name", "second",
		"--tls-dir", c.argument("gateway", "--tls-dir"), "--join", "127.0.0.1:"+c.argument("gateway", "--gossip-port"), "--planner-profile", "h100:llama-8b")
	c.wait(startBound, "the demand of both gateways is known", func() bool {
		var first, second struct {
			Known   int `json:"gateways_known"`
			Unknown int `json:"gateways_unknown"`
		}
		err := errors.Join(c.getJSON("/admin/desired", &first), b.getJSON("/admin/desired", &second))
		return err == nil && first == second && first.Known == 2 && first.Unknown == 0
	})
	b.signal(15)
	b.waitGone(time.Minute)
	c.signal(15)
	c.waitGone(time.Minute)
}
