package cluster

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxEventHashes bounds the hashes of one message; more are split over several.
const MaxEventHashes = 4096

const maxNodeID = 255 // bytes

// ErrBadEvent reports a message that is no block event of this version.
var ErrBadEvent = errors.New("cluster: malformed block event")

// Stored is a block that a node's prefix cache has stored.
type Stored struct{ Hash, Parent uint64 }

// BlockEvent is one message of a node: changes of its prefix cache since its
// previous message.
type BlockEvent struct {
	Node    string // Member.ID
	Epoch   uint64 // increases whenever the node's cache starts empty
	Seq     uint64 // 1, 2, … within the epoch
	Stored  []Stored
	Removed []uint64 // block hashes, removed before Stored were stored
}

// eventVersion begins every message.
const eventVersion = 1

const eventHeader = 1 + 1 + 8 + 8 + 4 + 4

// encode returns version u8, node length u8, epoch u64, seq u64, stored u32, removed
// u32, node, stored × (hash u64, parent u64), removed × u64; little-endian.
func (e BlockEvent) encode() []byte {
	b := make([]byte, 0, eventHeader+len(e.Node)+16*len(e.Stored)+8*len(e.Removed))
	b = append(b, eventVersion, byte(len(e.Node)))
	b = binary.LittleEndian.AppendUint64(b, e.Epoch)
	b = binary.LittleEndian.AppendUint64(b, e.Seq)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(e.Stored)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(e.Removed)))
	b = append(b, e.Node...)
	for _, s := range e.Stored {
		b = binary.LittleEndian.AppendUint64(b, s.Hash)
		b = binary.LittleEndian.AppendUint64(b, s.Parent)
	}
	for _, h := range e.Removed {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

func decodeEvent(b []byte) (BlockEvent, error) {
	if len(b) < eventHeader || b[0] != eventVersion {
		return BlockEvent{}, fmt.Errorf("%w: %d bytes beginning with %x", ErrBadEvent, len(b), b[:min(len(b), 1)])
	}
	nNode := int(b[1])
	nStored, nRemoved := binary.LittleEndian.Uint32(b[18:]), binary.LittleEndian.Uint32(b[22:])
	if nStored > MaxEventHashes || nRemoved > MaxEventHashes ||
		len(b) != eventHeader+nNode+16*int(nStored)+8*int(nRemoved) || nNode == 0 {
		return BlockEvent{}, fmt.Errorf("%w: %d bytes for %d stored and %d removed of a %d-byte ID", ErrBadEvent, len(b), nStored, nRemoved, nNode)
	}
	e := BlockEvent{
		Epoch: binary.LittleEndian.Uint64(b[2:]),
		Seq:   binary.LittleEndian.Uint64(b[10:]),
		Node:  string(b[eventHeader : eventHeader+nNode]),
	}
	b = b[eventHeader+nNode:]
	for range nStored {
		e.Stored = append(e.Stored, Stored{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])})
		b = b[16:]
	}
	for range nRemoved {
		e.Removed = append(e.Removed, binary.LittleEndian.Uint64(b))
		b = b[8:]
	}
	return e, nil
}

// subject returns the NATS subject of a model's block events. The name is encoded because
// '.', '*', '>' and spaces have a meaning in subjects.
func subject(model string) string {
	return "tandem.blocks." + token(model)
}

// askSubject returns the subject on which nodes of a model are asked to publish all
// their blocks again.
func askSubject(model string) string { return "tandem.ask." + token(model) }

func token(model string) string { return base64.RawURLEncoding.EncodeToString([]byte("m" + model)) }

// maxTracked bounds the nodes that a tracker follows.
const maxTracked = 16384

// tracker detects missing messages by their numbers. It is pure.
type tracker map[string]position

// position is the last message of a node. whole: no message is missing since its cache
// was empty, or since it published all blocks again.
type position struct {
	epoch, seq uint64
	whole      bool
}

// verdict is what to do with a message.
type verdict uint8

const (
	apply          verdict = iota // it follows the last message
	forgetAndApply                // messages before it are missing
	ignore                        // late, repeated, or of one node too many
)

// see judges one message; why is empty except for forgetAndApply.
func (t tracker) see(e BlockEvent) (v verdict, why string) {
	p, known := t[e.Node]
	if !known && len(t) >= maxTracked {
		return ignore, ""
	}
	switch {
	case !known:
	case e.Epoch < p.epoch, e.Epoch == p.epoch && e.Seq <= p.seq:
		return ignore, ""
	case e.Epoch > p.epoch:
		v, why = forgetAndApply, fmt.Sprintf("its cache was reset (epoch %d after %d)", e.Epoch, p.epoch)
	case e.Seq != p.seq+1:
		v, why = forgetAndApply, fmt.Sprintf("messages %d to %d were lost", p.seq+1, e.Seq-1)
	}
	t[e.Node] = position{e.Epoch, e.Seq, e.Seq == 1 || known && e.Epoch == p.epoch && e.Seq == p.seq+1 && p.whole}
	return v, why
}
