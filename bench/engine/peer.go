package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// llamaCpp is a process of peer/peer.c with a file loaded.
type llamaCpp struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func newLlamaCpp(program, file string, threads int) (*llamaCpp, error) {
	p := &llamaCpp{cmd: exec.Command(program, file, strconv.Itoa(threads), strconv.Itoa(context), strconv.Itoa(promptTokens))}
	// llama.cpp's libraries look for each other in the folder that they were built in.
	p.cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(program))
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	return p, p.cmd.Start()
}

// rate sends a command and returns the tokens per second of its steps, which are of so many tokens
// in all.
func (p *llamaCpp) rate(command string, tokens int) (float64, error) {
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		return 0, fmt.Errorf("llama.cpp: %w", err)
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("llama.cpp: no answer to %q: %w", command, err)
	}
	seconds, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
	if err != nil || !(seconds > 0) {
		return 0, fmt.Errorf("llama.cpp: %q answers %q", command, line)
	}
	return float64(tokens) / seconds, nil
}

// close ends the process.
func (p *llamaCpp) close() error {
	if err := p.in.Close(); err != nil {
		return err
	}
	return p.cmd.Wait()
}
