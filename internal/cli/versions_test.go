package cli

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/rpc"
)

var update = flag.Bool("update", false, "write the tables of docs/upgrades.md")

// nextRelease returns the release that main.go precedes.
func nextRelease(t *testing.T) string {
	t.Helper()
	source, err := os.ReadFile("../../main.go")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`version = "([0-9.]+)-dev"`).FindSubmatch(source)
	if m == nil {
		t.Fatal("main.go names no release")
	}
	return string(m[1])
}

// docs/upgrades.md has the tables of this build.
func TestUpgradesPage(t *testing.T) {
	const path, begin, end = "../../docs/upgrades.md", "<!-- versions -->\n", "<!-- end -->\n"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(page), begin)
	was, foot, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s lacks %q or %q", path, begin, end)
	}
	want := "\n" + versionTables(present(nextRelease(t))) + "\n"
	if *update {
		if err := os.WriteFile(path, []byte(head+begin+want+end+foot), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if was != want {
		t.Errorf("%s has\n%s\nwant\n%s\n`go test -run TestUpgradesPage ./internal/cli -update` writes it", path, was, want)
	}
}

// A release may serve with the one before it, and the table of releases is in order.
func TestReleasesMix(t *testing.T) {
	now := present(nextRelease(t))
	all := append(released[:len(released):len(released)], now)
	for i, v := range all {
		if v.RPCMin == 0 || v.RPCMin > v.RPC || v.KV == 0 || v.CPU == 0 || v.CUDA == 0 {
			t.Errorf("release %s: %+v", v.Release, v)
		}
		if i == 0 {
			continue
		}
		before := all[i-1]
		if m := mix(v, before); !m.Fleet {
			t.Errorf("release %s does not serve with %s: %+v", v.Release, before.Release, m)
		}
		if v.RPC < before.RPC || v.KV < before.KV || v.CPU < before.CPU || v.CUDA < before.CUDA || v.Grammar < before.Grammar {
			t.Errorf("release %s has older versions than %s: %+v, %+v", v.Release, before.Release, v, before)
		}
	}
}

func TestMix(t *testing.T) {
	base := Versions{Release: "a", RPCMin: 2, RPC: 3, KV: 1, CPU: 2, CUDA: 4, Grammar: 1}
	for name, c := range map[string]struct {
		change func(*Versions)
		want   Mixture
	}{
		"equal":          {func(*Versions) {}, Mixture{"b", true, true, true, true}},
		"newer protocol": {func(v *Versions) { v.RPCMin, v.RPC = 3, 4 }, Mixture{"b", true, true, true, true}},
		"two newer":      {func(v *Versions) { v.RPCMin, v.RPC = 4, 5 }, Mixture{Release: "b"}},
		"two older":      {func(v *Versions) { v.RPCMin, v.RPC = 1, 1 }, Mixture{Release: "b"}},
		"KV":             {func(v *Versions) { v.KV = 2 }, Mixture{"b", true, false, false, true}},
		"CPU":            {func(v *Versions) { v.CPU = 3 }, Mixture{"b", true, false, true, true}},
		"CUDA":           {func(v *Versions) { v.CUDA = 3 }, Mixture{"b", true, true, false, true}},
		"grammar":        {func(v *Versions) { v.Grammar = 2 }, Mixture{"b", true, true, true, false}},
	} {
		other := base
		other.Release = "b"
		c.change(&other)
		if got := mix(base, other); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
	none := base
	none.Grammar = 0
	if mix(none, none).Grammar {
		t.Error("releases without grammars move constrained streams")
	}
}

func TestVersionJSON(t *testing.T) {
	var out bytes.Buffer
	v := &Invocation{Set: config.New("version", "", "", io.Discard), Arguments: []string{"--json"}, Version: "9.8.7-dev+x1", Out: &out, ErrOut: io.Discard}
	if err := showVersion(v); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Version  string
		Protocol uint32
		Versions Versions
		Mixes    []Mixture
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Version != "9.8.7-dev+x1" || got.Protocol != rpc.Protocol || got.Versions != present("9.8.7-dev+x1") || len(got.Mixes) != len(released) || !got.Mixes[0].Fleet {
		t.Errorf("%s", out.String())
	}
}
