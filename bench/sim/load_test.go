package sim

import (
	"bytes"
	"compress/gzip"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseLoad(t *testing.T) {
	got, err := ParseLoad("rps=10,in=lognormal(8,0.9), out=100-200,prefix=0.3,n=50,burstiness=0.5,prefixes=4")
	want := Load{Rate: 10, Burstiness: 0.5, N: 50, In: Lengths{"lognormal", 8, 0.9}, Out: Lengths{"uniform", 100, 200}, Prefix: 0.3, Prefixes: 4}
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{
		"", "rps=10", "rps=10,in=5", "rps=0,in=5,out=5", "rps=NaN,in=5,out=5", "rps=1,in=0,out=5", "rps=1,in=1.5,out=5", "rps=1,in=5-4,out=5", "rps=1,in=-5,out=5",
		"rps=1,in=lognormal(8),out=5", "rps=1,in=lognormal(800,1),out=5", "rps=1,in=exp(0),out=5", "rps=1,in=gamma(1,2),out=5", "rps=1,rps=2,in=5,out=5", "rps=1,in=5,out=5,x=3",
		"rps=1,in=5,out=5,n=0", "rps=1e-6,in=5,out=5,n=1000000", "rps=1,in=5,out=5,prefix=2", "rps=1,in=5,out=99999999", "rps,in=5,out=5",
	} {
		if l, err := ParseLoad(bad); !errors.Is(err, ErrLoad) || !strings.Contains(err.Error(), "write such as") && !strings.Contains(err.Error(), "draw fewer") {
			t.Errorf("%q: %+v, %v", bad, l, err)
		}
	}
}

// Drawn requests have the rate, the lengths and the shared prefixes of their description, and equal
// seeds give equal requests.
func TestLoadTrace(t *testing.T) {
	l, err := ParseLoad("rps=20,n=4000,in=lognormal(6,0.5),out=exp(50),prefix=0.5,prefixes=3")
	if err != nil {
		t.Fatal(err)
	}
	trace, err := l.Trace(7)
	if err != nil || len(trace) != 4000 {
		t.Fatal(len(trace), err)
	}
	in, out, firsts := 0.0, 0.0, map[any]int{}
	for i := range trace {
		q := &trace[i]
		if i > 0 && q.At < trace[i-1].At || q.Tokens < 1 || q.Output < 1 || len(q.Blocks) < q.Tokens/q.IDTokens() {
			t.Fatalf("request %d: %+v", i, q)
		}
		in, out = in+float64(q.Tokens), out+float64(q.Output)
		if q.Tokens >= 2*loadBlock {
			firsts[q.Blocks[0]]++
		}
	}
	if mean := in / 4000; math.Abs(mean/math.Exp(6.125)-1) > 0.05 {
		t.Errorf("prompts have %g tokens", mean)
	}
	if mean := out / 4000; math.Abs(mean/50-1) > 0.08 {
		t.Errorf("answers have %g tokens", mean)
	}
	if span := trace[3999].At; math.Abs(span.Seconds()/200-1) > 0.02 || len(firsts) != 3 {
		t.Errorf("the load takes %v and has %d prefixes", span, len(firsts))
	}
	if again, err := l.Trace(7); err != nil || !reflect.DeepEqual(again, trace) {
		t.Error("equal seeds gave other requests")
	}
}

func TestReadTraceFormats(t *testing.T) {
	trace, err := ReadTrace(strings.NewReader("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"))
	if err != nil || len(trace) != 2 || trace[0].At != 0 || trace[1].At != 52*time.Millisecond || trace[1].Tokens != 3180 || trace[1].Output != 8 || trace[0].Blocks[0] == trace[1].Blocks[0] {
		t.Errorf("%+v, %v", trace, err)
	}
	text := `{"timestamp":1000,"input_length":600,"output_length":5}` + "\n\n" + `{"timestamp":1500,"input_length":600,"output_length":5,"hash_ids":[1,2]}`
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write([]byte(text)); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"plain": []byte(text), "packed": z.Bytes()} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		trace, err := LoadTrace(path)
		if err != nil || len(trace) != 2 || trace[1].At != 500*time.Millisecond || len(trace[0].Blocks) != 2 {
			t.Errorf("%s: %+v, %v", name, trace, err)
		}
	}
	if _, err := LoadTrace("nothing"); !errors.Is(err, ErrTrace) {
		t.Error(err)
	}
}

// A wrong trace is refused with one sentence that has the line and the remedy.
func TestWrongTraces(t *testing.T) {
	good := `{"timestamp":5,"input_length":5,"output_length":1}` + "\n"
	for text, want := range map[string]string{
		"":  "there is no request",
		"x": "line 1: invalid character",
		good + `{"timestamp":4,"input_length":5,"output_length":1}`:                 "line 2: the request arrives before the one above it: sort the lines",
		good + `{"timestamp":6,"input_length":0,"output_length":1}`:                 "line 2: 0 prompt and 1 answer tokens",
		good + `{"timestamp":6,"input_length":5,"output_length":-1}`:                "line 2: 5 prompt and -1 answer tokens",
		good + `{"timestamp":6,"input_length":99999999,"output_length":1}`:          "at most",
		good + `{"timestamp":1e300,"input_length":5,"output_length":1}`:             "write milliseconds",
		"TIMESTAMP,ContextTokens,GeneratedTokens\n":                                 "there is no request",
		"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1":            "2 fields",
		"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1":                    "write such as 2023",
		"TIMESTAMP,ContextTokens,GeneratedTokens\n2555-01-01 00:00:00,1,1\n":        "write such as 2023", // nanoseconds overflow
		"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97996,-1,1\n": "-1 prompt",
	} {
		if _, err := ReadTrace(strings.NewReader(text)); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
