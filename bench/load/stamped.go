package load

import (
	"net"
	"time"
)

// Stamped is a connection that knows when the bytes of its last Read came. Where
// the kernel tells (TCP on Linux) that is when they came to this machine, however
// long this process then took to be woken and to read them: a busy client does not
// make a server look slow. Elsewhere it is when Read returned.
//
// Bytes that came at different times and are read together all carry the last
// one's time.
type Stamped struct {
	net.Conn
	at   time.Time
	late time.Duration // from at to the end of Read; 0 where the kernel does not tell
	kernel
}

// At is when the bytes of the last Read came.
func (s *Stamped) At() time.Time { return s.at }

// readPlain reads without the kernel's help.
func (s *Stamped) readPlain(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	s.at, s.late = time.Now(), 0
	return n, err
}

// maxLate bounds what is believed of the kernel's clock against ours: more means
// that the clock was set in between.
const maxLate = 10 * time.Second

// came sets the time that the kernel gave, on the clock of the wall.
func (s *Stamped) came(wall time.Time) {
	now := time.Now()
	s.at, s.late = now, 0
	if d := now.Round(0).Sub(wall); d > 0 && d < maxLate {
		s.at, s.late = now.Add(-d), d
	}
}
