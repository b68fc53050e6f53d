package gateway

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/render"
)

// A recording has lengths, times and hashes that are equal where prompts begin equally, and nothing
// of their text, their keys or their names. It ends when nobody reads it.
func TestRecord(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"d": {Token: ramble}})
	ask := func(session string) (r recordings) {
		t.Helper()
		a := b.do("GET", "/admin/record?session="+session, "")
		if a.StatusCode != 200 {
			t.Fatalf("status %d: %s", a.StatusCode, a.body)
		}
		if err := json.Unmarshal([]byte(a.body), &r); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(a.body, "secret") || strings.Contains(a.body, "tiny") {
			t.Error(a.body)
		}
		return r
	}
	post := func(prompt string) { b.post("/v1/completions", `{"prompt":"`+prompt+`","max_tokens":5}`) }
	post("before")
	if r := ask("s1"); len(r.Requests) != 0 || r.BlockTokens != 64 {
		t.Fatalf("%+v", r)
	}
	common := strings.Repeat("secret", 30) // 180 tokens, two blocks of 64
	post(common + "a")
	post(common + "b" + strings.Repeat("c", 100))
	post("other")
	r := ask("s1")
	if len(r.Requests) != 3 {
		t.Fatalf("%+v", r)
	}
	first, second, third := r.Requests[0], r.Requests[1], r.Requests[2]
	if first.Prompt != 181 || first.Output != 5 || len(first.Blocks) != 2 || second.Prompt != 281 || len(second.Blocks) != 4 || third.Prompt != 5 || len(third.Blocks) != 0 {
		t.Errorf("%+v", r.Requests)
	}
	if first.Blocks[0] != second.Blocks[0] || first.Blocks[1] != second.Blocks[1] || first.Blocks[0] == first.Blocks[1] || first.At%10 != 0 {
		t.Errorf("%+v", r.Requests)
	}
	if first.First <= 0 || first.Last < first.First || first.Last > time.Minute.Microseconds() || first.First%100 != 0 {
		t.Errorf("tokens after %d to %d µs", first.First, first.Last)
	}
	m := b.g.native.Models.Load()
	tokens := make([]int32, len(common))
	for i := range common {
		tokens[i] = int32(common[i])
	}
	for _, h := range kvcache.AppendHashes(nil, m.Root(""), tokens, m.BlockTokens) {
		if uint64(h) == first.Blocks[0] || uint64(h) == first.Blocks[1] {
			t.Error("the hashes are not keyed")
		}
	}
	if a := b.do("GET", "/admin/record?session=s2", ""); a.StatusCode != 409 {
		t.Errorf("a second recording: status %d", a.StatusCode)
	}
	if a := b.do("GET", "/admin/record", ""); a.StatusCode != 400 {
		t.Errorf("without a session: status %d", a.StatusCode)
	}
	if len(ask("s1").Requests) != 0 {
		t.Error("requests are there twice")
	}
	b.g.recorder.mu.Lock()
	b.g.recorder.asked = time.Now().Add(-time.Minute)
	b.g.recorder.mu.Unlock()
	post(common)
	if b.g.recorder.active.Load() {
		t.Error("the recording goes on though nobody reads it")
	}
	ask("s2")
	post(common)
	if again := ask("s2").Requests; len(again) != 1 || again[0].Blocks[0] == first.Blocks[0] {
		t.Errorf("a second recording has the first one's key: %+v", again)
	}
}

// A recording that is read too seldom drops requests and counts them.
func TestRecordBound(t *testing.T) {
	r := &recorder{}
	r.take("s", time.Now())
	r.requests = make([]recorded, maxRecorded)
	a := &native.Ended{Start: time.Now(), Prompt: &render.Prompt{Tokens: make([]int32, 200), Hashes: make([]kvcache.Hash, 12)}, BlockTokens: 16, Output: 3}
	r.ended(a)
	if out, ok := r.take("s", time.Now()); !ok || len(out.Requests) != maxRecorded || out.Dropped != 1 {
		t.Errorf("%d requests, %d dropped", len(out.Requests), out.Dropped)
	}
	r.blocks = maxRecordedID
	r.ended(a)
	if out, _ := r.take("s", time.Now()); len(out.Requests) != 0 || out.Dropped != 2 {
		t.Errorf("%d requests, %d dropped", len(out.Requests), out.Dropped)
	}
}

// A refused request is load, too: the recording has it with its end, and what its client left.
func TestRecordRefused(t *testing.T) {
	b, gate := crowd(t, Options{Limits: Limits{MaxQueuedRequests: 1}})
	take := func() []recorded {
		r, ok := b.g.recorder.take("s", time.Now())
		if !ok {
			t.Fatal("no recording")
		}
		return r.Requests
	}
	if r, _ := b.g.recorder.take("s", time.Now()); !r.Began {
		t.Error("the first call does not begin the recording")
	}
	runs := b.ask("a", 0)
	b.ask("b", 0)
	waits := b.ask("c", 0)
	b.post("/v1/completions", `{"prompt":"`+strings.Repeat("d", 70)+`","n":2}`).wantError(t, 429, "1 requests wait")
	if r := take(); len(r) != 2 || r[0].End != native.EndRefused || r[0].Output != 0 || r[0].Prompt != 70 || len(r[0].Blocks) != 1 {
		t.Errorf("%+v", r)
	}
	var r []recorded
	waits.Close()
	b.until(func() bool { r = append(r, take()...); return len(r) == 1 })
	if r[0].End != native.EndRefused {
		t.Errorf("left the queue: %+v", r)
	}
	runs.Close()
	b.until(func() bool { r = append(r, take()...); return len(r) == 2 })
	if r[1].End != native.EndIncomplete {
		t.Errorf("left its answer: %+v", r)
	}
	close(gate)
	b.until(func() bool { r = append(r, take()...); return len(r) == 3 })
	if r[2].End != native.EndAnswered || r[2].Output != 2 {
		t.Errorf("answered: %+v", r)
	}
}

// Blocks that do not divide those of a recording give no hashes, and one recording's requests do
// not get into the next.
func TestRecordBlocks(t *testing.T) {
	for block, want := range map[int]int{16: 3, 32: 6, 64: 12, 48: 0, 128: 0} {
		r := &recorder{}
		r.take("s", time.Now())
		r.ended(&native.Ended{Start: time.Now(), Prompt: &render.Prompt{Tokens: make([]int32, 200), Hashes: make([]kvcache.Hash, 12)}, BlockTokens: block})
		if out, _ := r.take("s", time.Now()); len(out.Requests) != 1 || out.Began || len(out.Requests[0].Blocks) != want {
			t.Errorf("blocks of %d tokens: %+v", block, out)
		}
	}
	r := &recorder{}
	early := &native.Ended{Start: time.Now(), Prompt: &render.Prompt{Tokens: make([]int32, 200)}, BlockTokens: 16}
	r.take("s", time.Now().Add(-time.Hour))
	r.take("again", time.Now())
	r.ended(early)
	if out, _ := r.take("again", time.Now()); len(out.Requests) != 0 {
		t.Errorf("%+v", out)
	}
}
