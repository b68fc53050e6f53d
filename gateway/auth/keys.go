// Package auth holds the API keys of clients: which are valid, what the owner of each may
// use, and what it has used.
//
// Keys come from options, without limits, and from a file that is read again when it
// changes. Only their hashes are kept, and errors never show a key.
//
// Invariant: a request that LetIn took is counted until Done, also when its key's line in
// the file has changed or gone meanwhile.
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

	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/regular"
)

// Bounds of keys.
const (
	retryAfter = 1           // seconds; what refused requests are told
	filePoll   = time.Second // how often the file is looked at
	maxFile    = 4 << 20     // bytes: some 30,000 keys
	burstSecs  = 10          // seconds' worth of tokens that a key may take at once
	minWeight  = 0.001
	maxWeight  = 1000.0
)

// ErrFile says what is wrong with a file of keys.
var ErrFile = errors.New("gateway: bad file of API keys")

// Key is one API key with what its owner may use and uses. Its methods are nil-safe.
type Key struct {
	hash   [sha256.Size]byte // comparing hashes takes the same time whatever was sent
	Name   string            // for logs; empty: none
	Limits Limits
	Admin  bool          // may change the gateway itself and see the fleet
	tokens *rate.Limiter // nil: no limit
	use    *use          // outlives a change of the file
}

// Limits of a key; 0: none.
type Limits struct {
	Concurrency     int     // requests at once
	TokensPerSecond float64 // of prompts and answers
	Weight          float64 // of its share, where requests wait
	Priority        int32   // the best that its requests may have
}

type use struct {
	running atomic.Int64
	flow    *admit.Flow // its share of the fleet
}

func newKey(hash [sha256.Size]byte) *Key {
	return &Key{hash: hash, Limits: Limits{Weight: 1}, use: &use{flow: admit.NewFlow(1)}}
}

// Keyring is the keys that are valid now; empty: open to all.
type Keyring struct {
	now   atomic.Pointer[[]*Key]
	plain []string
	path  string // of the file; empty: there is none
	file  string // what the file said when it was last taken; owned by Watch
}

// New takes plain keys, without limits, and those of a file, if any.
func New(plain []string, file string) (*Keyring, error) {
	r := &Keyring{plain: plain, path: file}
	var keys []*Key
	if file != "" {
		var err error
		if r.file, err = readFile(file); err != nil {
			return nil, err
		}
		if keys, err = parse(r.file); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrFile, file, err)
		}
	}
	keys = withPlain(keys, plain)
	r.now.Store(&keys)
	return r, nil
}

// withPlain adds the plain keys that a file does not have: its limits hold.
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

func readFile(file string) (string, error) {
	text, err := regular.ReadFile(file, maxFile)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrFile, err)
	}
	return string(text), nil
}

// parse reads lines "KEY [name=N] [concurrency=N] [tokens-per-second=N]
// [weight=N] [priority=N] [admin=yes]"; KEY may be sha256:HEX, the hash of one. Empty lines and those that begin with # are
// nothing. Errors never show a key.
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

// Len is how many keys there are.
func (r *Keyring) Len() int { return len(*r.now.Load()) }

// Find is the key of an Authorization header; nil: none is right.
func (r *Keyring) Find(header []byte) (found *Key) {
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

// Allow says whether a request with that key, nil for none, may come in.
func (r *Keyring) Allow(k *Key) bool { return k != nil || r.Len() == 0 }

// Flow is the key's share of the fleet, the same as long as its key is in the file.
func (k *Key) Flow() *admit.Flow { return k.use.flow }

// renew takes new keys; those that were there keep what they have used. kept is called
// with each of them.
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
	r.now.Store(&keys)
}

// Watch reads the file of keys again when it has changed, until ctx ends. A bad file
// changes nothing but bad, which is 1 while it is there. kept is called with each new key
// that was there before.
func (r *Keyring) Watch(ctx context.Context, log *slog.Logger, bad *metrics.Value, kept func(*Key)) {
	tick := time.NewTicker(filePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		text, err := readFile(r.path)
		if err == nil && text == r.file {
			bad.Set(0)
			continue
		}
		var keys []*Key
		if err == nil {
			keys, err = parse(text)
		}
		if err != nil {
			if bad.Get() == 0 {
				log.Error("the file of API keys is not taken", "file", r.path, "error", err)
			}
			bad.Set(1)
			continue
		}
		r.file = text
		keys = withPlain(keys, r.plain)
		r.renew(keys, kept)
		bad.Set(0)
		log.Info("API keys read anew", "file", r.path, "keys", len(keys))
	}
}

// Refusal says which limit of its key a request is beyond.
type Refusal struct {
	Limit      string // value of the label of GatewayRefused
	RetryAfter int    // seconds
	Message    string
}

// LetIn counts a request with so many prompt tokens until Done, or refuses it.
func (k *Key) LetIn(nTokens int) *Refusal {
	if k == nil {
		return nil
	}
	if n, limit := k.use.running.Add(1), k.Limits.Concurrency; limit > 0 && n > int64(limit) {
		k.use.running.Add(-1)
		return &Refusal{"concurrency", retryAfter, fmt.Sprintf("this API key has %d requests running, as many as it may", limit)}
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

// charge takes tokens from the key's budget, which may end below zero: what has
// been admitted is not cut, what comes next waits.
func (k *Key) charge(now time.Time, n int) {
	for n > 0 && k.tokens != nil {
		part := min(n, k.tokens.Burst())
		k.tokens.ReserveN(now, part)
		n -= part
	}
}

// Done gives back what a request held, and charges for its answer.
func (k *Key) Done(nOutput int) {
	if k != nil {
		k.use.running.Add(-1)
		k.charge(time.Now(), nOutput)
	}
}
