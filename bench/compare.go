package bench

import (
	"fmt"
	"io"

	"github.com/tandem-serving/tandem/bench/report"
)

// Compare prints the figures of two result files side by side.
func Compare(a, b string, seed uint64, out io.Writer) error {
	ra, err := report.Load(a)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrOption, err)
	}
	rb, err := report.Load(b)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrOption, err)
	}
	fmt.Fprintf(out, "A: %s, runs: %d\nB: %s, runs: %d\n\n", a, len(ra), b, len(rb))
	return report.PrintRows(out, report.Compare(ra, rb, seed))
}
