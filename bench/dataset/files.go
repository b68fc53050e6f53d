package dataset

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// read opens the dataset's file and reads it with f.
func (m *maker) read(f func(io.Reader) error) error {
	if m.Path == "" {
		return fmt.Errorf("%w: --dataset-name %s needs --dataset-path", ErrOption, m.Name)
	}
	file, err := os.Open(m.Path)
	if err != nil {
		return fmt.Errorf("%w: --dataset-path: %w", ErrOption, err)
	}
	defer file.Close()
	if s, err := file.Stat(); err == nil && s.Size() > maxFile {
		return fmt.Errorf("%w: --dataset-path %s has %d bytes, more than %d", ErrOption, m.Path, s.Size(), int64(maxFile))
	}
	if err := f(file); err != nil {
		return fmt.Errorf("%w: --dataset-path %s: %w", ErrOption, m.Path, err)
	}
	return nil
}

// lines calls f for each line that is not empty, with its number.
func lines(r io.Reader, f func(n int, line []byte) error) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 64<<10), maxLine)
	for n := 1; s.Scan(); n++ {
		line := bytes.TrimSpace(s.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := f(n, line); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	return s.Err()
}

// count returns the tokens of a text, or 0 without a tokenizer.
func (m *maker) count(text string) int {
	if m.Vocabulary.Encode == nil {
		return 0
	}
	return len(m.Vocabulary.Encode(text))
}

// turn is one message of a ShareGPT conversation.
type turn struct {
	Value string `json:"value"`
}

// Limits of a conversation's first question and answer, in tokens. Shorter and longer
// ones are left out, as in other tools that use this dataset.
const (
	shareMin, shareMaxPrompt, shareMaxTotal = 4, 1024, 2048
)

// shareGPT sends each conversation's first question and requests as much output as its
// first answer has.
func (m *maker) shareGPT() ([]Request, error) {
	if m.ShareGPTOutput < 1 && m.Vocabulary.Encode == nil {
		return nil, fmt.Errorf("%w: sharegpt asks for as many tokens as the file's answers have: give --tokenizer, or --sharegpt-output-len", ErrOption)
	}
	var all [][]turn
	if err := m.read(func(r io.Reader) error {
		d := json.NewDecoder(bufio.NewReader(r))
		if _, err := d.Token(); err != nil {
			return err
		}
		for d.More() {
			var c struct {
				Conversations []turn `json:"conversations"`
			}
			if err := d.Decode(&c); err != nil {
				return err
			}
			if len(c.Conversations) >= 2 {
				all = append(all, c.Conversations[:2])
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	m.shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	var rs []Request
	for _, c := range all {
		if len(rs) == m.N {
			break
		}
		r := Request{Text: c[0].Value, PromptTokens: m.count(c[0].Value), OutputTokens: m.ShareGPTOutput}
		if m.ShareGPTOutput < 1 {
			r.OutputTokens = m.count(c[1].Value)
		}
		if m.Vocabulary.Encode != nil && (r.PromptTokens < shareMin || r.PromptTokens > shareMaxPrompt ||
			m.ShareGPTOutput < 1 && r.OutputTokens < shareMin || r.PromptTokens+r.OutputTokens > shareMaxTotal) || r.Text == "" {
			continue
		}
		rs = append(rs, r)
	}
	return m.fill(rs)
}

// custom reads one JSON object a line: {"prompt": "…", "output_tokens": 100}.
func (m *maker) custom() ([]Request, error) {
	if m.CustomOutput == 0 || m.CustomOutput < -1 {
		return nil, fmt.Errorf("%w: --custom-output-len %d: want at least 1, or -1 for the file's own", ErrOption, m.CustomOutput)
	}
	var rs []Request
	if err := m.read(func(r io.Reader) error {
		return lines(r, func(_ int, line []byte) error {
			var c struct {
				Prompt string `json:"prompt"`
				Output *int   `json:"output_tokens"`
			}
			if err := json.Unmarshal(line, &c); err != nil {
				return err
			}
			if c.Prompt == "" {
				return fmt.Errorf("no \"prompt\"")
			}
			q := Request{Text: c.Prompt, OutputTokens: m.CustomOutput}
			if m.CustomOutput == -1 {
				if c.Output == nil || *c.Output < 1 {
					return fmt.Errorf("no \"output_tokens\", which --custom-output-len -1 asks for")
				}
				q.OutputTokens = *c.Output
			}
			rs = append(rs, q)
			return nil
		})
	}); err != nil {
		return nil, err
	}
	m.shuffle(len(rs), func(i, j int) { rs[i], rs[j] = rs[j], rs[i] })
	rs, err := m.fill(rs)
	for i := range rs {
		rs[i].PromptTokens = m.count(rs[i].Text)
	}
	return rs, err
}
