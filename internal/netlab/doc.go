// Package netlab connects network namespaces of this machine by links that lose, delay, limit
// and drop packets, so that real TCP stacks can be tested and measured over other networks. It
// needs no kernel module: each namespace (Place) has one TUN interface, and the lab forwards its
// packets to the others.
//
// A packet of a way (one direction between two places) is dropped if the way is cut, by the draw
// of a seeded generator, or if more than Shape.Queue bytes wait to be sent at Shape.Rate. Other
// packets arrive Shape.Delay after their last byte was sent, in order.
//
// Invariant: a packet arrives whole or not at all, at most once, never before its time.
//
// The package is for tests and benchmarks only. It needs root, or the right to make network
// namespaces, and returns ErrDenied otherwise. It forwards IPv4 only, and some 100,000 packets a
// second.
package netlab
