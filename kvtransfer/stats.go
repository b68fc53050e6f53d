package kvtransfer

// ReaderStats are the counters of a Reader since its creation. Bytes are page bytes only.
type ReaderStats struct {
	PayloadBytes     uint64 // of pieces that landed and matched
	SharedBytes      uint64 // of these, copied out of the memory of a writer on this host
	FabricBytes      uint64 // likewise, written here by the writer itself
	Pieces           uint64 // landed and matched
	StaleFrames      uint64 // frames, or parts of frames, of ended leases: read into scratch
	StalePieces      uint64 // pieces in those
	DuplicatePieces  uint64 // repeated pieces of a live lease: read into scratch
	ChecksumFailures uint64 // pieces that landed and did not match
	Refused          uint64 // connections refused: unauthenticated clients, other layouts, too many
	Connections      int    // open now, of all kinds
	Sessions         int    // open now
	SessionsShared   int    // of these, with pages copied from the writer's memory
	SessionsFabric   int    // of these, with pages written by RDMA
	SessionsLost     uint64 // sessions that ended in an error other than the writer closing when idle

	LeasesGranted     uint64 // ever
	LeasesArrived     uint64 // of these, arrived
	LeasesFailed      uint64 // of these, failed
	LeasesExpired     uint64 // of the failed, by silence
	LeasesQuarantined uint64 // of the failed, with a read in progress when they ended
	Granted           int    // now waiting for their first piece
	Arriving          int    // now in transfer
	Quarantined       int    // now ended with a read in progress
}

// WriterStats are the counters of a Writer since its creation. Bytes are page bytes only.
type WriterStats struct {
	PayloadBytes  uint64 // written to connections
	Pieces        uint64 // written to connections
	Pushes        int    // open now
	MaxPushes     int    // their bound
	PushesOpened  uint64 // ever
	PushesDone    uint64 // of these, confirmed by the reader
	PushesFailed  uint64 // of these, ended otherwise
	Dials         uint64 // sessions dialed
	Retries       uint64 // dials after a first attempt that failed or a pooled session that had just died
	Sessions      int    // open now
	SharedBytes   uint64 // of PayloadBytes, copied by readers on this host
	FabricBytes   uint64 // of PayloadBytes, written to readers' memory
	SessionsLost  uint64 // sessions that ended in an error
	RenewalsSent  uint64
	AbortsUnacked uint64 // aborts that ended by closing the session
}
