package cuda

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Machine instructions of 128 bits: the operations that measureCode knows, by their lowest twelve
// bits.
const (
	codeBytes    = 16
	opBranch     = 0x947
	opNop        = 0x918
	opLoad       = 0x981 // from global memory
	opLoadShared = 0xfae // from global to shared memory
	opStore      = 0x986 // to global memory
	opWait       = 0x82e // for the previous kernel, from 9.0 on
)

// logFormat is part of the names of cached files: it changes with the lines of codeLines.
const logFormat = 2

// codeLines returns a line of the compiler's log for each kernel of the cubins in dir: its mangled
// name, architecture, instructions, instructions per KB, and accesses before it waits.
func codeLines(dir string) ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.cubin"))
	if err != nil {
		return nil, err
	}
	var lines []byte
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(filepath.Base(path), ".cubin") // KERNELS.compute_80.sm_80 or KERNELS.compute_90a
		arch := "sm" + name[strings.LastIndex(name, "_"):]
		f, err := parseCubin(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		for _, s := range f.Sections {
			kernel, ok := strings.CutPrefix(s.Name, ".text.")
			if !ok || s.Type != elf.SHT_PROGBITS {
				continue
			}
			text, err := s.Data()
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", path, s.Name, err)
			}
			n, perKB := measureCode(text, arch)
			lines = fmt.Appendf(lines, "code %s %s %d %d %d\n", kernel, arch, n, perKB, earlyAccesses(text))
		}
	}
	return lines, nil
}

// parseCubin parses a cubin. Compilers before 13.0 wrote their own version as that of ELF.
func parseCubin(data []byte) (*elf.File, error) {
	const version = 20 // offset in the header
	if len(data) > version+4 {
		data = bytes.Clone(data)
		binary.LittleEndian.PutUint32(data[version:], uint32(elf.EV_CURRENT))
	}
	return elf.NewFile(bytes.NewReader(data))
}

// measureCode returns the number of a kernel's instructions, and how many of them a warp executes
// for each KB that it reads: the most of the innermost loops that read at least a KB in a pass, 0
// without one. Instructions that a pass skips are counted. From 10.0 on, loads have operations that
// it does not know, and it returns 0.
func measureCode(text []byte, arch string) (instructions, perKB int) {
	type loop struct{ from, to int } // instructions
	var loops []loop
	read := make([]int, len(text)/codeBytes+1) // bytes that instructions before this one read, over a warp
	for i := range len(text) / codeBytes {
		low, high := binary.LittleEndian.Uint64(text[i*codeBytes:]), binary.LittleEndian.Uint64(text[i*codeBytes+8:])
		read[i+1] = read[i]
		switch op := low & 0xfff; op {
		case opNop:
			continue
		case opLoad, opLoadShared:
			code := int(high >> 9 & 7)
			size := 1 << max(code/2, code-2) // 0: a byte, 2: two, 4: a word
			read[i+1] += 32 * size
		case opBranch:
			to := i + 1 + branch(low, high, arch)
			if to == i {
				continue // what follows a kernel
			}
			if to < i && to >= 0 {
				loops = append(loops, loop{to, i})
			}
		}
		instructions++
	}
	if strings.HasPrefix(arch, "sm_1") {
		return instructions, 0
	}
	for _, l := range loops {
		bytes, inner := read[l.to+1]-read[l.from], true
		for _, other := range loops {
			inner = inner && (other == l || other.from < l.from || other.to > l.to)
		}
		if inner && bytes >= 1024 {
			perKB = max(perKB, (l.to+1-l.from)*1024/bytes)
		}
	}
	return instructions, perKB
}

// earlyAccesses returns how many reads and writes of global memory a kernel's code has before its
// wait for the previous kernel, or -1 if it has no such wait. Prefetches are not counted, and
// neither are reads by operations of 10.0 and later.
func earlyAccesses(text []byte) int {
	n := 0
	for i := range len(text) / codeBytes {
		switch binary.LittleEndian.Uint64(text[i*codeBytes:]) & 0xfff {
		case opWait:
			return n
		case opLoad, opLoadShared, opStore:
			n++
		}
	}
	return -1
}

// branch returns the distance of a branch in instructions, from the one after it.
func branch(low, high uint64, arch string) int {
	words := int64(low>>34|high<<30) << 16 >> 16 // of four bytes
	if strings.HasPrefix(arch, "sm_8") {
		return int(words) / (codeBytes / 4)
	}
	return int(words<<8|int64(low>>16&0xff)) / (codeBytes / 4)
}
