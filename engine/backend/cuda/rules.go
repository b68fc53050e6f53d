package cuda

import (
	"fmt"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// Words of the parts of an output's rules.
const (
	headWords = int(unsafe.Sizeof(rules{}) / 8)
	banWords  = int(unsafe.Sizeof(ban{}) / 8)
	markWords = int(unsafe.Sizeof(mark{}) / 8)
)

// OutputBytes returns the memory that an output of vocab logits takes in addition to a
// model's buffers: its rules, and the logits after the rules.
func OutputBytes(vocab int) int64 { return ruleWords*8 + 4*int64(vocab) }

// sampling is the memory that draws from some logits take in addition to them.
type sampling struct {
	ruled address  // [outputs, vocab] the logits after rules and masks
	words int      // of an output's mask
	masks []uint64 // [2, outputs, words] of even and odd steps, in pinned memory
	at    address  // of masks
}

// samplingOf returns the memory for draws from logits, and reserves it if there is none.
func (c *CUDA) samplingOf(logits *buffer) (*sampling, error) {
	if m := c.sampling[logits]; m != nil {
		return m, nil
	}
	outputs, m := c.limit(logits.rows), &sampling{words: (logits.cols + 63) / 64}
	var err error
	if m.ruled, err = c.reserve(outputs*logits.cols*4, "logits after rules"); err != nil {
		return nil, err
	}
	bytes := 2 * outputs * m.words * 8
	pinned := c.dev.host(nil, bytes)
	if pinned == nil {
		return nil, c.failed(fmt.Sprintf("%d bytes for masks", bytes))
	}
	m.masks, m.at = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(pinned))), bytes/8), address(hostAddress(pinned))
	c.sampling[logits] = m
	return m, nil
}

// putMask writes the mask of an output of a step of the given parity. Tokens beyond bits are
// excluded.
func (m *sampling) putMask(parity, output, outputs int, bits []uint64) {
	to := m.masks[(parity*outputs+output)*m.words:][:m.words]
	clear(to[copy(to, bits):])
}

// wordsOf returns the most words that the rules of a request take.
func wordsOf(c *sample.Controls) int {
	return headWords + len(c.Allowed()) + banWords*c.MaxBans() + markWords*len(c.Marks())
}

// Rules reports whether the device applies such rules, which must fit in ruleWords words;
// see backend.Ruler. Otherwise the host reads the logits and samples.
func (c *CUDA) Rules(of *sample.Controls, more int) bool {
	return of == nil || wordsOf(of)+markWords*more <= ruleWords
}

// putRules writes an output's rules after the words in use, and returns 1 plus the index
// of their first word.
func (m *stepMemory) putRules(step *backend.Step, o *backend.Output) int32 {
	at, c, last := int(m.counts[4]), o.Params.Controls, int32(-1)
	if id := step.Tokens[o.Row]; id < 0 {
		last = -1 - id
	}
	head := (*rules)(unsafe.Pointer(&m.rules[at]))
	*head = rules{allowed: -1, last: last}
	var next sample.Mark
	head.repetition, head.presence, head.frequency, next = c.Penalties()
	head.follows = next.Seen + 2*next.Count
	end := at + headWords
	if words := c.Allowed(); words != nil {
		head.allowed = int32(copy(m.rules[end:], words))
		end += len(words)
	}
	for b := range c.Bans(last >= 0) {
		*(*ban)(unsafe.Pointer(&m.rules[end])) = ban{b.Token, b.After}
		end += banWords
		head.bans++
	}
	if marks := c.Marks(); len(marks) > 0 {
		to := unsafe.Slice((*mark)(unsafe.Pointer(&m.rules[end])), len(marks))
		for i, k := range marks {
			to[i] = mark{k.Token, k.Count, k.Bias, k.Seen}
		}
		head.marks = int32(len(marks))
		end += markWords * len(marks)
	}
	m.counts[4] = int32(end)
	return int32(at) + 1
}
