// Package metrics holds every metric of Tandem in one literal table and serves
// them in Prometheus' text format.
//
// A row is declared once, as a variable of rows.go. A Set has the rows of the roles of one
// process: each row becomes one series per combination of its label values. All are created
// at start, so that a series never appears late and recording is an atomic addition. Only the
// names of Set.Named get series when the configuration has them. A scrape reads the table in order.
//
// Invariant: only metrics of the table are exposed, and label values come from the table or
// from the process' own configuration, never from a request. The number of series is bounded
// at start.
//
// The package does not measure. The packages that own a number record it, or provide a
// function that a scrape calls.
package metrics

// ID is the place of a row in the table.
type ID int

// Kind is a metric's type.
type Kind uint8

// Kinds. An info is a gauge, usually 1, whose labels are facts of the process. It is exposed
// once they are known.
const (
	KindCounter Kind = iota + 1
	KindGauge
	KindHistogram
	KindInfo
)

// Role is a set of roles, as bits.
type Role uint8

// Roles; nodes that do both or all are their union.
const (
	Gateway Role = 1 << iota
	Prefill
	Decode

	nodes = Prefill | Decode
	all   = Gateway | nodes
)

// Label is a label with all its values; the label of an info has none.
type Label struct {
	Name   string
	Values []string
	Of     map[string]Role // values that only some roles have
	Named  bool            // of the first label: names of Set.Named are values, too
}

// Row describes one metric.
type Row struct {
	Name    string // as exposed; counters end in _total
	Kind    Kind
	Roles   Role
	Labels  []Label   // without model_name and engine, see common
	Buckets []float64 // upper bounds of a histogram, ascending, without +Inf
	Help    string
}

// Rows is the table, in the order of docs/metrics.md.
var Rows []Row

// declare adds a row. The table is complete when the package is initialized.
func declare(r Row) ID {
	Rows = append(Rows, r)
	return ID(len(Rows) - 1)
}

func counter(name string, roles Role, help string, labels ...Label) ID {
	return declare(Row{Name: name, Kind: KindCounter, Roles: roles, Labels: labels, Help: help})
}

func gauge(name string, roles Role, help string, labels ...Label) ID {
	return declare(Row{Name: name, Kind: KindGauge, Roles: roles, Labels: labels, Help: help})
}

func info(name string, roles Role, help string, labels ...Label) ID {
	return declare(Row{Name: name, Kind: KindInfo, Roles: roles, Labels: labels, Help: help})
}

func histogram(name string, roles Role, buckets []float64, help string, labels ...Label) ID {
	return declare(Row{Name: name, Kind: KindHistogram, Roles: roles, Labels: labels, Buckets: buckets, Help: help})
}

func label(name string, values ...string) Label { return Label{Name: name, Values: values} }

// common returns the labels of a row in addition to its own: both of vLLM's for vllm: rows,
// except two that vLLM labels differently.
func common(id ID) []string {
	switch id {
	case AdmissionRejections:
		return []string{"model_name"}
	case CacheConfigInfo:
		return []string{"engine"}
	}
	if Rows[id].Name[0] == 'v' {
		return []string{"engine", "model_name"}
	}
	return nil
}
