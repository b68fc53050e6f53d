// Package doctor checks what Tandem needs of a machine and of a fleet: processor, memory, limits,
// ports, certificates, clock, libfabric, GPU, and whether the nodes of a gateway can be reached.
//
// The checks are one literal table. Each returns lines with a state, a figure and, unless all is
// well, what to do. A check changes nothing: it opens a port only to close it again.
//
// Invariant: Run returns within its context and the timeouts below. Its lines contain no secret: of
// certificates only names, roles and dates, of keys nothing.
//
// The package starts no process and knows no flag; what depends on flags comes in Options.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/internal/console"
)

// State is how a check ended.
type State string

// The states. Only Problem lets `tandem doctor` end with status 1.
const (
	OK      State = "ok"
	Warning State = "warning"
	Problem State = "problem"
)

// Line is one result.
type Line struct {
	Area   string `json:"area"`
	Name   string `json:"name"`
	State  State  `json:"state"`
	Figure string `json:"figure"`
	Do     string `json:"do,omitempty"` // what to do; empty: nothing
}

// Port is a port that a role wants.
type Port struct {
	Role, Flag string
	Host       string
	Number     int
	UDP        bool // too
}

// Options are what the checks need to know.
type Options struct {
	System  fs.FS // root of the file system: /proc and /sys
	Now     time.Time
	Kernels []string // kernel variants that the processor runs, best first
	// Descriptors returns how many clients may connect within the limit on descriptors.
	Descriptors func() (limit, clients int, err error)
	MemoryLimit int64 // of the machine or the cgroup, in bytes; 0: unknown
	Ports       []Port
	PortsNeeded bool // a port that another program has is a Problem, else a Warning
	TLSDirs     []string
	Fabric      func() (found []string, err error) // libfabric's providers that can be opened
	GPU         func() (name string, total, free int64, err error)
	URL, Key    string // of the gateway; empty URL: none is asked
	HTTP        *http.Client
}

// checks are all of them in the order of the output.
var checks = []struct {
	area string
	run  func(context.Context, *Options) []Line
}{
	{"machine", machine},
	{"kernels", kernels},
	{"limits", limits},
	{"ports", ports},
	{"certificates", certificates},
	{"clock", clock},
	{"fabric", fabric},
	{"GPU", gpu},
	{"fleet", fleet},
}

// Run returns the lines of all checks.
func Run(ctx context.Context, o Options) []Line {
	var all []Line
	for _, c := range checks {
		for _, l := range c.run(ctx, &o) {
			l.Area = c.area
			l.Name, l.Figure, l.Do = console.Printable(l.Name), console.Printable(l.Figure), console.Printable(l.Do)
			all = append(all, l)
		}
	}
	return all
}

// Count returns how many lines have a state.
func Count(lines []Line, s State) (n int) {
	for _, l := range lines {
		if l.State == s {
			n++
		}
	}
	return n
}

const widestName = 40 // columns

// Text writes lines for a terminal.
func Text(w io.Writer, lines []Line) error {
	area, wide := "", 0
	for _, l := range lines {
		wide = max(wide, min(utf8.RuneCountInString(l.Name), widestName))
	}
	for _, l := range lines {
		if l.Area != area {
			area = l.Area
			if _, err := fmt.Fprintf(w, "%s\n", area); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintf(w, "  %-8s %-*s  %s\n", l.State, wide, l.Name, l.Figure); err != nil {
			return err
		}
		if l.Do != "" {
			if _, err := fmt.Fprintf(w, "  %-8s %-*s  > %s\n", "", wide, "", l.Do); err != nil {
				return err
			}
		}
	}
	_, err := fmt.Fprintf(w, "\n%d ok, %s, %s\n", Count(lines, OK), counted(Count(lines, Warning), "warning"), counted(Count(lines, Problem), "problem"))
	return err
}

// JSON writes lines as one object.
func JSON(w io.Writer, version string, lines []Line) error {
	return json.NewEncoder(w).Encode(struct {
		Version  string `json:"version"`
		Problems int    `json:"problems"`
		Warnings int    `json:"warnings"`
		Checks   []Line `json:"checks"`
	}{version, Count(lines, Problem), Count(lines, Warning), lines})
}

func ok(name, format string, args ...any) Line {
	return Line{Name: name, State: OK, Figure: fmt.Sprintf(format, args...)}
}

// but returns a line with another state than ok, and what to do.
func (l Line) but(s State, do string) Line {
	l.State, l.Do = s, do
	return l
}

// read returns a file of the system without its last newline, and empty without the file.
func read(system fs.FS, name string) string {
	b, err := fs.ReadFile(system, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// field returns the value behind a key of a file such as /proc/meminfo.
func field(text, key string) string {
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func size(bytes int64) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
	case bytes >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", bytes)
}

// counted returns a number of things with their name.
func counted(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
