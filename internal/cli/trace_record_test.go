package cli

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/internal/console"
)

// A recording is written in order of arrival, with small ids in place of hashes, and the simulator
// reads it. What follows the last block of a prompt is shared with no other. A prompt of whole blocks
// has no further id: programs that read Mooncake's format refuse one without tokens.
func TestRecordingIsATrace(t *testing.T) {
	r := &Recording{blockTokens: 64, ids: map[uint64]uint64{}, Requests: []console.Recorded{
		{At: 5020, Prompt: 200, Output: 7, Blocks: []uint64{0, 1, 2}}, {At: 5000, Prompt: 150, Output: 9, Blocks: []uint64{0, 1}}, {At: 5010, Prompt: 10, Output: 1},
		{At: 5030, Prompt: 128, Output: 1, Blocks: []uint64{0, 1}},
	}}
	r.ids[1<<63], r.ids[1<<62], r.ids[7] = 0, 1, 2
	var b bytes.Buffer
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	trace, err := sim.LoadTrace(file)
	if err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	if len(trace) != 4 || trace[0].At != 0 || trace[0].Tokens != 150 || trace[2].At.Milliseconds() != 20 || trace[2].Output != 7 || trace[1].IDTokens() != 64 {
		t.Fatalf("%+v", trace)
	}
	if a, c := trace[0].Blocks, trace[2].Blocks; len(a) != 3 || len(c) != 4 || a[0] != c[0] || a[1] != c[1] || a[2] == c[2] || len(trace[1].Blocks) != 1 || trace[1].Blocks[0] == a[2] {
		t.Errorf("%v %v %v", a, c, trace[1].Blocks)
	}
	if d := trace[3].Blocks; !slices.Equal(d, trace[0].Blocks[:2]) {
		t.Errorf("a prompt of two blocks has %v", d)
	}
}

// Requests that were refused or broken off have the mean length of the answers, and say how they
// ended.
func TestRecordingOfRefused(t *testing.T) {
	r := &Recording{blockTokens: 64, Requests: []console.Recorded{
		{At: 0, Prompt: 9, Output: 10, End: "answered"}, {At: 1, Prompt: 9, Output: 31, End: ""}, {At: 2, Prompt: 9, End: "refused"},
		{At: 3, Prompt: 9, Output: 3, End: "incomplete"}, {At: 4, Prompt: 9, Output: 90, End: "incomplete"},
	}}
	var b bytes.Buffer
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	trace, err := sim.ReadTrace(strings.NewReader(b.String()))
	if err != nil || len(trace) != 5 {
		t.Fatalf("%v\n%s", err, b.String())
	}
	for i, want := range []int{10, 31, 21, 21, 90} {
		if trace[i].Output != want {
			t.Errorf("request %d has %d answer tokens, want %d", i, trace[i].Output, want)
		}
	}
	if n := strings.Count(b.String(), `"end":"refused"`); n != 1 || strings.Contains(b.String(), "answered") {
		t.Error(b.String())
	}
}

// A gateway that does not answer for a moment ends no recording. One that begins it anew does, and
// what was read before remains.
func TestRecordingOutage(t *testing.T) {
	t.Parallel()
	calls := 0
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch calls++; calls {
		case 2:
			http.Error(w, "starting", http.StatusBadGateway)
		default:
			fmt.Fprintf(w, `{"began":%v,"block_tokens":64,"requests":[{"at_ms":1,"prompt_tokens":5,"output_tokens":2}]}`, calls != 3)
		}
	}))
	defer gateway.Close()
	r := &Recording{most: 100, every: time.Millisecond, ids: map[uint64]uint64{}}
	err := r.read(t.Context(), &console.Client{URL: gateway.URL}, time.Minute)
	if err == nil || !strings.Contains(err.Error(), "begun the recording again") || len(r.Requests) != 2 || calls != 4 {
		t.Errorf("%v, %d requests, %d calls", err, len(r.Requests), calls)
	}
}
