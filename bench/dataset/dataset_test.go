package dataset

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// vocabulary is one of words: token i is the word w<i>, and a text has as many
// tokens as words.
func vocabulary() Vocabulary {
	v := Vocabulary{}
	for i := range int32(500) {
		v.IDs = append(v.IDs, i)
	}
	v.Encode = func(s string) []int32 { return make([]int32, len(strings.Fields(s))) }
	v.Decode = func(ids []int32) string { return strings.Repeat("w ", len(ids)) }
	return v
}

func options(name string) Options {
	return Options{
		Name: name, N: 50, Seed: 3, Vocabulary: vocabulary(), CustomOutput: 256,
		Random: RandomOptions{Input: 100, Output: 20, Prefix: 10, InputRatio: 0.3, OutputRatio: 0.5},
		Prefix: PrefixOptions{Prefix: 20, Suffix: 5, Prefixes: 7, Output: 9},
		Trace:  TraceOptions{ChunkTokens: 4, Seconds: 0.001, Timestamp: "timestamp", Input: "input_length", Output: "output_length", HashIDs: "hash_ids"},
	}
}

func file(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func make1(t *testing.T, o Options) []Request {
	t.Helper()
	rs, err := Make(o)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func flat(r Request) (ids []int32) {
	for _, p := range r.Pieces {
		ids = append(ids, p...)
	}
	return ids
}

func TestRandom(t *testing.T) {
	for seed := range uint64(5) {
		o := options("random")
		o.Seed = seed
		rs := make1(t, o)
		lengths := map[int]bool{}
		for i, r := range rs {
			n := len(flat(r))
			lengths[n] = true
			if n != r.PromptTokens || n < 80 || n > 140 || r.OutputTokens < 10 || r.OutputTokens > 30 {
				t.Fatalf("seed %d, request %d: %d tokens (told %d), output %d", seed, i, n, r.PromptTokens, r.OutputTokens)
			}
			if !reflect.DeepEqual(flat(r)[:10], flat(rs[0])[:10]) {
				t.Fatalf("seed %d, request %d: another prefix", seed, i)
			}
		}
		if len(rs) != 50 || len(lengths) < 10 || !reflect.DeepEqual(rs, make1(t, o)) {
			t.Errorf("seed %d: %d requests of %d lengths, or not the same again", seed, len(rs), len(lengths))
		}
		o.Seed += 100
		if reflect.DeepEqual(rs, make1(t, o)) {
			t.Errorf("seed %d: another seed gives the same", seed)
		}
	}
	o := options("random")
	o.AsText = true
	for _, r := range make1(t, o) {
		if r.Pieces != nil || len(strings.Fields(r.Text)) != r.PromptTokens {
			t.Fatalf("as text: %d words, told %d tokens", len(strings.Fields(r.Text)), r.PromptTokens)
		}
	}
}

func TestPrefixRepetition(t *testing.T) {
	rs := make1(t, options("prefix_repetition"))
	count := map[string]int{}
	for _, r := range rs {
		if ids := flat(r); len(ids) != 25 {
			t.Fatalf("%d tokens", len(ids))
		} else {
			count[string(rune(ids[0]))+string(rune(ids[1]))+string(rune(ids[19]))]++
		}
	}
	if len(rs) != 49 || len(count) != 7 {
		t.Fatalf("%d requests, prefixes %v", len(rs), count)
	}
	for p, n := range count {
		if n != 7 {
			t.Errorf("prefix %q: %d times", p, n)
		}
	}
}

func TestFiles(t *testing.T) {
	o := options("custom")
	o.Path = file(t, `{"prompt": "a b c", "output_tokens": 5}`+"\n\n"+`{"prompt": "d", "output_tokens": 6}`+"\n")
	o.NoShuffle = true
	rs := make1(t, o)
	if len(rs) != 50 || rs[0].Text != "a b c" || rs[0].PromptTokens != 3 || rs[0].OutputTokens != 256 {
		t.Errorf("custom: %d, %+v", len(rs), rs[0])
	}
	o.CustomOutput, o.NoRepeat = -1, true
	if rs = make1(t, o); len(rs) != 2 || rs[1].OutputTokens != 6 {
		t.Errorf("custom: %+v", rs)
	}
	o = options("sharegpt")
	o.NoRepeat = true
	long := strings.Repeat("x ", 1100)
	o.Path = file(t, `[{"id":"1","conversations":[{"from":"human","value":"a b c d e"},{"from":"gpt","value":"1 2 3 4 5 6"}]},
		{"conversations":[{"value":"`+long+`"},{"value":"1 2 3 4 5"}]},{"conversations":[{"value":"a b c d"},{"value":"1"}]},{"conversations":[{"value":"a b c d"}]}]`)
	if rs = make1(t, o); len(rs) != 1 || rs[0].PromptTokens != 5 || rs[0].OutputTokens != 6 {
		t.Errorf("sharegpt: %+v", rs)
	}
}

const mooncake = `{"timestamp": 1000, "input_length": 10, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 9, "output_length": 4, "hash_ids": [0, 1, 7]}
{"timestamp": 4000, "input_length": 3, "output_length": 0}
`

const azure = `TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,48,10
2023-11-16 18:17:04.0319600,31,8
`

func TestTraces(t *testing.T) {
	o := options("timed_trace")
	o.Path = file(t, mooncake)
	rs := make1(t, o)
	if len(rs) != 3 || rs[1].At != 500*time.Millisecond || rs[2].At != 3*time.Second || rs[2].OutputTokens != 1 {
		t.Fatalf("%+v", rs)
	}
	a, b := flat(rs[0]), flat(rs[1])
	if len(a) != 10 || len(b) != 9 || !reflect.DeepEqual(a[:8], b[:8]) || reflect.DeepEqual(a[8:9], b[8:9]) {
		t.Errorf("equal hash ids are not equal tokens, or others are: %v %v", a, b)
	}
	o.Path = file(t, azure)
	if rs = make1(t, o); len(rs) != 2 || rs[1].At != 52*time.Millisecond || rs[0].PromptTokens != 48 || rs[1].OutputTokens != 8 {
		t.Errorf("%+v", rs)
	}
	o.N = 1
	if rs = make1(t, o); len(rs) != 1 {
		t.Errorf("%d requests of 1", len(rs))
	}
}

func TestRefusals(t *testing.T) {
	change := func(name string, f func(*Options)) Options { o := options(name); f(&o); return o }
	for i, o := range []Options{
		options("hf"), options("custom"),
		change("random", func(o *Options) { o.N = 0 }),
		change("random", func(o *Options) { o.Random.InputRatio = 1 }),
		change("random", func(o *Options) { o.Random.Output = 0 }),
		change("random", func(o *Options) { o.Vocabulary.IDs = nil }),
		change("prefix_repetition", func(o *Options) { o.Prefix.Prefixes = 51 }),
		change("custom", func(o *Options) { o.Path = file(t, "{}") }),
		change("custom", func(o *Options) { o.Path = file(t, `{"prompt":"a"}`); o.CustomOutput = -1 }),
		change("custom", func(o *Options) { o.Path = file(t, "") }),
		change("sharegpt", func(o *Options) { o.Path = file(t, "{"); o.ShareGPTOutput = 1 }),
		change("sharegpt", func(o *Options) { o.Vocabulary = Vocabulary{} }),
		change("timed_trace", func(o *Options) { o.Path = file(t, `{"timestamp":1,"input_length":-1,"output_length":1}`) }),
		change("timed_trace", func(o *Options) { o.Path = file(t, `{"timestamp":1e300,"input_length":1,"output_length":1}`) }),
		change("timed_trace", func(o *Options) { o.Path = file(t, mooncake+`{"timestamp":1,"input_length":1,"output_length":1}`) }),
		change("timed_trace", func(o *Options) { o.Path = file(t, azure+"x,1,1\n") }),
	} {
		if rs, err := Make(o); !errors.Is(err, ErrOption) {
			t.Errorf("case %d (%s): %d requests, %v", i, o.Name, len(rs), err)
		}
	}
}

// FuzzFiles: whatever a file holds, reading it ends in requests with tokens or in
// a refusal.
func FuzzFiles(f *testing.F) {
	for _, s := range []string{mooncake, azure, `{"prompt":"a","output_tokens":2}`, `[{"conversations":[{"value":"a b c d"},{"value":"a b c d"}]}]`, "[", "{}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		path := file(t, text)
		for _, name := range []string{"custom", "sharegpt", "timed_trace"} {
			o := options(name)
			o.Path, o.N = path, 3
			rs, err := Make(o)
			if err != nil && !errors.Is(err, ErrOption) {
				t.Fatalf("%s: %v", name, err)
			}
			for _, r := range rs {
				if r.OutputTokens < 1 || r.At < 0 || len(r.Pieces) == 0 && r.Text == "" {
					t.Fatalf("%s: %+v", name, r)
				}
			}
		}
	})
}
