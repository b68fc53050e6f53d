package report_test

import (
	"fmt"

	"github.com/tandem-serving/tandem/bench/report"
)

// Quantiles interpolate between samples, as NumPy's do.
func ExampleQuantile() {
	latencies := []float64{10, 20, 30, 40} // milliseconds, sorted
	fmt.Printf("%.1f %.1f\n", report.Quantile(latencies, 50), report.Quantile(latencies, 99))
	// Output: 25.0 39.7
}
