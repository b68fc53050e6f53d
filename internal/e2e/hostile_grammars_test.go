//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/grammar/grammartest"
)

// Hostile grammars, of answers and of tools, are refused by name or followed next to streams, within
// a bound on the memory of the gateway and of the nodes.
func TestBinaryHostileGrammars(t *testing.T) {
	f := startHostileFleet(t, hostileFlags{gateway: []string{"--tool-call-parser", "hermes"}})
	streams := newBystanders(f.cluster, 16)
	type attack struct{ name, path, body string }
	var all []attack
	schemas := grammartest.Schemas()
	for i := range 100 {
		schemas[fmt.Sprint("random ", i)] = grammartest.RandomSchema(rand.New(rand.NewPCG(uint64(i), 3)), 3*i+1+i%2)
	}
	for _, name := range slices.Sorted(maps.Keys(schemas)) {
		text := schemas[name]
		all = append(all, attack{name, "/v1/completions", `{"prompt":"x","max_tokens":12,"structured_outputs":{"json":` + text + `}}`})
		const chat = `{"messages":[{"role":"user","content":"x"}],"max_tokens":12,"tool_choice":"required","tools":[`
		all = append(all, attack{name + " of a tool", "/v1/chat/completions", chat + `{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":{"p":` + text + `},"required":["p"]}}}]}`})
	}
	for i := range 50 {
		pattern, err := json.Marshal(grammartest.RandomPattern(rand.New(rand.NewPCG(uint64(i), 3))))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, attack{fmt.Sprint("pattern ", i), "/v1/completions", `{"prompt":"x","max_tokens":12,"guided_regex":` + string(pattern) + `}`})
	}
	followed, refused := 0, 0
	streams.during("grammars", func() {
		for _, a := range sample(all, 30, 16) {
			status, answer := f.send(a.path, []byte(a.body))
			switch {
			case status == 200:
				followed++
			case status == 400 && strings.Contains(answer, `"message":"`):
				refused++
			default:
				t.Errorf("%s: %d %.300s", a.name, status, answer)
			}
		}
	})
	for name, d := range map[string]*daemon{"gateway": f.gateway, "d1": f.decode[0], "d2": f.decode[1]} {
		if peak := peakRSS(t, d); peak > 1<<30 {
			t.Errorf("%s had %d MiB", name, peak>>20)
		}
		if !d.alive() {
			t.Errorf("%s has ended", name)
		}
	}
	t.Logf("note: %d grammars followed, %d refused", followed, refused)
	if followed == 0 || refused == 0 {
		t.Errorf("%d followed, %d refused", followed, refused)
	}
}
