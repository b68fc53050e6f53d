package lengths

import "testing"

// A prompt counts in its class and in all of longer prompts, and is gone when it was
// removed.
func TestQueue(t *testing.T) {
	var q Queue
	for _, tokens := range []int{0, 1, 64, 65, 256, 257, 1024, 1025, 100_000} {
		q.Add(tokens)
	}
	if want := (Queue{65, 65 + 65 + 256, 65 + 65 + 256 + 257 + 1024}); q != want {
		t.Errorf("queued %v, want %v", q, want)
	}
	q.Remove(64)
	q.Remove(1025)
	if want := (Queue{1, 1 + 65 + 256, 1 + 65 + 256 + 257 + 1024}); q != want {
		t.Errorf("without 64: %v, want %v", q, want)
	}
	if Class(64) != 0 || Class(65) != 1 || Class(1024) != 2 || Class(1025) != N {
		t.Errorf("classes of 64, 65, 1024, 1025: %d %d %d %d", Class(64), Class(65), Class(1024), Class(1025))
	}
}
