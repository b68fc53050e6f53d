package gateway

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// An adapter that nodes have told of is a model of its own: listed with its parent,
// chosen by name, computed where it is loaded, and hashed apart.
func TestAdapters(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": {}, "d2": {}, "d3": {}})
	m := b.g.native.Models.Load()
	b.until(func() bool { // a node may notice its connection after the gateway does
		b.nodes["d1"].Send(rpc.FrameStats, &nodepb.Stats{Steps: 1, Adapters: []*nodepb.Adapter{{Name: "french", Digest: 11, Rank: 8}, {Name: "sql", Digest: 5}}})
		b.nodes["d2"].Send(rpc.FrameStats, &nodepb.Stats{Steps: 1, Adapters: []*nodepb.Adapter{{Name: "sql", Digest: 6}}})
		b.nodes["d3"].Send(rpc.FrameStats, &nodepb.Stats{Steps: 1, Adapters: []*nodepb.Adapter{{Name: "sql", Digest: 6}}})
		all := b.g.native.Nodes.Now().Adapters(m.Fingerprint)
		return len(all) == 2 && all[1] == nodes.Adapter{Name: "sql", Digest: 6} // what most have
	})
	list := string(b.do("GET", "/v1/models", "").body)
	for _, want := range []string{`"id":"` + m.Name + `"`, `"id":"french"`, `"id":"sql"`, `"parent":"` + m.Name + `"`, `"parent":null`} {
		if !strings.Contains(list, want) {
			t.Errorf("no %s in %s", want, list)
		}
	}
	if one := b.do("GET", "/v1/models/sql", ""); one.StatusCode != 200 || !strings.Contains(string(one.body), `"parent"`) {
		t.Errorf("status %d: %s", one.StatusCode, one.body)
	}
	for range 6 {
		r := b.post("/v1/completions", `{"model":"french","prompt":[1,2,3],"max_tokens":2}`)
		if r.StatusCode != 200 || !strings.Contains(string(r.body), `"model":"french"`) {
			t.Fatalf("status %d: %s", r.StatusCode, r.body)
		}
		b.post("/v1/completions", `{"model":"sql","prompt":[1,2,3],"max_tokens":2}`)
		b.post("/v1/completions", `{"prompt":[1,2,3],"max_tokens":2}`)
	}
	roots := map[uint64]string{}
	for addr, n := range b.nodes {
		for _, g := range n.Requests() {
			a := g.GetAdapter()
			if a.GetName() == "french" && addr != "d1" || a.GetName() == "sql" && (addr == "d1" || a.Digest != 6) {
				t.Errorf("%s got a request for %v", addr, a)
			}
			if was, ok := roots[g.PrefixRoot]; ok && was != a.GetName() {
				t.Errorf("%q and %q begin their hashes alike", was, a.GetName())
			}
			roots[g.PrefixRoot] = a.GetName()
		}
	}
	if len(roots) != 3 {
		t.Errorf("hashes begin in %d ways, want 3", len(roots))
	}
	if r := b.post("/v1/completions", `{"model":"german","prompt":[1],"max_tokens":1}`); r.StatusCode != 404 {
		t.Errorf("an adapter that nobody has: status %d: %s", r.StatusCode, r.body)
	}
	b.nodes["d1"].Send(rpc.FrameStats, &nodepb.Stats{Steps: 2})
	b.until(func() bool { return len(b.g.native.Nodes.Now().Adapters(m.Fingerprint)) == 1 })
	if r := b.post("/v1/completions", `{"model":"french","prompt":[1],"max_tokens":1}`); r.StatusCode != 404 {
		t.Errorf("an adapter that was unloaded: status %d: %s", r.StatusCode, r.body)
	}
}

// Loading reaches every node; what a node says to it comes back.
func TestLoadingAdapters(t *testing.T) {
	said := make(chan proto.Message, 10)
	answer := func(code nodepb.Code, msg string) func(proto.Message) *nodepb.AdapterDone {
		return func(m proto.Message) *nodepb.AdapterDone {
			said <- m
			if l, ok := m.(*nodepb.LoadAdapter); ok && l.Name == "fine" {
				return &nodepb.AdapterDone{Adapter: &nodepb.Adapter{Name: l.Name, Digest: 3}}
			}
			return &nodepb.AdapterDone{Code: code, Message: msg}
		}
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{
		"d1": {Adapter: answer(nodepb.Code_CODE_INVALID, "no such folder")}, "d2": {Adapter: answer(nodepb.Code_CODE_NOT_FOUND, "not loaded")},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := b.g.native.Nodes.LoadAdapter(ctx, "fine", "/a", true); err != nil {
		t.Error(err)
	}
	for range 2 {
		if l, ok := (<-said).(*nodepb.LoadAdapter); !ok || l.Path != "/a" || !l.Replace {
			t.Errorf("told %v", l)
		}
	}
	var code *nodes.CodeError
	if err := b.g.native.Nodes.LoadAdapter(ctx, "bad", "/b", false); !errors.As(err, &code) || code.Message != "no such folder" || !strings.Contains(err.Error(), "d1") {
		t.Errorf("%v", err)
	}
	if err := b.g.native.Nodes.UnloadAdapter(ctx, "bad"); !errors.As(err, &code) || code.Code != nodepb.Code_CODE_INVALID {
		t.Errorf("%v", err)
	}
}

// The routes answer with vLLM's statuses and words, and are for operators.
func TestAdapterRoutes(t *testing.T) {
	answer := func(m proto.Message) *nodepb.AdapterDone {
		switch m := m.(type) {
		case *nodepb.LoadAdapter:
			if m.Path == "/full" {
				return &nodepb.AdapterDone{Code: nodepb.Code_CODE_OVERLOADED, Message: "4 adapters"}
			}
			if m.Path != "/a" || m.Name == "old" && !m.Replace {
				return &nodepb.AdapterDone{Code: nodepb.Code_CODE_INVALID, Message: "no folder " + m.Path}
			}
			return &nodepb.AdapterDone{Adapter: &nodepb.Adapter{Name: m.Name, Digest: 3}}
		case *nodepb.UnloadAdapter:
			if m.Name != "old" {
				return &nodepb.AdapterDone{Code: nodepb.Code_CODE_NOT_FOUND, Message: m.Name + " is not loaded"}
			}
		}
		return &nodepb.AdapterDone{}
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": {Adapter: answer}, "d2": {Adapter: answer}})
	m := b.g.native.Models.Load()
	b.nodes["d1"].Send(rpc.FrameStats, &nodepb.Stats{Steps: 1, Adapters: []*nodepb.Adapter{{Name: "old", Digest: 1}}})
	b.until(func() bool { return len(b.g.native.Nodes.Now().Adapters(m.Fingerprint)) == 1 })
	for _, c := range []struct {
		path, body, header string
		want               int
		says               string
	}{
		{openai.LoadAdapterPath, `{"lora_name":"new","lora_path":"/a"}`, "X-A: b", 200, "Success: LoRA adapter 'new' added successfully."},
		{openai.LoadAdapterPath, `{"lora_name":"old","lora_path":"/a","load_inplace":true}`, "X-A: b", 200, "'old' added"},
		{openai.LoadAdapterPath, `{"lora_name":"old","lora_path":"/a"}`, "X-A: b", 400, "load_inplace"},
		{openai.LoadAdapterPath, `{"lora_name":"` + m.Name + `","lora_path":"/a","load_inplace":true}`, "X-A: b", 400, "own name"},
		{openai.LoadAdapterPath, `{"lora_name":"new"}`, "X-A: b", 400, "lora_path is missing"},
		{openai.LoadAdapterPath, `{"lora_path":"/a"}`, "X-A: b", 400, "InvalidUserInput"},
		{openai.LoadAdapterPath, `{"lora_name":"` + strings.Repeat("a", 257) + `","lora_path":"/a"}`, "X-A: b", 400, "256"},
		{openai.LoadAdapterPath, `{"lora_name":"a","lora_path":"/` + strings.Repeat("a", 4096) + `"}`, "X-A: b", 400, "4097 bytes"},
		{openai.LoadAdapterPath, `{"lora_name":7}`, "X-A: b", 400, "lora_name"},
		{openai.LoadAdapterPath, `{"lora_name":"new","lora_path":"/b"}`, "X-A: b", 400, "no folder /b"},
		{openai.LoadAdapterPath, `{"lora_name":"new","lora_path":"/full"}`, "X-A: b", 503, "4 adapters"},
		{openai.LoadAdapterPath, `{"lora_name":"new","lora_path":"/a"}`, "Content-Type: text/plain", 415, "JSON"},
		{openai.LoadAdapterPath, `{"lora_name":"new","lora_path":"/a"}`, "Origin: http://example.com", 403, "web pages"},
		{openai.UnloadAdapterPath, `{"lora_name":"old"}`, "X-A: b", 200, "Success: LoRA adapter 'old' removed successfully."},
		{openai.UnloadAdapterPath, `{"lora_name":"new"}`, "X-A: b", 404, "new is not loaded"},
		{openai.UnloadAdapterPath, `{}`, "X-A: b", 400, "lora_name is missing"},
		{openai.UnloadAdapterPath, ``, "X-A: b", 400, "JSON"},
	} {
		if r := b.do("POST", c.path, c.body, c.header); r.StatusCode != c.want || !strings.Contains(r.body, c.says) || strings.Contains(r.body, "CODE_") || strings.Contains(r.body, `\n`) {
			t.Errorf("%s %s: %d %s", c.path, c.body, r.StatusCode, r.body)
		}
	}
	g := idle(t, Options{APIKeys: []string{"k"}, APIKeyFile: keyFile(t, "client\n")})
	for key, want := range map[string]int{"": 401, "Bearer client": 403, "Bearer k": 503} { // the last: no node
		if got, body := asked(g, clients, there, "POST", openai.LoadAdapterPath, `{"lora_name":"a","lora_path":"/a"}`, "Authorization", key); got != want {
			t.Errorf("%q: %d %s", key, got, body)
		}
	}
}
