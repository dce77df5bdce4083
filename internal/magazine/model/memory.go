package model

// order is a memory order of C11.
type order uint8

const (
	relaxed order = iota
	acquire
	release
	acqRel
	seqCst
)

func (o order) acquires() bool { return o == acquire || o == acqRel || o == seqCst }
func (o order) releases() bool { return o == release || o == acqRel || o == seqCst }

const threads = 3 // two, and the one that looks at the end

// view is what a thread knows: of each location the oldest message that it may still read, as a place in the modification
// order, and of each thread how many of its accesses to cells happened before.
type view struct {
	seen  [locations]uint8
	clock [threads]uint8
}

func (v *view) join(w *view) {
	for i := range v.seen {
		v.seen[i] = max(v.seen[i], w.seen[i])
	}
	for i := range v.clock {
		v.clock[i] = max(v.clock[i], w.clock[i])
	}
}

// message is a value in the modification order of a location, and what a thread knows that acquires it.
type message struct {
	value  uint64
	known  view
	behind bool // by a read-modify-write that read the message before: nothing comes between them
}

// cell is data that is not atomic. Two accesses of which none happens before the other are a data race.
type cell struct {
	data data
	last [threads]uint8 // each thread's last access, by its clock
}

// access is one with seq_cst, to a place in the modification order: the one that it wrote, or that a load read.
type access struct {
	thread, location, place uint8
	wrote                   bool
}

// memory is all that threads share.
type memory struct {
	at     [locations][]message // in modification order; shared between states until it is changed
	cells  [cells]cell
	ghost  ghost
	total  []access // of each thread in its order
	broken string   // the first thing that must not happen and has
}

// insert puts a message into a location's modification order, and moves the names of later places.
func (s *state) insert(l location, at uint8, m message) {
	old := s.at[l]
	s.at[l] = append(append(append(make([]message, 0, len(old)+1), old[:at]...), m), old[at:]...)
	if int(at) == len(old) {
		return
	}
	move := func(v *view) {
		if v.seen[l] >= at {
			v.seen[l]++
		}
	}
	for i := range s.threads {
		move(&s.threads[i].view)
	}
	for i := range s.at {
		s.at[i] = append([]message(nil), s.at[i]...)
		for k := range s.at[i] {
			if location(i) != l || k != int(at) {
				move(&s.at[i][k].known)
			}
		}
	}
	s.total = append([]access(nil), s.total...)
	for i := range s.total {
		if a := &s.total[i]; location(a.location) == l && a.place >= at {
			a.place++
		}
	}
}

// ordered reports whether the accesses with seq_cst have a total order: without a cycle of two accesses of a thread in its
// order, of two writes of a location in modification order, and of a read and the write of something newer. C++20 and RC11
// demand more, so no execution is taken for impossible that they allow.
func ordered(all []access) bool {
	before := func(i, k int) bool {
		a, b := all[i], all[k]
		switch {
		case a.thread == b.thread:
			return i < k
		case a.location != b.location || !b.wrote:
			return false
		}
		return a.place < b.place
	}
	var done [64]bool
	for n := len(all); n > 0; n-- {
		first := -1
		for k := range all {
			free := !done[k]
			for i := range all {
				free = free && (done[i] || i == k || !before(i, k))
			}
			if free {
				first = k
				break
			}
		}
		if first < 0 {
			return false
		}
		done[first] = true
	}
	return true
}
