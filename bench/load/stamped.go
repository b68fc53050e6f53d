package load

import (
	"net"
	"time"
)

// Stamped is a connection that records when the bytes of its last Read arrived. If the
// kernel reports it (TCP on Linux), that is their arrival at this machine, however long
// this process then took to read them. So a busy client does not make a server look
// slow. Otherwise it is when Read returned.
//
// Bytes that arrive at different times and are read together all have the time of the
// last ones.
type Stamped struct {
	net.Conn
	at   time.Time
	late time.Duration // from at to the end of Read; 0 if the kernel reports no arrival times
	kernel
}

// At returns when the bytes of the last Read arrived.
func (s *Stamped) At() time.Time { return s.at }

// readPlain reads without the kernel's timestamps.
func (s *Stamped) readPlain(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	s.at, s.late = time.Now(), 0
	return n, err
}

// maxLate bounds the difference between the kernel's clock and the process's. More means
// that the clock was set in between.
const maxLate = 10 * time.Second

// came stores the kernel's time, which is wall-clock time.
func (s *Stamped) came(wall time.Time) {
	now := time.Now()
	s.at, s.late = now, 0
	if d := now.Round(0).Sub(wall); d > 0 && d < maxLate {
		s.at, s.late = now.Add(-d), d
	}
}
