package responses

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// spliced returns events with their splices.
func spliced(events []byte, splices []openai.Splice) (all []byte) {
	from := 0
	for _, s := range splices {
		all = append(all, events[from:s.At]...)
		for _, p := range s.Parts {
			if len(p) == 0 {
				panic("an empty part")
			}
			all = append(all, p...)
		}
		from = s.At
	}
	return append(all, events[from:]...)
}

// rich is a token with 20 alternatives.
func rich(i int) openai.Delta {
	d := text(fmt.Sprint("t", i%10, " "))
	p := openai.TokenLogprob{Text: string(d.Text), Bytes: d.Text, Logprob: -0.25}
	for k := range 20 {
		word := fmt.Sprint("other", k)
		p.Top = append(p.Top, openai.TokenLogprob{Text: word, Bytes: []byte(word), Logprob: -float32(k) - 0.125})
	}
	d.Logprobs = []openai.TokenLogprob{p}
	return d
}

// rest returns what is behind a text.
func rest(all, text string) string {
	_, after, _ := strings.Cut(all, text)
	return after
}

// The log-probabilities of a message are in memory once, although four events at its end have all of
// them. The messages of a response with several have their own.
func TestLogprobsAreKeptOnce(t *testing.T) {
	const nTokens = 6000
	r, _ := chat(t, Options{}, `{"input":"u","stream":true,"top_logprobs":20}`)
	r.Begin("r1", 1, "m")
	live := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	tokens := make([]openai.Delta, 10)
	for i := range tokens {
		tokens[i] = rich(i)
	}
	buf, sent, before := make([]byte, 0, 64<<10), 0, live()
	first := tokens[0]
	first.Begin = true
	for i := range nTokens {
		d := &tokens[i%10]
		if i == 0 {
			d = &first
		}
		buf = r.AppendDelta(buf[:0], d)
		if sent += len(buf); len(r.Splices()) > 0 {
			t.Fatal("a delta has splices")
		}
	}
	kept := live() - before
	var start, end runtime.MemStats
	runtime.ReadMemStats(&start)
	last := openai.Delta{Finish: openai.Finish{Reason: "stop"}}
	buf = r.AppendEnd(r.AppendDelta(buf[:0], &last), &openai.Usage{})
	splices := r.Splices()
	runtime.ReadMemStats(&end)
	made := int64(end.TotalAlloc - start.TotalAlloc)
	t.Logf("note: %d tokens: %d KiB sent, %d KiB kept, %d KiB made for the end, which has %d KiB", nTokens, sent>>10, kept>>10, made>>10, len(spliced(buf, splices))>>10)
	if n := int64(sent); sent < 1<<20 || kept > n+n/8 || made > 1<<20 || len(splices) != 4 || len(spliced(buf, splices)) < 3*sent {
		t.Errorf("%d bytes kept and %d made for %d that were sent, %d splices", kept, made, sent, len(splices))
	}
	runtime.KeepAlive(r)
}

// The events with splices are those without, in order, also where calls and further messages follow,
// and in a stream that fails.
func TestSplicedEvents(t *testing.T) {
	for _, fails := range []bool{false, true} {
		var all []byte
		r, _ := chat(t, Options{}, `{"input":"u","stream":true,"top_logprobs":20}`)
		r.Begin("r1", 1, "m")
		add := func(d openai.Delta) {
			buf := r.AppendDelta(nil, &d)
			all = append(all, spliced(buf, r.Splices())...)
		}
		begin := thought("hm")
		begin.Begin = true
		add(begin)
		const nTokens = 40 // 60 KB
		for range 2 {
			for i := range nTokens {
				add(rich(i))
			}
			add(callOf(0, "c", "f", "{}"))
			add(scored(text("short"), "short"))
			add(callOf(1, "d", "f", "{}"))
		}
		for i := range nTokens {
			add(rich(i))
		}
		var buf []byte
		if fails {
			buf = r.AppendFault(nil, &openai.Error{Status: 500, Message: "lost"})
		} else {
			d := end("stop")
			buf = r.AppendEnd(r.AppendDelta(nil, &d), &openai.Usage{})
		}
		splices := r.Splices()
		all = append(all, spliced(buf, splices)...)
		if checkEvents(t, all); len(splices) != 6 { // three of the open message, and three messages
			t.Errorf("%d splices", len(splices))
		}
		one := `{"token":"t7 ","logprob":-0.25`
		deltas := 3 * nTokens / 10
		if n := strings.Count(string(all), one); n != 5*deltas {
			t.Errorf("a token is %d times in the events, want %d", n, 5*deltas)
		}
		response := rest(string(all[bytes.LastIndex(all, []byte("\ndata: ")):]), `"output":[`)
		if n := strings.Count(response, one); n != deltas {
			t.Errorf("a token is %d times in the response, want %d", n, deltas)
		}
	}
}

// Log-probabilities past the bound are in deltas only.
func TestKeptLogprobsAreBounded(t *testing.T) {
	r, _ := chat(t, Options{}, `{"input":"u","stream":true,"top_logprobs":20}`)
	r.Begin("r1", 1, "m")
	r.kept = maxKept - 3000
	var all []byte
	for i := range 4 {
		d := rich(i)
		d.Begin = i == 0
		all = r.AppendDelta(all, &d)
	}
	d := end("stop")
	all = r.AppendEnd(r.AppendDelta(all, &d), &openai.Usage{})
	checkEvents(t, all)
	for i, want := range []int{5, 5, 1, 1} {
		if n := strings.Count(string(all), fmt.Sprintf(`{"token":"t%d ","logprob":-0.25`, i)); n != want {
			t.Errorf("token %d is %d times in the events, want %d", i, n, want)
		}
	}
}

// A whole answer has its log-probabilities without a copy.
func TestWholeLogprobs(t *testing.T) {
	const nTokens = 3000
	r, _ := chat(t, Options{}, `{"input":"u","top_logprobs":20}`)
	r.Begin("r1", 1, "m")
	d := openai.Delta{Finish: openai.Finish{Reason: "stop"}}
	for i := range nTokens {
		token := rich(i)
		d.Text, d.Logprobs = append(d.Text, token.Text...), append(d.Logprobs, token.Logprobs...)
	}
	var start, end runtime.MemStats
	runtime.ReadMemStats(&start)
	out := r.AppendWhole(make([]byte, 0, 16<<20), []openai.Delta{d}, openai.Usage{})
	runtime.ReadMemStats(&end)
	if made := end.TotalAlloc - start.TotalAlloc; made > 17<<20 || len(out) < 1<<20 || strings.Count(string(out), `{"token":"t7 "`) != nTokens/10 {
		t.Errorf("%d bytes made for %d", made, len(out))
	}
}
