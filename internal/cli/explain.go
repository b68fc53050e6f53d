package cli

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/docs"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/explainlog"
)

// maxLog is how many bytes of a log are read. What follows is left out, and reported.
const maxLog = 1 << 30

// explainLog explains a log on the terminal and, with --html, on a page.
func explainLog(v *Invocation) error {
	page := v.String("html", "", "file to write the result to as one HTML page")
	summary := v.Bool("summary", false, "leave the explanation of each line out")
	args, err := v.Parse(len(v.Arguments))
	if err != nil {
		return err
	}
	if len(args) > 1 {
		return fmt.Errorf("%w: %d files are given: `cat FILE … | tandem explain-log -` explains several as one log", config.ErrValue, len(args))
	}
	if len(args) == 0 {
		return fmt.Errorf("%w: give the log's file, or - for standard input, such as in `tandem explain-log vllm.log`", config.ErrValue)
	}
	in, name := os.Stdin, "standard input"
	if args[0] != "-" {
		if in, err = os.Open(args[0]); err != nil {
			return fmt.Errorf("%w: %w", config.ErrValue, err)
		}
		defer in.Close()
		name = args[0]
	}
	e := explainlog.New(explainlog.Messages(docs.LogLines))
	meter := newReadMeter(in, Draws(os.Stderr))
	log := bufio.NewReaderSize(io.LimitReader(meter, maxLog), explainlog.MaxLine)
	// A log is looked at by many patterns, which takes minutes for a program.
	if head, _ := log.Peek(explainlog.MaxLine); bytes.IndexByte(head, 0) >= 0 {
		return fmt.Errorf("%w: %s is no text: it has bytes of value 0", config.ErrValue, name)
	}
	rest, err := readLines(log, maxLog, e.Add)
	meter.end()
	if err != nil {
		return fmt.Errorf("%w: reading %s: %w", config.ErrValue, name, err)
	}
	report := e.Report()
	if *page != "" {
		if err := os.WriteFile(*page, []byte(report.HTML(name)), 0o644); err != nil {
			return fmt.Errorf("%w: --html: %w", config.ErrValue, err)
		}
		fmt.Fprintf(v.ErrOut, "%s has the page\n", *page)
	}
	if known := report.Lines - report.ByShape; report.Lines == 0 {
		fmt.Fprintf(v.ErrOut, "tandem explain-log: %s is empty\n", name)
	} else if known*2 < report.Lines {
		fmt.Fprintf(v.ErrOut, "tandem explain-log: most lines of %s are of neither vLLM nor Tandem\n", name)
	}
	if rest {
		fmt.Fprintf(v.ErrOut, "tandem explain-log: only the first %d MiB were read\n", maxLog>>20)
	}
	_, err = io.WriteString(v.Out, report.Text(name, terminal(v.Out, v.Environ, *summary)))
	return err
}

// readMeter is a file whose reading is shown at a terminal: by a bar, or, where the size is not
// known, by the bytes so far.
type readMeter struct {
	in          *os.File
	show        func(done, total int64) // nil: nothing is shown
	done, total int64
}

func newReadMeter(in *os.File, shown bool) *readMeter {
	m := &readMeter{in: in, total: -1}
	if !shown {
		return m
	}
	if info, err := in.Stat(); err == nil && info.Mode().IsRegular() {
		m.total = min(info.Size(), maxLog)
	}
	m.show = progress(os.Stderr, true, "reading the log", false, memory.Bytes, nil, time.Now)
	return m
}

// Read implements io.Reader.
func (m *readMeter) Read(p []byte) (int, error) {
	n, err := m.in.Read(p)
	if m.done += int64(n); m.show != nil {
		m.show(m.done, m.total)
	}
	return n, err
}

// end removes the bar.
func (m *readMeter) end() {
	if m.show != nil {
		m.show(max(1, m.done), max(1, m.done))
	}
}

// terminal returns how to write to w: with colours and its width if it is a terminal.
func terminal(w io.Writer, environ []string, summary bool) explainlog.TextOptions {
	o := explainlog.TextOptions{Summary: summary}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return o
	}
	o.Color = !slices.ContainsFunc(environ, func(e string) bool {
		return strings.HasPrefix(e, "NO_COLOR=") && e != "NO_COLOR=" || e == "TERM=dumb"
	})
	if width, _, err := term.GetSize(int(f.Fd())); err == nil {
		o.Width = min(width, 160)
	}
	return o
}

// readLines calls add with each line of at most explainlog.MaxLine bytes; of a longer one add gets
// the beginning and cut. full reports that limit bytes were read.
func readLines(b *bufio.Reader, limit int64, add func(line []byte, cut bool)) (full bool, err error) {
	var total int64
	for {
		line, err := b.ReadSlice('\n')
		total += int64(len(line))
		cut := errors.Is(err, bufio.ErrBufferFull)
		if len(line) > 0 {
			add(bytes.TrimSuffix(line, []byte("\n")), cut)
		}
		for errors.Is(err, bufio.ErrBufferFull) {
			var more []byte
			more, err = b.ReadSlice('\n')
			total += int64(len(more))
		}
		if errors.Is(err, io.EOF) {
			return total >= limit, nil
		}
		if err != nil {
			return false, err
		}
	}
}
