package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Intervals between two tokens of a stream. The first token is sent at once. envGap passes gap to
// backends.
const (
	steady = 10 * time.Millisecond
	flood  = 2500 * time.Microsecond // 1,000 such streams are more than two cores can proxy
	envGap = "BENCH_GAP"
	// envBackendCerts is a folder of tlsconf by whose certificate the backend serves HTTPS; empty: it
	// serves HTTP.
	envBackendCerts = "BENCH_BACKEND_CERTS"
)

var gap = steady

// setGap sets gap from the environment.
func setGap() (err error) {
	if s := os.Getenv(envGap); s != "" {
		gap, err = time.ParseDuration(s)
	}
	return err
}

const (
	plainAnswer = `{"id":"chatcmpl-mock","object":"chat.completion","created":1700000000,"model":"mock","choices":[{"index":0,"message":{"role":"assistant","content":"tok"},"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	tokenEvent  = `{"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1700000000,"model":"mock","choices":[{"index":0,"delta":{"content":" tok"},"logprobs":null,"finish_reason":null}]}`
	streamHead  = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)

// serveBackend runs an OpenAI server that computes nothing, until its input ends. It prints its
// address. A token is one event, one chunk and one write.
func serveBackend() error {
	if err := setGap(); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		l.Close()
	}()
	if dir := os.Getenv(envBackendCerts); dir != "" {
		cert, err := tls.LoadX509KeyPair(filepath.Join(dir, tlsconf.NodeCertFile), filepath.Join(dir, tlsconf.NodeKeyFile))
		if err != nil {
			return err
		}
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}})
	}
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		go converse(c)
	}
}

func chunk(b []byte, data string) []byte {
	b = strconv.AppendInt(b, int64(len(data)+8), 16)
	return append(append(append(b, "\r\ndata: "...), data...), "\n\n\r\n"...)
}

var (
	tokenChunk = chunk(nil, tokenEvent)
	lastChunk  = append(chunk(nil, "[DONE]"), "0\r\n\r\n"...)
)

func plain(status int, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body)
}

var (
	answerBytes = plain(200, plainAnswer)
	modelBytes  = plain(200, `{"object":"list","data":[{"id":"mock","object":"model","created":0,"owned_by":"tandem","max_model_len":1048576}]}`)
	wellBytes   = plain(200, `{"status":"ok"}`)
	noneBytes   = plain(404, `{"error":{"message":"the mock has no such route"}}`)
)

// converse answers the requests of a connection.
func converse(c net.Conn) {
	defer c.Close()
	in := bufio.NewReaderSize(c, 16<<10)
	var body, out []byte
	for {
		line, size, err := readHead(in)
		if err != nil {
			return
		}
		if cap(body) < size {
			body = make([]byte, size)
		}
		body = body[:size]
		if _, err := io.ReadFull(in, body); err != nil {
			return
		}
		switch {
		case strings.HasPrefix(line, "POST /v1/chat/completions "):
			if n := streamed(body); n > 0 {
				if out, err = stream(c, out, n); err != nil {
					return
				}
				continue
			}
			_, err = c.Write(answerBytes)
		case strings.HasPrefix(line, "GET /v1/models"):
			_, err = c.Write(modelBytes)
		case strings.HasPrefix(line, "GET /health"):
			_, err = c.Write(wellBytes)
		default:
			_, err = c.Write(noneBytes)
		}
		if err != nil {
			return
		}
	}
}

// readHead reads the head of a message. It returns the first line and the length of the body; -1:
// chunked.
func readHead(in *bufio.Reader) (first string, length int, err error) {
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return "", 0, err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case len(line) == 0:
			return first, length, nil
		case first == "":
			first = string(line)
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		if len(name) == 14 && bytes.EqualFold(name, []byte("content-length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil || length < 0 || length > 64<<20 {
				return "", 0, fmt.Errorf("a Content-Length of %q", value)
			}
		}
		if len(name) == 17 && bytes.EqualFold(name, []byte("transfer-encoding")) && length == 0 {
			length = -1
		}
	}
}

// streamed returns the number of tokens that a request asks for as a stream, or 0 for one answer.
func streamed(body []byte) int {
	if !bytes.Contains(body, []byte(`"stream":true`)) && !bytes.Contains(body, []byte(`"stream": true`)) {
		return 0 // without parsing large bodies
	}
	var q struct {
		Stream  bool `json:"stream"`
		Max     int  `json:"max_tokens"`
		MaxChat int  `json:"max_completion_tokens"`
	}
	if json.Unmarshal(body, &q) != nil || !q.Stream {
		return 0
	}
	return max(1, q.Max, q.MaxChat)
}

// stream sends tokens at fixed times, so that a late one does not delay the next.
func stream(c net.Conn, out []byte, n int) ([]byte, error) {
	began := time.Now()
	out = append(out[:0], streamHead...)
	for i := range n {
		time.Sleep(time.Until(began.Add(time.Duration(i) * gap)))
		out = append(out, tokenChunk...)
		if i == n-1 {
			out = append(out, lastChunk...)
		}
		if _, err := c.Write(out); err != nil {
			return out, err
		}
		out = out[:0]
	}
	return out, nil
}
