package httpserver

import (
	"bufio"
	"strings"
	"testing"

	"github.com/valyala/fasthttp"
)

// Each request's head is looked at without an allocation.
func TestFramingCheckDoesNotAllocate(t *testing.T) {
	var h fasthttp.RequestHeader
	if err := h.Read(bufio.NewReader(strings.NewReader("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
		"User-Agent: python\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n\r\n"))); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if err := checkHead(&h); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

func BenchmarkFramingCheck(b *testing.B) {
	var h fasthttp.RequestHeader
	if err := h.Read(bufio.NewReader(strings.NewReader("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
		"User-Agent: python\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n\r\n"))); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := checkHead(&h); err != nil {
			b.Fatal(err)
		}
	}
}
