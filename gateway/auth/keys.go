// Package auth has the API keys of clients, with the limits and the use of each.
//
// Keys come from options, without limits, and from a file that is read again when it changes. Only
// their hashes are kept, and errors never contain a key.
//
// Invariant: a request that Acquire accepted is counted until Release, even if its key's line in
// the file was changed or removed meanwhile.
package auth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/regular"
)

// Bounds of keys.
const (
	retryAfter = 1           // Retry-After of refused requests, in seconds
	filePoll   = time.Second // between reads of the file
	maxFile    = 4 << 20     // bytes: some 30,000 keys
	burstSecs  = 10          // seconds of a key's tokens per second that it may use at once
	minWeight  = 0.001
	maxWeight  = 1000.0
)

// ErrFile reports an error in a file of keys.
var ErrFile = errors.New("gateway: bad file of API keys")

// Key is one API key with its limits and its use. Its methods accept nil, which has no limits.
type Key struct {
	hash   [sha256.Size]byte // hashes are compared in constant time
	Name   string            // for logs and metrics; empty: none
	Limits Limits
	Admin  bool             // may use the operators' routes
	tokens *rate.Limiter    // nil: no limit
	use    *use             // kept when the file changes
	counts []*metrics.Value // of metrics.KeyTokens; nil: the key has no name
}

// Limits of a key; 0: none.
type Limits struct {
	Concurrency     int     // requests at once
	TokensPerSecond float64 // of prompts and answers
	Weight          float64 // of its share while requests wait
	Priority        int32   // the best priority of its requests
}

type use struct {
	running atomic.Int64
	flow    *admit.Flow // the key's share of the fleet
}

func newKey(hash [sha256.Size]byte) *Key {
	return &Key{hash: hash, Limits: Limits{Weight: 1}, use: &use{flow: admit.NewFlow(1)}}
}

// Keyring has the valid keys. Without keys, all requests are allowed.
type Keyring struct {
	now   atomic.Pointer[[]*Key]
	plain []string
	path  string       // of the file; empty: there is none
	file  string       // the file's text when it was last loaded; owned by Watch
	set   *metrics.Set // nil: tokens of keys are not counted
}

// New returns a keyring of plain keys, without limits, and of a file's keys; file may be empty.
func New(plain []string, file string) (*Keyring, error) {
	r := &Keyring{plain: plain, path: file}
	r.now.Store(new([]*Key))
	if file == "" {
		r.renew(withPlain(nil, plain), nil)
		return r, nil
	}
	_, err := r.reload(nil)
	return r, err
}

// Meter has the tokens of keys with a name counted in set. It is called before the first request.
func (r *Keyring) Meter(set *metrics.Set) {
	r.set = set
	r.meter(*r.now.Load())
}

// meter gives keys the counters of their names.
func (r *Keyring) meter(keys []*Key) {
	for _, k := range keys {
		if r.set == nil || k.Name == "" {
			continue
		}
		for _, of := range metrics.KeyTokens {
			k.counts = append(k.counts, r.set.Named(metrics.GatewayKeyTokens, k.Name, of))
		}
	}
}

// Counter returns the counter of some of the key's tokens, by index of metrics.KeyTokens; nil: the
// key has none.
func (k *Key) Counter(of int) *metrics.Value {
	if k == nil || k.counts == nil {
		return nil
	}
	return k.counts[of]
}

// reload reads the file and replaces the keys if its text has changed. Keys that stay keep their
// use; kept is called with each of them.
func (r *Keyring) reload(kept func(*Key)) (changed bool, err error) {
	b, err := regular.ReadFile(r.path, maxFile)
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrFile, err)
	}
	text := string(b)
	if text == r.file && text != "" {
		return false, nil
	}
	keys, err := parse(text)
	if err != nil {
		return false, fmt.Errorf("%w: %s: %w", ErrFile, r.path, err)
	}
	r.file = text
	r.renew(withPlain(keys, r.plain), kept)
	return true, nil
}

// withPlain adds the plain keys that are not in the file. For keys in both, the file's limits
// apply.
func withPlain(keys []*Key, plain []string) []*Key {
	for _, p := range plain {
		hash := sha256.Sum256([]byte(p))
		if !slices.ContainsFunc(keys, func(k *Key) bool { return k.hash == hash }) {
			k := newKey(hash)
			k.Limits.Priority, k.Admin = math.MinInt32, true
			keys = append(keys, k)
		}
	}
	return keys
}

// parse reads lines "KEY [name=N] [concurrency=N] [tokens-per-second=N] [weight=N] [priority=N]
// [admin=yes]". KEY may be sha256:HEX, the hash of a key. Empty lines and lines that begin with #
// are skipped. A line without KEY is refused, because its first attribute would be a key that is
// easy to guess. Errors never contain a key.
func parse(text string) ([]*Key, error) {
	var keys []*Key
	seen := map[[sha256.Size]byte]int{}
	n := 0
	for line := range strings.Lines(text) {
		n++
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if name, _, ok := strings.Cut(fields[0], "="); ok && slices.Contains(attributes, name) {
			return nil, fmt.Errorf("line %d begins with %s=: its key is missing", n, name)
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
		k.use.flow = admit.NewFlow(k.Limits.Weight)
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, errors.New("it has no key: that would open the gateway to all")
	}
	return keys, nil
}

// attributes are the names that may follow a key in its line.
var attributes = []string{"name", "concurrency", "tokens-per-second", "weight", "priority", "admin"}

func (k *Key) set(field string) error {
	name, value, _ := strings.Cut(field, "=")
	x, err := strconv.ParseFloat(value, 64)
	bad := err != nil || !(x >= 0) || x > 1e12
	switch {
	case name == "name" && value != "":
		k.Name = value
	case name == "admin" && (value == "yes" || value == "no"):
		k.Admin = value == "yes"
	case name == "concurrency" && !bad && x == math.Trunc(x):
		k.Limits.Concurrency = int(x)
	case name == "tokens-per-second" && !bad:
		if k.Limits.TokensPerSecond = x; x > 0 {
			k.tokens = rate.NewLimiter(rate.Limit(x), int(max(1, burstSecs*x)))
		}
	case name == "weight" && err == nil && x >= minWeight && x <= maxWeight:
		k.Limits.Weight = x
	case name == "weight":
		return fmt.Errorf("weight is %q: want a number of %g to %g", value, minWeight, maxWeight)
	case name == "priority" && err == nil && x == math.Trunc(x) && math.Abs(x) < 1<<31:
		k.Limits.Priority = int32(x)
	case name == "priority":
		return fmt.Errorf("priority is %q: want a whole number, lower is better", value)
	case name == "concurrency" || name == "tokens-per-second":
		return fmt.Errorf("%s is %q: want a number of 0 (no limit) or more", name, value)
	default:
		return fmt.Errorf("%q is none of name=N, concurrency=N, tokens-per-second=N, weight=N, priority=N, admin=yes", name)
	}
	return nil
}

// Len returns the number of keys.
func (r *Keyring) Len() int { return len(*r.now.Load()) }

// Find returns the key of a request, or nil if it has no valid one. The key is in Authorization, by
// the scheme Bearer, in X-Api-Key or in Api-Key. A request with two different keys has none.
func (r *Keyring) Find(h *fasthttp.RequestHeader) (found *Key) {
	const scheme = "bearer "
	var key []byte
	for _, name := range [...]string{fasthttp.HeaderAuthorization, "X-Api-Key", "Api-Key"} {
		for _, value := range h.PeekAll(name) {
			if name == fasthttp.HeaderAuthorization {
				if len(value) < len(scheme) || !strings.EqualFold(string(value[:len(scheme)]), scheme) {
					continue
				}
				value = value[len(scheme):]
			}
			if len(value) == 0 {
				continue
			}
			if key != nil && subtle.ConstantTimeCompare(key, value) == 0 {
				return nil
			}
			key = value
		}
	}
	if key == nil {
		return nil
	}
	got := sha256.Sum256(key)
	for _, k := range *r.now.Load() {
		if subtle.ConstantTimeCompare(got[:], k.hash[:]) == 1 {
			found = k
		}
	}
	return found
}

// Allow reports whether a request with that key, or nil, is allowed.
func (r *Keyring) Allow(k *Key) bool { return k != nil || r.Len() == 0 }

// Owner returns the key's name, which other keys may have, too, or else a part of its hash. It
// returns "" for no key.
func (k *Key) Owner() string {
	switch {
	case k == nil:
		return ""
	case k.Name != "":
		return "name:" + k.Name
	}
	return "hash:" + hex.EncodeToString(k.hash[:16])
}

// Same reports whether two keys are the same one, perhaps from before and after the file changed.
// nil is a client without a key.
func (k *Key) Same(other *Key) bool {
	return k == other || k != nil && other != nil && k.use == other.use
}

// Flow returns the key's share of the fleet. It stays the same while the key is in the file.
func (k *Key) Flow() *admit.Flow { return k.use.flow }

// renew replaces the keys. Keys that stay keep their use; kept is called with each of them.
func (r *Keyring) renew(keys []*Key, kept func(*Key)) {
	for _, k := range keys {
		for _, old := range *r.now.Load() {
			if old.hash != k.hash {
				continue
			}
			k.use = old.use
			kept(k)
			if old.Limits.TokensPerSecond == k.Limits.TokensPerSecond {
				k.tokens = old.tokens
			}
		}
	}
	r.meter(keys)
	r.now.Store(&keys)
}

// Watch loads the file of keys whenever it has changed, until ctx ends. An invalid file only sets
// bad to 1, until the file is valid. kept is called with each key that stays.
func (r *Keyring) Watch(ctx context.Context, log *slog.Logger, bad *metrics.Value, kept func(*Key)) {
	tick := time.NewTicker(filePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		changed, err := r.reload(kept)
		if err != nil {
			if bad.Get() == 0 {
				log.Error("cannot reload API keys", "file", r.path, "error", err)
			}
			bad.Set(1)
			continue
		}
		if bad.Set(0); changed {
			log.Info("API keys reloaded", "file", r.path, "keys", r.Len())
		}
	}
}

// Refusal reports the limit of its key that a request exceeds.
type Refusal struct {
	Limit      string // label of metrics.GatewayRefused
	RetryAfter int    // seconds
	Message    string
}

// Acquire counts a request with nTokens prompt tokens until Release, or refuses it.
func (k *Key) Acquire(nTokens int) *Refusal {
	if k == nil {
		return nil
	}
	if n, limit := k.use.running.Add(1), k.Limits.Concurrency; limit > 0 && n > int64(limit) {
		k.use.running.Add(-1)
		return &Refusal{"concurrency", retryAfter, fmt.Sprintf("this API key has %d running requests, which is its limit", limit)}
	}
	if k.tokens == nil {
		return nil
	}
	now := time.Now()
	if left := k.tokens.TokensAt(now); left <= 0 {
		k.use.running.Add(-1)
		wait := int(math.Ceil((1 - left) / k.Limits.TokensPerSecond))
		return &Refusal{"tokens", min(max(1, wait), 3600), fmt.Sprintf("this API key has used its %g tokens per second", k.Limits.TokensPerSecond)}
	}
	k.charge(now, nTokens)
	return nil
}

// charge subtracts tokens from the key's budget. The budget may become negative: running requests
// continue, and later ones are refused.
func (k *Key) charge(now time.Time, n int) {
	for n > 0 && k.tokens != nil {
		part := min(n, k.tokens.Burst())
		k.tokens.ReserveN(now, part)
		n -= part
	}
}

// Release ends a request, and charges the tokens of its answer.
func (k *Key) Release(nOutput int) {
	if k != nil {
		k.use.running.Add(-1)
		k.charge(time.Now(), nOutput)
	}
}
