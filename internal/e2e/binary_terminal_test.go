//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// hostileOutputs are texts that would change a terminal if they reached it as they are.
func hostileOutputs() []string {
	all := []string{
		"\x1b[31m", "\x1b[1;5;7m", "\x1b[2J", "\x1b[H", "\x1b[3J", "\x1b[?1049h", "\x1b[?25l", "\x1b[?1000h\x1b[?1006h", "\x1b[?2004h", "\x1b[?1004h",
		"\x1b[?5h", "\x1b[?7l", "\x1b[4h", "\x1b[20h", "\x1b[5;10r", "\x1b[?6h", "\x1b[999B", "\x1b[6n", "\x1b[c", "\x1b[>c", "\x1b[5n", "\x1b[21t", "\x1b[8;1;1t", "\x1b[?1$p", "\x1b[?u", "\x1b[>1u", "\x1b[!p", "\x1b[12l",
		"\x1b]0;title\x07", "\x1b]2;title\x1b\\", "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "\x1b]52;c;cm0gLXJm\x07", "\x1b]4;1;rgb:ff/00/00\x07", "\x1b]11;?\x07", "\x1b]1337;File=inline=1:AAAA\x07", "\x1b]9;note\x07", "\x1b]777;notify;a;b\x07",
		"\x1bP+q544e\x1b\\", "\x1bP1$r0m\x1b\\", "\x1bPq#0;2;0;0;0\x1b\\", "\x1b_Ga=T;AAAA\x1b\\", "\x1b^private\x1b\\", "\x1bXstring\x1b\\",
		"\x1bc", "\x1b7\x1b8", "\x1b=", "\x1b#8", "\x1b(0lqk", "\x1bN\x1bO", "\x0e\x0f", "\x05", "\x07\x07\x07", "\x08\x08\x08\x08", "\x0b\x0c", "\x00\x01\x02", "\x7f\x7f",
		"\u009b31m", "\u009d0;title\u009c", "\u0090q\u009c", "\u0085\u008d\u0084", "secret\rshown", "\x18\x1a",
		"\u202etxt.exe\u202c", "\u2066a\u2067b\u2068c\u2069", "\u200e\u200f\u061c", "\u2028\u2029", "\ufeff\u2060", "\U000e0041\U000e0042",
	}
	return all
}

// hostileServer answers the message "N K" with hostile output N between two words, K characters a
// part; 0: in one part.
func hostileServer(t *testing.T, outputs []string) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var request struct {
			Messages []struct{ Content string }
		}
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
			http.Error(w, "\x1b[2J"+err.Error(), http.StatusBadRequest)
			return
		}
		n, size, _ := strings.Cut(request.Messages[len(request.Messages)-1].Content, " ")
		at, err := strconv.Atoi(n)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"message": "\x1b]0;refused\x07"}})
			return
		}
		k, _ := strconv.Atoi(size)
		text := []rune("begin " + outputs[at] + " end")
		for _, part := range slices.Collect(slices.Chunk(text, max(1, map[bool]int{true: len(text), false: k}[k == 0]))) {
			for _, field := range []string{"content", "reasoning"} {
				if field == "reasoning" && at%2 == 0 {
					continue
				}
				body, _ := json.Marshal(map[string]any{"choices": []any{map[string]any{"delta": map[string]string{field: string(part)}}}})
				fmt.Fprintf(w, "data: %s\n\n", body)
			}
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s
}

var (
	painting = regexp.MustCompile(`\x1b\[[0-9;]*m`)
	editing  = regexp.MustCompile(`\x1b\[(?:\?2004[hl]|[0-9]*[ABCDJ])`)
)

// wantHarmless reports an error if output has a control character but line ends and tabs, once the
// chat's own sequences are removed, or if it ends with a style.
func wantHarmless(t *testing.T, what, output string) {
	t.Helper()
	if styles := painting.FindAllString(output, -1); len(styles) > 0 && styles[len(styles)-1] != "\x1b[0m" {
		t.Errorf("%s: the style %q is left", what, styles[len(styles)-1])
	}
	rest := editing.ReplaceAllString(painting.ReplaceAllString(output, ""), "")
	for _, r := range rest {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) && !strings.ContainsRune("\n\r\t", r) {
			t.Errorf("%s: %U reached the terminal: %q", what, r, output)
			return
		}
	}
}

// modes returns the settings of a pseudo-terminal.
func modes(t *testing.T, f *os.File) unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}

// Hostile outputs of a model leave the terminal as it was: in a conversation and alone, whole and
// split anywhere, as text and as reasoning.
func TestBinaryChatHostile(t *testing.T) {
	t.Parallel()
	outputs := hostileOutputs()
	if len(outputs) < 60 {
		t.Fatalf("%d outputs", len(outputs))
	}
	server := hostileServer(t, outputs)
	chat := startTerminal(t, "chat", "--url", server.URL, "--history", "none")
	chat.expect("> ")
	raw := modes(t, chat.file)
	for n, output := range outputs {
		for _, k := range []int{0, 1, 2} {
			from := chat.at
			chat.enter(fmt.Sprintf("%d %d\r", n, k))
			chat.expect("begin")
			chat.expect("end")
			chat.expect("\x1b[?2004h")
			answer := chat.out.String()[from:chat.at]
			wantHarmless(t, fmt.Sprintf("%q in parts of %d", output, k), answer)
			body := answer[strings.Index(answer, "\x1b[?2004l"):]
			if own := painting.FindAllString(body, -1); n%2 == 0 && len(own) > 0 {
				t.Errorf("%q styled the answer: %q", output, body)
			}
			chat.expect("> ")
		}
	}
	chat.enter("refuse\r")
	chat.expect("error:")
	chat.expect("refused")
	chat.expect("> ")
	if now := modes(t, chat.file); now != raw {
		t.Errorf("the terminal's modes changed from %+v to %+v", raw, now)
	}
	chat.enter(ctrlD)
	chat.wantExit(0)
	wantHarmless(t, "all", chat.out.String())

	for n := 0; n < len(outputs); n += 7 {
		chat := startTerminal(t, "chat", "--url", server.URL, "--verbose", strconv.Itoa(n), "1")
		chat.wantExit(0)
		time.Sleep(10 * time.Millisecond)
		wantHarmless(t, outputs[n], chat.out.String())
	}
}

// However a chat ends, the terminal has the modes that it had before.
func TestBinaryChatRestores(t *testing.T) {
	t.Parallel()
	server, _ := slowServer(t)
	for name, end := range map[string]func(*terminal){
		"Ctrl-C":               func(c *terminal) { c.enter(ctrlC) },
		"Ctrl-D":               func(c *terminal) { c.enter(ctrlD) },
		"/exit":                func(c *terminal) { c.enter("/exit\r") },
		"SIGTERM":              func(c *terminal) { c.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGTERM in an answer": func(c *terminal) { c.enter("slow\r"); c.expect("w1 "); c.cmd.Process.Signal(syscall.SIGTERM) },
	} {
		t.Run(name, func(t *testing.T) {
			master, slave, err := pty.Open()
			if err != nil {
				t.Fatal(err)
			}
			defer slave.Close()
			before := modes(t, slave)
			c := &terminal{t: t, file: master, cmd: exec.Command(binary(t), "chat", "--url", server.URL, "--history", "none"), ended: make(chan error, 1)}
			c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = slave, slave, slave
			c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			if err := c.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			go io.Copy(&c.out, master)
			go func() { c.ended <- c.cmd.Wait() }()
			t.Cleanup(func() { c.cmd.Process.Kill(); master.Close() })
			c.expect("> ")
			if modes(t, slave) == before {
				t.Error("the chat does not edit lines")
			}
			end(c)
			<-c.ended
			if after := modes(t, slave); after != before {
				t.Errorf("the modes were %+v and are %+v", before, after)
			}
		})
	}
}

// --watch shows the state again and again, also while the gateway does not answer.
func TestBinaryStatusWatch(t *testing.T) {
	t.Parallel()
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked++; asked == 2 {
			http.Error(w, "no", http.StatusBadGateway)
			return
		}
		fmt.Fprintf(w, `{"version":"1","ready":true,"nodes":[{"id":"d%d\u001b[2J","role":"decode","connected":true,"ready":true,"output_tokens_per_s":%d.5}]}`, asked, asked)
	}))
	t.Cleanup(server.Close)
	watch := startTerminal(t, "status", "--watch", "--interval", "100ms", "--url", server.URL)
	for _, want := range []string{"d1", "1.5", "502", "d3", "3.5", "d4"} {
		watch.expect(want)
	}
	watch.enter(ctrlC)
	<-watch.ended
	if text := watch.out.String(); !strings.Contains(text, "\x1b[H") || strings.Contains(text, "\x1b[2J") {
		t.Errorf("watched as %q", text)
	}
	dumb := startTerminalOf(t, "dumb", "status", "--watch", "--interval", "100ms", "--url", server.URL)
	dumb.expect("ready")
	dumb.expect("ready")
	dumb.enter(ctrlC)
	<-dumb.ended
	if text := dumb.out.String(); strings.Contains(text, "\x1b") {
		t.Errorf("a terminal without a cursor gets %q", text)
	}
	if _, errOut, err := tandem(t, nil, "status", "--watch", "--interval", "1ms"); err == nil || !strings.Contains(errOut, "at least 100ms") {
		t.Errorf("an interval of 1ms: %v, %s", err, errOut)
	}
}

// Lines are edited: arrows, words, wide characters, history across chats, pastes of several lines.
func TestBinaryChatEdits(t *testing.T) {
	t.Parallel()
	server, asked := slowServer(t)
	history := filepath.Join(t.TempDir(), "folder", "history")
	sent := func(keys, want string) {
		t.Helper()
		chat := startTerminal(t, "chat", "--url", server.URL, "--history", history)
		chat.expect("> ")
		chat.enter(keys + "\r")
		chat.expect("answer 1")
		chat.expect("> ")
		chat.enter(ctrlD)
		chat.wantExit(0)
		var request struct {
			Messages []struct{ Content string }
		}
		if body := <-asked; json.Unmarshal([]byte(body), &request) != nil || request.Messages[0].Content != want {
			t.Errorf("%q sent %s, want %q", keys, body, want)
		}
	}
	left, right, up, down, home, del := "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[B", "\x1b[H", "\x1b[3~"
	sent("prefll"+left+left+"i", "prefill")
	sent("one two three"+"\x1b[1;5D"+"\x1b[1;5D"+"\x17"+home+"X"+right+del, "Xto three")
	sent("日本語"+"\x7f"+left+"x", "日x本")
	sent("a b c\x17\x17d\x19", "a db")
	sent(up, "a db")
	sent(up+up+up+down, "日x本")
	sent("pre"+"\x12", "prefill")
	sent("\x1b[200~first\r\nsecond\rthird\x1b[201~!", "first\nsecond\nthird!")
	sent("line\x1b\rtwo", "line\ntwo")
	sent("end"+right+del+"\x04", "end")
	sent("unknown \x1b[99~\x1b[1;9Zkeys\x1bz", "unknown keys")
	sent(up, "unknown keys")
	if info, err := os.Stat(history); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the history: %v, %v", info, err)
	}
	chat := startTerminal(t, "chat", "--url", server.URL, "--history", "none")
	chat.expect("> ")
	chat.enter("/he\t\r")
	chat.expect("/save FILE")
	chat.expect("> ")
	chat.enter("/save " + history[:len(history)-4] + "\t\r")
	chat.expect("exists")
	chat.enter(ctrlD)
	chat.wantExit(0)
}

// A message that is being written is drawn again when the terminal's width changes: from its first
// row, which the terminal may have wrapped.
func TestBinaryChatResizes(t *testing.T) {
	t.Parallel()
	server, asked := slowServer(t)
	chat := startTerminal(t, "chat", "--url", server.URL, "--history", "none")
	columns := func(n uint16) {
		if err := pty.Setsize(chat.file, &pty.Winsize{Rows: 24, Cols: n}); err != nil {
			t.Fatal(err)
		}
	}
	x := func(n int) string { return strings.Repeat("x", n) }
	chat.expect("> ")
	columns(30)
	chat.expect("\r\x1b[J")
	chat.expect("> ")
	chat.enter(x(40))
	chat.expect(x(28) + "\r\n" + x(12))
	columns(16)
	chat.expect("\x1b[2A\r\x1b[J")
	chat.expect(x(14) + "\r\n" + x(16) + "\r\n" + x(10))
	columns(60)
	chat.expect("\x1b[2A\r\x1b[J")
	chat.expect(x(40))
	chat.enter("\r")
	chat.expect("answer 1")
	if body := <-asked; !strings.Contains(body, `"`+x(40)+`"`) {
		t.Errorf("sent %s", body)
	}
	chat.enter(ctrlD)
	chat.wantExit(0)
}

// A terminal shows Markdown and dims reasoning; a pipe gets the text of the answer alone, and --json
// one object. --verbose has the times.
func TestBinaryChatShows(t *testing.T) {
	t.Parallel()
	// The end of an answer follows 20 ms after what this waits for: its rate is known then.
	var until atomic.Pointer[func()]
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		for i, part := range []string{`{"reasoning":"I th"}`, `{"reasoning_content":"ink"}`, `{"content":"# He"}`, `{"content":"ad\n**bo"}`, `{"content":"ld** and \u001b[2J\u202e` + "`code`" + `"}`} {
			if seen := until.Load(); seen != nil && i == 1 {
				(*seen)()
			}
			fmt.Fprintf(w, "data: {\"model\":\"m\",\"choices\":[{\"delta\":%s}]}\n\n", part)
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
		}
		io.WriteString(w, `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}`+"\n\n")
		if strings.Contains(string(body), `"include_usage":true`) {
			io.WriteString(w, `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9}}`+"\n\n")
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}))
	t.Cleanup(server.Close)
	shown := func(env string, args ...string) string {
		chat := &terminal{t: t, cmd: exec.Command(binary(t), append([]string{"chat", "hi", "--url", server.URL}, args...)...), ended: make(chan error, 1)}
		chat.cmd.Env = append(os.Environ(), "TERM=xterm", env)
		var err error
		if chat.file, err = pty.Start(chat.cmd); err != nil {
			t.Fatal(err)
		}
		defer chat.file.Close()
		copied := make(chan struct{})
		seen := func() {
			for end := time.Now().Add(startBound); !strings.Contains(chat.out.String(), "I") && time.Now().Before(end); {
				time.Sleep(5 * time.Millisecond)
			}
		}
		until.Store(&seen)
		defer until.Store(nil)
		go func() { io.Copy(&chat.out, chat.file); close(copied) }()
		<-copied
		chat.cmd.Wait()
		return strings.ReplaceAll(chat.out.String(), "\r\n", "\n")
	}
	text := shown("A=b", "--verbose")
	plain := painting.ReplaceAllString(text, "")
	if !regexp.MustCompile(`^I think\n\nHead\nbold and ␛\[2J\x{fffd}code\nfirst token \d+\.\d{3} s, \d+\.\d tokens/s, 7 prompt \+ 9 output tokens, \d+\.\d\d s\n$`).MatchString(plain) {
		t.Errorf("shown as %q", text)
	}
	for _, want := range []string{"\x1b[2mI", "\x1b[1mHe", "\x1b[1mbo", "\x1b[36mcode"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	if text := shown("NO_COLOR=1"); strings.Contains(text, "\x1b") || !strings.Contains(text, "**bold**") {
		t.Errorf("without colours: %q", text)
	}
	out, errOut, err := tandem(t, nil, "chat", "hi", "--url", server.URL)
	if err != nil || out != "# Head\n**bold** and \x1b[2J\u202e`code`\n" || errOut != "" {
		t.Errorf("in a pipe: %q, %q, %v", out, errOut, err)
	}
	out, errOut, err = tandem(t, nil, "chat", "hi", "--json", "--url", server.URL)
	var answer map[string]any
	if err != nil || errOut != "" || json.Unmarshal([]byte(out), &answer) != nil || strings.ContainsAny(out, "\x1b\u202e") {
		t.Fatalf("as JSON: %q, %q, %v", out, errOut, err)
	}
	if rate, ok := answer["tokens_per_second"].(float64); ok && !(rate > 0) { // a client that waited for the processor has read it all at once, and says none
		t.Errorf("as JSON: %v tokens/s", rate)
	}
	if answer["reasoning"] != "I think" || answer["model"] != "m" || answer["finish_reason"] != "stop" || answer["completion_tokens"] != 9.0 || answer["content"] != "# Head\n**bold** and \x1b[2J\u202e`code`" {
		t.Errorf("as JSON: %v", answer)
	}
}
