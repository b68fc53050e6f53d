package kvtransfer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// Version is the protocol version. The hello and the grant carry it. An end that does not support
// the peer's version reports its own and closes.
const Version = 1

// Magics start every message, so that foreign bytes or a lost frame boundary are detected at once.
const (
	magicHello   = 0x48564b54 // "TKVH"
	magicWelcome = 0x57564b54 // "TKVW"
	magicControl = 0x43564b54 // "TKVC"
	magicFrame   = 0x46564b54 // "TKVF"
	magicGrant   = 0x47564b54 // "TKVG"
	magicMemory  = 0x4d564b54 // "TKVM"
	magicCopied  = 0x44564b54 // "TKVD"
	magicFabric  = 0x42564b54 // "TKVB"
)

// maxBatch bounds the pages of one frame. Larger batches measure the same; 16 pages of 32 KiB stay
// in a core's L2 between checksum and copy.
const maxBatch = 16

const (
	nameSize    = 1 + maxName                       // length, bytes, zeros
	helloSize   = 4 + 4 + 8 + 8 + 16 + nameSize + 4 // magic, version+kind+0+0, session, epoch, layout, node, crc
	welcomeSize = 4 + 4 + 8 + 16 + nameSize + 4     // magic, version+status+0+0, epoch, layout, node, crc
	controlSize = 4 + 4 + 16 + 8 + nameSize + 4     // magic, type+code+0+0, lease key, value, text, crc
	frameSize   = 4 + 4 + 16 + maxBatch*8 + 4       // magic, region u16 + count u16, lease key, {index, crc}…, crc
	sharedSize  = frameSize + maxBatch*4 + 8        // on a sharedConn or fabricConn: with {source page u32}…, number u64 after {index, crc}…
	memoryFixed = 4 + 4 + 8 + 8 + 4 + 4             // magic, 0, session, epoch, pages, regions; then regions × offset u64, crc
	copiedSize  = 4 + 8                             // magic, number of a frame whose pages have all been copied or have landed
	fabricFixed = 4 + 4 + 8 + nameSize + nameSize   // magic, status+flags+regions u16, place, provider, endpoint; regions × {at u64, key u64}, crc
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// connKind is the purpose of a session's connection.
type connKind uint8

const (
	controlConn connKind = 1 // control messages both ways
	dataConn    connKind = 2 // frames and pages, writer to reader
	sharedConn  connKind = 3 // frames, whose pages the reader copies from the writer's memory; back: the copied frames
	fabricConn  connKind = 4 // fabricMessage of both ends; frames, whose pages the writer writes by RDMA; back: the landed
)

// hello is the first message of every connection.
type hello struct {
	version uint8
	kind    connKind
	session uint64 // random, drawn by the writer; groups the connections of a session
	epoch   uint64 // of the reader, from the grant: unknown to other clients, and different after a restart
	layout  Layout // the writer's
	node    string // the writer's name
}

// status is the reader's answer to a hello.
type status uint8

const (
	welcomeOK status = iota
	refusedVersion
	refusedEpoch
	refusedLayout
	refusedSession // data connection of an unknown session, or too many
	refusedBusy
)

var statusText = [...]string{"ok", "protocol version", "epoch: the reader has restarted since the grant", "layout", "unknown session", "too many connections"}

func (s status) String() string {
	if int(s) < len(statusText) {
		return statusText[s]
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// welcome answers a hello. The reader closes the connection after any status but welcomeOK.
type welcome struct {
	version uint8
	status  status
	epoch   uint64 // the reader's; zero if the hello's was wrong
	layout  Layout // the reader's; zero if the hello's epoch was wrong
	node    string // the reader's name; empty if the hello's epoch was wrong
}

// msgType is the type of a control message.
type msgType uint8

const (
	msgRenew   msgType = 1 + iota // writer: value = progress
	msgAbort                      // writer: text = reason
	msgPing                       // writer
	msgDone                       // reader: every piece landed and matched
	msgGone                       // reader: the lease is not live; code and text give the reason
	msgAborted                    // reader: nothing of the aborted lease lands any more
	msgPong                       // reader
	msgPermit                     // reader, fabric only: the writer may write; value = key of region 0, 0: the session's keys
	msgFenced                     // writer, fabric only: none of its writes to the lease's pages is in flight, nor will be
	msgEnd
)

// goneCode is the reason why a lease is not live.
type goneCode uint8

const (
	goneUnknown goneCode = iota
	goneExpired
	goneCancelled
	goneChecksum
	goneClosed
	goneEnd
)

var goneErrors = [goneEnd]error{ErrUnknown, ErrExpired, ErrCancelled, ErrChecksum, ErrClosed}

// control is one message of a control connection.
type control struct {
	kind  msgType
	code  goneCode
	key   lease.Key
	value uint64
	text  string // at most maxName bytes
}

// frame is the header before a batch of pages.
type frame struct {
	key    lease.Key
	region uint32
	count  int  // pages that follow
	loose  bool // without checksums; only for readers whose grant allows it
	index  [maxBatch]uint32
	crc    [maxBatch]uint32 // CRC32C of each page
	src    [maxBatch]uint32 // source page, on a sharedConn
	number uint64           // on a sharedConn or fabricConn: unique; each write on a fabricConn carries the low half
}

// frameLoose is the bit of the count for frame.loose.
const frameLoose = 1 << 15

var le = binary.LittleEndian

// seal stores the CRC of all but the last four bytes in them.
func seal(b []byte) {
	le.PutUint32(b[len(b)-4:], crc32.Checksum(b[:len(b)-4], castagnoli))
}

// unseal checks magic and CRC.
func unseal(b []byte, magic uint32, what string) error {
	if got := le.Uint32(b); got != magic {
		return fmt.Errorf("%w: %s starts with %08x", ErrProtocol, what, got)
	}
	if crc32.Checksum(b[:len(b)-4], castagnoli) != le.Uint32(b[len(b)-4:]) {
		return fmt.Errorf("%w: %s is damaged", ErrProtocol, what)
	}
	return nil
}

// putName writes s, truncated to maxName bytes, into a field of nameSize bytes.
func putName(b []byte, s string) {
	b[0] = byte(copy(b[1:nameSize], s[:min(len(s), maxName)]))
}

func getName(b []byte) string { return string(b[1 : 1+int(b[0])]) }

func putLayout(b []byte, l Layout) {
	le.PutUint64(b, l.Hash)
	le.PutUint32(b[8:], uint32(l.Regions))
	le.PutUint32(b[12:], uint32(l.PageBytes))
}

func getLayout(b []byte) Layout {
	return Layout{Hash: le.Uint64(b), Regions: int(le.Uint32(b[8:])), PageBytes: int(le.Uint32(b[12:]))}
}

func putKey(b []byte, k lease.Key) {
	le.PutUint64(b, k.Epoch)
	le.PutUint32(b[8:], k.Slot)
	le.PutUint32(b[12:], k.Gen)
}

func getKey(b []byte) lease.Key {
	return lease.Key{Epoch: le.Uint64(b), Slot: le.Uint32(b[8:]), Gen: le.Uint32(b[12:])}
}

func (h *hello) encode() []byte {
	b := make([]byte, helloSize)
	le.PutUint32(b, magicHello)
	b[4], b[5] = h.version, byte(h.kind)
	le.PutUint64(b[8:], h.session)
	le.PutUint64(b[16:], h.epoch)
	putLayout(b[24:], h.layout)
	putName(b[40:], h.node)
	seal(b)
	return b
}

func (h *hello) decode(b []byte) error {
	if err := unseal(b, magicHello, "hello"); err != nil {
		return err
	}
	*h = hello{
		version: b[4], kind: connKind(b[5]),
		session: le.Uint64(b[8:]), epoch: le.Uint64(b[16:]), layout: getLayout(b[24:]), node: getName(b[40:]),
	}
	if h.session == 0 || h.kind < controlConn || h.kind > fabricConn {
		return fmt.Errorf("%w: hello of session %d, kind %d", ErrProtocol, h.session, h.kind)
	}
	return nil
}

func (w *welcome) encode() []byte {
	b := make([]byte, welcomeSize)
	le.PutUint32(b, magicWelcome)
	b[4], b[5] = w.version, byte(w.status)
	le.PutUint64(b[8:], w.epoch)
	putLayout(b[16:], w.layout)
	putName(b[32:], w.node)
	seal(b)
	return b
}

func (w *welcome) decode(b []byte) error {
	if err := unseal(b, magicWelcome, "welcome"); err != nil {
		return err
	}
	*w = welcome{version: b[4], status: status(b[5]), epoch: le.Uint64(b[8:]), layout: getLayout(b[16:]), node: getName(b[32:])}
	return nil
}

func (c *control) encode(b []byte) {
	clear(b[:controlSize])
	le.PutUint32(b, magicControl)
	b[4], b[5] = byte(c.kind), byte(c.code)
	putKey(b[8:], c.key)
	le.PutUint64(b[24:], c.value)
	putName(b[32:], c.text)
	seal(b[:controlSize])
}

func (c *control) decode(b []byte) error {
	if err := unseal(b, magicControl, "control message"); err != nil {
		return err
	}
	*c = control{kind: msgType(b[4]), code: goneCode(b[5]), key: getKey(b[8:]), value: le.Uint64(b[24:])}
	if b[32] != 0 {
		c.text = getName(b[32:])
	}
	if c.kind == 0 || c.kind >= msgEnd || c.code >= goneEnd {
		return fmt.Errorf("%w: control message of type %d, code %d", ErrProtocol, c.kind, c.code)
	}
	return nil
}

// encode writes the form that fits b: frameSize bytes, or sharedSize.
func (f *frame) encode(b []byte) {
	clear(b)
	le.PutUint32(b, magicFrame)
	le.PutUint16(b[4:], uint16(f.region))
	le.PutUint16(b[6:], uint16(f.count))
	if f.loose {
		b[7] |= frameLoose >> 8
	}
	putKey(b[8:], f.key)
	for i := range f.count {
		le.PutUint32(b[24+8*i:], f.index[i])
		le.PutUint32(b[28+8*i:], f.crc[i])
		if len(b) == sharedSize {
			le.PutUint32(b[frameSize-4+4*i:], f.src[i])
		}
	}
	if len(b) == sharedSize {
		le.PutUint64(b[sharedSize-12:], f.number)
	}
	seal(b)
}

// decode reads either form.
func (f *frame) decode(b []byte) error {
	if err := unseal(b, magicFrame, "frame"); err != nil {
		return err
	}
	f.key, f.region, f.count = getKey(b[8:]), uint32(le.Uint16(b[4:])), int(le.Uint16(b[6:])&^frameLoose)
	f.loose = b[7]&(frameLoose>>8) != 0
	if f.count < 1 || f.count > maxBatch {
		return fmt.Errorf("%w: frame of %d pages, want 1..%d", ErrProtocol, f.count, maxBatch)
	}
	if len(b) == sharedSize {
		f.number = le.Uint64(b[sharedSize-12:])
	}
	for i := range f.count {
		f.index[i], f.crc[i] = le.Uint32(b[24+8*i:]), le.Uint32(b[28+8*i:])
		if len(b) == sharedSize {
			f.src[i] = le.Uint32(b[frameSize-4+4*i:])
		}
	}
	return nil
}

// memoryMessage sends a writer's memory to a reader on its host. Two files are attached: the
// memory, and the session's flag.
type memoryMessage struct {
	session uint64
	epoch   uint64 // the reader's
	nPages  int
	offsets []uint64 // [region] in the file
}

func (m *memoryMessage) encode() []byte {
	b := make([]byte, memoryFixed+8*len(m.offsets)+4)
	le.PutUint32(b, magicMemory)
	le.PutUint64(b[8:], m.session)
	le.PutUint64(b[16:], m.epoch)
	le.PutUint32(b[24:], uint32(m.nPages))
	le.PutUint32(b[28:], uint32(len(m.offsets)))
	for i, at := range m.offsets {
		le.PutUint64(b[memoryFixed+8*i:], at)
	}
	seal(b)
	return b
}

// decode decodes a message for a reader with the given number of regions.
func (m *memoryMessage) decode(b []byte, regions int) error {
	if len(b) != memorySize(regions) {
		return fmt.Errorf("%w: memory message of %d bytes", ErrProtocol, len(b))
	}
	if err := unseal(b, magicMemory, "memory message"); err != nil {
		return err
	}
	*m = memoryMessage{session: le.Uint64(b[8:]), epoch: le.Uint64(b[16:]), nPages: int(le.Uint32(b[24:]))}
	if n := le.Uint32(b[28:]); int(n) != regions || m.nPages < 1 || m.nPages > 1<<31-1 {
		return fmt.Errorf("%w: memory of %d pages in %d regions, want %d", ErrProtocol, m.nPages, n, regions)
	}
	for i := range regions {
		m.offsets = append(m.offsets, le.Uint64(b[memoryFixed+8*i:]))
	}
	return nil
}

// fabricMessage describes an endpoint to its peer and, from the reader, the memory to write to.
type fabricMessage struct {
	refused  bool
	fixed    bool            // the targets' keys are the session's; otherwise each permit has its own
	place    uint64          // of providers with a limited reach: equal on ends that can connect
	provider string          // full name
	endpoint string          // its name
	targets  []fabric.Target // [region]; from the reader only
}

func (m *fabricMessage) encode() []byte {
	b := make([]byte, fabricFixed, fabricSize(len(m.targets)))
	le.PutUint32(b, magicFabric)
	if m.refused {
		b[4] = 1
	}
	if m.fixed {
		b[5] = 1
	}
	le.PutUint16(b[6:], uint16(len(m.targets)))
	le.PutUint64(b[8:], m.place)
	putName(b[16:], m.provider)
	putName(b[16+nameSize:], m.endpoint)
	for _, t := range m.targets {
		b = le.AppendUint64(le.AppendUint64(b, t.At), t.Key)
	}
	b = append(b, 0, 0, 0, 0)
	seal(b)
	return b
}

// decode decodes a message with the given number of targets.
func (m *fabricMessage) decode(b []byte, targets int) error {
	if len(b) != fabricSize(targets) {
		return fmt.Errorf("%w: fabric message of %d bytes", ErrProtocol, len(b))
	}
	if err := unseal(b, magicFabric, "fabric message"); err != nil {
		return err
	}
	*m = fabricMessage{refused: b[4] != 0, fixed: b[5] != 0, place: le.Uint64(b[8:]), provider: getName(b[16:]), endpoint: getName(b[16+nameSize:])}
	if n := int(le.Uint16(b[6:])); n != targets {
		return fmt.Errorf("%w: fabric message with %d targets, want %d", ErrProtocol, n, targets)
	}
	for i := range targets {
		at := fabricFixed + 16*i
		m.targets = append(m.targets, fabric.Target{At: le.Uint64(b[at:]), Key: le.Uint64(b[at+8:])})
	}
	return nil
}

func fabricSize(targets int) int { return fabricFixed + 16*targets + 4 }

func memorySize(regions int) int { return memoryFixed + 8*regions + 4 }

// readControl reads one message into buf, which has controlSize bytes.
func readControl(r io.Reader, buf []byte) (control, error) {
	var c control
	if _, err := io.ReadFull(r, buf); err != nil {
		return c, err
	}
	return c, c.decode(buf)
}
