//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
)

// chatBound bounds each wait of the chat's tests.
const chatBound = 20 * time.Second

// slowServer streams w0, w1 and so on, one each 50 ms, to a message that contains "slow". To
// others it answers with the messages that it got. Each body goes to asked.
func slowServer(t *testing.T) (server *httptest.Server, asked chan string) {
	asked = make(chan string, 100)
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"data":[{"id":"small"},{"id":"large"}]}`)
			return
		}
		body, err := io.ReadAll(r.Body)
		var request struct {
			Messages []struct{ Role, Content string }
		}
		if err != nil || r.URL.Path != "/v1/chat/completions" || json.Unmarshal(body, &request) != nil || len(request.Messages) == 0 {
			http.Error(w, "bad request", http.StatusBadRequest)
			return
		}
		asked <- string(body)
		last := request.Messages[len(request.Messages)-1].Content
		finish := "stop"
		if strings.Contains(last, "cut") {
			finish = "length"
		}
		for i := 0; strings.Contains(last, "slow") && r.Context().Err() == nil; i++ {
			fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"w%d \"}}]}\n\n", i)
			w.(http.Flusher).Flush()
			time.Sleep(50 * time.Millisecond)
		}
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"answer %d\"},\"finish_reason\":%q}]}\n\ndata: [DONE]\n\n", len(request.Messages), finish)
	}))
	t.Cleanup(server.Close)
	return server, asked
}

// terminal is a program at a pseudo-terminal.
type terminal struct {
	t     *testing.T
	file  *os.File
	cmd   *exec.Cmd
	out   output
	at    int // of out, behind what expect found
	ended chan error
}

func startTerminal(t *testing.T, args ...string) *terminal {
	t.Helper()
	return startTerminalOf(t, "xterm", args...)
}

// startTerminalOf starts a command at a terminal of a kind.
func startTerminalOf(t *testing.T, kind string, args ...string) *terminal {
	t.Helper()
	c := &terminal{t: t, cmd: exec.Command(binary(t), args...), ended: make(chan error, 1)}
	c.cmd.Env = append(os.Environ(), "TERM="+kind)
	var err error
	if c.file, err = pty.Start(c.cmd); err != nil {
		t.Fatal(err)
	}
	copied := make(chan struct{})
	go func() { io.Copy(&c.out, c.file); close(copied) }()
	go func() { c.ended <- c.cmd.Wait() }()
	t.Cleanup(func() { c.cmd.Process.Kill(); c.file.Close(); <-copied })
	return c
}

// expect waits for text in the output behind what the last expect found.
func (c *terminal) expect(text string) {
	c.t.Helper()
	for deadline := time.Now().Add(chatBound); ; time.Sleep(5 * time.Millisecond) {
		all := c.out.String()
		if i := strings.Index(all[c.at:], text); i >= 0 {
			c.at += i + len(text)
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("no %q in %q", text, all[c.at:])
		}
	}
}

func (c *terminal) enter(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c.file, text); err != nil {
		c.t.Fatal(err)
	}
}

// wantExit waits for the end of the program.
func (c *terminal) wantExit(status int) {
	c.t.Helper()
	select {
	case <-c.ended:
		if got := c.cmd.ProcessState.ExitCode(); got != status {
			c.t.Errorf("exit status %d, want %d: %s", got, status, c.out.String())
		}
	case <-time.After(chatBound):
		c.t.Fatalf("the program did not end: %q", c.out.String())
	}
}

const ctrlC, ctrlD = "\x03", "\x04"

// Ctrl-C at the prompt ends the chat, and so does SIGTERM; Ctrl-D and /exit are success.
func TestBinaryChatEnds(t *testing.T) {
	t.Parallel()
	server, _ := slowServer(t)
	for name, c := range map[string]struct {
		keys   string
		status int
	}{"Ctrl-C": {ctrlC, 130}, "half a line": {"what is" + ctrlC, 130}, "Ctrl-D": {ctrlD, 0}, "/exit": {"/exit\n", 0}} {
		t.Run(name, func(t *testing.T) {
			chat := startTerminal(t, "chat", "--url", server.URL)
			chat.expect("> ")
			chat.enter(c.keys)
			chat.wantExit(c.status)
		})
	}
	for _, message := range []string{"", "slow"} {
		chat := startTerminal(t, "chat", "--url", server.URL)
		chat.expect("> ")
		if message != "" {
			chat.enter(message + "\n")
			chat.expect("w1 ")
		}
		if err := chat.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		chat.wantExit(143)
	}
}

// Ctrl-C in an answer stops the answer only, and the conversation continues. A second one ends it.
func TestBinaryChatStopsAnswer(t *testing.T) {
	t.Parallel()
	server, asked := slowServer(t)
	chat := startTerminal(t, "chat", "--url", server.URL)
	chat.expect("> ")
	chat.enter("slow\n")
	chat.expect("w1 ")
	chat.enter(ctrlC)
	chat.expect("(stopped")
	chat.expect("> ")
	<-asked
	chat.enter("go on\n")
	chat.expect("answer 3")
	if body := <-asked; !strings.Contains(body, "w0 w1") {
		t.Errorf("the conversation lost the interrupted answer: %s", body)
	}
	chat.expect("> ")
	chat.enter("cut\n")
	chat.expect("cut off: the answer reached --max-tokens")
	chat.expect("> ")
	chat.enter("slow\n")
	chat.expect("w1 ")
	chat.enter(ctrlC)
	chat.expect("> ")
	chat.enter(ctrlC)
	chat.wantExit(130)
}

// The commands of a chat never go to the model.
func TestBinaryChatCommands(t *testing.T) {
	t.Parallel()
	server, asked := slowServer(t)
	file := filepath.Join(t.TempDir(), "talk.json")
	chat := startTerminal(t, "chat", "--url", server.URL)
	for _, c := range []struct{ enter, want, body string }{
		{"/help", "/save FILE", ""},
		{"/nonsense", "no command /nonsense", ""},
		{"/model", "large", ""},
		{"/model huge", `no model "huge"`, ""},
		{"/model large", "> ", ""},
		{"/system be brief", "> ", ""},
		{"/etc/passwd is what?", "answer 2", `"model":"large"`},
		{"\"\"\"one\ntwo\"\"\"", "answer 4", `one\ntwo`},
		{"/save " + file, "> ", ""},
		{"/save " + file, "exists", ""},
		{"/new", "> ", ""},
		{"hello", "answer 2", `be brief`},
		{"/load " + file, "> ", ""},
		{"again", "answer 6", `/etc/passwd`},
	} {
		if c.want != "> " {
			chat.expect("> ")
		}
		chat.enter(c.enter + "\n")
		chat.expect(c.want)
		if c.body == "" {
			continue
		}
		if body := <-asked; !strings.Contains(body, c.body) {
			t.Errorf("%s: %s", c.enter, body)
		}
	}
	if len(asked) > 0 {
		t.Errorf("a command went to the model: %s", <-asked)
	}
}

// In pipes the arguments and the input are one message, and the output is the answer alone.
func TestBinaryChatPipes(t *testing.T) {
	t.Parallel()
	server, asked := slowServer(t)
	host := strings.TrimPrefix(server.URL, "http://")
	for _, c := range []struct {
		args   []string
		input  string
		status int
		out    string
		body   string
		errOut string
	}{
		{[]string{"why?"}, "line 1\nline 2\n", 0, "answer 1\n", `why?\n\nline 1\nline 2`, ""},
		{nil, "What is prefill?\nAnd decode?\n", 0, "answer 1\n", `"What is prefill?\nAnd decode?"`, ""},
		{[]string{"what", "is", "prefill"}, "", 0, "answer 1\n", `"what is prefill"`, ""},
		{[]string{"cut"}, "", 0, "answer 1\n", `"cut"`, "cut off"},
		{[]string{""}, "", 2, "", "", "the message is empty"},
		{nil, "", 2, "", "", "the message is empty"},
	} {
		for _, url := range []string{server.URL, server.URL + "/", server.URL + "/v1", server.URL + "/v1/", host, host + "/v1"} {
			cmd := exec.Command(binary(t), append([]string{"chat", "--url", url}, c.args...)...)
			var out, errOut bytes.Buffer
			cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(c.input), &out, &errOut
			cmd.Run() // the status has its error
			if cmd.ProcessState.ExitCode() != c.status || out.String() != c.out || !strings.Contains(errOut.String(), c.errOut) || c.errOut == "" && errOut.Len() > 0 {
				t.Errorf("%q at %s: status %d, %q, %q", c.args, url, cmd.ProcessState.ExitCode(), &out, &errOut)
			}
			if c.status == 0 {
				if body := <-asked; !strings.Contains(body, c.body) {
					t.Errorf("%q sent %s", c.args, body)
				}
			}
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		cmd := exec.Command(binary(t), "chat", "slow", "--url", server.URL)
		var out output
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(chatBound); !strings.Contains(out.String(), "w1") && time.Now().Before(deadline); {
			time.Sleep(5 * time.Millisecond)
		}
		cmd.Process.Signal(s)
		cmd.Wait()
		if got := cmd.ProcessState.ExitCode(); got != 128+int(s) {
			t.Errorf("%v: exit status %d", s, got)
		}
		<-asked
	}
}

// closesAll returns the URL of a server that closes each connection without an answer, as a gateway
// with a certificate closes those of plain HTTP.
func closesAll(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Read(make([]byte, 4<<10))
			c.Close()
		}
	}()
	return "http://" + l.Addr().String()
}

// An address at which nothing answers, or that is none, comes with what to do.
func TestBinaryChatHints(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	answers := func(text string, status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { http.Error(w, text, status) }
	}
	node := httptest.NewServer(answers("not found", http.StatusNotFound))
	t.Cleanup(node.Close)
	locked := httptest.NewServer(answers(`{"error":{"message":"no key"}}`, http.StatusUnauthorized))
	t.Cleanup(locked.Close)
	secure := httptest.NewUnstartedServer(answers("", http.StatusOK))
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	silent := closesAll(t)
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"chat", "hi", "--url", closed.Addr().String()}, 1, "start a cluster with `tandem up`"},
		{[]string{"status", "--url", closed.Addr().String()}, 1, "start a cluster with `tandem up`"},
		{[]string{"status", "--url", "ftp://x"}, 2, "write http://HOST:PORT"},
		{[]string{"doctor", "--url", "http://"}, 2, "write http://HOST:PORT"},
		{[]string{"chat", "hi", "--url", silent}, 1, "a gateway with a certificate has the URL https://"},
		{[]string{"chat", "hi", "--url", secure.URL}, 1, "trusted by SSL_CERT_FILE=FILE"},
		{[]string{"status", "--url", strings.Replace(node.URL, "http:", "https:", 1)}, 1, "a gateway without a certificate has the URL http://"},
		{[]string{"status", "--url", node.URL}, 1, "/debug/nodes is no route of a gateway"},
		{[]string{"chat", "hi", "--url", locked.URL}, 1, "by --api-key KEY or TANDEM_API_KEY"},
		{[]string{"run", "llama3.2"}, 2, "`tandem serve MODEL_DIR` serves a model"},
		{[]string{"pull", "llama3.2"}, 2, "want ORG/NAME"},
		{[]string{"ps"}, 2, "`tandem status`"},
		{[]string{"list"}, 2, "`tandem models` lists the models"},
		{[]string{"rm", "llama3.2"}, 2, "want ORG/NAME"},
	} {
		_, errOut, err := tandem(t, nil, c.args...)
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != c.status || !strings.Contains(errOut, c.want) {
			t.Errorf("%q: %v, %q", c.args, err, errOut)
		}
	}
	for proxy, want := range map[string]string{"http://" + closed.Addr().String(): "that is the proxy that HTTP_PROXY or HTTPS_PROXY names", node.URL: "this answer may be that of the proxy that"} {
		if _, errOut, err := tandem(t, []string{"HTTP_PROXY=" + proxy, "NO_PROXY=", "no_proxy="}, "status", "--url", "http://gateway.example:8000"); err == nil || !strings.Contains(errOut, want) {
			t.Errorf("through the proxy %s: %v, %q", proxy, err, errOut)
		}
	}
	if out, _, err := tandem(t, nil, "help", "serve"); err != nil || !strings.Contains(out, "Usage: tandem serve") {
		t.Errorf("help serve: %v, %s", err, out)
	}
	if out, _, err := tandem(t, nil, "-v"); err != nil || !strings.HasPrefix(out, "tandem ") {
		t.Errorf("-v: %v, %s", err, out)
	}
}
