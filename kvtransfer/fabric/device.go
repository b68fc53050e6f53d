//go:build cgo && linux

package fabric

/*
#cgo CFLAGS: -O2 -std=gnu11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#cgo noescape td_post
#cgo nocallback td_post
#cgo noescape td_poll
#cgo nocallback td_poll
#include <stdlib.h>
#include "fabric.h"
*/
import "C"

import (
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// C and Go use the same layout.
var (
	_ = [1]byte{}[unsafe.Sizeof(C.td_event{})-unsafe.Sizeof(Event{})]
	_ = [1]byte{}[unsafe.Offsetof(C.td_event{}.kind)-unsafe.Offsetof(Event{}.Kind)]
	_ = [1]byte{}[C.TD_WRITTEN-int(Written)+C.TD_LANDED-int(Landed)+C.TD_FAILED-int(Failed)]
)

var errDevice = fmt.Errorf("%w: the device is closed", ErrFabric)

// loading guards the process-wide state of the library.
var loading sync.Mutex

// Built reports that this build can open the library.
const Built = true

// Device is an open provider.
type Device struct {
	c    *C.td_device // nil: closed
	info Info
	virt bool // targets use the memory's own addresses
	desc bool // writes name the registration of their source

	mu      sync.Mutex
	sources map[Memory]*Source
	shared  map[Memory]*registration // ProviderKeys: targets
	open    int                      // registrations and endpoints that are open
}

// cError returns an error for a message of the C code, nil for none. If the message is in a
// thread-local buffer, the caller must have locked the thread.
func cError(of error, s *C.char) error {
	if s == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", of, C.GoString(s))
}

// Open opens a provider. The error is ErrLibrary without libfabric, otherwise ErrProvider.
func Open(o Options) (*Device, error) {
	if !slices.Contains(Providers, o.Provider) {
		return nil, fmt.Errorf("%w: %q, want one of %s", ErrProvider, o.Provider, strings.Join(Providers, ", "))
	}
	if o.Library == "" {
		o.Library = Library
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	loading.Lock()
	defer loading.Unlock()
	library, provider, address := C.CString(o.Library), C.CString(o.Provider), C.CString(o.Address)
	defer func() {
		for _, s := range []*C.char{library, provider, address} {
			C.free(unsafe.Pointer(s))
		}
	}()
	if err := cError(ErrLibrary, C.td_load(library)); err != nil {
		return nil, err
	}
	d := &Device{sources: make(map[Memory]*Source), shared: make(map[Memory]*registration)}
	var i C.td_info
	gpu := C.int(0)
	if o.GPU {
		gpu = 1
	}
	if err := cError(ErrProvider, C.td_open(provider, address, gpu, &d.c, &i)); err != nil {
		return nil, fmt.Errorf("%w (%s, address %q)", err, o.Provider, o.Address)
	}
	d.virt, d.desc = i.virtual_addresses != 0, i.local_keys != 0
	d.info = Info{
		Provider: C.GoString(&i.provider[0]), Fabric: C.GoString(&i.fabric[0]), Domain: C.GoString(&i.domain[0]),
		Library:      fmt.Sprintf("%d.%d", i.library>>16, i.library&0xffff),
		ProviderKeys: i.provider_keys != 0, GPU: i.hmem != 0, MostBytes: int(min(uint64(i.most), 1<<62)),
	}
	e, err := d.Endpoint(1) // fails here if the address is not this machine's
	if err == nil {
		err = e.Close()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w (%s, address %q)", ErrProvider, err, o.Provider, o.Address), d.Close())
	}
	return d, nil
}

// Place returns a number that is equal on ends that can connect, for a provider that reaches only
// processes of one host. Otherwise it is 0.
func (d *Device) Place() uint64 {
	if d.info.Provider != "shm" {
		return 0
	}
	h := fnv.New64a()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	pids, perr := os.Readlink("/proc/self/ns/pid")
	var st unix.Stat_t
	if serr := unix.Stat("/dev/shm", &st); errors.Join(err, perr, serr) != nil {
		return uint64(os.Getpid()) // only this process
	}
	fmt.Fprint(h, string(boot), pids, st.Dev, st.Ino)
	return h.Sum64()
}

// Info returns a description of the provider.
func (d *Device) Info() Info { return d.info }

// enter counts an endpoint that is about to be opened, so that the device stays open.
func (d *Device) enter() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.c == nil {
		return errDevice
	}
	d.open++
	return nil
}

func (d *Device) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open--
}

// Close closes the device. Its endpoints and registrations must be closed. Closing it again does
// nothing.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.c == nil {
		return nil
	}
	if d.open != 0 {
		return fmt.Errorf("%w: closing a device with %d endpoints and registrations open", ErrFabric, d.open)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cError(ErrFabric, C.td_close(d.c))
	d.c = nil
	return err
}

// InUse returns the number of open endpoints and registrations, for tests of leaks.
func (d *Device) InUse() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.open
}

// registration is memory that is registered with the provider.
type registration struct {
	d     *Device
	c     *C.td_mr
	mem   Memory
	pin   runtime.Pinner
	users int // of a shared registration
}

// register registers memory. The caller holds d.mu.
func (d *Device) register(m Memory, key uint64, remote bool) (*registration, error) {
	if d.c == nil {
		return nil, errDevice
	}
	r := &registration{d: d, mem: m, users: 1}
	if m.GPU == Host {
		r.pin.Pin((*byte)(pointer(m.At)))
	}
	flag, dmabuf := C.int(0), C.int(-1)
	if remote {
		flag = 1
	}
	if m.OfDMABuf {
		dmabuf = C.int(m.DMABuf)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cError(ErrFabric, C.td_register(d.c, C.uint64_t(m.At), C.uint64_t(m.Bytes), C.uint64_t(key), flag, C.int(m.GPU), dmabuf, C.uint64_t(m.Offset), &r.c))
	if err != nil {
		r.pin.Unpin()
		return nil, fmt.Errorf("%w (%d bytes, %s)", err, m.Bytes, d.info.Provider)
	}
	d.open++
	return r, nil
}

// pointer converts an address to a pointer. The caller of the registration keeps the memory alive.
func pointer(at uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&at)) }

// close closes a registration. The caller holds d.mu.
func (r *registration) close() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cError(ErrFabric, C.td_unregister(r.c))
	r.pin.Unpin()
	r.d.open--
	return err
}

// Source is registered memory that can be the source of writes.
type Source struct{ r *registration }

// Source registers memory to write from. Repeated calls share one registration; each result must be
// closed.
func (d *Device) Source(m Memory) (*Source, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.sources[m]; s != nil {
		s.r.users++
		return s, nil
	}
	r, err := d.register(m, d.key(), false)
	if err != nil {
		return nil, err
	}
	d.sources[m] = &Source{r}
	return d.sources[m], nil
}

// Close closes the registration after its last user.
func (s *Source) Close() error {
	d := s.r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.r.users--; s.r.users > 0 {
		return nil
	}
	delete(d.sources, s.r.mem)
	return s.r.close()
}

// Key lets peers write to memory until it is closed.
type Key struct {
	d       *Device
	all     []*registration
	targets []Target
}

// maxMemories bounds the memories of one Grant, whose keys count up from a random one.
const maxMemories = 1 << 12

// key returns the first of a range of keys that cannot be guessed: 52 random bits, and bits to
// count.
func (d *Device) key() (key uint64) {
	var b [8]byte
	rand.Read(b[:])
	for _, x := range b {
		key = key<<8 | uint64(x)
	}
	return key &^ (maxMemories - 1)
}

// Grant registers memory to be written to: under new random keys or, with ProviderKeys, under the
// keys that all peers share.
func (d *Device) Grant(mem []Memory) (*Key, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(mem) > maxMemories {
		return nil, fmt.Errorf("%w: %d memories under one key, want at most %d", ErrFabric, len(mem), maxMemories)
	}
	k, base := &Key{d: d}, d.key()
	var err error
	for i, m := range mem {
		var r *registration
		if r = d.shared[m]; r != nil {
			r.users++
		} else if r, err = d.register(m, base+uint64(i), true); err != nil {
			break
		}
		if d.info.ProviderKeys {
			d.shared[m] = r
		}
		t := Target{Key: uint64(C.td_key(r.c))}
		if d.virt {
			t.At = uint64(m.At)
		}
		k.all, k.targets = append(k.all, r), append(k.targets, t)
	}
	if err != nil {
		return nil, errors.Join(err, k.closeLocked())
	}
	return k, nil
}

// Targets returns the description that a peer needs, one for each memory.
func (k *Key) Targets() []Target { return k.targets }

// Close closes the key. Writes in flight may still land. Only closing their endpoint, or a message
// of their sender, excludes that.
func (k *Key) Close() error {
	k.d.mu.Lock()
	defer k.d.mu.Unlock()
	return k.closeLocked()
}

func (k *Key) closeLocked() error {
	var errs []error
	for _, r := range k.all {
		if r.users--; r.users > 0 {
			continue
		}
		if k.d.shared[r.mem] == r {
			delete(k.d.shared, r.mem)
		}
		errs = append(errs, r.close())
	}
	k.all = nil
	return errors.Join(errs...)
}
