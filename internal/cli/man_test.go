package cli

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// The page names every command and flag, and its text cannot be taken for macros.
func TestManualPage(t *testing.T) {
	table := append(Table{New("odd", "[flags]", ".SH is no macro here, 'nor this \\ one.", "tandem odd", func(v *Invocation) error {
		v.String("dash-dot", ".5", "a - b")
		_, err := v.Parse(0)
		return err
	})}, Tools()...)
	at := time.Unix(1e9, 0).UTC()
	page := table.man("1.2.3", at)
	if again := table.man("1.2.3", at); again != page {
		t.Error("two pages of one table differ")
	}
	for i := range table {
		if want := ".SS " + manEscape("tandem "+table[i].Name); !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
		table[i].visible(table, func(f *pflag.Flag) {
			if want := manEscape("--" + f.Name); !strings.Contains(page, want) {
				t.Errorf("the page lacks %s of tandem %s", want, table[i].Name)
			}
		})
	}
	for _, want := range []string{`.TH TANDEM 1 "2001-09-09" "tandem 1.2.3"`, `\&.SH is no macro`, `\e one`, "(default .5)"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	for l := range strings.SplitSeq(page, "\n") {
		if macro, _, _ := strings.Cut(l, " "); strings.HasPrefix(l, ".") && !strings.Contains(" .TH .ad .SH .SS .PP .RS .RE .nf .fi .TP ", " "+macro+" ") {
			t.Errorf("%q would be read as a macro", l)
		}
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		return
	}
	cmd := exec.Command(groff, "-Kutf8", "-man", "-ww", "-Tutf8")
	cmd.Stdin = strings.NewReader(page)
	var warnings strings.Builder
	cmd.Stderr = &warnings
	if err := cmd.Run(); err != nil || warnings.Len() > 0 {
		t.Errorf("groff: %v: %s", err, warnings.String())
	}
}
