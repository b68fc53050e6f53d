package transfer

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Round is one transfer, timed at the writer until the reader confirmed its last byte.
type Round struct {
	Seconds   float64 `json:"seconds"`
	WriterCPU float64 `json:"writer_cpu_seconds"`
	ReaderCPU float64 `json:"reader_cpu_seconds"`
}

// Report is the result of a measurement. Every byte of every round was compared.
type Report struct {
	Transport string    `json:"transport"`
	Machines  [2]string `json:"machines"` // writer's, reader's
	Layers    int       `json:"layers"`
	Pages     int       `json:"pages"` // of a round, over all layers
	PageBytes int       `json:"page_bytes"`
	Bytes     int64     `json:"bytes"` // of a round
	Streams   int       `json:"streams"`
	Checksum  bool      `json:"checksum"`
	TLS       bool      `json:"tls"`
	Rounds    []Round   `json:"rounds"`

	GBps        float64   `json:"gb_per_second"`             // median; 1 GB = 10⁹ bytes
	WriterPerGB float64   `json:"writer_cpu_seconds_per_gb"` // mean
	ReaderPerGB float64   `json:"reader_cpu_seconds_per_gb"`
	SmallBytes  int64     `json:"small_bytes,omitempty"`
	SmallRounds int       `json:"small_rounds,omitempty"`
	SmallMillis []float64 `json:"small_millis,omitempty"` // percentiles 0, 50, 90, 99, 100
	smalls      []Round
}

// percentiles of small transfers' latencies.
var percentiles = []float64{0, 0.5, 0.9, 0.99, 1}

// sum computes the figures that depend on the rounds.
func (r *Report) sum() {
	var seconds []float64
	for _, x := range r.Rounds {
		seconds = append(seconds, x.Seconds)
		r.WriterPerGB += x.WriterCPU
		r.ReaderPerGB += x.ReaderCPU
	}
	gb := float64(r.Bytes) / 1e9
	r.WriterPerGB /= gb * float64(len(r.Rounds))
	r.ReaderPerGB /= gb * float64(len(r.Rounds))
	slices.Sort(seconds)
	r.GBps = gb / quantile(seconds, 0.5)
	if r.SmallRounds = len(r.smalls); r.SmallRounds == 0 {
		return
	}
	var millis []float64
	for _, x := range r.smalls {
		millis = append(millis, 1e3*x.Seconds)
	}
	slices.Sort(millis)
	for _, q := range percentiles {
		r.SmallMillis = append(r.SmallMillis, quantile(millis, q))
	}
}

// quantile returns a quantile of sorted values, interpolated.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := min(int(at), len(sorted)-1)
	j := min(i+1, len(sorted)-1)
	return sorted[i] + (at-float64(i))*(sorted[j]-sorted[i])
}

func (r *Report) write(o Options) error {
	if o.JSON {
		return json.NewEncoder(o.Out).Encode(r)
	}
	crc, encryption := "CRC32C", "in the clear"
	if !r.Checksum {
		crc = "no checksum"
	}
	if r.TLS {
		encryption = "TLS"
	}
	fmt.Fprintf(o.Out, "writer: %s\nreader: %s\n", r.Machines[0], r.Machines[1])
	fmt.Fprintf(o.Out, "%s, %d streams, %s, %s: %d pages of %d bytes in %d layers, %d rounds, every byte compared\n",
		r.Transport, r.Streams, crc, encryption, r.Pages, r.PageBytes, r.Layers, len(r.Rounds))
	fmt.Fprintf(o.Out, "%.2f GB/s (median)   CPU s/GB: writer %.3f, reader %.3f\n", r.GBps, r.WriterPerGB, r.ReaderPerGB)
	if r.SmallRounds > 0 {
		fmt.Fprintf(o.Out, "%d bytes, %d times: %.3f ms median   p90 %.3f   p99 %.3f   min %.3f   max %.3f\n",
			r.SmallBytes, r.SmallRounds, r.SmallMillis[1], r.SmallMillis[2], r.SmallMillis[3], r.SmallMillis[0], r.SmallMillis[4])
	}
	return nil
}
