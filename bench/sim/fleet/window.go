package fleet

// window maps ids that are given in order to values, of which most leave in about that order. The
// values from the oldest id in use on are in a ring, so that a look-up reads one place of memory. A
// map reads several. The zero window is empty.
type window[V any] struct {
	ring        []*V   // by id, modulo the length, which is a power of two
	first, next uint64 // no id before first, or from next on, has a value
	n           int    // values
}

func (w *window[V]) place(id uint64) **V { return &w.ring[id&uint64(len(w.ring)-1)] }

// get returns the value of an id; nil: it has none.
func (w *window[V]) get(id uint64) *V {
	if id-w.first >= w.next-w.first {
		return nil
	}
	return *w.place(id)
}

// put gives an id its value. The id is not before that of any earlier call.
func (w *window[V]) put(id uint64, v *V) {
	if w.n == 0 {
		w.first = id
	}
	if room := uint64(len(w.ring)); id-w.first >= room {
		old := *w
		for room = max(4, room); id-w.first >= room; room *= 2 {
		}
		w.ring = make([]*V, room)
		for i := old.first; old.n > 0 && i != old.next; i++ {
			*w.place(i) = old.get(i)
		}
	}
	*w.place(id) = v
	w.next = id + 1
	w.n++
}

// remove removes an id that may have a value.
func (w *window[V]) remove(id uint64) {
	if w.get(id) == nil {
		return
	}
	*w.place(id) = nil
	for w.n--; w.first != w.next && *w.place(w.first) == nil; {
		w.first++
	}
}

// values returns the values in order of their ids.
func (w *window[V]) values() (list []*V) {
	for id := w.first; id != w.next; id++ {
		if v := w.get(id); v != nil {
			list = append(list, v)
		}
	}
	return list
}
