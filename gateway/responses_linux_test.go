package gateway

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// The events at the end of a message repeat its log-probabilities, whole and streamed, over sockets
// and in memory, and in a stream that fails.
func TestResponsesLogprobs(t *testing.T) {
	const nTokens = 300
	fails := nodestest.Options{Token: ramble, CutAfter: nTokens, CutCode: nodepb.Code_CODE_INTERNAL, Refuse: func(r *nodepb.Generate) (nodepb.Code, string) {
		if len(r.Output) > 0 {
			return nodepb.Code_CODE_OVERLOADED, "full"
		}
		return 0, ""
	}}
	body := fmt.Sprintf(`{"input":"hi","max_output_tokens":%d,"top_logprobs":20,"stream":true}`, nTokens)
	logprobs := func(event string) string { // its last list
		_, event, _ = strings.Cut(event[strings.LastIndex(event, `"logprobs":[`):], "[")
		at := strings.LastIndex(event, `"top_logprobs":[`)
		return event[:at+strings.Index(event[at:], "]}]")]
	}
	whole := ""
	for name, tcp := range map[string]bool{"memory": false, "tcp": true} {
		o := Options{}
		if tcp {
			var err error
			if o.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
				t.Fatal(err)
			}
		}
		b := newBed(t, o, one(nodestest.Options{Token: ramble}))
		c := b.dialAny(t, tcp, nil)
		defer c.Close()
		for range 2 {
			c.send("POST", responses.Path, body)
			r := c.receive()
			responseOf(t, r)
			want, n := "", 0
			for event := range strings.SplitSeq(strings.TrimSuffix(r.body, "\n\n"), "\n\n") {
				_, data, _ := strings.Cut(event, "\ndata: ")
				if !json.Valid([]byte(data)) {
					t.Fatalf("%s: %.300q", name, event)
				}
				if !strings.Contains(event, `"top_logprobs":[{`) || strings.HasPrefix(event, "event: response.output_text.delta\n") {
					continue
				}
				n++
				if want == "" {
					want = logprobs(event)
				}
				if got := logprobs(event); got != want || strings.Count(got, `"top_logprobs":`) != nTokens {
					t.Errorf("%s: %.60q has %d tokens, want %d", name, event, strings.Count(got, `"top_logprobs":`), nTokens)
				}
			}
			if whole = want; n != 4 {
				t.Errorf("%s: %d events repeat them", name, n)
			}
		}
		c.send("POST", responses.Path, strings.Replace(body, `,"stream":true`, "", 1))
		if r := c.receive(); logprobs(r.body) != whole {
			t.Errorf("%s: %.300q", name, r.body)
		}
	}
	lost := newBed(t, Options{Limits: Limits{ResumeTimeout: 10 * time.Millisecond}}, one(fails))
	r := lost.post(responses.Path, strings.Replace(body, fmt.Sprint(nTokens), fmt.Sprint(nTokens+1), 1))
	if a := responseOf(t, r); a.Status != "failed" || r.err != nil || len(a.Output[0].Content[0].Logprobs) != nTokens {
		t.Errorf("%v, %v", a.Status, r.err)
	}
}
