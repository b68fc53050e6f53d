package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// equivalent is a mutant that no test can kill, because it behaves as the
// original does.
type equivalent struct{ key, reason string }

// readEquivalents reads pairs of lines: a mutant's key, and below it, indented,
// the reason why it is equivalent. Empty lines and # comments are skipped.
func readEquivalents(path string) ([]equivalent, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []equivalent
	seen := map[string]bool{}
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		text := strings.TrimSpace(line)
		indented := line != strings.TrimLeft(line, " \t")
		last := len(all) - 1
		switch {
		case text == "" || text[0] == '#':
		case indented && last >= 0 && all[last].reason == "":
			all[last].reason = text
		case indented:
			return nil, fmt.Errorf("%s:%d: a reason without a mutant above it", path, n)
		case last >= 0 && all[last].reason == "":
			return nil, fmt.Errorf("%s:%d: the mutant above has no reason: want one in an indented line", path, n)
		case seen[text]:
			return nil, fmt.Errorf("%s:%d: listed twice: %s", path, n, text)
		default:
			seen[text] = true
			all = append(all, equivalent{key: text})
		}
	}
	if len(all) > 0 && all[len(all)-1].reason == "" {
		return nil, fmt.Errorf("%s: the last mutant has no reason", path)
	}
	return all, lines.Err()
}
