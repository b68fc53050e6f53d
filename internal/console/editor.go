package console

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/internal/regular"
)

// Bounds of the editor.
const (
	typeAhead    = 64 << 10              // bytes of keys that wait while an answer is shown
	escapeDelay  = 50 * time.Millisecond // after which ESC is a key of its own
	maxSequence  = 32                    // bytes of a key's sequence
	historyLines = 1000
	historyBytes = 4 << 20
)

// editor reads messages at a terminal in raw mode.
//
// Algorithm: a goroutine reads keys, so that Ctrl-C is noticed while an answer is shown. A key
// changes the text by the table actions, and the text is drawn again from its first row, as it is
// when the terminal's size changes. A character at the end is only written.
//
// Invariant: the editor sends no queries to the terminal, because their replies could reach the
// shell after the end.
type editor struct {
	tty       *os.File
	out       io.Writer
	cooked    *term.State
	keys      chan byte
	interrupt chan os.Signal // one value for each Ctrl-C
	resized   chan os.Signal // SIGWINCH; room for one
	path      string         // of the history's file; empty: none
	history   []string       // the newest last

	prompt  string
	with    style  // of prompt
	text    string // of the message
	at      int    // cursor: a byte of text
	killed  string // by Ctrl-K, Ctrl-U or Ctrl-W
	entry   int    // of history; len(history): the draft
	draft   string
	query   string   // of Ctrl-R, while it is repeated
	drawn   []string // rows down to the cursor, with the prompt; of the last, what is in front of it
	under   string   // character at the cursor in its row; empty: there is none
	column  int      // of the cursor
	drawing bytes.Buffer
}

// newEditor puts a terminal into raw mode, until close, and reads the history. Keys that are typed
// before the first read are kept.
func newEditor(tty *os.File, out io.Writer, history string, interrupt chan os.Signal) (*editor, error) {
	cooked, err := term.MakeRaw(int(tty.Fd()))
	if err != nil {
		return nil, err
	}
	e := &editor{tty: tty, out: out, cooked: cooked, keys: make(chan byte, typeAhead), interrupt: interrupt, resized: make(chan os.Signal, 1), path: history}
	signal.Notify(e.resized, syscall.SIGWINCH)
	go e.listen()
	e.load()
	return e, nil
}

// close restores the terminal.
func (e *editor) close() error {
	signal.Stop(e.resized)
	return e.restore()
}

func (e *editor) restore() error { return term.Restore(int(e.tty.Fd()), e.cooked) }

// listen reads keys until the input ends. A read of a terminal cannot be interrupted, so that the
// goroutine may stay until the process ends.
func (e *editor) listen() {
	defer close(e.keys)
	in := bufio.NewReader(e.tty)
	for {
		b, err := in.ReadByte()
		if err != nil {
			return
		}
		if b != ctrlC {
			e.keys <- b
			continue
		}
		select {
		case e.interrupt <- os.Interrupt:
		default: // one waits already
		}
	}
}

// read prompts for a message and returns it when Enter is pressed. It returns io.EOF at Ctrl-D, and
// ErrInterrupted at Ctrl-C.
func (e *editor) read(ctx context.Context, prompt string, with style) (string, error) {
	e.prompt, e.with, e.text, e.at, e.entry, e.draft, e.drawn = prompt, with, "", 0, len(e.history), "", nil
	e.drawing.WriteString(pasteOn)
	e.draw()
	for {
		if err := e.show(); err != nil {
			return "", err
		}
		key, err := e.key(ctx)
		if err == nil && key == "\x04" && e.text == "" {
			err = io.EOF
		}
		if err != nil {
			return "", cmp.Or(err, e.end())
		}
		if key == "\r" || key == "\n" {
			return e.text, e.end()
		}
		if key != ctrlR {
			e.query = ""
		}
		switch act := actions[key]; {
		case act != nil:
			act(e)
			e.draw()
		case key == pasteStart:
			if err := e.paste(ctx); err != nil {
				return "", err
			}
		case key >= " ":
			e.insert(key)
		}
	}
}

// end moves the cursor behind the text.
func (e *editor) end() error {
	if e.at < len(e.text) {
		e.at = len(e.text)
		e.draw()
	}
	e.drawing.WriteString("\r\n" + pasteOff)
	return e.show()
}

// Sequences of keys and of terminals.
const (
	ctrlC      = 0x03
	ctrlR      = "\x12"
	pasteStart = "\x1b[200~"
	pasteEnd   = "\x1b[201~"
	pasteOn    = "\x1b[?2004h"
	pasteOff   = "\x1b[?2004l"
)

// actions are what keys other than characters do.
var actions = map[string]func(*editor){
	"\x01": (*editor).home, "\x1b[H": (*editor).home, "\x1bOH": (*editor).home, "\x1b[1~": (*editor).home, "\x1b[7~": (*editor).home,
	"\x05": (*editor).toEnd, "\x1b[F": (*editor).toEnd, "\x1bOF": (*editor).toEnd, "\x1b[4~": (*editor).toEnd, "\x1b[8~": (*editor).toEnd,
	"\x02": (*editor).left, "\x1b[D": (*editor).left, "\x1bOD": (*editor).left,
	"\x06": (*editor).right, "\x1b[C": (*editor).right, "\x1bOC": (*editor).right,
	"\x1bb": (*editor).wordLeft, "\x1b[1;5D": (*editor).wordLeft, "\x1b[1;3D": (*editor).wordLeft,
	"\x1bf": (*editor).wordRight, "\x1b[1;5C": (*editor).wordRight, "\x1b[1;3C": (*editor).wordRight,
	"\x7f":     func(e *editor) { e.cut(e.before(), e.at) },
	"\x08":     func(e *editor) { e.cut(e.before(), e.at) },
	"\x04":     func(e *editor) { e.cut(e.at, e.after()) },
	"\x1b[3~":  func(e *editor) { e.cut(e.at, e.after()) },
	"\x17":     func(e *editor) { e.kill(e.wordBefore(), e.at) },
	"\x1b\x7f": func(e *editor) { e.kill(e.wordBefore(), e.at) },
	"\x1bd":    func(e *editor) { e.kill(e.at, e.wordAfter()) },
	"\x0b":     func(e *editor) { e.kill(e.at, len(e.text)) },
	"\x15":     func(e *editor) { e.kill(0, e.at) },
	"\x19":     func(e *editor) { e.put(e.killed) },
	"\x1b\r":   func(e *editor) { e.put("\n") }, "\x1b\n": func(e *editor) { e.put("\n") },
	"\x10": func(e *editor) { e.recall(e.entry - 1) }, "\x1b[A": func(e *editor) { e.recall(e.entry - 1) }, "\x1bOA": func(e *editor) { e.recall(e.entry - 1) },
	"\x0e": func(e *editor) { e.recall(e.entry + 1) }, "\x1b[B": func(e *editor) { e.recall(e.entry + 1) }, "\x1bOB": func(e *editor) { e.recall(e.entry + 1) },
	ctrlR:  (*editor).search,
	"\x0c": func(e *editor) { e.drawing.WriteString("\x1b[H\x1b[2J"); e.drawn = nil },
	"\x1a": (*editor).suspend,
	"\t":   (*editor).complete,
}

func (e *editor) home()      { e.at = 0 }
func (e *editor) toEnd()     { e.at = len(e.text) }
func (e *editor) left()      { e.at = e.before() }
func (e *editor) right()     { e.at = e.after() }
func (e *editor) wordLeft()  { e.at = e.wordBefore() }
func (e *editor) wordRight() { e.at = e.wordAfter() }

// before returns where the character in front of the cursor begins.
func (e *editor) before() (at int) {
	for next := 0; next < e.at; {
		cluster, _ := firstCluster(e.text[next:])
		at, next = next, next+len(cluster)
	}
	return at
}

// after returns where the character at the cursor ends, or the end of the text.
func (e *editor) after() int {
	if e.at == len(e.text) {
		return e.at
	}
	cluster, _ := firstCluster(e.text[e.at:])
	return e.at + len(cluster)
}

// wordBefore returns where the word in front of the cursor begins.
func (e *editor) wordBefore() int {
	front := strings.TrimRightFunc(e.text[:e.at], unicode.IsSpace)
	return strings.LastIndexFunc(front, unicode.IsSpace) + 1
}

// wordAfter returns where the word behind the cursor ends.
func (e *editor) wordAfter() int {
	rest := e.text[e.at:]
	skipped := len(rest) - len(strings.TrimLeftFunc(rest, unicode.IsSpace))
	if n := strings.IndexFunc(rest[skipped:], unicode.IsSpace); n >= 0 {
		return e.at + skipped + n
	}
	return len(e.text)
}

// cut removes text.
func (e *editor) cut(from, to int) { e.text, e.at = e.text[:from]+e.text[to:], from }

// kill removes text, which Ctrl-Y inserts again.
func (e *editor) kill(from, to int) {
	if from < to {
		e.killed = e.text[from:to]
	}
	e.cut(from, to)
}

// put inserts text at the cursor.
func (e *editor) put(text string) {
	e.text = e.text[:e.at] + text + e.text[e.at:]
	e.at += len(text)
}

// insert inserts a character. At the end of a row with room it is written without drawing the rest
// again.
func (e *editor) insert(key string) {
	last := e.at == len(e.text)
	e.put(key)
	cells := cellsOf(key)
	if width, _ := e.size(); !last || cells == 0 || key != shown(key) || e.column+cells >= width {
		e.draw()
		return
	}
	e.drawing.WriteString(key)
	e.drawn[len(e.drawn)-1] += key
	e.column += cells
}

// recall shows an entry of the history; the one behind the newest is the draft.
func (e *editor) recall(entry int) {
	if entry < 0 || entry > len(e.history) {
		return
	}
	if e.entry == len(e.history) {
		e.draft = e.text
	}
	e.entry, e.text = entry, e.draft
	if entry < len(e.history) {
		e.text = e.history[entry]
	}
	e.at = len(e.text)
}

// search shows the newest entry in front of the current one with the text that was typed.
func (e *editor) search() {
	if e.query == "" {
		e.query = e.text
	}
	query := e.query
	for i := e.entry - 1; i >= 0; i-- {
		if strings.Contains(e.history[i], query) && e.history[i] != e.text {
			e.recall(i)
			return
		}
	}
}

// complete completes a command of a chat, or the name of its file, as far as it is unambiguous.
func (e *editor) complete() {
	name, file, hasFile := strings.Cut(e.text, " ")
	var all []string
	switch {
	case e.at < len(e.text) || !strings.HasPrefix(e.text, "/"):
		return
	case !hasFile:
		for _, c := range commands {
			if strings.HasPrefix(c, name) {
				all = append(all, c+" ")
			}
		}
	case name == "/save" || name == "/load":
		entries, err := os.ReadDir(filepath.Dir(file + "x"))
		if err != nil {
			return
		}
		dir, _ := filepath.Split(file)
		for _, d := range entries {
			path := dir + d.Name()
			if d.IsDir() {
				path += "/"
			}
			if strings.HasPrefix(path, file) && path == Visible(path) {
				all = append(all, name+" "+path)
			}
		}
	}
	if len(all) == 0 {
		return
	}
	common := all[0]
	for _, text := range all[1:] {
		for !strings.HasPrefix(text, common) {
			_, size := utf8.DecodeLastRuneInString(common)
			common = common[:len(common)-size]
		}
	}
	e.text, e.at = common, len(common)
}

// suspend stops the process as Ctrl-Z does outside of raw mode, until the shell continues it.
func (e *editor) suspend() {
	e.drawing.WriteString("\r\n" + pasteOff)
	if e.show() != nil || e.restore() != nil {
		return
	}
	_ = syscall.Kill(0, syscall.SIGTSTP) // the error leaves the process running
	_, _ = term.MakeRaw(int(e.tty.Fd()))
	e.drawing.WriteString(pasteOn)
	e.drawn = nil
}

// paste inserts what the terminal pastes, with its line ends.
func (e *editor) paste(ctx context.Context) error {
	var b strings.Builder
	for {
		key, err := e.key(ctx)
		if err != nil {
			return err
		}
		if key == pasteEnd {
			break
		}
		b.WriteString(key)
	}
	e.put(strings.ReplaceAll(strings.ReplaceAll(b.String(), "\r\n", "\n"), "\r", "\n"))
	e.draw()
	return nil
}

// key returns the next key: a character, a control character, or a sequence that begins with ESC.
func (e *editor) key(ctx context.Context) (string, error) {
	b, err := e.next(ctx, nil)
	if err != nil {
		return "", err
	}
	key := []byte{b}
	for b >= utf8.RuneSelf && !utf8.FullRune(key) {
		if b, err = e.next(ctx, nil); err != nil {
			return "", err
		}
		key = append(key, b)
	}
	if key[0] != 0x1b {
		return strings.ToValidUTF8(string(key), "\ufffd"), nil
	}
	alone := time.NewTimer(escapeDelay)
	defer alone.Stop()
	for len(key) < maxSequence {
		b, err := e.next(ctx, alone.C)
		if err != nil {
			return "", err
		}
		if b == 0 {
			break
		}
		key = append(key, b)
		if len(key) == 2 && (b == '[' || b == 'O') {
			continue
		}
		if len(key) == 2 || b >= 0x40 && b <= 0x7e {
			break
		}
	}
	return string(key), nil
}

// next returns the next byte of the input, or 0 when late fires first. It draws the text again
// when the terminal's size changes.
func (e *editor) next(ctx context.Context, late <-chan time.Time) (byte, error) {
	for {
		select {
		case b, ok := <-e.keys:
			if !ok {
				return 0, io.EOF
			}
			return b, nil
		case <-e.resized:
			e.draw()
			if err := e.show(); err != nil {
				return 0, err
			}
		case <-e.interrupt:
			return 0, ErrInterrupted
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-late:
			return 0, nil
		}
	}
}

// size returns the terminal's columns and rows.
func (e *editor) size() (width, height int) {
	width, height, err := term.GetSize(int(e.tty.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

// shown returns how text of a message is shown.
func shown(text string) string { return Visible(strings.ReplaceAll(text, "\t", "    ")) }

// draw draws the prompt and the text. Of more rows than the terminal has, those around the cursor
// are drawn.
func (e *editor) draw() {
	width, height := e.size()
	rows, _ := layout(shown(e.text), cellsOf(e.prompt), width)
	until, column := layout(shown(e.text[:e.at]), cellsOf(e.prompt), width)
	at := len(until) - 1
	first := max(0, at-height+1)
	rows = rows[first:min(len(rows), first+height)]
	if up := e.rowsAbove(width); up > 0 {
		fmt.Fprintf(&e.drawing, "\x1b[%dA", up)
	}
	e.drawing.WriteString("\r\x1b[J")
	if first == 0 {
		e.drawing.WriteString(e.with.paint(e.prompt))
	}
	e.drawing.WriteString(strings.Join(rows, "\r\n"))
	e.drawn, e.under, e.column = until[first:], "", column
	if rest := strings.TrimPrefix(rows[min(at-first, len(rows)-1)], until[at]); rest != "" {
		e.under, _ = firstCluster(rest)
	}
	if first == 0 {
		e.drawn[0] = e.prompt + e.drawn[0]
	}
	if e.at == len(e.text) {
		return
	}
	if up := len(rows) - len(e.drawn); up > 0 {
		fmt.Fprintf(&e.drawing, "\x1b[%dA", up)
	}
	e.drawing.WriteByte('\r')
	if column > 0 {
		fmt.Fprintf(&e.drawing, "\x1b[%dC", column)
	}
}

// rowsAbove returns the rows between the first one that is drawn and the cursor's. A terminal that
// became narrower has wrapped rows that are longer than its width.
func (e *editor) rowsAbove(width int) int {
	above := -1
	for i, row := range e.drawn {
		if i == len(e.drawn)-1 {
			row += e.under
		}
		rows, column := layout(row, 0, width)
		if above += len(rows); column == 0 && len(rows) > 1 {
			above-- // the last one is empty until a further character comes
		}
	}
	return max(0, above)
}

// layout breaks text into rows of at most width cells, the first of which has indent cells less,
// and returns the column behind the last character.
func layout(text string, indent, width int) (rows []string, column int) {
	column, from, next := indent, 0, 0
	for next < len(text) {
		cluster, cells := firstCluster(text[next:])
		if cluster == "\n" || column+cells > width {
			rows = append(rows, text[from:next])
			from, column = next, 0
			if cluster == "\n" {
				from++
			}
		}
		if cluster != "\n" {
			column += cells
		}
		next += len(cluster)
	}
	rows = append(rows, text[from:])
	if column >= width {
		rows, column = append(rows, ""), 0
	}
	return rows, column
}

// show writes what was drawn.
func (e *editor) show() error {
	_, err := e.out.Write(e.drawing.Bytes())
	e.drawing.Reset()
	return err
}

// load reads the history's file, which has a JSON string a line. A file that cannot be read is an
// empty history.
func (e *editor) load() {
	if e.path == "" {
		return
	}
	text, err := regular.ReadFile(e.path, historyBytes)
	if err != nil {
		return
	}
	for line := range bytes.Lines(text) {
		var entry string
		if json.Unmarshal(line, &entry) == nil {
			e.history = append(e.history, entry)
		}
	}
	if len(e.history) > historyLines {
		e.history = slices.Clone(e.history[len(e.history)-historyLines:])
		// The error leaves a longer file.
		_ = os.WriteFile(e.path, historyText(e.history...), 0o600)
	}
}

// historyText returns the lines of entries in the history's file.
func historyText(entries ...string) (text []byte) {
	for _, entry := range entries {
		line, err := json.Marshal(entry)
		if err != nil {
			panic("console: " + err.Error()) // a string has a JSON form
		}
		text = append(append(text, line...), '\n')
	}
	return text
}

// remember adds a message to the history and its file, unless it repeats the newest. After an error
// the file is left alone, so that it is reported once.
func (e *editor) remember(text string) error {
	if text == "" || len(e.history) > 0 && e.history[len(e.history)-1] == text {
		return nil
	}
	e.history = append(e.history, text)
	if e.path == "" {
		return nil
	}
	err := appendFile(e.path, historyText(text))
	if err != nil {
		e.path = ""
	}
	return err
}

// appendFile appends text to a file of the user, and creates it and its folder.
func appendFile(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}
