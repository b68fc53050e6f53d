package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// goldensDir lets a larger set, made by testdata/goldens.py --out, be checked.
var goldensDir = flag.String("goldens", "testdata", "folder of golden files")

// golden is one file of testdata/goldens.py, which documents it.
type golden struct {
	Tokenizer json.RawMessage `json:"tokenizer"`
	Encode    []encodeCase    `json:"encode"`
	Decode    []decodeCase    `json:"decode"`
}

type encodeCase struct {
	text, decoded, skipped string
	ids, plain             []int32
}

func (c *encodeCase) UnmarshalJSON(data []byte) error {
	var plain *[]int32
	var decoded, skipped *string
	if err := json.Unmarshal(data, &[]any{&c.text, &c.ids, &plain, &decoded, &skipped}); err != nil {
		return err
	}
	c.plain, c.decoded = c.ids, c.text
	if plain != nil {
		c.plain = *plain
	}
	if decoded != nil {
		c.decoded = *decoded
	}
	c.skipped = c.decoded
	if skipped != nil {
		c.skipped = *skipped
	}
	return nil
}

type decodeCase struct {
	ids     []int32
	decoded string
}

func (c *decodeCase) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&c.ids, &c.decoded})
}

func loadGolden(t testing.TB, path string) (*Tokenizer, *golden) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zr, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.NewDecoder(zr).Decode(&g); err != nil {
		t.Fatal(err)
	}
	tok, err := Load(g.Tokenizer)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return tok, &g
}

func goldenFiles(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(*goldensDir, "*.json.gz"))
	if err != nil || len(files) < 5 {
		t.Fatalf("found %d golden files in %q, want at least 5 (%v)", len(files), *goldensDir, err)
	}
	return files
}

func eachGolden(t *testing.T, f func(t *testing.T, tok *Tokenizer, g *golden)) {
	for _, path := range goldenFiles(t) {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".json.gz"), func(t *testing.T) {
			tok, g := loadGolden(t, path)
			if len(g.Encode) < 300 || len(g.Decode) < 100 {
				t.Fatalf("only %d encode and %d decode cases", len(g.Encode), len(g.Decode))
			}
			f(t, tok, g)
		})
	}
}

func TestEncodeEqualsReference(t *testing.T) {
	eachGolden(t, func(t *testing.T, tok *Tokenizer, g *golden) {
		for round := range 2 { // the second from the cache
			for i, c := range g.Encode {
				if got := tok.Encode(c.text, true); !slices.Equal(got, c.ids) {
					t.Errorf("round %d, case %d: Encode(%q, true)\n got %v\nwant %v", round, i, c.text, got, c.ids)
				}
				if got := tok.Encode(c.text, false); !slices.Equal(got, c.plain) {
					t.Errorf("round %d, case %d: Encode(%q, false)\n got %v\nwant %v", round, i, c.text, got, c.plain)
				}
			}
		}
	})
}

func TestDecodeEqualsReference(t *testing.T) {
	eachGolden(t, func(t *testing.T, tok *Tokenizer, g *golden) {
		for i, c := range g.Encode {
			if got := tok.Decode(c.ids, false); got != c.decoded {
				t.Errorf("case %d: Decode(%v, false)\n got %q\nwant %q", i, c.ids, got, c.decoded)
			}
			if got := tok.Decode(c.ids, true); got != c.skipped {
				t.Errorf("case %d: Decode(%v, true)\n got %q\nwant %q", i, c.ids, got, c.skipped)
			}
		}
		for i, c := range g.Decode {
			if got := tok.Decode(c.ids, false); got != c.decoded {
				t.Errorf("random case %d: Decode(%v)\n got %q\nwant %q", i, c.ids, got, c.decoded)
			}
			want := c.decoded
			if tok.tearsBytes() { // whose Streams give characters before a run of bytes has ended
				want = naiveStream(tok, c.ids, false)
			}
			if got := streamAll(tok, c.ids, false); got != want {
				t.Errorf("random case %d: Stream of %v\n got %q\nwant %q", i, c.ids, got, want)
			}
		}
	})
}

func streamAll(tok *Tokenizer, ids []int32, skipSpecial bool) string {
	s := tok.NewStream(skipSpecial)
	var out strings.Builder
	for _, id := range ids {
		out.WriteString(s.Next(id))
	}
	out.WriteString(s.Flush())
	return out.String()
}
