//go:build !cgo || !linux

package cuda

import "errors"

var errBuild = errors.New("this build cannot open shared objects: build it on Linux, with cgo")

type (
	library  struct{}
	driver   struct{}
	recorded struct{}
)

func openLibrary(string) (*library, error)                    { return nil, errBuild }
func (*library) count() (int, error)                          { return 0, errBuild }
func (*library) open(int, limits) (*driver, error)            { return nil, errBuild }
func (*library) ncclID(string) ([]byte, error)                { return nil, errBuild }
func (*driver) joinGroup(string, []byte, int, int) bool       { return false }
func (*driver) abortGroup()                                   {}
func (*driver) close()                                        {}
func (*driver) err() error                                    { return errBuild }
func (*driver) describe() info                                { return info{} }
func (*driver) alloc(int) address                             { return 0 }
func (*driver) upload(address, []byte) bool                   { return false }
func (*driver) download([]byte, address) bool                 { return false }
func (*driver) groups(int, limits) (s [2]stepMemory, ok bool) { return s, false }
func (*driver) tables(int, int, int, int, int) bool           { return false }
func (*driver) record([]op, int, int, bool) (recorded, bool)  { return recorded{}, false }
func (*driver) run(recorded, int, int, int) bool              { return false }
func (*driver) blas(string) (int, error)                      { return 0, errBuild }
func (*driver) host([]byte, int) []byte                       { return nil }
func (*driver) copy([]piece, bool) bool                       { return false }
func (*driver) follow() bool                                  { return false }
func (*driver) direct(address) bool                           { return false }
func (*driver) flush() bool                                   { return false }
func (*driver) digest([]piece) bool                           { return false }
func (*driver) poll() (bool, error)                           { return false, errBuild }
func (*driver) wait() bool                                    { return false }
func (*driver) memory(address, int) []byte                    { return nil }
