// Package console has clients of the gateway's HTTP API for a terminal: a chat and the state of
// the cluster.
//
// Invariant: an incomplete answer is never shown as complete.
//
// The package knows of nodes and models only what the API returns.
package console

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// Errors of the clients.
var (
	ErrAPI     = errors.New("the server refused")
	ErrDenied  = errors.New("the server refused") // with 401 or 403: another key may do
	ErrAborted = errors.New("the answer broke off")
)

const (
	maxEvent = 1 << 20 // bytes of one SSE line
	maxBody  = 4 << 20 // bytes of an answer that is no stream
)

// Client talks to one gateway.
type Client struct {
	URL  string // such as http://127.0.0.1:8000
	Key  string // bearer token, or empty
	HTTP *http.Client
}

// Message is one turn of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// ChatOptions are a chat's settings. Nil leaves a value to the server.
type ChatOptions struct {
	Model       string
	System      string
	MaxTokens   *int
	Temperature *float64
	Seed        *int64
}

// do sends a request. A status other than 200 is an error with the server's message.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.URL, "/")+path, r)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer from %s: %w", c.URL, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, err
	}
	var e struct {
		Error struct{ Message string }
	}
	if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
		text = []byte(e.Error.Message)
	}
	kind := ErrAPI
	if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden {
		kind = ErrDenied
	}
	return nil, fmt.Errorf("%w: %s: %s", kind, resp.Status, bytes.TrimSpace(text))
}

// Ready returns nil if the gateway, or a node at c.URL, is ready. It needs no key.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.do(ctx, http.MethodGet, "/readyz", nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Models returns the served models.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	resp, err := c.do(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(&list); err != nil {
		return nil, fmt.Errorf("%s/v1/models: %w", c.URL, err)
	}
	ids := make([]string, len(list.Data))
	for i, m := range list.Data {
		ids[i] = m.ID
	}
	return ids, nil
}

// Complete sends a conversation and streams the answer's text to w.
func (c *Client) Complete(ctx context.Context, o ChatOptions, messages []Message, w io.Writer) (string, error) {
	body := map[string]any{"messages": messages, "stream": true}
	if o.Model != "" {
		body["model"] = o.Model
	}
	if o.MaxTokens != nil {
		body["max_completion_tokens"] = *o.MaxTokens
	}
	if o.Temperature != nil {
		body["temperature"] = *o.Temperature
	}
	if o.Seed != nil {
		body["seed"] = *o.Seed
	}
	resp, err := c.do(ctx, http.MethodPost, "/v1/chat/completions", body)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	return readStream(resp.Body, w)
}

// readStream copies the text of an SSE answer to w.
func readStream(r io.Reader, w io.Writer) (string, error) {
	var all strings.Builder
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxEvent)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return all.String(), nil
		}
		var chunk struct {
			Choices []struct{ Delta struct{ Content string } }
			Error   *struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return all.String(), fmt.Errorf("%w: event %q: %w", ErrAborted, data, err)
		}
		if chunk.Error != nil {
			return all.String(), fmt.Errorf("%w: %s", ErrAborted, chunk.Error.Message)
		}
		for _, choice := range chunk.Choices {
			all.WriteString(choice.Delta.Content)
			if _, err := io.WriteString(w, choice.Delta.Content); err != nil {
				return all.String(), err
			}
		}
	}
	return all.String(), errors.Join(ErrAborted, lines.Err())
}

// Chat reads lines from in and prints answers to out until in ends or a line is /exit. With a
// message in once, it prints the answer to that and returns.
func (c *Client) Chat(ctx context.Context, o ChatOptions, once string, in io.Reader, out io.Writer) error {
	var history []Message
	if o.System != "" {
		history = append(history, Message{"system", o.System})
	}
	turn := func(text string) error {
		history = append(history, Message{"user", text})
		answer, err := c.Complete(ctx, o, history, out)
		fmt.Fprintln(out)
		if err != nil {
			history = history[:len(history)-1]
			return err
		}
		history = append(history, Message{"assistant", answer})
		return nil
	}
	if once != "" {
		return turn(once)
	}
	fmt.Fprintln(out, "Type a message; /new starts over, /exit or Ctrl-D ends.")
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxEvent)
	for fmt.Fprint(out, "> "); lines.Scan(); fmt.Fprint(out, "> ") {
		switch text := strings.TrimSpace(lines.Text()); text {
		case "":
		case "/exit":
			return nil
		case "/new":
			history = history[:0]
			if o.System != "" {
				history = append(history, Message{"system", o.System})
			}
		default:
			if err := turn(text); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				fmt.Fprintln(out, "error:", err)
			}
		}
	}
	fmt.Fprintln(out)
	return lines.Err()
}
