// Package kvtransfer moves pages of registered memory from one node to another, and never anywhere else.
//
// Both ends register regions: one KV layer's memory each, nPages × Layout.PageBytes, one page being what all layers of a block
// table call by the same number. The reader (a decode node) grants a list of its pages under a lease; the grant is opaque bytes that
// reach the writer (a prefill node) with the request. The writer opens it as a Push and sends its own pages, region by region as
// layers are computed and in any order, to the positions of that list. When every (region, position) has landed and matched its
// CRC32C the reader reports Arrived and the writer's Wait returns; anything else ends in Failed at the reader, then Released once no
// write can land any more, and in an error at the writer.
//
// Pages travel behind their headers over TCP, TLS or Mem, or, between processes of one host, not at all: the reader maps the
// writer's memory (Shared) read-only and copies each page once. By RDMA (kvtransfer/fabric) the writer writes them to the reader's memory
// itself. Transport chooses; everything else is the same.
//
// A pair of nodes shares one session: a control connection and Connections data connections, dialed by the writer at its first
// push and kept for the next. A session lives and dies as one; its death fails the leases and pushes that used it. There is no
// resending within a lease: the owner gets a new grant, here or elsewhere, or computes the prompt itself.
//
// # Protocol
//
// All integers are little endian; every message carries a CRC32C (Castagnoli) of itself in its last four bytes, so that a damaged
// message ends the session rather than being obeyed. Constants and layouts stand in wire.go (connections) and grant.go (the grant).
//
//	writer                                   reader
//	hello {session, control}          ────→           epoch, layout and version must match, else welcome says why not
//	                                  ←────  welcome
//	hello {session, data} × n         ────→           each on its own connection
//	                                  ←────  welcome
//	renew {lease, progress}           ────→           binds the lease to this session; progress moves its expiry
//	memory {session, offsets} + 2 files ─→            shm only, between the first two, on a unix socket of its own: the writer's memory, its flag
//	                                  ←────  welcome
//	frame {lease, region, index, crc…} pages ─→       on any data connection; shm: {…, source page…, number} without pages
//	                                  ←────  copied {number}  shm only, on the data connection: the source pages are read no more
//	                                  ←────  done {lease}     all pieces landed and matched
//	                                  ←────  gone {lease, why}: expired, cancelled, checksum, unknown; in answer to renewals and frames too
//	abort {lease, why}                ────→           ends the lease
//	                                  ←────  aborted {lease}  after which nothing more lands
//	                                  ←────  permit {lease, key}   rdma only, once a lease is bound: its pages may be written
//	fenced {lease}                    ────→           rdma only, after a push that failed: none of its writes is under way any more
//	ping                              ────→           each PingInterval
//	                                  ←────  pong             silence for PeerTimeout ends the session
//
// A page lands only by a read that began while its lease was live. On plain TCP a read is one system call on bytes that are already
// there, so none outlasts its lease by more than that call; over TLS and Mem a read may be waiting for the peer inside the page, and then the pages
// stay quarantined until it returns or, after QuarantineTimeout, the session is closed under it. Bytes of a lease that is
// over are read into scratch and counted.
//
// Over shm the reader reads the writer's pages, so it is the writer whose pages could change under a slow peer: a writer that stops waiting
// for "copied" takes the session's flag down before its pages get other contents, and a reader that finds the flag down behind a copy lets
// nothing of it land. The writer cannot write to the reader's memory, nor the reader to the writer's: the file is sealed.
//
// Over rdma the ends first tell each other their endpoints and where the reader's regions are, on the session's one data connection, which then carries
// headers: a frame has landed when as many of its writes as it has pages have brought its number along, in whatever order, and its header has
// come; then its pages are held against their CRC32C. The reader cannot refuse a write that it does not see coming. So a lease lets nobody write before
// its permit, and once that is given an end of the lease is a quarantine, which only the writer's "fenced" ends, or, after
// QuarantineTimeout, the destruction of the session's endpoint; no time alone does. Each lease has a random key of its own, closed with it, where
// the provider takes such keys (tcp, shm); hardware has one for the whole memory.
//
// Either end may have its pages in a GPU (DeviceMemory): then RDMA reads or writes them there, past the processor, which can neither make nor compare
// their checksums. The device makes those of pages that leave; what pages that have landed are to be compared with goes to their owner with Arrived. One
// that does not compare them has pages that are complete, but not known to be what was sent.
//
// What RDMA cannot give: the pages travel in clear, TLS or not, and so do the keys; a writer that has a key can write to pages of
// other leases, and the software providers take what it sends them on trust, down to a crash. TLS on the connections keeps strangers from being told endpoints and
// keys, not from a wire that they can listen on. It is for networks on which every machine is trusted.
//
// Invariant: after Arrived or Released of a lease no byte from the network is written to its pages (by rdma: of writers that keep the protocol), and Arrived means that each
// page holds what the writer's page held when it was sent (in a device: once it has the checksum that comes with Arrived).
//
// The package does not know models, requests or blocks, does not choose nodes, retries nothing but connecting, and does not keep source pages
// alive: the owner holds them until Wait or Abort has returned (or OnSent told). Without TLS the epoch in a grant is the only thing
// that keeps strangers out, and it travels in clear.
package kvtransfer
