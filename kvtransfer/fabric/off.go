//go:build !cgo || !linux

package fabric

import "fmt"

// MaxName bounds an endpoint's name.
const MaxName = 256

var errBuild = fmt.Errorf("%w: this build cannot open shared objects: build it on Linux, with cgo", ErrLibrary)

// Built reports that this build cannot open the library.
const Built = false

// Device and the types below cannot be created in this build.
type (
	Device   struct{}
	Source   struct{}
	Key      struct{}
	Endpoint struct{}
)

// Open returns ErrLibrary.
func Open(Options) (*Device, error) { return nil, errBuild }

func (*Device) Info() Info                     { return Info{} }
func (*Device) Close() error                   { return errBuild }
func (*Device) Place() uint64                  { return 0 }
func (*Device) InUse() int                     { return 0 }
func (*Device) Source(Memory) (*Source, error) { return nil, errBuild }
func (*Device) Grant([]Memory) (*Key, error)   { return nil, errBuild }
func (*Device) Endpoint(int) (*Endpoint, error) {
	return nil, errBuild
}
func (*Source) Close() error                                 { return errBuild }
func (*Key) Targets() []Target                               { return nil }
func (*Key) Close() error                                    { return errBuild }
func (*Endpoint) Name() []byte                               { return nil }
func (*Endpoint) Peer([]byte) error                          { return errBuild }
func (*Endpoint) Write([]Write, uint64, uint32) (int, error) { return 0, errBuild }
func (*Endpoint) Poll([]Event, int) (int, error)             { return 0, errBuild }
func (*Endpoint) Close() error                               { return errBuild }
