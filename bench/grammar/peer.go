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

// peer is a process that runs llguidance: peer.py.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

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
	p := &peer{cmd: exec.Command(python, script)}
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReaderSize(out, 1<<20)
	return p, p.cmd.Start()
}

func (p *peer) close() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}

func (p *peer) ask(r peerRequest) (peerAnswer, error) {
	var a peerAnswer
	b, err := json.Marshal(r)
	if err != nil {
		return a, err
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		return a, err
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return a, fmt.Errorf("the peer's answer: %w", err)
	}
	return a, json.Unmarshal(line, &a)
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
