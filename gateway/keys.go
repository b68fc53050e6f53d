package gateway

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/regular"
)

// Bounds of keys.
const (
	keyFilePoll  = time.Second // how often the file is looked at
	maxKeyFile   = 4 << 20     // bytes: some 30,000 keys
	keyBurstSecs = 10          // seconds' worth of tokens that a key may take at once
	minWeight    = 0.001
	maxWeight    = 1000.0
)

// ErrKeyFile says what is wrong with a file of keys.
var ErrKeyFile = errors.New("gateway: bad file of API keys")

// key is one API key with what its owner may use and uses.
type key struct {
	hash   [sha256.Size]byte // comparing hashes takes the same time whatever was sent
	name   string            // for logs and messages; empty: none
	limits limits
	admin  bool          // may change the gateway itself and see the fleet
	tokens *rate.Limiter // nil: no limit
	use    *use          // outlives a change of the file
}

// limits of a key; 0: none.
type limits struct {
	concurrency     int     // requests at once
	tokensPerSecond float64 // of prompts and answers
	weight          float64 // of its share, where requests wait
	priority        int32   // the best that its requests may have
}

type use struct {
	running atomic.Int64
	flow    *admit.Flow // its share of the fleet
}

func newKey(hash [sha256.Size]byte) *key {
	return &key{hash: hash, limits: limits{weight: 1}, use: &use{flow: admit.NewFlow(1)}}
}

// keyring is the keys that are valid now; empty: open to all.
type keyring struct {
	now  atomic.Pointer[[]*key]
	file string // what the file said when it was last taken; owned by keepKeys
}

// newKeyring takes plain keys, without limits, and those of a file, if any.
func newKeyring(plain []string, file string) (*keyring, error) {
	r := new(keyring)
	var keys []*key
	if file != "" {
		var err error
		if r.file, err = readKeyFile(file); err != nil {
			return nil, err
		}
		if keys, err = parseKeys(r.file); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrKeyFile, file, err)
		}
	}
	keys = withPlain(keys, plain)
	r.now.Store(&keys)
	return r, nil
}

// withPlain adds the plain keys that a file does not have: its limits hold.
func withPlain(keys []*key, plain []string) []*key {
	for _, p := range plain {
		hash := sha256.Sum256([]byte(p))
		if !slices.ContainsFunc(keys, func(k *key) bool { return k.hash == hash }) {
			k := newKey(hash)
			k.limits.priority, k.admin = math.MinInt32, true
			keys = append(keys, k)
		}
	}
	return keys
}

func readKeyFile(file string) (string, error) {
	text, err := regular.ReadFile(file, maxKeyFile)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrKeyFile, err)
	}
	return string(text), nil
}

// parseKeys reads lines "KEY [name=N] [concurrency=N] [tokens-per-second=N]
// [weight=N] [priority=N] [admin=yes]"; KEY may be sha256:HEX, the hash of one. Empty lines and those that begin with # are
// nothing. Errors never show a key.
func parseKeys(text string) ([]*key, error) {
	var keys []*key
	seen := map[[sha256.Size]byte]int{}
	n := 0
	for line := range strings.Lines(text) {
		n++
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		k := newKey(sha256.Sum256([]byte(fields[0])))
		if digits, ok := strings.CutPrefix(fields[0], "sha256:"); ok {
			h, err := hex.DecodeString(digits)
			if err != nil || len(h) != sha256.Size {
				return nil, fmt.Errorf("line %d: sha256: wants %d hexadecimal digits", n, 2*sha256.Size)
			}
			copy(k.hash[:], h)
		}
		if first := seen[k.hash]; first > 0 {
			return nil, fmt.Errorf("line %d has the key of line %d", n, first)
		}
		seen[k.hash] = n
		for _, f := range fields[1:] {
			if err := k.set(f); err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
		}
		k.use.flow = admit.NewFlow(k.limits.weight)
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, errors.New("it has no key: that would open the gateway to all")
	}
	return keys, nil
}

func (k *key) set(field string) error {
	name, value, _ := strings.Cut(field, "=")
	x, err := strconv.ParseFloat(value, 64)
	bad := err != nil || !(x >= 0) || x > 1e12
	switch {
	case name == "name" && value != "":
		k.name = value
	case name == "admin" && (value == "yes" || value == "no"):
		k.admin = value == "yes"
	case name == "concurrency" && !bad && x == math.Trunc(x):
		k.limits.concurrency = int(x)
	case name == "tokens-per-second" && !bad:
		if k.limits.tokensPerSecond = x; x > 0 {
			k.tokens = rate.NewLimiter(rate.Limit(x), int(max(1, keyBurstSecs*x)))
		}
	case name == "weight" && err == nil && x >= minWeight && x <= maxWeight:
		k.limits.weight = x
	case name == "weight":
		return fmt.Errorf("weight is %q: want a number of %g to %g", value, minWeight, maxWeight)
	case name == "priority" && err == nil && x == math.Trunc(x) && math.Abs(x) < 1<<31:
		k.limits.priority = int32(x)
	case name == "priority":
		return fmt.Errorf("priority is %q: want a whole number, lower is better", value)
	case name == "concurrency" || name == "tokens-per-second":
		return fmt.Errorf("%s is %q: want a number of 0 (no limit) or more", name, value)
	default:
		return fmt.Errorf("%q is none of name=N, concurrency=N, tokens-per-second=N, weight=N, priority=N, admin=yes", name)
	}
	return nil
}

// len is how many keys there are.
func (r *keyring) len() int { return len(*r.now.Load()) }

// find is the key of an Authorization header; nil: none is right.
func (r *keyring) find(header []byte) (found *key) {
	const scheme = "bearer "
	if len(header) < len(scheme) || !strings.EqualFold(string(header[:len(scheme)]), scheme) {
		return nil
	}
	got := sha256.Sum256(header[len(scheme):])
	for _, k := range *r.now.Load() {
		if subtle.ConstantTimeCompare(got[:], k.hash[:]) == 1 {
			found = k
		}
	}
	return found
}

// allow says whether a request with that key, nil for none, may come in.
func (r *keyring) allow(k *key) bool { return k != nil || r.len() == 0 }

// keyName is where a request keeps its key, which is looked for once.
type keyName struct{}

// keyOf is the key of a request; nil: none is right.
func (g *Gateway) keyOf(ctx *fasthttp.RequestCtx) *key {
	if k, ok := ctx.Request.UserValue(keyName{}).(*key); ok {
		return k
	}
	k := g.keys.find(ctx.Request.Header.Peek("Authorization"))
	if k != nil {
		ctx.Request.SetUserValue(keyName{}, k)
	}
	return k
}

// renew takes new keys; those that were there keep what they have used.
func (r *keyring) renew(keys []*key, a *admission) {
	for _, k := range keys {
		for _, old := range *r.now.Load() {
			if old.hash != k.hash {
				continue
			}
			k.use = old.use
			a.setWeight(k.use.flow, k.limits.weight)
			if old.limits.tokensPerSecond == k.limits.tokensPerSecond {
				k.tokens = old.tokens
			}
		}
	}
	r.now.Store(&keys)
}

// keepKeys reads the file of keys again when it has changed. A bad file changes
// nothing but a metric.
func (g *Gateway) keepKeys(ctx context.Context) {
	bad := g.meters.set.Gauge(metrics.GatewayKeyFileBad)
	tick := time.NewTicker(keyFilePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		text, err := readKeyFile(g.o.APIKeyFile)
		if err == nil && text == g.keys.file {
			bad.Set(0)
			continue
		}
		var keys []*key
		if err == nil {
			keys, err = parseKeys(text)
		}
		if err != nil {
			if bad.Get() == 0 {
				g.log.Error("the file of API keys is not taken", "file", g.o.APIKeyFile, "error", err)
			}
			bad.Set(1)
			continue
		}
		g.keys.file = text
		keys = withPlain(keys, g.o.APIKeys)
		g.keys.renew(keys, g.admission)
		bad.Set(0)
		g.log.Info("API keys read anew", "file", g.o.APIKeyFile, "keys", len(keys))
	}
}

// letIn lets a request with so many prompt tokens in, or says which limit of its
// key it is beyond: 429.
func (g *Gateway) letIn(k *key, nTokens int) *openai.Error {
	if k == nil {
		return nil
	}
	if n, limit := k.use.running.Add(1), k.limits.concurrency; limit > 0 && n > int64(limit) {
		k.use.running.Add(-1)
		g.refused("concurrency")
		return tooMany(retryAfter, "this API key has %d requests running, as many as it may", limit)
	}
	if k.tokens == nil {
		return nil
	}
	now := time.Now()
	if left := k.tokens.TokensAt(now); left <= 0 {
		k.use.running.Add(-1)
		g.refused("tokens")
		wait := int(math.Ceil((1 - left) / k.limits.tokensPerSecond))
		return tooMany(min(max(1, wait), 3600), "this API key has used its %g tokens per second", k.limits.tokensPerSecond)
	}
	k.charge(now, nTokens)
	return nil
}

func tooMany(retryAfter int, format string, args ...any) *openai.Error {
	return &openai.Error{Status: 429, Type: openai.TypeRateLimit, Message: fmt.Sprintf(format, args...), RetryAfter: retryAfter}
}

// charge takes tokens from the key's budget, which may end below zero: what has
// been admitted is not cut, what comes next waits.
func (k *key) charge(now time.Time, n int) {
	for n > 0 && k.tokens != nil {
		part := min(n, k.tokens.Burst())
		k.tokens.ReserveN(now, part)
		n -= part
	}
}

// done gives back what a request held, and charges for its answer.
func (k *key) done(nOutput int) {
	if k != nil {
		k.use.running.Add(-1)
		k.charge(time.Now(), nOutput)
	}
}
