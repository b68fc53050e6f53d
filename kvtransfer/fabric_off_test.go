//go:build !cgo || !linux

package kvtransfer

import (
	"testing"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// fabricTransports are none in a build that opens no shared objects.
func fabricTransports(testing.TB) []transport { return nil }

func fabricDevices(testing.TB, string) (reader, writer *fabric.Device) { return nil, nil }

func (*faults) wrap(e endpoint) endpoint { return e }
