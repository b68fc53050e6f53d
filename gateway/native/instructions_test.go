//go:build !race

package native

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
)

// The environment by which TestParsedTokenInstructions runs itself: the number of tokens, and
// whether a parser reads them.
const (
	countedTokens = "TANDEM_TEST_TOKENS"
	countedParse  = "TANDEM_TEST_PARSE"
)

// A token of a chat with tools takes at most 1.3 times the instructions of one without, from the
// node's event to the client's. QEMU counts them, because virtual machines often have no counter.
func TestParsedTokenInstructions(t *testing.T) {
	if n, _ := strconv.Atoi(os.Getenv(countedTokens)); n > 0 {
		x := testRequest(t)
		if os.Getenv(countedParse) != "" {
			parseHermes(t, x)
		}
		e, at := nodes.Event{Kind: nodes.Token, Attempt: 1, Token: 'q'}, time.Now()
		for range n {
			if x.buf = x.buf[:0]; x.handle(&e, at) != nil || len(x.buf) == 0 {
				t.Fatal("no event")
			}
		}
		return
	}
	if testing.Short() {
		t.Skip("an emulator runs 24,000 tokens")
	}
	emulator, err := exec.LookPath("qemu-" + map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH])
	if err != nil {
		t.Skip("qemu-user is not installed")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	plugin := filepath.Join(t.TempDir(), "count.so")
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O2", "-o", plugin, "testdata/count.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	perToken := func(parse string) float64 {
		const few, many = 1000, 11000
		return float64(instructions(t, emulator, plugin, many, parse)-instructions(t, emulator, plugin, few, parse)) / (many - few)
	}
	plain, parsed := perToken(""), perToken("1")
	t.Logf("%.0f instructions a token, %.0f with tools: %.2f", plain, parsed, parsed/plain)
	if plain < 100 || parsed > 1.3*plain {
		t.Errorf("a token takes %.0f instructions, %.0f with tools", plain, parsed)
	}
}

// instructions returns how many instructions this test takes for n tokens.
func instructions(t *testing.T, emulator, plugin string, n int, parse string) int {
	cmd := exec.Command(emulator, "-plugin", plugin, os.Args[0], "-test.run=^TestParsedTokenInstructions$")
	cmd.Env = append(os.Environ(), fmt.Sprint(countedTokens, "=", n), countedParse+"="+parse, "GOGC=off", "GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1")
	out, err := cmd.CombinedOutput()
	if m := regexp.MustCompile(`\ninstructions (\d+)\n`).FindSubmatch(out); err == nil && m != nil {
		count, err := strconv.Atoi(string(m[1]))
		if err == nil {
			return count
		}
	}
	t.Fatalf("%v: %s", err, out)
	return 0
}
