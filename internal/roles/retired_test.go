package roles

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
)

// releaseBefore is the release whose flags this one has, or removes with a row of config.Retired.
const releaseBefore = "0.1.0"

// Each flag of the release before is a flag of the same command, or a row of config.Retired. Rows
// are of the release that main.go precedes: the next release refuses their flags.
func TestNoFlagGoesUnannounced(t *testing.T) {
	source, err := os.ReadFile("../../main.go")
	if err != nil {
		t.Fatal(err)
	}
	next := regexp.MustCompile(`version = "([0-9.]+)-dev"`).FindSubmatch(source)
	if next == nil {
		t.Fatal("main.go names no release")
	}
	flags, err := os.ReadFile("testdata/flags-" + releaseBefore + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	had := map[string][]string{} // commands, by flag
	for line := range strings.Lines(string(flags)) {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(f) != 2 {
			continue
		}
		had[f[0]] = append(had[f[0]], strings.Split(f[1], ",")...)
	}
	if len(had) < 150 {
		t.Fatalf("release %s has only %d flags", releaseBefore, len(had))
	}
	commands := table()
	has := func(command, flag string) bool {
		if command == "plan" { // which had one kind
			command = "plan memory"
		}
		at := slices.IndexFunc(commands, func(c cli.Command) bool { return c.Name == command })
		return at >= 0 && commands[at].Declared(commands).Lookup(flag) != nil
	}
	retired := map[string]bool{}
	for _, row := range config.Retired {
		if row.Release != string(next[1]) {
			t.Errorf("--%s was removed by release %q: release %s refuses it, so that its row goes", row.Name, row.Release, next[1])
		}
		if (row.Now == "") == (row.Why == "") || strings.HasSuffix(row.Why, ".") {
			t.Errorf("--%s: want a new name or a reason without a full stop: %+v", row.Name, row)
		}
		for _, command := range row.Commands {
			retired[command+" "+row.Name] = true
			switch {
			case has(command, row.Name):
				t.Errorf("`tandem %s` has --%s, which is a row of config.Retired", command, row.Name)
			case !slices.Contains(had[row.Name], command):
				t.Errorf("`tandem %s` of release %s does not have --%s, a row of config.Retired", command, releaseBefore, row.Name)
			case row.Now != "" && !has(command, row.Now):
				t.Errorf("`tandem %s` does not have --%s, the new name of --%s", command, row.Now, row.Name)
			}
		}
	}
	for flag, all := range had {
		for _, command := range all {
			if command == "all" {
				command = "decode"
			}
			if !has(command, flag) && !retired[command+" "+flag] {
				t.Errorf("`tandem %s` of release %s has --%s, and config.Retired has no row for it", command, releaseBefore, flag)
			}
		}
	}
}
