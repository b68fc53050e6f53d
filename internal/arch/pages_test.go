package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// foreignMessages are messages on docs/troubleshooting.md that come from libraries.
var foreignMessages = []string{
	"address already in use",                      // the system
	"no installed keys could decrypt the message", // memberlist
	"certificate signed by unknown authority",     // crypto/x509
}

// Each message that docs/troubleshooting.md explains is one of the program.
func TestTroubleshootingQuotesMessages(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	var source strings.Builder
	for _, f := range goFiles(t) {
		if !f.test() {
			source.Write(f.text)
		}
	}
	code := source.String()
	quoted := regexp.MustCompile("`([^`]+)`")
	n, messages := 0, false
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			messages = false
			continue
		}
		if strings.Contains(cells[1], "message") {
			messages = true
			continue
		}
		marks := quoted.FindAllStringSubmatch(cells[1], -1)
		if !messages || len(marks) == 0 || strings.Contains(cells[1], "prompts are never") {
			continue
		}
		n++
		message := marks[len(marks)-1][1]
		if !slices.Contains(foreignMessages, message) && !strings.Contains(code, message) {
			t.Errorf("docs/troubleshooting.md explains %q, which no code writes", message)
		}
	}
	if n < 30 {
		t.Errorf("found %d messages", n)
	}
}

// The relative links of the pages lead to files, and links within pages to headings.
func TestLinksOfPages(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"`)
	pages, err := filepath.Glob(filepath.Join(root, "docs/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md"} {
		pages = append(pages, filepath.Join(root, name))
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			target := m[1] + m[2]
			if strings.Contains(target, "://") {
				continue
			}
			file, heading, _ := strings.Cut(target, "#")
			to := page
			if file != "" {
				to = filepath.Join(filepath.Dir(page), file)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s, which is not there", page, target)
				continue
			}
			if heading != "" && !slices.Contains(headings(t, to), heading) {
				t.Errorf("%s links to %s, which has no such heading", page, target)
			}
		}
	}
}

// headings returns the anchors that GitHub gives to a page's headings.
func headings(t *testing.T, page string) []string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	drop := regexp.MustCompile(`[^a-z0-9 _-]`)
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "#"); ok {
			name = strings.ToLower(strings.TrimSpace(strings.TrimLeft(name, "#")))
			all = append(all, strings.ReplaceAll(drop.ReplaceAllString(name, ""), " ", "-"))
		}
	}
	return all
}
