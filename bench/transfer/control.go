package transfer

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// maxLine bounds a message: a grant of a million pages in base64.
const maxLine = 8 << 20

// request is a line from the peer: exactly one of the fields is set.
type request struct {
	Setup  *setup `json:"setup,omitempty"`
	Grant  *round `json:"grant,omitempty"`  // pages for a round
	Verify *round `json:"verify,omitempty"` // a round that was pushed
}

// round names pages. Both sides draw the same.
type round struct {
	N         uint64 `json:"n"`
	Positions int    `json:"positions"`
}

// reply is the answer to a request.
type reply struct {
	Error   string  `json:"error,omitempty"`
	Machine string  `json:"machine,omitempty"` // to setup
	Wire    []byte  `json:"wire,omitempty"`    // to grant
	CPU     float64 `json:"cpu_seconds"`       // to verify: the listener's, from the grant to the arrival
	Path    string  `json:"path,omitempty"`    // to verify: the transport that was used
}

// lines sends and reads messages on one connection.
type lines struct {
	conn net.Conn
	in   *bufio.Scanner
}

func newLines(conn net.Conn) *lines {
	in := bufio.NewScanner(conn)
	in.Buffer(nil, maxLine)
	return &lines{conn, in}
}

func (l *lines) send(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_ = l.conn.SetWriteDeadline(time.Now().Add(stepTimeout)) // the write reports a dead connection
	_, err = l.conn.Write(append(b, '\n'))
	return err
}

// read waits for a message, without a time limit if patient.
func (l *lines) read(v any, patient bool) error {
	deadline := time.Now().Add(stepTimeout)
	if patient {
		deadline = time.Time{}
	}
	_ = l.conn.SetReadDeadline(deadline)
	if !l.in.Scan() {
		return errors.Join(net.ErrClosed, l.in.Err())
	}
	return json.Unmarshal(l.in.Bytes(), v)
}

// ask sends a request and returns its answer.
func (l *lines) ask(r request) (reply, error) {
	var a reply
	if err := l.send(r); err != nil {
		return a, fmt.Errorf("asking %v: %w", l.conn.RemoteAddr(), err)
	}
	if err := l.read(&a, false); err != nil {
		return a, fmt.Errorf("answer of %v: %w", l.conn.RemoteAddr(), err)
	}
	if a.Error != "" {
		return a, fmt.Errorf("%v: %s", l.conn.RemoteAddr(), a.Error)
	}
	return a, nil
}
