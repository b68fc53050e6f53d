//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
)

// The ways in which requests and prefill jobs end, each with what its panel shows.

// ends are how requests are to have ended: how many with each finish reason, and how
// many were cut by each cause.
func (m *meterBed) ends(finish, cut map[string]float64) {
	m.t.Helper()
	const success, aborted = "vllm:request_success_total", "tandem:gateway_streams_aborted_total"
	each := func(panel, metric, label string, values []string, n map[string]float64) {
		all, sum := map[string]float64{}, 0.0
		for _, v := range values {
			m.is('G', metric, fmt.Sprintf("%s=%q", label, v), n[v])
			all[fmt.Sprintf("{%s=%q}", label, v)] = n[v]
			sum += n[v]
		}
		m.is('G', metric, "", sum)
		if sum > 0 {
			m.showsEach(panel, 0, all)
		}
	}
	each("Requests by finish reason", success, "finished_reason", []string{"stop", "length", "abort", "error"}, finish)
	each("Cut requests", aborted, "cause", abortCauses, cut)
}

// prefills are how prefill jobs are to have ended.
func (m *meterBed) prefills(n map[string]float64) {
	m.t.Helper()
	all := map[string]float64{}
	for _, result := range []string{"done", "cancelled", "failed", "refused"} {
		m.is('P', "tandem:prefill_jobs_total", `"`+result+`"`, n[result])
		all[fmt.Sprintf("{result=%q}", result)] = n[result]
	}
	m.showsEach("Prefill jobs", 0, all)
}

// failedAttempts are how many attempts are to have failed, by code.
func (m *meterBed) failedAttempts(n map[string]float64) {
	m.t.Helper()
	all := map[string]float64{}
	for _, code := range failureCodes {
		m.is('G', "tandem:gateway_attempt_failures_total", `"`+code+`"`, n[code])
		all[fmt.Sprintf("{code=%q}", code)] = n[code]
	}
	m.showsEach("Failed attempts", 0, all)
}

// refused wants all of them told a status, and nobody anything else.
func (m *meterBed) refused(status int, all ...told) {
	m.t.Helper()
	for _, a := range all {
		if a.status != status {
			m.errorf("%d %s, want %d", a.status, a.text, status)
		}
	}
	m.showsEach("HTTP answers by status", 0, map[string]float64{fmt.Sprintf(`{status="%d"}`, status): float64(len(all))})
}

// meteredEnds has requests end as real processes' cannot be made to on time.
func meteredEnds(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const n, timeout = 3, 5 * time.Second
	var still gate
	stands := func(m *meterBed, o *gateway.Options) {
		m.measured.step = func(string) { still.pass() }
		m.timeout, o.StallTimeout, o.ShutdownTimeout = timeout, -1, time.Second
	}
	for _, c := range []struct {
		name   string
		change func(*meterBed, *gateway.Options)
		f      func(*meterBed)
	}{
		{"answers that end and transfers that fail", plainMeters, (*meterBed).endWell},
		{"clients that leave", stands, func(m *meterBed) {
			still.close()
			ctx, leave := context.WithCancel(context.Background())
			for i := range n {
				go m.sayIn(ctx, unlike(i, 40), 2, "", "")
			}
			time.Sleep(time.Second)
			leave()
			time.Sleep(time.Second)
			still.open()
			time.Sleep(time.Second)
			m.ends(map[string]float64{"abort": n}, map[string]float64{"client_gone": n})
			m.prefills(map[string]float64{"cancelled": n})
		}},
		{"requests that take too long", stands, func(m *meterBed) {
			still.close()
			m.refused(504, m.crowd(n, 40, 2)()...)
			still.open()
			time.Sleep(time.Second)
			m.ends(map[string]float64{"error": n}, map[string]float64{"deadline": n})
		}},
		{"a gateway that stops", stands, func(m *meterBed) {
			still.close()
			answers := m.crowd(n, 40, 2)
			time.Sleep(time.Second)
			m.stop()
			m.refused(503, answers()...)
			still.open()
			m.ends(map[string]float64{"error": n}, map[string]float64{"shutdown": n})
		}},
		{"answers that nobody can go on with", plainMeters, (*meterBed).endAlone},
		{"a client that does not read", func(_ *meterBed, o *gateway.Options) { o.StreamTokens, o.Limits.SlowClientTimeout = 8, timeout }, func(m *meterBed) {
			c := m.stream(unlike(1, 20), 150)
			time.Sleep(4 * timeout)
			m.must(c.Close())
			m.ends(map[string]float64{"abort": 1}, map[string]float64{"slow_client": 1})
		}},
	} {
		metered(t, ds, seen, c.name, c.change, c.f)
	}
}

// endWell has some answers end with a word and some for their length, though no
// prompt can be moved: both prefill nodes try, and fail.
func (m *meterBed) endWell() {
	m.kv.refuse = func() error { return errors.New("nobody is there") }
	const words, lengths = 2, 1
	for i := range words + lengths {
		stop := ""
		if i < words {
			stop = `,"stop":["A"]`
		}
		m.well(m.say(unlike(i, 40), 5, `,"allowed_token_ids":[65]`+stop, ""))
	}
	m.ends(map[string]float64{"stop": words, "length": lengths}, nil)
	m.is('D', "tandem:decode_prefill_failures_total", "", 2*(words+lengths))
	m.prefills(map[string]float64{"failed": 2 * (words + lengths)})
}

// endAlone takes the decode nodes away while they answer.
func (m *meterBed) endAlone() {
	const n = 2
	answers := m.crowd(n, 20, 150)
	for m.value('G', "vllm:generation_tokens_total", "") < 20 {
		time.Sleep(time.Millisecond)
	}
	for _, d := range m.nodes[:2] {
		m.take(d)
	}
	m.refused(503, answers()...)
	m.ends(map[string]float64{"error": n}, map[string]float64{"upstream": n})
	m.failedAttempts(map[string]float64{"connection": m.value('G', "tandem:gateway_attempts_total", "")}) // not one went well
}

// stream begins a streamed completion, of which nothing is read.
func (m *meterBed) stream(prompt string, tokens int) net.Conn {
	c, err := m.door.Dial(context.Background(), "gateway")
	m.must(err)
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	_, err = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	m.must(err)
	return c
}
