package parse

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of formats in docs/serving.md")

// kinds say in words what the arguments of a call are.
var kinds = map[argsKind]string{
	argsJSON: "a JSON object behind the name", argsObject: "in a JSON object with the name", argsArray: "in a JSON array of calls", argsXML: "an element for each parameter",
	argsKV: "elements for names and values", argsPythonic: "a call as Python writes it", argsGemma: "unquoted names, quoted strings", argsHarmony: "a JSON object as a message",
}

// The tables of formats in docs/serving.md are made from the tables in the code.
func TestFormatsPage(t *testing.T) {
	const file, begin, end = "../../../docs/serving.md", "<!-- formats -->\n", "<!-- /formats -->\n"
	code := func(texts ...string) string {
		var out []string
		for _, s := range texts {
			if s != "" {
				out = append(out, "`"+strings.ReplaceAll(s, "|", `\|`)+"`")
			}
		}
		return strings.Join(out, ", ")
	}
	also := func(aliases map[string]string, name string) string {
		var out []string
		for _, alias := range slices.Sorted(maps.Keys(aliases)) {
			if aliases[alias] == name {
				out = append(out, alias)
			}
		}
		return code(out...)
	}
	var b strings.Builder
	b.WriteString("\n| `--tool-call-parser` | also | calls begin with | arguments |\n|---|---|---|---|\n")
	for i := range rows {
		r := &rows[i]
		marker := ""
		if len(r.call) > 0 {
			marker = r.call[0]
		}
		if marker = cmp.Or(r.section, marker); marker == "" && r.bare != 0 {
			marker = string(r.bare)
		}
		if r.args == argsHarmony {
			marker = "<|channel|>commentary to=functions."
		}
		if marker == "" || kinds[r.args] == "" {
			t.Errorf("%s: no words for it", r.name)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", r.name, also(toolAliases, r.name), code(marker), kinds[r.args])
	}
	b.WriteString("\n| `--reasoning-parser` | also | reasoning is between |\n|---|---|---|\n")
	for i := range thoughts {
		h := &thoughts[i]
		between := code(strings.Join(h.open, " or ")) + " and " + code(strings.Join(h.close, " or "))
		switch {
		case h.echo != "":
			between = "nothing: it stays in the content, behind " + code(h.echo)
		case len(h.open) == 0:
			between = code("<|channel|>analysis<|message|>") + " and " + code("<|end|>")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", h.name, also(thinkingAliases, h.name), between)
	}
	b.WriteByte('\n')
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(page), begin)
	was, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatal("docs/serving.md has no place for the tables")
	}
	if was == b.String() {
		return
	}
	if !*update {
		t.Fatal("docs/serving.md differs from the tables of formats: run go test ./gateway/render/parse -run TestFormatsPage -update")
	}
	if err := os.WriteFile(file, []byte(before+begin+b.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
