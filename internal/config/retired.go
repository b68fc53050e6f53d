package config

import (
	"fmt"
	"slices"
)

// RetiredFlag is a flag that a release removed. That release accepts it with a warning, the next
// one refuses it.
type RetiredFlag struct {
	Name     string
	Commands []string // that had it
	Release  string   // that removed it
	Switch   bool     // the flag took no value
	// Now is the flag that has the same values under a new name; empty: the flag has no effect.
	Now string
	Why string // without Now: the reason, and what to do instead
}

// Retired has the flags that the present release removed. A test in internal/roles compares the
// flags of the release before with those of this build, and refuses rows of earlier releases.
var Retired []RetiredFlag

// retired is a removed flag without effect. It implements pflag.Value.
type retired struct {
	set *Set
	row RetiredFlag
	was string
}

func (r *retired) String() string { return r.was }
func (r *retired) Type() string   { return "" }

// Set accepts every value.
func (r *retired) Set(v string) error {
	r.was = v
	r.set.Warn(r.row.Name, fmt.Sprintf("--%s has no effect since release %s: %s; the next release refuses it", r.row.Name, r.row.Release, r.row.Why))
	return nil
}

// declareRetired makes the set accept the rows of its command. Flags without a new name are hidden
// from its help. renamed has the others by their old names.
func (s *Set) declareRetired(rows []RetiredFlag) {
	s.renamed = map[string]RetiredFlag{}
	for _, row := range rows {
		switch {
		case !slices.Contains(row.Commands, s.Name()):
		case row.Now != "":
			s.renamed[row.Name] = row
		default:
			p := s.VarPF(&retired{set: s, row: row}, row.Name, "", "")
			if p.Hidden = true; row.Switch {
				p.NoOptDefVal = "true"
			}
		}
	}
}

// newName returns the present name of a flag, and warns if name is its old one.
func (s *Set) newName(name string) string {
	row, ok := s.renamed[name]
	if !ok {
		return name
	}
	s.Warn(name, fmt.Sprintf("--%s is called --%s since release %s; the next release refuses the old name", name, row.Now, row.Release))
	return row.Now
}

// renameEnv moves the variables of renamed flags to their new names, unless those are set.
func (s *Set) renameEnv(env map[string]string) {
	for name := range s.renamed {
		old := EnvName(name)
		v, ok := env[old]
		if !ok {
			continue
		}
		delete(env, old)
		if now := EnvName(s.newName(name)); env[now] == "" {
			env[now] = v
		}
	}
}
