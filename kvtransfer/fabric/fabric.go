// Package fabric writes into the registered memory of other processes with libfabric: RDMA where
// there is hardware for it (providers verbs, efa), and the same calls over sockets and shared
// memory (tcp, shm) where there is none.
//
// The library is opened at run time, by the first Open. So builds need neither the library nor its
// headers, and programs run without it (ErrLibrary). abi.h declares the parts of the library's
// binary interface that are used; a test compares them with the headers of an installed libfabric.
//
// A Device is a provider's fabric and domain. It registers memory. Memory to write from is
// registered once. Memory to be written to is registered once, with a key that the hardware
// chooses, or any number of times with random keys of 64 bits, where the provider accepts those
// (Info.ProviderKeys is false). An Endpoint has one peer. Each of its writes carries 32 bits, which
// the peer's Poll reports once the write's bytes are in its memory. Neither writes nor their
// reports are ordered. With the provider tcp, the reports travel in messages, each for up to eight
// writes of one call.
//
// Invariant: after Endpoint.Close has returned, no peer's write through that endpoint changes
// memory here; a test checks this for each available provider. Closing a Key does not guarantee it
// for writes in flight.
//
// The package does not encrypt, authenticate peers or retry, and does not know pages, leases or
// checksums: kvtransfer does.
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

// Hardware lists the providers that require hardware.
var Hardware = []string{"verbs", "efa"}

// Library is the default file name of the library, which the system's loader finds.
const Library = "libfabric.so.1"

// Providers lists the supported providers. Only tcp and shm run without hardware.
var Providers = []string{"verbs", "efa", "tcp", "shm"}

// Options are the options of Open.
type Options struct {
	Provider string // one of Providers
	Address  string // host or interface address that peers can reach; empty: the provider's first
	GPU      bool   // GPU memory will be registered; an error if the provider does not support it (FI_HMEM)
	Library  string // file; empty: Library
}

// Info describes a Device.
type Info struct {
	Provider     string // the library's name for the provider, with the layers it uses
	Fabric       string // network
	Domain       string // interface
	Library      string // version
	ProviderKeys bool   // the hardware chooses keys, one for all peers; otherwise each registration has a random one
	GPU          bool
	MostBytes    int // of one write
}

func (i Info) String() string {
	return fmt.Sprintf("%s on %s (%s), libfabric %s", i.Provider, i.Domain, i.Fabric, i.Library)
}

// Host is the value of Memory.GPU for host memory.
const Host = -1

// Memory is memory to register. It must neither move nor be freed before its registration is
// closed.
type Memory struct {
	At     uintptr
	Bytes  int
	GPU    int // ordinal of the memory's CUDA device, or Host
	DMABuf int // descriptor of the dma-buf that contains it, at Offset; only if OfDMABuf
	Offset uint64

	OfDMABuf bool
}

// Of returns host memory of this process.
func Of(b []byte) Memory { return Memory{At: uintptr(unsafe.Pointer(&b[0])), Bytes: len(b), GPU: Host} }

// Write is a write from local memory to a peer's.
type Write struct {
	From   uintptr
	To     uint64 // Target.At, plus an offset
	Key    uint64 // Target.Key
	Bytes  int
	Source *Source // contains From
}

// Target describes registered memory to a peer that writes to it.
type Target struct{ At, Key uint64 }

// EventKind is the kind of an Event.
type EventKind int32

const (
	Written EventKind = 1 + iota // a local write has completed, its memory may change; it may not have landed
	Landed                       // a write of the peer has landed in local memory
	Failed                       // a local write, if Own, or an operation of the peer has failed
)

// Event is a completion.
type Event struct {
	Token uint64 // Written, Failed: of the Write call
	Data  uint32 // Landed: carried by the write
	Kind  EventKind
	errno int32
	own   int32
}

// Own reports whether a Failed event is about a local write.
func (e Event) Own() bool { return e.own != 0 }
