package config

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A removed flag is accepted with one warning, from each place, and a renamed one keeps its effect.
func TestRetired(t *testing.T) {
	rows := []RetiredFlag{
		{Name: "lookahead", Commands: []string{"x"}, Release: "0.9.0", Why: "steps overlap by themselves"},
		{Name: "fast", Commands: []string{"x"}, Release: "0.9.0", Switch: true, Why: "it is the default"},
		{Name: "most", Commands: []string{"x"}, Release: "0.9.0", Now: "max-n"},
		{Name: "elsewhere", Commands: []string{"y"}, Release: "0.9.0", Why: "it was never useful"},
	}
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "x.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const (
		lookahead = "--lookahead has no effect since release 0.9.0: steps overlap by themselves; the next release refuses it"
		fast      = "--fast has no effect since release 0.9.0: it is the default; the next release refuses it"
		most      = "--most is called --max-n since release 0.9.0; the next release refuses the old name"
	)
	for name, c := range map[string]struct {
		args, env []string
		n         int
		warnings  []string
		err       string
	}{
		"none":                 {nil, nil, 1, nil, ""},
		"flag":                 {[]string{"--lookahead", "3", "--fast"}, nil, 1, []string{lookahead, fast}, ""},
		"variable":             {nil, []string{"TANDEM_LOOKAHEAD=3"}, 1, []string{lookahead}, ""},
		"key":                  {[]string{"--config", file("lookahead: 3\n")}, nil, 1, []string{lookahead}, ""},
		"underscores":          {[]string{"--config", file("look_ahead: 3\n")}, nil, 1, nil, "lookahead?"},
		"renamed flag":         {[]string{"--most", "3"}, nil, 3, []string{most}, ""},
		"renamed variable":     {nil, []string{"TANDEM_MOST=4"}, 4, []string{most}, ""},
		"both variables":       {nil, []string{"TANDEM_MOST=4", "TANDEM_MAX_N=5"}, 5, []string{most}, ""},
		"renamed key":          {[]string{"--config", file("most: 6\n")}, nil, 6, []string{most}, ""},
		"both keys":            {[]string{"--config", file("most: 6\nmax-n: 7\n")}, nil, 6, []string{most}, "max-n is set on line 1 already"},
		"flag before variable": {[]string{"--max-n", "2"}, []string{"TANDEM_MOST=4"}, 2, []string{most}, ""},
		"bad value":            {[]string{"--most", "many"}, nil, 1, []string{most}, "max-n"},
		"of another command":   {[]string{"--elsewhere", "1"}, nil, 1, nil, "elsewhere"},
	} {
		t.Run(name, func(t *testing.T) {
			s := New("x [flags]", "", "tandem x", io.Discard)
			var n int
			s.CountVar(&n, "max-n", 1, 1, "")
			s.declareRetired(rows)
			err := s.Resolve(c.args, c.env)
			if c.err == "" && err != nil || c.err != "" && (!errors.Is(err, ErrValue) || !strings.Contains(err.Error(), c.err)) {
				t.Fatalf("%v, want %q", err, c.err)
			}
			if n != c.n || !slices.Equal(s.Warnings(), c.warnings) {
				t.Errorf("max-n %d, warnings %q; want %d, %q", n, s.Warnings(), c.n, c.warnings)
			}
		})
	}
}

// Neither the help nor --dry-run shows a removed flag.
func TestRetiredHidden(t *testing.T) {
	for arg, want := range map[string]error{"--dry-run": ErrDryRun, "--help": ErrHelp} {
		var out strings.Builder
		s := New("x [flags]", "", "tandem x", &out)
		s.declareRetired([]RetiredFlag{{Name: "lookahead", Commands: []string{"x"}, Release: "0.9.0", Why: "steps overlap"}})
		if err := s.Resolve([]string{"--lookahead", "3", arg}, nil); !errors.Is(err, want) || strings.Contains(out.String(), "lookahead") {
			t.Errorf("%s: %v, %s", arg, err, out.String())
		}
	}
}
