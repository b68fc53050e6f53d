package roles

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// hostKV stands for a GPU's KV as the kernels' host twin does.
type hostKV struct{ page []byte }

func (k hostKV) KVAddress(int) (uintptr, int) { return uintptr(unsafe.Pointer(&k.page[0])), -1 }
func (hostKV) KVDigest(int, int32) uint32     { return 0 }
func (hostKV) KVError() error                 { return nil }

// notThere stands for a GPU that there is not, whose memory cannot be registered.
type notThere struct{ hostKV }

func (k notThere) KVAddress(int) (uintptr, int) { return uintptr(unsafe.Pointer(&k.page[0])), 0 }

// Without a device KV blocks travel over TCP, and one line says so; with one, one line says which, and whether it reaches the GPU's memory.
func TestFabricOrTCP(t *testing.T) {
	if device, err := fabric.Open(fabric.Options{Provider: "shm"}); errors.Is(err, fabric.ErrLibrary) && fabric.Built {
		t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
	} else if err == nil {
		_ = device.Close() // the test opens its own
	}
	page := hostKV{make([]byte, 8192)}
	for _, c := range []struct {
		provider, address string
		gpu               kvtransfer.DeviceMemory
		want              kvtransfer.Transport
		direct            bool
		line              string
	}{
		{"efa", "", nil, kvtransfer.OverTCP, false, "KV transfer: TCP, because RDMA is not available"},
		{"efa", "", page, kvtransfer.OverTCP, false, "KV transfer: TCP, because RDMA is not available"},
		{"auto", "203.0.113.9", nil, kvtransfer.OverTCP, false, "KV transfer: TCP, because RDMA is not available"},
		{"tcp", "203.0.113.9", nil, kvtransfer.OverTCP, false, "203.0.113.9"},
		{"tcp", "", nil, kvtransfer.OverRDMA, false, `"KV transfer: RDMA"`},
		{"shm", "", nil, kvtransfer.OverRDMA, false, `"KV transfer: RDMA"`},
		{"tcp", "", page, kvtransfer.OverRDMA, false, "through the host's memory"},
		{"shm", "", page, kvtransfer.OverRDMA, true, "between GPUs"},
		{"shm", "", notThere{page}, kvtransfer.OverRDMA, false, "through the host's memory"},
	} {
		if !fabric.Built {
			c.want, c.direct, c.line = kvtransfer.OverTCP, false, "build it on Linux, with cgo"
		}
		var out bytes.Buffer
		d := &process.Process{Log: slog.New(slog.NewTextHandler(&out, nil))}
		device, got, gpu := kvFabric(d, &nodeFlags{host: "127.0.0.1", fabric: fabric.Options{Provider: c.provider, Address: c.address}}, kvtransfer.OverRDMA, c.gpu)
		if got != c.want || (device != nil) != (got == kvtransfer.OverRDMA) || (gpu != nil) != c.direct {
			t.Errorf("%s at %q: over %s, to a GPU %v", c.provider, c.address, got, gpu != nil)
		}
		if device != nil && device.InUse() != 0 {
			t.Errorf("%s: %d registrations are left", c.provider, device.InUse())
		}
		if strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), c.line) {
			t.Errorf("%s at %q: it says\n%s", c.provider, c.address, &out)
		}
		d.End()
	}
	if device, got, _ := kvFabric(nil, nil, kvtransfer.Auto, page); device != nil || got != kvtransfer.Auto {
		t.Errorf("not asked for: over %s", got)
	}
	for want, n := range map[string]nodeFlags{
		"--fabric-provider": {transport: "rdma", fabric: fabric.Options{Provider: "pigeon"}},
		"--kv-tls":          {transport: "rdma", fabric: fabric.Options{Provider: "tcp"}, tls: true},
		"--kv-transport":    {transport: "pigeon", fabric: fabric.Options{Provider: "auto"}},
		"--kv-connections":  {transport: "tcp", fabric: fabric.Options{Provider: "auto"}, writer: kvtransfer.WriterOptions{Connections: 1000}},
	} {
		if n.writer.Connections == 0 {
			n.writer.Connections = 1
		}
		if _, err := kvTransport(&n); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", n, err)
		}
	}
	for host, want := range map[string]string{"0.0.0.0": "", "::": "", "10.1.2.3": "10.1.2.3", "node-1": "node-1"} {
		if got := fabricAddress(&nodeFlags{host: host}, "verbs"); got != want {
			t.Errorf("--host %s: interface %q", host, got)
		}
	}
}

// TestNoLibrary is a process of its own, since one opens the library once: where there is none KV blocks travel over TCP, and one line says so.
func TestNoLibrary(t *testing.T) {
	const at = "TANDEM_TEST_LIBRARY"
	if library := os.Getenv(at); library != "" {
		d := &process.Process{Log: slog.New(slog.NewTextHandler(os.Stdout, nil))}
		device, got, _ := kvFabric(d, &nodeFlags{host: "127.0.0.1", fabric: fabric.Options{Provider: "auto", Library: library}}, kvtransfer.OverRDMA, nil)
		fmt.Printf("travels %s %v\n", got, device == nil)
		d.End()
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestNoLibrary$")
	cmd.Env = append(os.Environ(), at+"=libnone.so")
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "level=") != 1 || !strings.Contains(string(out), `level=WARN msg="KV transfer: TCP, because RDMA is not available"`) || !strings.Contains(string(out), "travels tcp true\n") ||
		fabric.Built && !strings.Contains(string(out), "libnone.so") {
		t.Errorf("%v: it says\n%s", err, out)
	}
}
