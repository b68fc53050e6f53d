// Package netlab joins network namespaces of this machine by links that lose, delay, limit and cut packets, so that real TCP stacks can be
// tested and measured over networks that this machine does not have. It needs no kernel module: each namespace (Place) has one TUN interface, whose
// packets the lab carries to the others.
//
// A packet of a way (one direction between two places) is dropped where the way is cut, where the draw of its seeded generator says so, and where
// more than Shape.Queue bytes wait to be sent at Shape.Rate; the rest arrive Shape.Delay after their last byte has left, in order. Invariant: a packet
// arrives whole or not at all, at most once, never before its time.
//
// It is for tests and benchmarks alone: it needs root, or the right to make network namespaces, and says ErrDenied where it has neither. It carries
// IPv4 only, and some 100,000 packets a second.
package netlab
