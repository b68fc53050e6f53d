package load

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"
)

func itoa(i int) string { return strconv.Itoa(i) }

// mock is a server that streams tokens at a pace, or fails according to its mode.
type mock struct {
	url     string
	tokens  int
	gap     time.Duration
	stallAt int // request number that stalls all
	stall   time.Duration
	mode    string

	mu   sync.Mutex
	n    int
	hold sync.RWMutex
}

func newMock(t *testing.T) *mock {
	m := &mock{tokens: 3, gap: time.Millisecond, stallAt: -1}
	s := httptest.NewServer(m)
	t.Cleanup(s.Close)
	m.url = s.URL
	return m
}

const mockChunk = `data: {"id":"x","choices":[{"index":0,"text":"tok\"en ","finish_reason":null}],"usage":null}` + "\n\n"

func (m *mock) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct{ ID int }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.Header.Get("X-Test") != "yes" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	m.n++
	stalls := m.n == m.stallAt
	m.mu.Unlock()
	if stalls {
		m.hold.Lock()
		time.Sleep(m.stall)
		m.hold.Unlock()
	}
	switch m.mode {
	case "status":
		http.Error(w, "no room", http.StatusServiceUnavailable)
		return
	case "error":
		fmt.Fprint(w, mockChunk, `data: {"error":{"message":"broken"}}`+"\n\n")
		return
	case "empty":
		fmt.Fprint(w, "data: [DONE]\n\n")
		return
	case "cut":
		fmt.Fprint(w, mockChunk)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	case "close":
		w.Header().Set("Connection", "close")
	}
	next := time.Now()
	for range m.tokens {
		next = next.Add(m.gap)
		select {
		case <-time.After(time.Until(next)):
		case <-r.Context().Done():
			return
		}
		m.hold.RLock()
		fmt.Fprint(w, mockChunk)
		w.(http.Flusher).Flush()
		m.hold.RUnlock()
	}
	fmt.Fprintf(w, `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}`+"\n\ndata: [DONE]\n\n", m.tokens)
}
