// Package fabric writes into the registered memory of other processes by libfabric: RDMA where there is hardware for it (providers
// verbs, efa), and the same calls over sockets and shared memory (tcp, shm) where there is none.
//
// The library is opened at run time, and only when a Device is: no build needs it, or its headers, and a program runs without it
// (ErrLibrary). abi.h says in its own words what is used of the library's binary interface; a test holds that against the headers of
// an installed one.
//
// A Device is a provider's fabric and domain. It registers memory: once for what is written from, and for what may be written to either
// once, with a key that the hardware chooses, or as often as wanted with random keys of 64 bits, where the provider takes those
// (Info.ProviderKeys). An Endpoint has one peer. Its writes each bring 32 bits along, which the peer's Poll tells once their bytes are
// in its memory; neither writes nor what they bring arrive in any promised order. Over the provider tcp that comes in messages behind up
// to eight of one call.
//
// Invariant: after Endpoint.Close has returned, no peer's write through that endpoint changes memory here any more; a test proves it for each
// provider there is. Closing a Key does not promise that for writes that are under way.
//
// The package does not encrypt, does not say who a peer is, retries nothing, and does not know pages, leases or checksums: kvtransfer does.
package fabric

import (
	"errors"
	"fmt"
	"unsafe"
)

var (
	ErrLibrary  = errors.New("fabric: libfabric cannot be used")
	ErrProvider = errors.New("fabric: provider cannot be used")
	ErrFabric   = errors.New("fabric: operation failed")
	ErrClosed   = errors.New("fabric: endpoint is closed")
)

// Hardware are those of these that need it.
var Hardware = []string{"verbs", "efa"}

// Library is the file that is opened; the system's loader finds it.
const Library = "libfabric.so.1"

// Providers are those that this package is written for. Only tcp and shm run without hardware.
var Providers = []string{"verbs", "efa", "tcp", "shm"}

// Options choose a Device.
type Options struct {
	Provider string // one of Providers
	Address  string // host or interface address that peers reach; empty: the provider's first
	GPU      bool   // GPU memory will be registered; refused where the provider reaches none (FI_HMEM)
	Library  string // file; empty: Library
}

// Info says what a Device is.
type Info struct {
	Provider     string // the library's name for it, with the layers it uses
	Fabric       string // network
	Domain       string // interface
	Library      string // version
	ProviderKeys bool   // registrations get the hardware's keys, one for all peers; else a random one each
	GPU          bool
	MostBytes    int // of one write
}

func (i Info) String() string {
	return fmt.Sprintf("%s on %s (%s), libfabric %s", i.Provider, i.Domain, i.Fabric, i.Library)
}

// Host is the GPU of memory that is none's.
const Host = -1

// Memory is what can be registered. It must neither move nor be freed before its registration is closed.
type Memory struct {
	At     uintptr
	Bytes  int
	GPU    int // ordinal of the CUDA device whose memory it is, or Host
	DMABuf int // descriptor of the dma-buf it lies in, at Offset; only if OfDMABuf
	Offset uint64

	OfDMABuf bool
}

// Of is memory of this process.
func Of(b []byte) Memory { return Memory{At: uintptr(unsafe.Pointer(&b[0])), Bytes: len(b), GPU: Host} }

// Write is one write from memory here to a peer's.
type Write struct {
	From   uintptr
	To     uint64 // Target.At, and where in it
	Key    uint64 // Target.Key
	Bytes  int
	Source *Source // From is in it
}

// Target is what a peer needs to write to registered memory.
type Target struct{ At, Key uint64 }

// EventKind is what an Event tells.
type EventKind int32

const (
	Written EventKind = 1 + iota // a write of this side is over, its memory may change; not that it has landed
	Landed                       // a write of the peer is in memory here
	Failed                       // a write of this side, if Own, or something of the peer's did not work
)

// Event is a completion.
type Event struct {
	Token uint64 // Written, Failed: of the Write call
	Data  uint32 // Landed: what the write brought
	Kind  EventKind
	errno int32
	own   int32
}

// Own says whether a Failed event is of a write of this side.
func (e Event) Own() bool { return e.own != 0 }
