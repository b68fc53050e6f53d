package dataset

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strconv"
	"time"
)

// TraceOptions are the format of a trace.
type TraceOptions struct {
	ChunkTokens                       int     // tokens per hash id
	Seconds                           float64 // factor that converts a timestamp to seconds
	Timestamp, Input, Output, HashIDs string  // keys of a line
}

// trace reads JSON lines with hash ids, or the CSV of the Azure traces. Equal hash ids
// become equal tokens, so that prefixes repeat as in the trace.
func (m *maker) trace() ([]Request, error) {
	o := m.Trace
	if o.ChunkTokens < 1 || o.ChunkTokens > maxPrompt || !(o.Seconds > 0) {
		return nil, fmt.Errorf("%w: --timed-trace-chunk-hash-size %d, --timed-trace-sec-multiplier %g: want more than 0", ErrOption, o.ChunkTokens, o.Seconds)
	}
	var rs []Request
	err := m.read(func(r io.Reader) (err error) {
		b := bufio.NewReader(r)
		if head, _ := b.Peek(len(azureHeader)); string(head) == azureHeader {
			rs, err = m.azure(b)
			return err
		}
		rs, err = m.hashed(b)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(rs) == 0 {
		return nil, fmt.Errorf("%w: %s has no request", ErrOption, m.Path)
	}
	first := rs[0].At
	for i := range rs {
		rs[i].At -= first
		if i > 0 && rs[i].At < rs[i-1].At {
			return nil, fmt.Errorf("%w: %s: request %d arrives before the one above it", ErrOption, m.Path, i+1)
		}
	}
	return rs, nil
}

// errEnough ends reading after N requests.
var errEnough = errors.New("dataset: enough requests")

// sizes checks one line's lengths.
func sizes(input, output float64) error {
	if input != math.Trunc(input) || output != math.Trunc(output) || input < 1 || input > maxPrompt || output < 0 || output > maxPrompt {
		return fmt.Errorf("%g tokens in, %g out: want whole numbers, at least one in, at most %d", input, output, maxPrompt)
	}
	return nil
}

// arrival converts a timestamp to a duration.
func arrival(seconds float64) (time.Duration, error) {
	if !(math.Abs(seconds) < 1e9) {
		return 0, fmt.Errorf("arrival at %g s", seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

func (m *maker) hashed(r io.Reader) ([]Request, error) {
	chunks := map[int64][]int32{}
	var rs []Request
	err := lines(r, func(_ int, line []byte) error {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(line, &fields); err != nil {
			return err
		}
		var at, input, output float64
		for _, f := range []struct {
			key string
			to  *float64
		}{{m.Trace.Timestamp, &at}, {m.Trace.Input, &input}, {m.Trace.Output, &output}} {
			if err := json.Unmarshal(fields[f.key], f.to); err != nil {
				return fmt.Errorf("%q: want a number: %w", f.key, err)
			}
		}
		var ids []int64
		if raw := fields[m.Trace.HashIDs]; raw != nil {
			if err := json.Unmarshal(raw, &ids); err != nil {
				return fmt.Errorf("%q: %w", m.Trace.HashIDs, err)
			}
		}
		if err := sizes(input, output); err != nil {
			return err
		}
		when, err := arrival(at * m.Trace.Seconds)
		if err != nil {
			return err
		}
		pieces, err := m.chunked(chunks, ids, int(input))
		if err != nil {
			return err
		}
		q := m.prompt(max(1, int(output)), pieces...)
		q.At = when
		rs = append(rs, q)
		if len(rs) == m.N {
			return errEnough
		}
		return nil
	})
	return rs, enough(err)
}

// enough returns nil for the error that ended reading on purpose.
func enough(err error) error {
	if err != nil && errors.Is(err, errEnough) {
		return nil
	}
	return err
}

// chunked returns n tokens: those of the hash ids, and new ones after the last id.
func (m *maker) chunked(chunks map[int64][]int32, ids []int64, n int) ([][]int32, error) {
	var pieces [][]int32
	for _, id := range ids {
		if n <= 0 {
			break
		}
		c := chunks[id]
		if c == nil {
			own := *m // the chunk depends only on its id, not on the order of lines
			own.rng = rand.New(rand.NewPCG(m.Seed, uint64(id)))
			var err error
			if c, err = own.tokens(m.Trace.ChunkTokens); err != nil {
				return nil, err
			}
			chunks[id] = c
		}
		pieces = append(pieces, c[:min(n, len(c))])
		n -= len(c)
	}
	if n > 0 {
		rest, err := m.tokens(n)
		if err != nil {
			return nil, err
		}
		pieces = append(pieces, rest)
	}
	return pieces, nil
}

// azureHeader is the first line of the Azure LLM inference traces.
const azureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens"

func (m *maker) azure(r io.Reader) ([]Request, error) {
	var rs []Request
	err := lines(r, func(n int, line []byte) error {
		if n == 1 {
			return nil
		}
		fields := bytes.Split(line, []byte{','})
		if len(fields) != 3 {
			return fmt.Errorf("%d fields, want 3", len(fields))
		}
		at, err := time.Parse("2006-01-02 15:04:05.9999999", string(fields[0]))
		if err != nil {
			return err
		}
		input, err := strconv.Atoi(string(fields[1]))
		if err != nil {
			return err
		}
		output, err := strconv.Atoi(string(fields[2]))
		if err != nil {
			return err
		}
		if err := sizes(float64(input), float64(output)); err != nil {
			return err
		}
		pieces, err := m.chunked(nil, nil, input)
		if err != nil {
			return err
		}
		q := m.prompt(max(1, output), pieces...)
		q.At = time.Duration(at.UnixNano())
		rs = append(rs, q)
		if len(rs) == m.N {
			return errEnough
		}
		return nil
	})
	return rs, enough(err)
}
