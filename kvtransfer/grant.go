package kvtransfer

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

const (
	grantTLS       = 1 // flag: the reader's connections are TLS
	grantUnchecked = 2 // flag: the reader takes pages without checksums
	grantFabric    = 4 // flag: the reader's memory can be written to by libfabric
	maxGrantAddrs  = 8
)

// grantVersion is the newest form of a grant. A grant whose pages have pieces in every region uses
// the form before it, which has no runs.
const grantVersion = 2

// grant is the content of a grant. Layout on the wire, followed by the CRC32C of all of it:
//
//	magic u32 | version u8 | flags u8 | nAddrs u8 | nRuns u8 | lease key 16 | layout 16 | duration ns u64 | nPages u32
//	node name: length u8, bytes | nAddrs × (length u8, bytes) | nRuns × (pages u32, regions u32) | nPages × page u32
//
// Page numbers are for transports whose writer places the bytes; over connections the reader does.
type grant struct {
	key      lease.Key
	layout   Layout // the reader's
	duration time.Duration
	tls      bool
	loose    bool     // pages need no checksums
	fabric   bool     // writers may open a fabricConn
	node     string   // the reader's name
	addrs    []string // the reader's addresses, in the order to try
	pages    []int32  // [index] the reader's page
	runs     []Run    // of pages; none: all regions
}

const grantFixed = 4 + 4 + 16 + 16 + 8 + 4

func (g *grant) encode() []byte {
	b := make([]byte, grantFixed, grantFixed+64+4*len(g.pages))
	le.PutUint32(b, magicGrant)
	b[4] = Version
	if len(g.runs) > 0 {
		b[4], b[7] = grantVersion, byte(len(g.runs))
	}
	if g.tls {
		b[5] = grantTLS
	}
	if g.loose {
		b[5] |= grantUnchecked
	}
	if g.fabric {
		b[5] |= grantFabric
	}
	b[6] = byte(len(g.addrs))
	putKey(b[8:], g.key)
	putLayout(b[24:], g.layout)
	le.PutUint64(b[40:], uint64(g.duration))
	le.PutUint32(b[48:], uint32(len(g.pages)))
	for _, s := range append([]string{g.node}, g.addrs...) {
		b = append(b, byte(len(s)))
		b = append(b, s...)
	}
	for _, r := range g.runs {
		b = le.AppendUint32(le.AppendUint32(b, uint32(r.Pages)), uint32(r.Regions))
	}
	for _, p := range g.pages {
		b = le.AppendUint32(b, uint32(p))
	}
	b = append(b, 0, 0, 0, 0)
	seal(b)
	return b
}

// decodeGrant reads and checks a grant. The grant's length bounds what it allocates.
func decodeGrant(b []byte) (*grant, error) {
	if len(b) < grantFixed+4 {
		return nil, fmt.Errorf("%w: %d bytes", ErrGrant, len(b))
	}
	if err := unseal(b, magicGrant, "grant"); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrGrant, err)
	}
	if b[4] != Version && b[4] != grantVersion {
		return nil, fmt.Errorf("%w: grant of version %d, want %d or %d", ErrVersion, b[4], Version, grantVersion)
	}
	if (b[4] == grantVersion) != (b[7] > 0) {
		return nil, fmt.Errorf("%w: version %d with %d runs", ErrGrant, b[4], b[7])
	}
	g := &grant{key: getKey(b[8:]), layout: getLayout(b[24:]), duration: time.Duration(le.Uint64(b[40:])), tls: b[5]&grantTLS != 0, loose: b[5]&grantUnchecked != 0, fabric: b[5]&grantFabric != 0}
	nAddrs, nPages := int(b[6]), int(le.Uint32(b[48:]))
	rest := b[grantFixed : len(b)-4]
	for i := range 1 + nAddrs {
		if len(rest) < 1 || len(rest) < 1+int(rest[0]) {
			return nil, fmt.Errorf("%w: cut off in name %d of %d", ErrGrant, i, 1+nAddrs)
		}
		s := string(rest[1 : 1+int(rest[0])])
		rest = rest[1+len(s):]
		if i == 0 {
			g.node = s
		} else {
			g.addrs = append(g.addrs, s)
		}
	}
	rest, err := g.decodeRuns(rest, int(b[7]), nPages)
	if err != nil {
		return nil, err
	}
	if nAddrs < 1 || nAddrs > maxGrantAddrs || nPages < 1 || nPages > MaxGrantPages || len(rest) != 4*nPages {
		return nil, fmt.Errorf("%w: %d addresses, %d pages in %d bytes", ErrGrant, nAddrs, nPages, len(rest))
	}
	if g.duration <= 0 || g.key.Gen == 0 || g.layout.validate() != nil {
		return nil, fmt.Errorf("%w: lease %v, duration %v, layout %v", ErrGrant, g.key, g.duration, g.layout)
	}
	g.pages = make([]int32, nPages)
	for i := range g.pages {
		if g.pages[i] = int32(le.Uint32(rest[4*i:])); g.pages[i] < 0 {
			return nil, fmt.Errorf("%w: page %d", ErrGrant, le.Uint32(rest[4*i:]))
		}
	}
	return g, nil
}

// maxRuns bounds the runs of a grant.
const maxRuns = 255

// decodeRuns reads n runs, which must cover the pages.
func (g *grant) decodeRuns(b []byte, n, nPages int) (rest []byte, err error) {
	if len(b) < 8*n {
		return nil, fmt.Errorf("%w: cut off in %d runs", ErrGrant, n)
	}
	left := nPages
	for ; n > 0; n-- {
		r := Run{Pages: int(le.Uint32(b)), Regions: int(le.Uint32(b[4:]))}
		if r.Pages < 1 || r.Pages > left || r.Regions < 1 || r.Regions > g.layout.Regions {
			return nil, fmt.Errorf("%w: a run of %d pages in %d regions, of %d pages in %d", ErrGrant, r.Pages, r.Regions, left, g.layout.Regions)
		}
		left -= r.Pages
		g.runs, b = append(g.runs, r), b[8:]
	}
	if len(g.runs) > 0 && left != 0 {
		return nil, fmt.Errorf("%w: runs leave out %d of %d pages", ErrGrant, left, nPages)
	}
	return b, nil
}

// regions returns the smallest number of regions of the positions [first, first+n).
func (g *grant) regions(first, n int) int {
	least, at := g.layout.Regions, 0
	for _, r := range g.runs {
		if first < at+r.Pages && at < first+n {
			least = min(least, r.Regions)
		}
		at += r.Pages
	}
	return least
}
