package gateway

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// With KeepModels a model whose nodes are all gone keeps its name. Its requests wait for a node, and
// get 503 after the time of the queue. Other models are served meanwhile, and the gateway stays
// ready.
func TestKeepModels(t *testing.T) {
	o := Options{KeepModels: true}
	o.Limits.QueueTimeout = 300 * time.Millisecond
	b := two(t, o)
	second := decodeMember("d2")
	second.Fingerprint, second.Model = 8, "other"
	const request = `{"model":"other","prompt":"x","max_tokens":1}`
	b.g.SetMembers([]nodes.Member{decodeMember("d1")})
	time.Sleep(nodes.DefaultProbeInterval) // refresh has run
	if r := b.do("GET", "/v1/models", ""); !strings.Contains(r.body, `"id":"other"`) {
		t.Fatal(r.body)
	}
	began := time.Now()
	b.post("/v1/completions", request).wantError(t, 503, `no decode node is available for model "other"`)
	if waited := time.Since(began); waited < o.Limits.QueueTimeout {
		t.Errorf("refused after %v", waited)
	}
	if r := b.post("/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
	b.g.SetMembers(nil)
	b.until(func() bool { return b.g.native.Usable() == 0 })
	if err := b.g.Ready(); err != nil {
		t.Error(err)
	}

	l := *b.g.Limits()
	l.QueueTimeout = soon
	b.g.SetLimits(l)
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", request)
	b.until(func() bool { return b.g.native.Models.All()[1].Queue().Waiting() == 1 })
	b.g.SetMembers([]nodes.Member{second})
	if r := c.receive(); r.StatusCode != 200 || r.parse(t).Model != "other" {
		t.Errorf("after its node came: %d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
}

// A model of the same name replaces one that is kept without nodes.
func TestKeptModelIsReplaced(t *testing.T) {
	next := proto.CloneOf(bundle())
	next.Fingerprint = 8
	second := decodeMember("d2")
	second.Fingerprint = 8
	b := newBed(t, Options{KeepModels: true, Members: []nodes.Member{decodeMember("d1")}}, map[string]nodestest.Options{"d1": {}})
	b.node("d2", nodestest.Options{Bundle: next})
	b.g.SetMembers([]nodes.Member{decodeMember("d1"), second})
	b.until(func() bool { return strings.Contains(b.log.String(), "newer model of the same name waits") })
	b.g.SetMembers([]nodes.Member{second})
	b.until(func() bool { m := b.g.native.Models.All(); return len(m) == 1 && m[0].Fingerprint == 8 })
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":1}`); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
	b.g.SetMembers(nil)
	time.Sleep(nodes.DefaultProbeInterval)
	b.g.SetMembers([]nodes.Member{decodeMember("d1")}) // and back
	b.until(func() bool { m := b.g.native.Models.All(); return len(m) == 1 && m[0].Fingerprint == 7 })
}
