package upstream

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Protocol is the way in which a prefill and a decode server compute one request.
type Protocol uint8

// Protocols.
const (
	// VLLM sends one request after the other. The prefill server is asked for one token and answers
	// with kv_transfer_params, which are added to the decode server's request.
	VLLM Protocol = iota
	// SGLang sends both requests at once, with the prefill server's bootstrap address and a room
	// number of their own.
	SGLang
)

var protocols = [...]string{"vllm", "sglang"}

// ErrProtocol reports a name of no protocol.
var ErrProtocol = errors.New("upstream: no such protocol of prefill and decode servers")

// ParseProtocol returns the protocol of that name.
func ParseProtocol(name string) (Protocol, error) {
	i := slices.Index(protocols[:], name)
	if i < 0 {
		return 0, fmt.Errorf("%w: %q; want vllm or sglang", ErrProtocol, name)
	}
	return Protocol(i), nil
}

func (p Protocol) String() string { return protocols[p] }

// change is a change of one member of an object.
type change struct {
	name string
	to   string // JSON; empty: the member is removed
	kept bool   // only if the object has the member
}

// patch appends an object with changes to dst. Other members stay as they are written; changed ones
// are moved to the end.
func patch(dst, b []byte, changes ...change) []byte {
	present := make([]bool, len(changes))
	room := len(b) + 2
	for _, c := range changes {
		room += len(c.name) + len(c.to) + len(`,"":`)
	}
	dst = append(slices.Grow(dst, room), '{') // once, so that a large body is not copied as it grows
	begin := len(dst)
	s := jsonscan.Object(b)
	for s.Next() {
		s.Unchecked()
		key := s.Key()
		if i := slices.IndexFunc(changes, func(c change) bool { return c.name == string(key) }); i >= 0 {
			present[i] = true
			continue
		}
		if len(dst) > begin {
			dst = append(dst, ',')
		}
		dst = append(dst, s.Member()...)
	}
	for i, c := range changes {
		if c.to == "" || c.kept && !present[i] {
			continue
		}
		if len(dst) > begin {
			dst = append(dst, ',')
		}
		dst = append(append(append(dst, '"'), c.name...), `":`...)
		dst = append(dst, c.to...)
	}
	return append(dst, '}')
}

// PrefillRequest appends the body of VLLM's request to the prefill server.
func PrefillRequest(dst, b []byte) []byte {
	return patch(dst, b,
		change{name: "max_tokens", to: "1"}, change{name: "min_tokens", to: "1"}, change{name: "max_completion_tokens", to: "1", kept: true},
		change{name: "stream", to: "false"}, change{name: "stream_options"},
		change{name: "kv_transfer_params", to: `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`})
}

// TransferParams returns the kv_transfer_params of a prefill server's answer, or nil if it has
// none: then the decode server computes the prompt.
func TransferParams(answer []byte) ([]byte, error) {
	params, err := member(answer, "kv_transfer_params")
	if string(params) == "null" {
		params = nil
	}
	return params, err
}

// member returns the value of an object's last member of that name as it is written, or nil if it
// has none.
func member(object []byte, name string) (value []byte, err error) {
	s := jsonscan.Object(object)
	for s.Next() {
		if v := s.Unchecked(); string(s.Key()) == name {
			value = v
		}
	}
	return value, bodyError(&s)
}

// DecodeRequest appends the body of VLLM's request to the decode server.
func DecodeRequest(dst, b, params []byte) []byte {
	return patch(dst, b, change{name: "kv_transfer_params", to: string(params)})
}

// BootstrapRequest appends the body of both of SGLang's requests. room returns a new number for
// each prompt of a batch.
func BootstrapRequest(dst, b []byte, envelope *Envelope, host string, port int, room func() int64) []byte {
	hosts, ports, rooms := strconv.AppendQuote(nil, host), strconv.AppendInt(nil, int64(port), 10), strconv.AppendInt(nil, room(), 10)
	if envelope.Batch > 1 {
		h, p := hosts, ports
		for range envelope.Batch - 1 {
			hosts, ports = append(append(hosts, ','), h...), append(append(ports, ','), p...)
			rooms = strconv.AppendInt(append(rooms, ','), room(), 10)
		}
		hosts, ports, rooms = brackets(hosts), brackets(ports), brackets(rooms)
	}
	return patch(dst, b, change{name: "bootstrap_host", to: string(hosts)}, change{name: "bootstrap_port", to: string(ports)}, change{name: "bootstrap_room", to: string(rooms)})
}

func brackets(b []byte) []byte { return append(append([]byte{'['}, b...), ']') }

// batch returns the number of prompts in a value of prompt: the elements of a list of strings or of
// lists, and 1 for anything else.
func batch(v []byte) int {
	if len(v) < 2 || v[0] != '[' {
		return 1
	}
	n := 0
	for s := jsonscan.List(v); s.Next(); n++ {
		if e := s.Unchecked(); len(e) == 0 || e[0] != '"' && e[0] != '[' { // a number: token ids of one prompt
			break
		}
	}
	return max(1, n)
}

// bootstrapPort returns the port of the bootstrap server in an SGLang server's description, or 0 if
// it has none.
func bootstrapPort(info []byte) int {
	v, _ := member(info, "disaggregation_bootstrap_port")
	n, err := strconv.ParseUint(string(v), 10, 16)
	if err != nil {
		return 0
	}
	return int(n)
}
