package console

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/creack/pty"
)

// screen is a terminal that wraps lines again when its width changes, as most do.
type screen struct {
	width       int
	rows        []screenRow
	row, column int // of the cursor
}

// screenRow is a row of cells. A wide character has an empty cell behind it.
type screenRow struct {
	cells     []string
	continues bool // the row above, which the terminal wrapped
}

var sequence = regexp.MustCompile(`^\x1b\[([0-9]*)([ACJm])`)

// Write implements io.Writer. It knows the sequences that the editor draws with.
func (s *screen) Write(drawn []byte) (int, error) {
	text := string(drawn)
	for text != "" {
		if m := sequence.FindStringSubmatch(text); m != nil {
			n, _ := strconv.Atoi(m[1])
			switch m[2] {
			case "A":
				s.row = max(0, s.row-n)
			case "C":
				s.column = min(s.column+n, s.width-1)
			case "J":
				s.rows = s.rows[:s.row+1]
				r := &s.rows[s.row]
				r.cells = r.cells[:min(s.column, len(r.cells))]
			}
			text = text[len(m[0]):]
			continue
		}
		cluster, cells := firstCluster(text)
		switch cluster {
		case "\r":
			s.column = 0
		case "\n":
			if s.row++; s.row == len(s.rows) {
				s.rows = append(s.rows, screenRow{})
			}
		default:
			r := &s.rows[s.row]
			if s.column+cells > s.width || cells < 1 {
				return 0, fmt.Errorf("%q is drawn in column %d of %d", cluster, s.column, s.width)
			}
			for len(r.cells) < s.column {
				r.cells = append(r.cells, " ")
			}
			r.cells = append(r.cells[:s.column], append([]string{cluster, ""}[:cells], r.cells[min(len(r.cells), s.column+cells):]...)...)
			s.column += cells
		}
		text = text[len(cluster):]
	}
	return len(drawn), nil
}

// resize changes the width. The cursor stays at its character.
func (s *screen) resize(width int) {
	var rows []screenRow
	var row, column int
	for i := 0; i < len(s.rows); {
		line := slices.Clone(s.rows[i].cells)
		at := -1 // of the cursor in the line
		if i == s.row {
			at = s.column
		}
		for i++; i < len(s.rows) && s.rows[i].continues; i++ {
			if i == s.row {
				at = len(line) + s.column
			}
			line = append(line, s.rows[i].cells...)
		}
		for first := true; first || len(line) > 0; first = false {
			n := min(width, len(line))
			if n < len(line) && line[n] == "" {
				n-- // a wide character does not fit
			}
			if at >= 0 && (at < n || len(line) == n) {
				row, column, at = len(rows), min(at, width-1), -1
			}
			rows = append(rows, screenRow{line[:n:n], !first})
			line, at = line[n:], max(-1, at-n)
		}
	}
	s.width, s.rows, s.row, s.column = width, rows, row, column
}

// texts returns the rows without the blanks at their ends.
func (s *screen) texts() (texts []string) {
	for _, r := range s.rows {
		texts = append(texts, strings.TrimRight(strings.Join(r.cells, ""), " "))
	}
	return texts
}

// After every key and every change of the width the terminal shows the prompt and the text once, and
// what was above them.
func TestEditorResizes(t *testing.T) {
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	const answer = "an answer of several words"
	keys := []string{"\x1b[D", "\x1b[C", "\x01", "\x05", "\x7f", "\x04", "\x1b\r", "\x1bb", "\x17", "\x19"}
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		s := &screen{width: 40, rows: []screenRow{{cells: strings.Split(answer, "")}, {}}, row: 1}
		e := &editor{tty: slave, out: s, prompt: "> ", resized: make(chan os.Signal, 1)}
		if err := pty.Setsize(master, &pty.Winsize{Rows: 500, Cols: 40}); err != nil {
			t.Fatal(err)
		}
		e.draw()
		for step := range 200 {
			what := ""
			switch k := rnd.IntN(20); {
			case k < 3:
				width := 4 + rnd.IntN(60)
				what = fmt.Sprintf("%d columns", width)
				if err := pty.Setsize(master, &pty.Winsize{Rows: 500, Cols: uint16(width)}); err != nil {
					t.Fatal(err)
				}
				s.resize(width)
				e.draw()
			case k < 6:
				what = keys[rnd.IntN(len(keys))]
				actions[what](e)
				e.draw()
			default:
				what = []string{"a", "b", " ", "é", "日", "🙂"}[rnd.IntN(6)]
				e.insert(what)
			}
			if err := e.show(); err != nil {
				t.Fatalf("seed %d, step %d, %q: %v", seed, step, what, err)
			}
			above, _ := layout(answer, 0, s.width)
			if above[len(above)-1] == "" {
				above = above[:len(above)-1]
			}
			want, _ := layout(e.prompt+e.text, 0, s.width)
			front, column := layout(e.prompt+e.text[:e.at], 0, s.width)
			want = append(above, want...)
			for i := range want {
				want[i] = strings.TrimRight(want[i], " ")
			}
			if got := s.texts(); !slices.Equal(got, want) || s.row != len(above)+len(front)-1 || s.column != column {
				t.Fatalf("seed %d, step %d, %q: the cursor is in row %d, column %d, want %d, %d;\n got %q\nwant %q", seed, step, what, s.row, s.column, len(above)+len(front)-1, column, got, want)
			}
		}
	}
}

// A history that cannot be kept is reported once, and the messages of this run stay.
func TestHistoryNotKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e := &editor{path: filepath.Join(file, "chat.history")}
	if err := e.remember("a"); err == nil {
		t.Error("a file that cannot be is written")
	}
	if err := e.remember("b"); err != nil || len(e.history) != 2 {
		t.Errorf("%v, history %q", err, e.history)
	}
}
