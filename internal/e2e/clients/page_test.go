package clients

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

const pageHead = `# Clients

` + "`make clients`" + ` writes this page. It runs official clients against Tandem, at the versions of
[the lock files](../internal/e2e/clients), and compares what each client returns with what the model
wrote. Types of the client validate each event, where it has such types.

- **Loops of tools** run once with each of the %d formats that
  [Tandem reads](serving.md): a scripted node writes two calls as a model of that format does, the
  client sends the results, and the node answers with them. ` + "`tool_choice`" + ` is ` + "`auto`" + `.
- **Structured output** runs with the built-in model and with one of random weights.
- *Refused* means that Tandem answers 400 or 404 and names what it lacks. The notes have the answer.

## What to set

HOST and KEY are those of the gateway. A gateway without keys accepts any key.

| client | version | for | setting |
|---|---|---|---|
`

const pageTable = `
## %s

| client | surface | what ran | mode | result |
|---|---|---|---|---|
`

// verdict returns the result in words.
func (c *check) verdict() string {
	var parts []string
	if c.OK > 0 || c.Of == 0 {
		parts = append(parts, fmt.Sprintf("%d of %d", c.OK, c.Of))
	}
	if n := len(c.Refused); n > 0 {
		parts = append(parts, fmt.Sprintf("%d refused", n))
	}
	if n := len(c.Failed); n > 0 {
		parts = append(parts, fmt.Sprintf("%d failed", n))
	}
	return strings.Join(parts, ", ")
}

// page returns docs/clients.md.
func page(all []report, formats int) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, pageHead, formats)
	for _, r := range all {
		fmt.Fprintf(&b, "| %s | %s | all | %s |\n", r.Client, r.Version, code(r.Config))
		for _, surface := range slices.Sorted(maps.Keys(r.Configs)) {
			fmt.Fprintf(&b, "| | | %s | %s |\n", surface, code(r.Configs[surface]))
		}
	}
	var notes []string
	for _, t := range []struct{ kind, title string }{{"formats", "Loops of tools"}, {"models", "Structured output"}} {
		fmt.Fprintf(&b, pageTable, t.title)
		for _, r := range all {
			for _, c := range r.Checks {
				if c.Kind != t.kind {
					continue
				}
				result := c.verdict()
				for _, why := range c.reasons() {
					at := slices.Index(notes, why)
					if at < 0 {
						at = len(notes)
						notes = append(notes, why)
					}
					result += fmt.Sprintf(" (%d)", at+1)
				}
				fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.Client, code(c.Surface), c.Ran, c.Mode, result)
			}
		}
	}
	if len(notes) > 0 {
		b.WriteString("\n## Notes\n\n| note | answer |\n|---|---|\n")
		for i, n := range notes {
			fmt.Fprintf(&b, "| %d | %s |\n", i+1, code(n))
		}
	}
	return b.Bytes()
}

// errorCode is what the openai package for Python writes before a server's message.
var errorCode = regexp.MustCompile(`^Error code: \d+ - `)

// reasons returns the distinct answers of the servers that refused, and the last lines of failures.
func (c *check) reasons() (all []string) {
	add := func(why string) {
		if !slices.Contains(all, why) {
			all = append(all, why)
		}
	}
	for _, o := range c.Refused {
		add(errorCode.ReplaceAllString(strings.Join(strings.Fields(o.Why), " "), ""))
	}
	for _, o := range c.Failed {
		lines := strings.Split(strings.TrimSpace(o.Why), "\n")
		add("failed: " + o.Name + ": " + lines[len(lines)-1])
	}
	return all
}

// code returns a text as code in the cell of a table.
func code(text string) string {
	return "`" + strings.NewReplacer("|", `\|`, "`", "'", "\n", " ").Replace(text) + "`"
}
