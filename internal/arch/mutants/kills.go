package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"
)

// kills is a file of mutants that need not run again: a killed mutant is killed as long as
// tests are only added, and a mutant that does not compile never does. Its lines are of runs
// with any seed; several runs may append to it at a time.
type kills struct {
	file  *os.File
	fates map[string]fate // of earlier runs, by key
}

// kill is one line of the file.
type kill struct {
	Mutant string
	Fate   fate
}

// openKills reads a file, or creates it; with path "" nothing is kept.
func openKills(path string) (*kills, error) {
	f, err := os.OpenFile(cmp.Or(path, os.DevNull), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	k := &kills{f, map[string]fate{}}
	for in := json.NewDecoder(f); in.More(); {
		var line kill
		if err := in.Decode(&line); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		k.fates[line.Mutant] = line.Fate
	}
	return k, nil
}

// fate returns the result of a mutant in an earlier run; false: it must run.
func (k *kills) fate(m *mutant) (fate, bool) {
	f, ok := k.fates[m.key()]
	return f, ok
}

// add records a mutant that has run, unless it survived.
func (k *kills) add(m *mutant, f fate) error {
	if f == survived {
		return nil
	}
	return json.NewEncoder(k.file).Encode(kill{m.key(), f})
}

func (k *kills) close() { k.file.Close() }
