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

// record writes a trace of the requests that a gateway answers.
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
	t := &recording{most: *most, ids: map[uint64]uint64{}}
	err = t.read(ctx, c, length)
	if err != nil && ctx.Err() == nil {
		return errors.Join(err, file.discard())
	}
	if len(t.requests) == 0 {
		return errors.Join(cmp.Or(context.Cause(ctx), fmt.Errorf("%w: the gateway answered no request of its own nodes in %v: record for longer, or a gateway that has clients", config.ErrValue, length)), file.discard())
	}
	if err := t.write(file); err != nil {
		return errors.Join(err, file.discard())
	}
	if err := file.Close(); err != nil {
		return err
	}
	fmt.Fprintf(v.ErrOut, "%d requests recorded", len(t.requests))
	if t.dropped > 0 {
		fmt.Fprintf(v.ErrOut, "; %d were dropped, because there were too many between two readings", t.dropped)
	}
	fmt.Fprintln(v.ErrOut)
	return context.Cause(ctx)
}

// recording is the requests that were recorded.
type recording struct {
	most        int
	blockTokens int
	dropped     int
	ids         map[uint64]uint64 // of hashes in the trace, so that no hash is written
	requests    []console.Recorded
}

// read reads from a gateway until the recording ends.
func (t *recording) read(ctx context.Context, c *console.Client, length time.Duration) error {
	session := rand.Text()
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	for {
		r, err := c.Record(context.WithoutCancel(ctx), session)
		if err != nil {
			return err
		}
		t.blockTokens, t.dropped = r.BlockTokens, r.Dropped
		for _, q := range r.Requests {
			if len(t.requests) == t.most {
				return nil
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
		case <-time.After(recordEvery):
		}
	}
}

// write writes the trace in order of arrival, from 0 on. The tokens behind a prompt's last block
// get an id of their own, so that no other prompt has them.
func (t *recording) write(out io.Writer) error {
	slices.SortStableFunc(t.requests, func(a, b console.Recorded) int { return cmp.Compare(a.At, b.At) })
	w := bufio.NewWriter(out)
	next := uint64(len(t.ids))
	for _, q := range t.requests {
		line, err := json.Marshal(struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Block     int      `json:"block_tokens"`
			IDs       []uint64 `json:"hash_ids"`
		}{q.At - t.requests[0].At, q.Prompt, q.Output, t.blockTokens, append(q.Blocks, next)})
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
