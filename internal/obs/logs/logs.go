// Package logs writes log lines in vLLM's format:
//
//	INFO 11-21 03:42:21 model loaded weights=8.4MB seconds=0.4
//
// and a line of rates for the work of a node every ten seconds.
//
// Invariant: one record is one line, whatever its values contain, so that values cannot
// forge lines and grep works.
//
// The package has no levels of its own.
package logs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Handler is a slog.Handler that prints one line per record.
type Handler struct {
	out    *output
	level  slog.Leveler
	prefix string // of attribute names, from groups
	attrs  string // already formatted, each with a leading space
}

// output is shared by a handler and those derived from it.
type output struct {
	mu sync.Mutex
	w  io.Writer
}

// New returns a handler that writes records of level and above to w.
func New(w io.Writer, level slog.Leveler) *Handler {
	return &Handler{out: &output{w: w}, level: level}
}

// Format is the format of records.
type Format string

// Formats.
const (
	Text Format = "text" // one line in vLLM's format
	JSON Format = "json" // one object, as log/slog writes it
)

// Log returns a logger of a format; ok is false for an unknown format.
func Log(w io.Writer, level slog.Leveler, f Format) (log *slog.Logger, ok bool) {
	switch f {
	case Text, "":
		return slog.New(New(w, level)), true
	case JSON:
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})), true
	}
	return nil, false
}

// Enabled reports whether records of this level are written.
func (h *Handler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level.Level() }

// Handle writes one line.
func (h *Handler) Handle(_ context.Context, r slog.Record) error {
	b := make([]byte, 0, 256)
	b = append(b, LevelName(r.Level)...)
	b = append(b, ' ')
	b = r.Time.AppendFormat(b, "01-02 15:04:05")
	b = append(b, ' ')
	b = appendClean(b, r.Message)
	b = append(b, h.attrs...)
	r.Attrs(func(a slog.Attr) bool {
		b = appendAttr(b, h.prefix, a)
		return true
	})
	b = append(b, '\n')
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	_, err := h.out.w.Write(b)
	return err
}

// WithAttrs returns a handler that adds attributes to each record.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	d := *h
	b := []byte(h.attrs)
	for _, a := range attrs {
		b = appendAttr(b, h.prefix, a)
	}
	d.attrs = string(b)
	return &d
}

// WithGroup returns a handler that prefixes attribute names.
func (h *Handler) WithGroup(name string) slog.Handler {
	d := *h
	d.prefix += name + "."
	return &d
}

// LevelName returns the name of a level at the beginning of lines.
func LevelName(l slog.Level) string {
	switch {
	case l >= slog.LevelError:
		return "ERROR"
	case l >= slog.LevelWarn:
		return "WARNING"
	case l >= slog.LevelInfo:
		return "INFO"
	}
	return "DEBUG"
}

// Levels are the names of levels. The caller does not change them.
var Levels = []string{"debug", "info", "warning", "error"}

// ParseLevel returns the level of a name: debug, info, warning or error.
func ParseLevel(name string) (slog.Level, error) {
	switch strings.ToLower(name) {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warning", "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("%q; use debug, info, warning or error", name)
}

// packageNames matches the names of packages in front of the texts of their errors.
var packageNames = regexp.MustCompile(`(^|\n|: |; |\()(?:(?:backend|bench|build|cli|cluster|config|cuda|dataset|decode|discover|draft|engine|fabric|gateway|gguf|grammar|hub|kvcache|kvtransfer|launch|lease|masks|memory|model|native|nodes|offline|prefill|process|quantize|report|rpc|safetensors|scheduler|tlsconf|tokenizer|transfer|upstream|workers): )+`)

// WithoutPackages removes the names of packages, which users do not know, from the text of an error.
func WithoutPackages(text string) string { return packageNames.ReplaceAllString(text, "$1") }

func appendAttr(b []byte, prefix string, a slog.Attr) []byte {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, g := range v.Group() {
			b = appendAttr(b, prefix, g)
		}
		return b
	}
	if a.Equal(slog.Attr{}) {
		return b
	}
	b = append(b, ' ')
	b = append(b, prefix...)
	b = appendClean(b, a.Key)
	b = append(b, '=')
	var s string
	switch v.Kind() {
	case slog.KindDuration:
		s = v.Duration().Round(time.Microsecond).String()
	case slog.KindAny:
		s = v.String()
		if _, ok := v.Any().(error); ok {
			s = WithoutPackages(s)
		}
	default:
		s = v.String()
	}
	if s == "" || strings.ContainsAny(s, " \"=") || !clean(s) {
		return strconv.AppendQuote(b, s)
	}
	return append(b, s...)
}

// appendClean appends text, quoted if it would break the line.
func appendClean(b []byte, s string) []byte {
	if clean(s) {
		return append(b, s...)
	}
	return strconv.AppendQuote(b, s)
}

func clean(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) })
}
