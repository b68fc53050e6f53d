//go:build !race

// One goroutine, and 7 times as long under the race detector.

package tokenizer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

var update = flag.Bool("update", false, "ask the reference again: TANDEM_PYTHON is a Python with tokenizers 0.23.3")

const (
	nRealTexts = 6000 // texts per tokenizer
	nRealIDs   = 1500 // lists of random ids per tokenizer
)

// realCases are the texts and ids that one tokenizer is asked about.
func realCases(name string, tok *Tokenizer) (texts []string, ids [][]int32) {
	h := fnv.New64a()
	h.Write([]byte(name))
	seed := h.Sum64()
	var added []string
	for _, id := range slices.Sorted(func(yield func(int32) bool) {
		for id := int32(tok.VocabSize()) - 9; id < int32(tok.VocabSize()); id++ {
			if !yield(id) {
				return
			}
		}
	}) {
		added = append(added, string(tok.TokenBytes(id)))
	}
	texts = append(slices.Clone(sentences), scraps...)
	for i := len(texts); i < nRealTexts; i++ {
		texts = append(texts, realText(rand.New(rand.NewPCG(seed, uint64(i))), added))
	}
	for i := range nRealIDs {
		rng := rand.New(rand.NewPCG(seed+1, uint64(i)))
		list := make([]int32, 1+rng.IntN(12))
		for k := range list {
			n := tok.VocabSize() + 2 // two ids too many
			if rng.IntN(2) == 0 {
				n = 300 // bytes, mostly
			}
			list[k] = int32(rng.IntN(n))
		}
		ids = append(ids, list)
	}
	return texts, ids
}

func digest(ids []int32, texts ...string) uint32 {
	h := fnv.New32a()
	for _, id := range ids {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(id)))
	}
	for _, s := range texts {
		h.Write([]byte{0xff})
		h.Write([]byte(s))
	}
	return h.Sum32()
}

// TestRealVocabularies holds every answer against the reference's, of which
// testdata/real/NAME has the digests: of ids and their two decodings for each
// text, and of the decoding of each list of ids.
func TestRealVocabularies(t *testing.T) {
	for _, r := range realTokenizers {
		t.Run(r.name, func(t *testing.T) {
			tok := realTokenizer(t, r.name)
			texts, ids := realCases(r.name, tok)
			path := filepath.Join("testdata", "real", r.name)
			if *update {
				askReference(t, realFile(t, r.name), texts, ids, path)
			}
			file, err := os.ReadFile(path)
			if err != nil || len(file) != 4*(len(texts)+len(ids)) {
				t.Fatalf("%s has %d bytes, want 4 for each of %d texts and %d lists of ids (%v)", path, len(file), len(texts), len(ids), err)
			}
			wrong := 0
			for i := range len(texts) + len(ids) {
				var got uint32
				var what string
				if i < len(texts) {
					list := tok.Encode(texts[i], true)
					got = digest(list, tok.Decode(list, false), tok.Decode(list, true))
					what = fmt.Sprintf("Encode(%q) = %v, decoded %q and %q", texts[i], list, tok.Decode(list, false), tok.Decode(list, true))
				} else {
					text := tok.Decode(ids[i-len(texts)], false)
					got = digest(nil, text)
					what = fmt.Sprintf("Decode(%v) = %q", ids[i-len(texts)], text)
				}
				if got != binary.LittleEndian.Uint32(file[4*i:]) {
					if wrong++; wrong <= 10 {
						t.Errorf("case %d: %s: not what the reference says", i, what)
					}
				}
			}
			if wrong > 10 {
				t.Errorf("%d cases in all differ", wrong)
			}
		})
	}
}

// askReference writes the reference's digests, and says where it differs.
func askReference(t *testing.T, tokenizer []byte, texts []string, ids [][]int32, path string) {
	cmd := exec.Command(os.Getenv("TANDEM_PYTHON"), "testdata/real.py")
	cmd.Stdin = bytes.NewReader(marshal(t, object{"tokenizer": json.RawMessage(tokenizer), "texts": texts, "ids": ids}))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("testdata/real.py: %v", err)
	}
	var answer struct {
		Texts [][3]json.RawMessage
		IDs   []string
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		t.Fatal(err)
	}
	tok, err := Load(tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	var file []byte
	shown := 0
	for i, a := range answer.Texts {
		var want []int32
		var decoded, skipped string
		for k, into := range []any{&want, &decoded, &skipped} {
			if err := json.Unmarshal(a[k], into); err != nil {
				t.Fatal(err)
			}
		}
		file = binary.LittleEndian.AppendUint32(file, digest(want, decoded, skipped))
		got := tok.Encode(texts[i], true)
		if same := slices.Equal(got, want) && tok.Decode(got, false) == decoded && tok.Decode(got, true) == skipped; !same && shown < 10 {
			shown++
			t.Logf("%q\n got %v %q %q\nwant %v %q %q", texts[i], got, tok.Decode(got, false), tok.Decode(got, true), want, decoded, skipped)
		}
	}
	for i, want := range answer.IDs {
		file = binary.LittleEndian.AppendUint32(file, digest(nil, want))
		if got := tok.Decode(ids[i], false); got != want && shown < 20 {
			shown++
			t.Logf("Decode(%v)\n got %q\nwant %q", ids[i], got, want)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, file, 0o644); err != nil {
		t.Fatal(err)
	}
}
