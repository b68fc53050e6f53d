package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	soon  = time.Minute // on a machine that has other things to do
	eosID = 257         // <|im_end|>
	lore  = "Hello, wörld! The 😀 quick brown fox\njumps over \"the\" lazy dog.\n\n"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, // fasthttp's own tickers outlive a server
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"))
}

// tokenizerJSON is a tokenizer whose tokens are bytes: id = byte.
var tokenizerJSON = sync.OnceValue(func() []byte { return nodestest.Tokenizer(nil, "<|im_start|>", "<|im_end|>") })

const chatML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}" +
	"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

func bundle() *nodepb.Bundle {
	return &nodepb.Bundle{Model: "tiny", Fingerprint: 7, NumericsClass: "test", TokenizerJson: tokenizerJSON(), ChatTemplate: chatML,
		EosToken: "<|im_end|>", EosTokenIds: []int32{eosID}, MaxModelLen: 100000, VocabSize: 258, BlockTokens: 16}
}

// tell is a token function that writes lore and ends.
func tell(r *nodepb.Generate, position int) int32 {
	if i := position - len(r.Prompt); i < len(lore) {
		return int32(lore[i])
	}
	return eosID
}

// ramble writes lore again and again.
func ramble(r *nodepb.Generate, position int) int32 {
	return int32(lore[(position-len(r.Prompt))%len(lore)])
}

// bed is a gateway with made-up nodes on an in-memory network.
type bed struct {
	testing.TB
	net   *rpc.Network
	g     *Gateway
	nodes map[string]*nodestest.Node
	stop  context.CancelFunc
	done  chan error
	log   lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// newBed starts the nodes, named by address, and a gateway that sees them all.
func newBed(t testing.TB, o Options, nodes map[string]nodestest.Options) *bed {
	t.Helper()
	return newBedOn(t, rpc.NewNetwork(), o, nodes)
}

// newBedOn is newBed on a network that is there.
func newBedOn(t testing.TB, n *rpc.Network, o Options, nodes map[string]nodestest.Options) *bed {
	t.Helper()
	b := &bed{TB: t, net: n, nodes: map[string]*nodestest.Node{}, done: make(chan error, 1)}
	for addr, no := range nodes {
		b.node(addr, no)
	}
	var err error
	if o.Listener == nil {
		if o.Listener, err = b.net.Listen("gateway"); err != nil {
			t.Fatal(err)
		}
	}
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: b.net.Dial, BackoffMin: time.Millisecond, CloseLinger: 10 * time.Millisecond}
	o.Log = slog.New(slog.NewTextHandler(&b.log, nil))
	if o.DrainDelay == 0 {
		o.DrainDelay = -1
	}
	if o.MinRemotePrefillTokens == 0 {
		o.MinRemotePrefillTokens = -1
	}
	if o.Members == nil {
		for addr := range nodes {
			o.Members = append(o.Members, decodeMember(addr))
		}
	}
	if b.g, err = New(o); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	go func() { b.done <- b.g.Run(ctx) }()
	t.Cleanup(b.close)
	if len(nodes) > 0 {
		b.until(func() bool { return b.g.native.Usable() == len(nodes) })
	}
	return b
}

func decodeMember(addr string) nodes.Member {
	return nodes.Member{ID: addr, Role: "decode", RPC: addr, Fingerprint: 7, Class: "test", Ready: true}
}

func (b *bed) node(addr string, o nodestest.Options) *nodestest.Node {
	b.Helper()
	if o.Bundle == nil {
		o.Bundle = bundle()
	}
	if o.Token == nil {
		o.Token = tell
	}
	n, err := nodestest.Start(b.net, addr, o)
	if err != nil {
		b.Fatal(err)
	}
	b.nodes[addr] = n
	return n
}

// close ends everything and looks that nothing was left behind.
func (b *bed) close() {
	b.stop()
	if b.done != nil {
		if err := <-b.done; err != nil {
			b.Error(err)
		}
		b.done = nil
	}
	for _, n := range b.nodes {
		n.Stop()
	}
	if n := b.g.InFlight.Load(); n != 0 {
		b.Errorf("%d requests still counted as in flight", n)
	}
	for _, n := range b.g.native.Nodes.Now().Decode {
		if f := n.InFlight(); f != 0 {
			b.Errorf("%d attempts still counted on %s", f, n.Name)
		}
	}
	for _, n := range b.g.native.Nodes.Now().Prefill {
		if f := n.InFlight(); f != 0 {
			b.Errorf("%d prefills still counted on %s", f, n.Name)
		}
	}
}

// virtually runs f in virtual time, in which waits take none.
func virtually(t *testing.T, f func(*testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own tickers
		f(t)
	})
}

func (b *bed) until(cond func() bool) {
	b.Helper()
	for end := time.Now().Add(soon); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("condition did not come true; log:\n%s", b.log.String())
		}
	}
}

// client is one connection to the gateway.
type client struct {
	*bed
	net.Conn
	r *bufio.Reader
}

func (b *bed) dial() *client {
	b.Helper()
	c, err := b.net.Dial(b.Context(), "gateway")
	if err != nil {
		b.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(2 * soon)); err != nil {
		b.Fatal(err)
	}
	return &client{bed: b, Conn: c, r: bufio.NewReader(c)}
}

// send writes a request; headers are lines.
func (c *client) send(method, path, body string, headers ...string) {
	c.Helper()
	head := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n", method, path, len(body))
	for _, h := range headers {
		head += h + "\r\n"
	}
	if _, err := io.WriteString(c, head+"\r\n"+body); err != nil {
		c.Fatal(err)
	}
}

// reply is a response read to its end; err is why its body did not end well.
type reply struct {
	*http.Response
	body string
	err  error
}

func (c *client) receive() reply {
	c.Helper()
	return c.response("POST")
}

// response is the answer to a request with the method, which decides whether a
// body follows.
func (c *client) response(method string) reply {
	c.Helper()
	resp, err := http.ReadResponse(c.r, &http.Request{Method: method})
	if err != nil {
		c.Fatalf("no response: %v; log:\n%s", err, c.log.String())
	}
	body, err := io.ReadAll(resp.Body)
	return reply{resp, string(body), err}
}

func (b *bed) do(method, path, body string, headers ...string) reply {
	b.Helper()
	c := b.dial()
	defer c.Close()
	c.send(method, path, body, headers...)
	return c.receive()
}

func (b *bed) post(path, body string, headers ...string) reply {
	b.Helper()
	return b.do("POST", path, body, headers...)
}

// answer is what tests look at of a response object or a stream event.
type answer struct {
	ID      string
	Object  string
	Model   string
	Choices []struct {
		Index   int
		Text    string
		Message struct{ Role, Content string }
		Delta   struct{ Role, Content string }
		Finish  *string `json:"finish_reason"`
		Stop    any     `json:"stop_reason"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error *struct {
		Message, Type string
		Param         *string
		Code          any // a float64, which is the status, or a string
	}
}

func (r reply) parse(t *testing.T) answer {
	t.Helper()
	var a answer
	if err := json.Unmarshal([]byte(r.body), &a); err != nil {
		t.Fatalf("%d %q: %v", r.StatusCode, r.body, err)
	}
	return a
}

// told is a stream put together.
type told struct {
	text    map[int]string
	finish  map[int]string
	stop    map[int]any
	roles   int
	usage   int // events with usage
	last    answer
	failure *answer
	done    bool
}

func (r reply) events(t *testing.T) told {
	t.Helper()
	s := told{text: map[int]string{}, finish: map[int]string{}, stop: map[int]any{}}
	for _, ev := range strings.SplitAfter(r.body, "\n\n") {
		if ev == "" {
			continue
		}
		data, ok := strings.CutPrefix(ev, "data: ")
		if !ok || !strings.HasSuffix(data, "\n\n") || s.done || s.failure != nil {
			t.Fatalf("event %q in %q", ev, r.body)
		}
		if data == "[DONE]\n\n" {
			s.done = true
			continue
		}
		var a answer
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			t.Fatalf("%q: %v", data, err)
		}
		if a.Error != nil {
			s.failure = &a
			continue
		}
		s.last = a
		if a.Usage != nil {
			s.usage++
		}
		for _, c := range a.Choices {
			s.text[c.Index] += c.Delta.Content + c.Text
			if c.Delta.Role != "" {
				s.roles++
			}
			if c.Finish != nil {
				s.finish[c.Index], s.stop[c.Index] = *c.Finish, c.Stop
			}
		}
	}
	return s
}

func one(o nodestest.Options) map[string]nodestest.Options {
	return map[string]nodestest.Options{"d1": o}
}

func lastRequest(b *bed, addr string) *nodepb.Generate {
	b.Helper()
	rs := b.nodes[addr].Requests()
	if len(rs) == 0 {
		b.Fatal("no request reached ", addr)
	}
	return proto.CloneOf(rs[len(rs)-1])
}
