//go:build deploy

package systemd

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/hub/hubtest"
)

// insideVariable is set in the container, where testdata/check.sh starts this test binary. Its value is
// the folder of the model that the hub has.
const insideVariable = "TANDEM_INSIDE"

// TestHub is a hub with a model that asks for a token. It writes its address to /hub-url and serves
// until it is killed.
func TestHub(t *testing.T) {
	dir := os.Getenv(insideVariable)
	if dir == "" {
		t.Skip("a part of TestUnitsBoot")
	}
	h := hubtest.New(t, "org/name", hubtest.Folder(t, dir))
	h.Hook = func(w http.ResponseWriter, r *http.Request, storage bool) bool {
		if storage || r.Header.Get("Authorization") == "Bearer hf_secret" {
			return false
		}
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
	if err := os.WriteFile("/hub-url", []byte(h.URL), 0o644); err != nil {
		t.Fatal(err)
	}
	select {}
}

// TestRequests sends 200 requests a second, each on a connection of its own, until /stop-asking
// exists. It fails if a connection was refused or a request was not answered.
func TestRequests(t *testing.T) {
	if os.Getenv(insideVariable) == "" {
		t.Skip("a part of TestUnitsBoot")
	}
	const rate = 200
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	var (
		wg       sync.WaitGroup
		mu       sync.Mutex
		asked    int
		failures = map[string]int{}
	)
	begun := time.Now()
	for tick := time.NewTicker(time.Second / rate); ; <-tick.C {
		if _, err := os.Stat("/stop-asking"); err == nil {
			break
		}
		// A late tick is made up for, so that the rate holds on a busy machine.
		for due := int(time.Since(begun) * rate / time.Second); asked < due; asked++ {
			wg.Go(func() {
				resp, err := client.Get("http://127.0.0.1:8000/livez")
				if err == nil {
					err = resp.Body.Close()
				}
				if err == nil {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, syscall.ECONNREFUSED) {
					failures["refused"]++
				} else {
					failures[err.Error()]++
				}
			})
		}
	}
	lasted := time.Since(begun).Seconds()
	wg.Wait()
	fmt.Printf("%d requests in %.1f s, failures: %v\n", asked, lasted, failures)
	if len(failures) > 0 || float64(asked) < 0.95*rate*lasted {
		t.Error("not each of 200 requests a second was answered")
	}
}
