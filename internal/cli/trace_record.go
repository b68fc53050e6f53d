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
	c := client(v)
	length := time.Hour
	v.SecondsVar(&length, "for", false, "length of the recording; Ctrl-C ends it earlier, and the trace has the requests so far")
	out := v.String("out", "", "file to write the trace to, which tandem sim --trace reads; empty: the standard output")
	most := v.Int("max-requests", recordRequests, "requests after which the recording ends")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if *most < 1 || *most > recordRequests {
		return fmt.Errorf("%w: --max-requests %d: give 1 to %d", config.ErrValue, *most, recordRequests)
	}
	file, err := createProfile(*out, v.Out)
	if err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	t := &recording{most: *most, every: recordEvery, ids: map[uint64]uint64{}}
	err = t.read(ctx, c, length)
	if err != nil && len(t.requests) == 0 && ctx.Err() == nil {
		return errors.Join(err, file.discard())
	}
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("the trace ends early: %w", err)
	} else {
		err = nil
	}
	if len(t.requests) == 0 {
		return errors.Join(cmp.Or(context.Cause(ctx), fmt.Errorf("%w: no request for the gateway's own nodes ended in %v: record for longer, or a gateway that has clients", config.ErrValue, length)), file.discard())
	}
	if werr := t.write(file); werr != nil {
		return errors.Join(werr, file.discard())
	}
	if cerr := file.Close(); cerr != nil {
		return cerr
	}
	fmt.Fprintf(v.ErrOut, "%d requests recorded", len(t.requests))
	if t.refused+t.incomplete > 0 {
		fmt.Fprintf(v.ErrOut, ", of which %d were refused and %d not answered completely", t.refused, t.incomplete)
	}
	if t.dropped > 0 {
		fmt.Fprintf(v.ErrOut, "; %d were dropped, because there were too many between two readings", t.dropped)
	}
	fmt.Fprintln(v.ErrOut)
	return cmp.Or(err, context.Cause(ctx))
}

// recording is the requests that were recorded.
type recording struct {
	most        int
	every       time.Duration // between two readings
	blockTokens int
	dropped     int
	hashes      int
	refused     int
	incomplete  int
	ids         map[uint64]uint64 // of hashes in the trace, so that no hash is written
	requests    []console.Recorded
}

// read reads from a gateway until the recording ends. An error means that it ends early.
func (t *recording) read(ctx context.Context, c *console.Client, length time.Duration) error {
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
			if t.hashes += len(q.Blocks); len(t.requests) == t.most || t.hashes > recordHashes {
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
			t.requests = append(t.requests, q)
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

// write writes the trace in order of arrival, from 0 on. The tokens behind a prompt's last block
// get an id of their own, so that no other prompt has them. The length of an incomplete answer is
// not known: the trace has the mean of the complete ones, or the tokens received if these are more.
func (t *recording) write(out io.Writer) error {
	slices.SortStableFunc(t.requests, func(a, b console.Recorded) int { return cmp.Compare(a.At, b.At) })
	w := bufio.NewWriter(out)
	next := uint64(len(t.ids))
	answers, tokens := 0, 0
	for i := range t.requests {
		if q := &t.requests[i]; complete(q) {
			answers, tokens = answers+1, tokens+q.Output
		}
	}
	mean := int(math.Round(float64(tokens) / float64(max(1, answers))))
	for _, q := range t.requests {
		end := q.End
		if complete(&q) {
			end = ""
		} else {
			q.Output = max(q.Output, mean)
		}
		line, err := json.Marshal(struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Block     int      `json:"block_tokens"`
			IDs       []uint64 `json:"hash_ids"`
			End       string   `json:"end,omitempty"`
		}{q.At - t.requests[0].At, q.Prompt, q.Output, t.blockTokens, append(q.Blocks, next), end})
		if err != nil {
			return err
		}
		next++
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
