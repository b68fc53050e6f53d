package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/internal/console"
)

// A recording is written in order of arrival, with small ids in place of hashes, and the simulator
// reads it. What follows the last block of a prompt is shared with no other.
func TestRecordingIsATrace(t *testing.T) {
	r := &recording{blockTokens: 64, ids: map[uint64]uint64{}, requests: []console.Recorded{
		{At: 5020, Prompt: 200, Output: 7, Blocks: []uint64{0, 1, 2}}, {At: 5000, Prompt: 150, Output: 9, Blocks: []uint64{0, 1}}, {At: 5010, Prompt: 10, Output: 1},
	}}
	r.ids[1<<63], r.ids[1<<62], r.ids[7] = 0, 1, 2
	var b bytes.Buffer
	if err := r.write(&b); err != nil {
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
	if len(trace) != 3 || trace[0].At != 0 || trace[0].Tokens != 150 || trace[2].At.Milliseconds() != 20 || trace[2].Output != 7 || trace[1].IDTokens() != 64 {
		t.Fatalf("%+v", trace)
	}
	if a, c := trace[0].Blocks, trace[2].Blocks; len(a) != 3 || len(c) != 4 || a[0] != c[0] || a[1] != c[1] || a[2] == c[2] || len(trace[1].Blocks) != 1 || trace[1].Blocks[0] == a[2] {
		t.Errorf("%v %v %v", a, c, trace[1].Blocks)
	}
}
