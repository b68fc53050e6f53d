package console

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// Recordings is what a gateway has answered since the last call of Record with the same session.
type Recordings struct {
	BlockTokens int `json:"block_tokens"`
	Dropped     int `json:"dropped"` // since the first call
	Requests    []Recorded
}

// Recorded is an answered request.
type Recorded struct {
	At     int64    `json:"at_ms"` // of arrival, since the first call
	Prompt int      `json:"prompt_tokens"`
	Output int      `json:"output_tokens"`
	Blocks []uint64 `json:"blocks"` // a hash for each BlockTokens of the prompt
}

// maxRecordings bounds an answer of /admin/record in bytes.
const maxRecordings = 256 << 20

// Record returns what the gateway has answered since the last call, and has it record from the
// first call on until 30 seconds after the last one.
func (c *Client) Record(ctx context.Context, session string) (*Recordings, error) {
	path := "/admin/record?session=" + url.QueryEscape(session)
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	r := new(Recordings)
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxRecordings)).Decode(r); err != nil {
		return nil, fmt.Errorf("%s/admin/record: %w", c.URL, err)
	}
	return r, nil
}
