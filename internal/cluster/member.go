package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/hashicorp/memberlist"
)

// Member describes a node to the others.
type Member struct {
	ID          string // see NewID; the name alone at nodes of version 0.1.0
	Role        string // gateway | prefill | decode | serve
	RPC         string // host:port for nodes; empty: it accepts none
	HTTP        string // host:port for clients and metrics
	Model       string // served model name; empty at a gateway
	Fingerprint uint64 // of weights and config
	Class       string // numerics class
	Protocol    uint32 // highest version of package rpc spoken
	ProtocolMin uint32 // lowest
	Ready       bool
	Draining    bool
	NATS        string // host:port of its NATS server for nodes; empty: it has none
	NATSRoute   string // host:port of its NATS server for other servers
	Build       string // version with build; empty: an older node, or no room in the metadata

	// Mismatch is why this node and that one cannot pair; empty: they can. Each reader
	// sets it; it is not gossiped.
	Mismatch string
}

// MaxMetaBytes bounds an encoded Member; it is the limit of the gossip protocol.
const MaxMetaBytes = memberlist.MetaMaxSize

// Errors of a Member.
var (
	ErrMetaTooLong = errors.New("cluster: a node's description is too long to gossip")
	ErrBadMeta     = errors.New("cluster: unreadable description of a node")
)

// metaVersion begins every encoded Member. New fields are appended, where older nodes
// ignore them; the version changes only when old fields change.
const metaVersion = 1

const (
	flagReady = 1 << iota
	flagDraining
)

// encode returns all fields but the ID, which gossip carries itself, and Mismatch:
// version u8, flags u8, fingerprint u64, protocol and protocolMin uvarint, then the
// texts, each behind its length as uvarint.
func (m Member) encode() ([]byte, error) {
	if m.ID == "" {
		return nil, fmt.Errorf("%w: it has no ID", ErrBadMeta)
	}
	if b := m.append(); len(b) <= MaxMetaBytes {
		return b, nil
	}
	m.Build = "" // the one field that other nodes do not need
	b := m.append()
	if len(b) > MaxMetaBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d (model name has %d, addresses %d)", ErrMetaTooLong,
			len(b), MaxMetaBytes, len(m.Model), len(m.RPC)+len(m.HTTP)+len(m.NATS)+len(m.NATSRoute))
	}
	return b, nil
}

func (m *Member) append() []byte {
	b := []byte{metaVersion, 0}
	if m.Ready {
		b[1] |= flagReady
	}
	if m.Draining {
		b[1] |= flagDraining
	}
	b = binary.LittleEndian.AppendUint64(b, m.Fingerprint)
	b = binary.AppendUvarint(b, uint64(m.Protocol))
	b = binary.AppendUvarint(b, uint64(m.ProtocolMin))
	for _, s := range m.texts() {
		b = binary.AppendUvarint(b, uint64(len(*s)))
		b = append(b, *s...)
	}
	return b
}

// texts returns the texts in wire order; new ones are appended.
func (m *Member) texts() []*string {
	return []*string{&m.Role, &m.RPC, &m.HTTP, &m.Model, &m.Class, &m.NATS, &m.NATSRoute, &m.Build}
}

// firstTexts is the number of texts in the first version of the format.
const firstTexts = 7

// decode parses the output of encode, or of a newer version of it.
func decode(id string, b []byte) (Member, error) {
	m := Member{ID: id}
	if len(b) < 10 {
		return m, fmt.Errorf("%w: %d bytes", ErrBadMeta, len(b))
	}
	if b[0] != metaVersion {
		return m, fmt.Errorf("%w: format %d, this node reads %d", ErrBadMeta, b[0], metaVersion)
	}
	m.Ready, m.Draining = b[1]&flagReady != 0, b[1]&flagDraining != 0
	m.Fingerprint = binary.LittleEndian.Uint64(b[2:])
	b = b[10:]
	for _, v := range []*uint32{&m.Protocol, &m.ProtocolMin} {
		x, n := binary.Uvarint(b)
		if n <= 0 || x > 1<<32-1 {
			return Member{ID: id}, fmt.Errorf("%w: protocol versions", ErrBadMeta)
		}
		*v = uint32(x)
		b = b[n:]
	}
	for i, s := range m.texts() {
		if len(b) == 0 && i >= firstTexts {
			break // of a node of an earlier version
		}
		n, w := binary.Uvarint(b)
		if w <= 0 || n > uint64(len(b)-w) {
			return Member{ID: id}, fmt.Errorf("%w: text %d", ErrBadMeta, i)
		}
		*s = string(b[w : w+int(n)])
		b = b[w+int(n):]
	}
	return m, nil
}

// judge returns why own and m cannot pair because of protocol versions, or "". The router
// compares models and numerics classes.
func (m Member) judge(own Member) string {
	if v := min(m.Protocol, own.Protocol); v < m.ProtocolMin || v < own.ProtocolMin {
		return fmt.Sprintf("it speaks protocol %d to %d, this node %d to %d", m.ProtocolMin, m.Protocol, own.ProtocolMin, own.Protocol)
	}
	return ""
}
