package sim

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/regular"
)

// Request is a request of a trace.
type Request struct {
	At     time.Duration
	Tokens int            // of the prompt
	Output int            // tokens of the answer; 0: unknown
	Blocks []kvcache.Hash // of the prompt, each chained to those before it
	Block  int            // tokens of each of Blocks; 0: BlockTokens
}

// IDTokens returns the number of tokens of each of the request's Blocks.
func (r *Request) IDTokens() int { return cmp.Or(r.Block, BlockTokens) }

// ErrTrace means that a trace cannot be used. The text has the line and the remedy.
var ErrTrace = errors.New("sim: unreadable trace")

// BlockTokens is the number of prompt tokens per hash id of a Mooncake trace.
const BlockTokens = 512

// MaxSpan is the longest trace in seconds: a hundred days.
const MaxSpan = 100 * 24 * 3600

// Bounds of a trace.
const (
	maxLine     = 1 << 20       // bytes
	maxTokens   = 4 << 20       // of a prompt or an answer
	maxTime     = 1e9           // seconds of a timestamp
	maxYear     = 2261          // of a timestamp, whose nanoseconds since 1970 an int64 holds
	maxRequests = 10_000_000    // of a trace
	maxBlocks   = 256 << 20     // of all prompts, 8 bytes each
	azureHeader = "TIMESTAMP,"  // begins the first line of an Azure trace
	gzipMagic   = "\x1f\x8b"    // begins a gzip file
	azureTime   = time.DateTime // fractions of a second are accepted, too
)

// LoadTrace reads a trace from a file, compressed by gzip or not.
func LoadTrace(path string) ([]Request, error) {
	f, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w: give the trace's file", ErrTrace, err)
	}
	defer f.Close()
	b := bufio.NewReader(f)
	var r io.Reader = b
	if head, _ := b.Peek(len(gzipMagic)); string(head) == gzipMagic {
		if r, err = gzip.NewReader(b); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrTrace, path, err)
		}
	}
	trace, err := ReadTrace(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %s", ErrTrace, path, err.Error()[len(ErrTrace.Error())+2:])
	}
	return trace, nil
}

// ReadTrace reads lines {timestamp (ms), input_length, output_length, hash_ids}, the format of the
// Mooncake traces, or the CSV of the Azure traces. Prompts without hash ids have no block in
// common. Times are since the first request.
func ReadTrace(r io.Reader) ([]Request, error) {
	var trace []Request
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	var m jsonLines
	read := m.line
	first, blocks := time.Duration(0), 0
	for n := 1; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if n == 1 && bytes.HasPrefix(line, []byte(azureHeader)) {
			read = azureLine
			continue
		}
		if len(line) == 0 {
			continue
		}
		q, err := read(line)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, n, err)
		case q.Tokens < 1 || q.Tokens > maxTokens || q.Output < 0 || q.Output > maxTokens:
			return nil, fmt.Errorf("%w: line %d: %d prompt and %d answer tokens: write at least 1 and 0, and at most %d", ErrTrace, n, q.Tokens, q.Output, maxTokens)
		case len(trace) == maxRequests:
			return nil, fmt.Errorf("%w: there are more than %d requests: cut the trace", ErrTrace, maxRequests)
		}
		if len(trace) == 0 {
			first = q.At
		}
		if q.At -= first; len(trace) > 0 && q.At < trace[len(trace)-1].At {
			return nil, fmt.Errorf("%w: line %d: the request arrives before the one above it: sort the lines by time", ErrTrace, n)
		}
		if len(q.Blocks) == 0 {
			q.Blocks = own(uint64(len(trace)), q.Tokens, BlockTokens)
		}
		if blocks += len(q.Blocks); blocks > maxBlocks {
			return nil, fmt.Errorf("%w: line %d: the prompts so far have more than %d blocks: cut the trace", ErrTrace, n, maxBlocks)
		}
		trace = append(trace, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTrace, err)
	}
	if len(trace) == 0 {
		return nil, fmt.Errorf("%w: there is no request: write a line for each, as Mooncake's or Azure's traces have", ErrTrace)
	}
	return trace, nil
}

// own returns blocks that no other request has.
func own(request uint64, tokens, block int) (blocks []kvcache.Hash) {
	blocks = make([]kvcache.Hash, tokens/block+1)
	for b := range blocks {
		blocks[b] = kvcache.Hash(mix(1<<62 | request<<24 | uint64(b)))
	}
	return blocks
}

// traceLine is a line of JSON.
type traceLine struct {
	Timestamp float64  `json:"timestamp"`
	Tokens    int      `json:"input_length"`
	Output    int      `json:"output_length"`
	Blocks    []uint64 `json:"hash_ids"`
	Block     int      `json:"block_tokens"` // of each of Blocks, as tandem record writes it; 0: BlockTokens
}

// jsonLines reads lines of JSON.
type jsonLines struct{ ids []uint64 } // of the last line; reused

// line reads a line.
func (m *jsonLines) line(line []byte) (q Request, err error) {
	l, ok := usualLine(line, m.ids)
	if m.ids = l.Blocks; !ok {
		l = traceLine{}
		err = json.Unmarshal(line, &l)
	}
	if err != nil {
		return q, fmt.Errorf(`%w: write such as {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}`, err)
	}
	if !(math.Abs(l.Timestamp) < maxTime*1e3) {
		return q, fmt.Errorf("timestamp %g: write milliseconds since the start", l.Timestamp)
	}
	if l.Blocks != nil && len(l.Blocks) == 0 {
		return q, errors.New("hash_ids is empty: write an id for each 512 tokens, or leave it out")
	}
	if l.Block < 0 || l.Block > maxTokens {
		return q, fmt.Errorf("block_tokens is %d: write the prompt tokens of each of hash_ids, or leave it out for %d", l.Block, BlockTokens)
	}
	q = Request{At: time.Duration(l.Timestamp * float64(time.Millisecond)), Tokens: l.Tokens, Output: l.Output, Block: l.Block}
	q.Blocks = make([]kvcache.Hash, len(l.Blocks))
	for i, b := range l.Blocks {
		q.Blocks[i] = kvcache.Hash(mix(b + 1))
	}
	return q, nil
}

// azureLine reads a line TIMESTAMP,ContextTokens,GeneratedTokens.
func azureLine(line []byte) (q Request, err error) {
	fields := bytes.Split(line, []byte{','})
	if len(fields) != 3 {
		return q, fmt.Errorf("%d fields: write TIMESTAMP,ContextTokens,GeneratedTokens", len(fields))
	}
	at, errTime := time.Parse(azureTime, string(fields[0]))
	tokens, errIn := strconv.Atoi(string(fields[1]))
	output, errOut := strconv.Atoi(string(fields[2]))
	if err := errors.Join(errTime, errIn, errOut); err != nil || at.Year() < 1970 || at.Year() > maxYear {
		return q, fmt.Errorf("%q: write such as 2023-11-16 18:17:03.9799600,4808,10", line)
	}
	return Request{At: time.Duration(at.UnixNano()), Tokens: tokens, Output: output}, nil
}

// mix spreads small ids over 64 bits (the finalizer of SplitMix64).
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
