//go:build !linux

package kvtransfer

import "net"

func newPageReader(conn net.Conn) pageReader { return streamReader{conn} }
