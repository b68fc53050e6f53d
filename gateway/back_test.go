package gateway

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// A restarted node serves again within 2 s of being ready, however long it was away,
// and nobody fails meanwhile.
func TestNodeBackInService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
		b := newBed(t, Options{Policy: "round_robin", Limits: Limits{RetriesPerSecond: 1e6}}, map[string]nodestest.Options{"d1": {}, "d2": {}})
		ask := func() {
			t.Helper()
			if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":2}`); r.StatusCode != 200 {
				t.Fatal(r.StatusCode, r.body)
			}
		}
		for _, away := range []time.Duration{100 * time.Millisecond, 5 * time.Second, time.Minute} {
			b.nodes["d1"].Stop()
			for end := time.Now().Add(away); time.Now().Before(end); time.Sleep(max(20*time.Millisecond, away/20)) {
				ask()
			}
			n := b.node("d1", nodestest.Options{})
			ready := time.Now()
			for len(n.Requests()) == 0 {
				ask()
				time.Sleep(10 * time.Millisecond)
				if time.Since(ready) > time.Minute {
					t.Fatal("it never serves again")
				}
			}
			if took := time.Since(ready); took > 2*time.Second {
				t.Errorf("away for %v, it served again %v after it was ready", away, took)
			}
		}
		b.stop()
		synctest.Wait()
	})
}
