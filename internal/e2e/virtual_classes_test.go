package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// resumedTokens is how many tokens the stream of TestVirtualClasses has.
const resumedTokens = 120

// A fleet has two numerics classes: KV of float32 and of bfloat16. A stream whose node
// is killed continues on the other node of its class, with the bits that it would have
// had; where there is none it continues on a node of the other class, which has its
// prompt computed by a prefill node of its own class. The client keeps what it has, the
// answer ends whole, and the gateway counts the change.
func TestVirtualClasses(t *testing.T) {
	dir := filepath.Join(checkpoints, "gqa-tied")
	first := devicesWithKV(t, dir, native(), "float32", 3, engine.Adapters{})
	other := devicesWithKV(t, dir, native(), "bfloat16", 2, engine.Adapters{})
	if first[0].Class == other[0].Class {
		t.Fatalf("both classes are %s", first[0].Class)
	}
	for name, ds := range map[string][]*engine.Loaded{ // d0, d1, p0, p1, d2
		"a node of its class": {first[0], other[0], first[1], other[1], first[2]},
		"none of its class":   {first[0], other[0], first[1], other[1]},
	} {
		t.Run(name, func(t *testing.T) {
			same := len(ds) == 5
			inBubble(t, ds, nil, &counts{n: map[string]int{}}, func(v *virtual, o *gateway.Options) {
				v.gentle, v.heard = true, func(string, bool) {}               // the test says who is there
				o.MinRemotePrefillTokens, o.StreamTokens = 1, 2*resumedTokens // the client pauses while a node is killed
			}, func(v *virtual) {
				v.only("d0")
				whole, _ := v.speak(nil)
				// The others join when the stream has begun, and then its node is killed.
				got, seen := v.speak(func() {
					v.only("d0", "d1", "d2")
					v.nodes[0].kill()
				})
				changes := v.meters.Counter(metrics.GatewayClassChanges).Get()
				resumes := v.meters.Counter(metrics.GatewayResumes).Get()
				switch {
				case len(seen) == 0 || !strings.HasPrefix(got, seen) || !strings.HasPrefix(whole, seen) || len(seen) >= len(got):
					v.errorf("%q was delivered of %q before the node was killed, undisturbed it is %q", seen, got, whole)
				case resumes < 1:
					v.errorf("the stream was not resumed")
				case same && (got != whole || changes != 0):
					v.errorf("within its class the answer is %q, want %q; %g changes of class", got, whole, changes)
				case !same && changes != 1:
					v.errorf("%g changes of class, want 1", changes)
				}
				at := v.nodes[1] // of the other class
				if same {
					at = v.nodes[4]
				}
				if k := at.decode.Counters(); k.RemotePrefills != 1 || k.PrefillFailures != 0 || k.FinishedLength != 1 {
					v.errorf("%s took the stream with %+v; want one remote prefill without a failure", at.addr, k)
				}
				if k := v.nodes[1].decode.Counters(); same && k.Accepted != 0 {
					v.errorf("a node of the other class accepted %d attempts", k.Accepted)
				}
				v.nodes[0].start(v.rng)
				v.end(new(sync.WaitGroup))
			})
		})
	}
}

// only makes the gateway see all prefill nodes and these decode nodes, and waits until it
// can use them.
func (v *virtual) only(decode ...string) {
	v.mu.Lock()
	n := 0
	for _, node := range v.nodes {
		up := node.addr[0] == 'p'
		for _, addr := range decode {
			up = up || addr == node.addr
		}
		if v.down[node.addr] = !up; up && node.addr[0] == 'd' {
			n++
		}
	}
	v.mu.Unlock()
	v.g.SetMembers(v.members())
	usable := v.meters.Gauge(metrics.GatewayUsableDecodeNodes)
	for began := time.Now(); int(usable.Get()) != n; time.Sleep(100 * time.Microsecond) {
		if time.Since(began) > 5*time.Second {
			v.errorf("after 5 s the gateway uses %g decode nodes, want %d", usable.Get(), n)
			return
		}
	}
	time.Sleep(time.Millisecond) // prefill nodes, too
}

// speak asks for a seeded stream and returns its text. begun is called when a few events
// have come; seen is the text of those.
func (v *virtual) speak(begun func()) (text, seen string) {
	nc, err := v.door.Dial(v.t.Context(), "gateway")
	v.must(err)
	defer nc.Close()
	body, err := json.Marshal(map[string]any{"prompt": "the node keeps a block until nothing pins it", "max_tokens": resumedTokens,
		"seed": 11, "temperature": 1, "ignore_eos": true, "stream": true, "stream_options": map[string]bool{"include_usage": true}})
	v.must(err)
	_, err = fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	v.must(err)
	resp, err := http.ReadResponse(bufio.NewReader(nc), &http.Request{Method: "POST"})
	v.must(err)
	defer resp.Body.Close()
	var s said
	finish, done, events := "", false, bufio.NewScanner(resp.Body)
	for n := 0; events.Scan(); {
		data, ok := bytes.CutPrefix(events.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			done = true
			continue
		}
		s = said{}
		v.must(json.Unmarshal(data, &s))
		for _, c := range s.Choices {
			text, finish = text+c.Text, finish+c.Finish
		}
		if n++; n == 5 && begun != nil {
			seen = text
			begun()
		}
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK || !done || finish != "length" || s.Usage == nil || s.Usage.Completion != resumedTokens {
		v.errorf("the stream ended with %d, %v, done %t, finish %q, usage %+v, error %+v", resp.StatusCode, err, done, finish, s.Usage, s.Error)
	}
	return text, seen
}
