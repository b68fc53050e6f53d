package main

import "testing"

// Each node of a scaled workload has the load that it had before.
func TestScale(t *testing.T) {
	for _, nodes := range []int{0, 10, 30, 1000, 3000} {
		l := workloads[1]
		l.scale(nodes)
		of := workloads[1]
		if nodes == 0 {
			nodes = of.prefill + of.decode
		}
		if l.prefill+l.decode != nodes || l.prefill*of.decode != l.decode*of.prefill || l.speedup/float64(nodes) != of.speedup/float64(of.prefill+of.decode) {
			t.Errorf("%d nodes: %dP%dD at %g times the pace", nodes, l.prefill, l.decode, l.speedup)
		}
	}
}

// The loads of chase take time.
func TestChase(t *testing.T) {
	if ns := chase(64 << 10); ns <= 0 {
		t.Errorf("a load takes %g ns", ns)
	}
}
