package simulate

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/internal/regular"
)

// maxMeasured bounds a result of bench serve in bytes; with --save-detailed it has every token.
const maxMeasured = 256 << 20

// figure is a predicted figure next to the measured one.
type figure struct {
	name                string
	predicted, measured float64
}

// off returns the relative error of the prediction.
func (f *figure) off() string {
	if f.measured == 0 {
		return "-"
	}
	return fmt.Sprintf("%+.1f %%", 100*(f.predicted/f.measured-1))
}

// comparableField matches the fields of a result that have a figure of a run.
var comparableField = regexp.MustCompile(`^(?:(?:mean|median|p[0-9.]+)_(?:ttft|tpot|itl|e2el)_ms|request_throughput|request_goodput|output_throughput)$`)

// readMeasured reads the result that the simulation is compared with.
func (r *run) readMeasured() error {
	if r.Compare == "" {
		return nil
	}
	const remedy = "give the JSON that tandem bench serve --save-result wrote"
	data, err := regular.ReadFile(r.Compare, maxMeasured)
	if err != nil {
		return fmt.Errorf("%w: --compare: %w: %s", ErrOption, err, remedy)
	}
	if err := json.Unmarshal(data, &r.measured); err != nil {
		return fmt.Errorf("%w: --compare %s: %w: %s", ErrOption, r.Compare, err, remedy)
	}
	return nil
}

// checkMeasured returns an error if the result that the simulation is compared with has none of its
// figures, before a simulation that may take long. One request shows which figures there are.
func (r *run) checkMeasured() error {
	if r.Compare == "" {
		return nil
	}
	o := r.fleet
	o.Prefill, o.Decode, o.Events, o.Steps.Count = 0, 1, nil, nil
	result, err := fleet.Run([]sim.Request{{Tokens: 1, Output: 3}}, o)
	if err != nil {
		return wrap(err)
	}
	_, err = r.compare(r.json(result, r.summarize(result)))
	return err
}

// compare returns the figures that both results have.
func (r *run) compare(predicted report.Object) (list []figure, err error) {
	if r.Compare == "" {
		return nil, nil
	}
	for _, f := range predicted {
		p, ok := f.Value.(float64)
		m, has := r.measured[f.Key].(float64)
		if ok && has && comparableField.MatchString(f.Key) {
			list = append(list, figure{f.Key, p, m})
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: --compare %s: it has none of the predicted figures: give the JSON that tandem bench serve --save-result wrote, with its --percentile-metrics and --metric-percentiles", ErrOption, r.Compare)
	}
	return list, nil
}

// printCompared prints a line for each figure.
func printCompared(w io.Writer, list []figure) {
	fmt.Fprintf(w, "%-28s %12s %12s %10s\n", "", "predicted", "measured", "error")
	for i := range list {
		f := &list[i]
		fmt.Fprintf(w, "%-28s %12s %12s %10s\n", strings.ReplaceAll(f.name, "_", " "), report.Figure(f.predicted), report.Figure(f.measured), f.off())
	}
}
