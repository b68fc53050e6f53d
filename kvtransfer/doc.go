// Package kvtransfer moves pages of registered memory from one node to another.
//
// Both ends register regions. A region is the memory of one KV layer, nPages × Layout.PageBytes
// bytes. All layers of a block table use the same page number for a block. The reader (a decode
// node) grants a list of its pages under a lease. The grant is opaque bytes that reach the writer
// (a prefill node) with the request. The writer opens the grant as a Push and sends its own pages
// to the positions of that list, region by region as layers are computed, in any order. When every
// (region, position) has landed and matched its CRC32C, the reader reports Arrived and the writer's
// Wait returns. Every other end is an error at the writer and Failed at the reader, followed by
// Released once no write can land any more.
//
// Over TCP, TLS and Mem, pages follow their headers. Between processes of one host (Shared), the
// reader maps the writer's memory read-only and copies each page once. With RDMA
// (kvtransfer/fabric), the writer writes pages to the reader's memory itself. Transport selects the
// way; the rest of the protocol is the same.
//
// A pair of nodes shares one session: a control connection and Connections data connections. The
// writer dials them at its first push and keeps them for later ones. A session fails as a whole,
// which fails the leases and pushes that use it. Nothing is resent within a lease: the owner gets a
// new grant, from the same node or another, or computes the prompt itself.
//
// # Protocol
//
// All integers are little endian. The last four bytes of every message are its CRC32C (Castagnoli),
// so that a damaged message ends the session instead of being executed. Constants and layouts are
// in wire.go (connections) and grant.go (the grant).
//
//	writer                                   reader
//	hello {session, control}          ────→           epoch, layout and version must match, else welcome gives the reason
//	                                  ←────  welcome
//	hello {session, data} × n         ────→           each on its own connection
//	                                  ←────  welcome
//	renew {lease, progress}           ────→           binds the lease to this session; progress moves its expiry
//	memory {session, offsets} + 2 files ─→            shm only, between the first two, on a unix socket of its own: the writer's memory, its flag
//	                                  ←────  welcome
//	frame {lease, region, index, crc…} pages ─→       on any data connection; shm: {…, source page…, number} without pages
//	                                  ←────  copied {number}  shm only, on the data connection: the source pages are no longer read
//	                                  ←────  done {lease}     all pieces landed and matched
//	                                  ←────  gone {lease, reason}: expired, cancelled, checksum, unknown; also the answer to renewals and frames
//	abort {lease, reason}             ────→           ends the lease
//	                                  ←────  aborted {lease}  after which nothing more lands
//	                                  ←────  permit {lease, key}   rdma only, once a lease is bound: its pages may be written
//	fenced {lease}                    ────→           rdma only, after a failed push: none of its writes is in flight any more
//	ping                              ────→           each PingInterval
//	                                  ←────  pong             silence for PeerTimeout ends the session
//
// A page lands only by a read that began while its lease was live. On plain TCP, a read is one
// system call on bytes that have already arrived, so that no read outlasts its lease by more than
// that call. Over TLS and Mem, a read may wait for the peer in the middle of a page. Then the pages
// stay quarantined until the read returns or, after QuarantineTimeout, the session is closed. Bytes
// of an ended lease are read into scratch memory and counted.
//
// Over shm, the reader reads the writer's pages, so that the writer's pages could change under a
// slow reader. A writer that stops waiting for "copied" clears the session's flag before its pages
// get other contents. A reader that finds the flag clear after a copy discards the copy. The writer
// cannot write to the reader's memory, nor the reader to the writer's: the file is sealed.
//
// Over rdma, the ends first exchange their endpoints and the addresses of the reader's regions, on
// the session's one data connection, which then carries headers. Each write carries its frame's
// number. A frame has landed when its header and one write for each of its pages have arrived, in
// any order; the reader then checks the pages against their CRC32C. The reader cannot refuse a
// write that is in flight. So a writer must not write before it has the lease's permit, and a lease
// that ends after its permit is quarantined. Only the writer's "fenced" or, after
// QuarantineTimeout, the destruction of the session's endpoint ends the quarantine. Each lease has
// a random key of its own, which is closed with the lease, where the provider accepts such keys
// (tcp, shm); hardware has one key for the whole memory.
//
// Either end may have its pages in a GPU (DeviceMemory). RDMA then accesses them there, without the
// processor, which can neither compute nor compare their checksums. The device computes the
// checksums of pages that are sent. The owner gets the expected checksums of pages that have landed
// with Arrived. Without comparing them the owner knows that its pages are complete, but not that
// they are correct.
//
// RDMA has weaker guarantees. Pages and keys travel unencrypted, with TLS or without. A writer with
// a key can write to pages of other leases. The software providers trust what a peer sends, and may
// crash on invalid data. TLS on the connections hides endpoints and keys from unauthenticated
// clients, but not from an eavesdropper on the network. Use RDMA only on networks on which every
// machine is trusted.
//
// Invariant: after Arrived or Released of a lease, no byte from the network is written to its
// pages; with RDMA this requires writers that follow the protocol. Arrived means that each page
// holds what the writer's page held when it was sent; in a device, once it matches the checksum of
// Arrived.
//
// The package does not know models, requests or blocks, does not choose nodes, and retries only
// connecting. The owner must keep source pages until Wait or Abort has returned, or until OnSent.
// Without TLS, only the epoch in a grant keeps unauthenticated clients out, and it travels
// unencrypted.
package kvtransfer
