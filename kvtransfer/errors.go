package kvtransfer

import "errors"

var (
	ErrArguments  = errors.New("kvtransfer: bad arguments")
	ErrGrant      = errors.New("kvtransfer: malformed grant")
	ErrLayout     = errors.New("kvtransfer: layouts differ")
	ErrVersion    = errors.New("kvtransfer: protocol versions differ")
	ErrRefused    = errors.New("kvtransfer: reader refused the connection")
	ErrProtocol   = errors.New("kvtransfer: protocol violation")
	ErrUnknown    = errors.New("kvtransfer: lease is over, unknown or another writer's")
	ErrExpired    = errors.New("kvtransfer: lease expired without progress")
	ErrCancelled  = errors.New("kvtransfer: cancelled by the reader")
	ErrAborted    = errors.New("kvtransfer: aborted by the writer")
	ErrChecksum   = errors.New("kvtransfer: checksum does not match")
	ErrConnection = errors.New("kvtransfer: connection lost")
	ErrTimeout    = errors.New("kvtransfer: peer is too slow")
	ErrBusy       = errors.New("kvtransfer: too many at a time")
	ErrClosed     = errors.New("kvtransfer: closed")
)
