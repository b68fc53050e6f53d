package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"sync"
)

// kills is a file of mutants that need not run again: a killed mutant is killed as long as
// tests are only added, and a mutant that does not compile never does. Its lines are of runs
// with any seed; several runs may append to it at a time.
type kills struct {
	mu    sync.Mutex
	file  *os.File // nil: nothing is kept
	fates map[string]fate
}

// kill is one line of the file.
type kill struct {
	Mutant string
	Fate   fate
}

// openKills reads a file, or creates it; with path "" nothing is kept.
func openKills(path string) (*kills, error) {
	k := &kills{fates: map[string]fate{}}
	if path == "" {
		return k, nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	for in := json.NewDecoder(f); ; {
		var line kill
		switch err := in.Decode(&line); {
		case errors.Is(err, io.EOF):
			k.file = f
			return k, nil
		case err != nil:
			f.Close()
			return nil, err
		}
		k.fates[line.Mutant] = line.Fate
	}
}

// fate returns the result of a mutant in an earlier run; false: it must run.
func (k *kills) fate(m *mutant) (fate, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f, ok := k.fates[m.key()]
	return f, ok
}

// add records a mutant that has run, unless it survived.
func (k *kills) add(m *mutant, f fate) error {
	if k.file == nil || f == survived {
		return nil
	}
	line, err := json.Marshal(kill{m.key(), f})
	if err != nil {
		return err
	}
	_, err = k.file.Write(append(line, '\n'))
	return err
}

func (k *kills) close() {
	if k.file != nil {
		k.file.Close()
	}
}
