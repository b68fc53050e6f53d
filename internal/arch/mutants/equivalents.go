package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// knownEquivalents reads the reasons why mutants are equivalent, so that no test can kill them, by
// their keys. The file has pairs of lines, a mutant's key and below it, indented, the reason. Empty
// lines and # comments are skipped. An entry that matches no mutant is an error, so that the list
// cannot outlive its code.
func knownEquivalents(path string, all []*sampled) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	known, key := map[string]string{}, "" // key: the mutant whose reason comes next
	for n, line := range strings.Split(string(text), "\n") {
		text := strings.TrimSpace(line)
		if text == "" || text[0] == '#' {
			continue
		}
		switch indented := line[0] == '\t' || line[0] == ' '; {
		case indented && key == "":
			return nil, fmt.Errorf("%s:%d: a reason without a mutant above it", path, n+1)
		case indented:
			known[key], key = text, ""
		case key != "":
			return nil, fmt.Errorf("%s:%d: the mutant above has no reason: want one in an indented line", path, n+1)
		case known[text] != "":
			return nil, fmt.Errorf("%s:%d: listed twice: %s", path, n+1, text)
		default:
			key = text
		}
	}
	if key != "" {
		return nil, fmt.Errorf("%s: the last mutant has no reason", path)
	}
	unmatched := maps.Clone(known)
	for _, s := range all {
		for _, m := range s.mutants {
			delete(unmatched, m.key())
		}
	}
	for _, key := range slices.Sorted(maps.Keys(unmatched)) {
		return nil, fmt.Errorf("%s: matches no mutant: %s: remove it, or write the line as it is now", path, key)
	}
	return known, nil
}
