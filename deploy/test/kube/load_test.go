//go:build deploy && linux

package kube

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
	"sync"
	"sync/atomic"
	"time"
)

// streamBound is how long one stream may take.
const streamBound = 5 * time.Minute

// load runs streams of chats through the Service and compares each with the same chat of an
// undisturbed fleet.
type load struct {
	url    string
	host   string // header Host
	client *http.Client
	tokens int      // of each answer
	words  int      // of each prompt, about
	want   []string // the answer to each question

	ended    atomic.Int64
	running  atomic.Int64 // streams with text
	mu       sync.Mutex
	failures []string
}

// newLoad returns a load with a number of different questions.
func newLoad(url string, questions int) *load {
	return &load{url: url, host: "tandem." + namespace, tokens: 1000, words: 12, want: make([]string, questions), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}}
}

// learn asks each question once. The answers are what streams are compared with.
func (l *load) learn(ctx context.Context) error {
	for i := range l.want {
		text, err := l.stream(ctx, i, nil)
		if err != nil {
			return err
		}
		l.want[i] = text
	}
	return nil
}

// start starts streams, each followed by the next until stop is called. stop waits for those that
// run, and returns how many have ended.
func (l *load) start(ctx context.Context, streams int) (stop func() int64) {
	before := l.ended.Load()
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() {
			for n := i; ; n += streams {
				select {
				case <-done:
					return
				default:
				}
				l.one(ctx, n)
			}
		})
	}
	return func() int64 {
		close(done)
		wg.Wait()
		return l.ended.Load() - before
	}
}

// one runs one stream and records how it ends. Questions are asked in turn, and a load without
// answers asks each once.
func (l *load) one(ctx context.Context, question int) {
	if len(l.want) > 0 {
		question %= len(l.want)
	}
	begun := time.Now()
	got := false
	text, err := l.stream(ctx, question, func() { got = true; l.running.Add(1) })
	if got {
		l.running.Add(-1)
	}
	if err == nil && len(l.want) > 0 && text != l.want[question] {
		err = fmt.Errorf("the answer to question %d is altered: %q; want %q", question, text, l.want[question])
	}
	l.ended.Add(1)
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.failures = append(l.failures, fmt.Sprintf("%s after %.1f s: %v", time.Now().Format("15:04:05.000"), time.Since(begun).Seconds(), err))
	}
}

// stream runs one chat and returns its text. begun is called at the first text, if it is not nil.
func (l *load) stream(ctx context.Context, question int, begun func()) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, streamBound)
	defer cancel()
	body, err := json.Marshal(map[string]any{
		"messages": []map[string]string{{"role": "user", "content": fmt.Sprintf("Question %d: %s?", question, strings.Repeat("what is the use of a prefill node ", l.words/7+1))}},
		"stream":   true, "max_tokens": l.tokens, "ignore_eos": true, "seed": question, "temperature": 0.8,
	})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", l.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Host = l.host
	req.Header.Set("Content-Type", "application/json")
	resp, err := l.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	var text strings.Builder
	for lines := bufio.NewScanner(resp.Body); ; {
		if !lines.Scan() {
			return "", errors.Join(fmt.Errorf("the stream breaks off after %d bytes of text", text.Len()), lines.Err())
		}
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return text.String(), nil
		}
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
			Error json.RawMessage
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return "", fmt.Errorf("%w: %q", err, data)
		}
		if chunk.Error != nil {
			return "", fmt.Errorf("an error event after %d bytes of text: %s", text.Len(), chunk.Error)
		}
		for _, c := range chunk.Choices {
			if c.Delta.Content != "" && text.Len() == 0 && begun != nil {
				begun()
			}
			text.WriteString(c.Delta.Content)
		}
	}
}
