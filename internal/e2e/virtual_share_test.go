package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"context"
	"net"

	"github.com/tandem-serving/tandem/gateway"
)

// customer keeps asking with a key until the bubble's time is over, and counts the
// tokens that it was served between from and to.
func (v *virtual) customer(rng *rand.Rand, key string, longest int, from, to time.Time, served *atomic.Int64) {
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return v.door.Dial(ctx, "gateway")
	}}}
	defer c.CloseIdleConnections()
	for time.Now().Before(to) {
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"ignore_eos":true,"temperature":1}`, string(rune('A'+rng.IntN(26)))+fmt.Sprint(rng.Uint64())[:1+rng.IntN(15)], 1+rng.IntN(longest))
		req, err := http.NewRequest("POST", "http://gateway/v1/completions", bytes.NewBufferString(body))
		v.must(err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := c.Do(req)
		v.must(err)
		text, err := io.ReadAll(resp.Body)
		v.must(err)
		resp.Body.Close()
		var a struct {
			Usage struct {
				Total int64 `json:"total_tokens"`
			}
		}
		if err := json.Unmarshal(text, &a); err != nil || resp.StatusCode != 200 {
			v.errorf("%s: %d %s", key, resp.StatusCode, text)
			return
		}
		if now := time.Now(); now.After(from) && now.Before(to) {
			served.Add(a.Usage.Total)
		}
	}
}

// Two keys that always have more to ask than the fleet can do get tokens as their
// weights say, though the one with less weight asks for longer answers.
func TestVirtualShares(t *testing.T) {
	ds, _ := virtualDevices(t)
	count := &counts{n: map[string]int{}}
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, []byte("two weight=2\none\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var two, one atomic.Int64
	inBubble(t, ds, nil, count, func(v *virtual, o *gateway.Options) {
		v.gentle = true
		v.key = "one"
		o.APIKeyFile, o.Limits.NodeBacklog, o.MinRemotePrefillTokens = keys, 1, 1000
	}, func(v *virtual) {
		var clients sync.WaitGroup
		from, to := time.Now().Add(time.Second), time.Now().Add(shareTime)
		for range 24 {
			for _, k := range []struct {
				key     string
				longest int
				served  *atomic.Int64
			}{{"two", 20, &two}, {"one", 60, &one}} {
				mine := rand.New(rand.NewPCG(v.rng.Uint64(), 41))
				clients.Go(func() { v.customer(mine, k.key, k.longest, from, to, k.served) })
			}
		}
		v.end(&clients)
	})
	ratio := float64(two.Load()) / float64(one.Load())
	t.Logf("%d and %d tokens: %.3f", two.Load(), one.Load(), ratio)
	if ratio < 1.9 || ratio > 2.1 {
		t.Errorf("weights 2 and 1 were served %d and %d tokens: %.3f", two.Load(), one.Load(), ratio)
	}
}

// shareTime is how long they ask, in virtual time.
const shareTime = 3500 * time.Millisecond
