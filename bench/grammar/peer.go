package main

import (
	"bufio"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// lines is a process that answers each line of JSON by one.
type lines struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func newLines(cmd *exec.Cmd) (*lines, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &lines{cmd, in, bufio.NewReaderSize(out, 1<<20)}, cmd.Start()
}

func (l *lines) close() {
	_ = l.in.Close()
	_ = l.cmd.Wait()
}

func (l *lines) exchange(request, answer any) error {
	b, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if _, err := l.in.Write(append(b, '\n')); err != nil {
		return err
	}
	line, err := l.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the answer of %s: %w", l.cmd.Path, err)
	}
	return json.Unmarshal(line, answer)
}

// peer is a process that runs llguidance: peer.py.
type peer struct{ *lines }

type peerRequest struct {
	Vocabulary string  `json:"vocabulary,omitempty"`
	Compile    *string `json:"compile,omitempty"`
	Mask       bool    `json:"mask,omitempty"`
	Bits       bool    `json:"bits,omitempty"`
	Accept     *int32  `json:"accept,omitempty"`
}

type peerAnswer struct {
	NS    int64  `json:"ns"`
	Bytes int64  `json:"bytes"`
	Error string `json:"error"`
	Bits  string `json:"bits"`
}

func startPeer(python, script string) (*peer, error) {
	l, err := newLines(exec.Command(python, script))
	return &peer{l}, err
}

func (p *peer) ask(r peerRequest) (a peerAnswer, err error) {
	return a, p.exchange(r, &a)
}

// compile returns the time that the peer took, or its error.
func (p *peer) compile(schema string) (time.Duration, error) {
	a, err := p.ask(peerRequest{Compile: &schema})
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return time.Duration(a.NS), err
}

// mask returns the time that the peer took; with dst it also copies the mask.
func (p *peer) mask(dst []uint64) (time.Duration, error) {
	a, err := p.ask(peerRequest{Mask: true, Bits: dst != nil})
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	if err != nil || dst == nil {
		return time.Duration(a.NS), err
	}
	b, err := base64.StdEncoding.DecodeString(a.Bits)
	if err != nil {
		return 0, err
	}
	clear(dst)
	for i := 0; i+4 <= len(b) && i/8 < len(dst); i += 4 {
		dst[i/8] |= uint64(binary.LittleEndian.Uint32(b[i:])) << (i % 8 * 8)
	}
	return time.Duration(a.NS), nil
}

func (p *peer) accept(id int32) error {
	a, err := p.ask(peerRequest{Accept: &id})
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return err
}
