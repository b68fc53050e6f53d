package cli

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/process"
)

// recordEvery is the time between two readings of a recording.
const recordEvery = 2 * time.Second

// recordRequests bounds the requests of a recording.
const recordRequests = 1_000_000

const (
	// recordHashes bounds the hashes of a recording, which it holds in memory.
	recordHashes = 16 << 20
	// recordOutage is the time without an answer after which the recording ends. The gateway ends it
	// after 30 seconds.
	recordOutage = 25 * time.Second
)

// record writes a trace of the requests that a gateway gets.
func record(v *Invocation) error {
	c := Client(v)
	length := time.Hour
	most := RecordFlags(v, &length, "length of the recording; Ctrl-C ends it earlier, and the trace has the requests so far")
	out := v.String("out", "", "file to write the trace to, which tandem sim --trace reads; empty: the standard output")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	file, err := createProfile(*out, v.Out)
	if err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	t, err := Record(ctx, c, length, *most)
	if len(t.Requests) == 0 {
		return errors.Join(cmp.Or(err, context.Cause(ctx)), file.discard())
	}
	if werr := t.Write(file); werr != nil {
		return errors.Join(werr, file.discard())
	}
	if cerr := file.Close(); cerr != nil {
		return cerr
	}
	fmt.Fprintln(v.ErrOut, t)
	return cmp.Or(err, context.Cause(ctx))
}

// RecordFlags declares the flags of a recording, whose usage of --for is given. It returns the
// requests after which the recording ends.
func RecordFlags(v *Invocation, length *time.Duration, usage string) (most *int) {
	v.SecondsVar(length, "for", false, usage)
	most = v.Int("max-requests", recordRequests, "requests after which the recording ends")
	v.Check(func() error {
		if *most < 1 || *most > recordRequests {
			return fmt.Errorf("%w: --max-requests %d: give 1 to %d", config.ErrValue, *most, recordRequests)
		}
		return nil
	})
	return most
}

// Record records the requests that a gateway gets until the length is over, ctx ends or there are
// most requests. It returns an error if the recording ended early by itself, and if nothing was
// recorded although ctx has not ended.
func Record(ctx context.Context, c *console.Client, length time.Duration, most int) (*Recording, error) {
	t := &Recording{most: most, every: recordEvery, ids: map[uint64]uint64{}}
	err := t.read(ctx, c, length)
	switch {
	case ctx.Err() != nil:
		return t, nil
	case err != nil && len(t.Requests) > 0:
		return t, fmt.Errorf("the trace ends early: %w", err)
	case err == nil && len(t.Requests) == 0:
		return t, fmt.Errorf("%w: no request for the gateway's own nodes ended in %v: record for longer, or a gateway that has clients", config.ErrValue, length)
	}
	return t, err
}

// Recording is the requests that were recorded.
type Recording struct {
	Requests []console.Recorded

	most        int
	every       time.Duration // between two readings
	blockTokens int
	dropped     int
	hashes      int
	refused     int
	incomplete  int
	ids         map[uint64]uint64 // of hashes in the trace, so that no hash is written
}

// String returns how many requests were recorded, and how many were not answered.
func (t *Recording) String() string {
	text := fmt.Sprintf("%d requests recorded", len(t.Requests))
	if t.refused+t.incomplete > 0 {
		text += fmt.Sprintf(", of which %d were refused and %d not answered completely", t.refused, t.incomplete)
	}
	if t.dropped > 0 {
		text += fmt.Sprintf("; %d were dropped, because there were too many between two readings", t.dropped)
	}
	return text
}

// read reads from a gateway until the recording ends. An error means that it ends early.
func (t *Recording) read(ctx context.Context, c *console.Client, length time.Duration) error {
	session := rand.Text()
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	var last time.Time // of an answer
	for {
		r, err := c.Record(context.WithoutCancel(ctx), session)
		switch {
		case err != nil && (ctx.Err() != nil || time.Since(last) > recordOutage):
			return err
		case err != nil:
			select {
			case <-ctx.Done():
			case <-time.After(t.every):
			}
			continue
		case r.Began && !last.IsZero():
			return errors.New("the gateway has begun the recording again, because it was restarted or not read for 30 seconds")
		}
		last = time.Now()
		t.blockTokens, t.dropped = r.BlockTokens, r.Dropped
		for _, q := range r.Requests {
			if t.hashes += len(q.Blocks); len(t.Requests) == t.most || t.hashes > recordHashes {
				return nil
			}
			switch q.End {
			case console.EndRefused:
				t.refused++
			case console.EndIncomplete:
				t.incomplete++
			}
			for i, h := range q.Blocks {
				id, ok := t.ids[h]
				if !ok {
					id = uint64(len(t.ids))
					t.ids[h] = id
				}
				q.Blocks[i] = id
			}
			t.Requests = append(t.Requests, q)
		}
		if ctx.Err() != nil {
			return nil
		}
		select {
		case <-ctx.Done(): // read once more
		case <-time.After(t.every):
		}
	}
}

// Write writes the trace in order of arrival, from 0 on. The tokens behind a prompt's last whole
// block get an id of their own, so that no other prompt has them. The length of an incomplete
// answer is not known: the trace has the mean of the complete ones, or the tokens received if these
// are more.
func (t *Recording) Write(out io.Writer) error {
	slices.SortStableFunc(t.Requests, func(a, b console.Recorded) int { return cmp.Compare(a.At, b.At) })
	w := bufio.NewWriter(out)
	next := uint64(len(t.ids))
	answers, tokens := 0, 0
	for i := range t.Requests {
		if q := &t.Requests[i]; complete(q) {
			answers, tokens = answers+1, tokens+q.Output
		}
	}
	mean := int(math.Round(float64(tokens) / float64(max(1, answers))))
	for _, q := range t.Requests {
		end := q.End
		if complete(&q) {
			end = ""
		} else {
			q.Output = max(q.Output, mean)
		}
		if len(q.Blocks) == 0 || len(q.Blocks)*t.blockTokens < q.Prompt {
			q.Blocks = append(q.Blocks, next)
			next++
		}
		line, err := json.Marshal(struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Block     int      `json:"block_tokens"`
			IDs       []uint64 `json:"hash_ids"`
			End       string   `json:"end,omitempty"`
		}{q.At - t.Requests[0].At, q.Prompt, q.Output, t.blockTokens, q.Blocks, end})
		if err != nil {
			return err
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
	}
	return w.Flush()
}

// complete reports whether a request was answered completely.
func complete(q *console.Recorded) bool {
	return q.End != console.EndRefused && q.End != console.EndIncomplete
}
