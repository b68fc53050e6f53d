package cluster

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// A node gossips under its identity: its name, a slash and a suffix that is new with each start.
// Nodes of one name therefore never conflict, and a node that starts again at another address is
// a new member at once. Nodes of version 0.1.0 gossip their name alone.

// suffixDigits is the length of a suffix in hexadecimal digits: 11 of the milliseconds since 1970,
// 5 at random.
const suffixDigits = 16

// NewID returns the identity of a process of that name that starts now. Of two processes at one
// address, the later one has the greater suffix.
func NewID(name string, now time.Time) string {
	return fmt.Sprintf("%s/%011x%05x", name, now.UnixMilli()&(1<<44-1), rand.Uint32N(1<<20))
}

// NameOf returns the name in an identity.
func NameOf(id string) string {
	name, _ := cutID(id)
	return name
}

// cutID returns the parts of an identity. The suffix of a node of version 0.1.0 is empty.
func cutID(id string) (name, suffix string) {
	at := len(id) - suffixDigits - 1
	if at < 1 || id[at] != '/' || strings.Trim(id[at+1:], "0123456789abcdef") != "" {
		return id, ""
	}
	return id[:at], id[at+1:]
}

// ShownNames returns the name that people use for each of the identities: the name in it, or, for
// further nodes of one name in the order of their starts, that name with -2, -3 and so on. The
// names depend on the identities only, so that all gateways agree on them.
func ShownNames(ids []string) map[string]string {
	sorted := make([]parsedID, len(ids))
	taken := make(map[string]bool, len(ids))
	for i, id := range ids {
		sorted[i].id = id
		sorted[i].name, sorted[i].suffix = cutID(id)
		taken[sorted[i].name] = true
	}
	slices.SortFunc(sorted, func(a, b parsedID) int {
		return cmp.Or(cmp.Compare(a.suffix, b.suffix), cmp.Compare(a.id, b.id))
	})
	shown, last := make(map[string]string, len(ids)), make(map[string]int, len(ids))
	for _, s := range sorted {
		if last[s.name]++; last[s.name] == 1 {
			shown[s.id] = s.name
			continue
		}
		name := fmt.Sprintf("%s-%d", s.name, last[s.name])
		for taken[name] { // the name that another node has been given
			last[s.name]++
			name = fmt.Sprintf("%s-%d", s.name, last[s.name])
		}
		shown[s.id], taken[name] = name, true
	}
	return shown
}

// parsedID is an identity in its parts.
type parsedID struct{ id, name, suffix string }

// superseded returns the members that have ended according to a later member at the same address,
// by ID. Gossip itself notices their end only after seconds. address returns an address of a
// member; empty: it has none.
func superseded(ms map[string]Member, address func(id string) string) map[string]bool {
	last, ended := make(map[string]string, len(ms)), map[string]bool{}
	for id := range ms {
		at := address(id)
		if at == "" {
			continue
		}
		other, two := last[at]
		if !two {
			last[at] = id
			continue
		}
		_, a := cutID(id)
		_, b := cutID(other)
		switch {
		case a > b:
			last[at], ended[other] = id, true
		case a < b:
			ended[id] = true
		}
	}
	return ended
}
