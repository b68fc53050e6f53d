package tokenizer

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// benchText is prose and code: this repository's documents and some of its Go
// files, and the sentences in other scripts.
func benchText(b testing.TB) string {
	var text strings.Builder
	for _, pattern := range []string{"../../*.md", "*.go", "../scheduler/*.go", "../../gateway/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			b.Fatalf("%s: no files (%v)", pattern, err)
		}
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				b.Fatal(err)
			}
			if f != "real_test.go" && f != "tokenizer_test.go" { // made of odd characters
				text.Write(data)
			}
		}
	}
	text.WriteString(strings.Join(sentences, "\n"))
	return text.String()
}

// cpuTime is what this process has used of all processors.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRealEncode gives MB/s of one thread: warm is text whose words were
// all seen lately, cold begins with an empty cache. MB/cpu-s is per second of
// processor time, the collector's included, for machines that others use too.
func BenchmarkRealEncode(b *testing.B) {
	text := benchText(b)
	for _, r := range realTokenizers {
		tok := realTokenizer(b, r.name)
		dst := tok.AppendEncode(nil, text, false)
		for _, kind := range []string{"warm", "cold"} {
			b.Run(r.name+"/"+kind, func(b *testing.B) {
				b.SetBytes(int64(len(text)))
				var used time.Duration
				for b.Loop() {
					if kind == "cold" {
						b.StopTimer()
						clear(tok.cache.slots[:])
						b.StartTimer()
					}
					began := cpuTime(b)
					dst = tok.AppendEncode(dst[:0], text, false)
					used += cpuTime(b) - began
				}
				b.ReportMetric(float64(b.N*len(text))/1e6/used.Seconds(), "MB/cpu-s")
				b.ReportMetric(float64(len(text))/float64(len(dst)), "B/token")
			})
		}
	}
}

// BenchmarkRealDecode gives the bytes of text per second.
func BenchmarkRealDecode(b *testing.B) {
	text := benchText(b)
	for _, r := range realTokenizers {
		tok := realTokenizer(b, r.name)
		ids := tok.Encode(text, false)
		b.Run(r.name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				_ = tok.Decode(ids, true)
			}
		})
	}
}

// BenchmarkRealLoad is what a node or gateway pays once per model.
func BenchmarkRealLoad(b *testing.B) {
	for _, r := range realTokenizers {
		file := realFile(b, r.name)
		b.Run(r.name, func(b *testing.B) {
			b.SetBytes(int64(len(file)))
			for b.Loop() {
				if _, err := Load(file); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
