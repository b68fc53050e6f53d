package console

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// Ends of a recorded request.
const (
	EndIncomplete = "incomplete"
	EndRefused    = "refused"
)

// Recordings are the requests that have ended since the last call of Record with the same session.
type Recordings struct {
	Began       bool `json:"began"` // this call has started the recording
	BlockTokens int  `json:"block_tokens"`
	Dropped     int  `json:"dropped"` // since the first call
	Requests    []Recorded
}

// Recorded is a request that has ended.
type Recorded struct {
	At     int64    `json:"at_ms"` // of arrival, since the first call
	Prompt int      `json:"prompt_tokens"`
	Output int      `json:"output_tokens"`
	End    string   `json:"end"`      // empty: a gateway of an older release, which recorded answered ones only
	First  int64    `json:"first_us"` // from arrival to the first token; 0: there is none, or an older gateway
	Last   int64    `json:"last_us"`  // and to the last one
	Blocks []uint64 `json:"blocks"`   // a hash for each BlockTokens of the prompt
}

// recordTimeout bounds the duration of a call.
const recordTimeout = 20 * time.Second

// maxRecordings bounds an answer of /admin/record in bytes.
const maxRecordings = 256 << 20

// Record returns the requests that have ended since the last call, and has the gateway record from
// the first call on until 30 seconds after the last one.
func (c *Client) Record(ctx context.Context, session string) (*Recordings, error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	path := "/admin/record?session=" + url.QueryEscape(session)
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	r := new(Recordings)
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxRecordings)).Decode(r); err != nil {
		return nil, fmt.Errorf("%s/admin/record: %w", c.Shown(), err)
	}
	return r, nil
}
