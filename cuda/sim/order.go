package sim

import "slices"

// The order checker. Every stream has a rank and counts its work; a vector clock says, for each rank, up to which
// count work is known to come before. Streams, events and the host each carry one; recording copies, waiting and
// synchronising join. Work a comes before work b if b's clock covers a's count (Lamport's happens-before, as race
// detectors for threads compute it).

// vector is a vector clock: by rank, the count of work that comes before. Missing entries are 0.
type vector []uint64

// join adds what o knows.
func (v *vector) join(o vector) {
	if len(*v) < len(o) {
		*v = append(*v, make([]uint64, len(o)-len(*v))...)
	}
	w := *v
	for i, n := range o {
		w[i] = max(w[i], n)
	}
}

func (v *vector) set(rank int, n uint64) {
	if len(*v) <= rank {
		*v = append(*v, make([]uint64, rank+1-len(*v))...)
	}
	(*v)[rank] = n
}

// mark names one piece of work: the n-th of its rank. The zero mark is none, and always covered.
type mark struct {
	rank int
	n    uint64
}

func (v vector) covers(m mark) bool { return m.n == 0 || m.rank < len(v) && v[m.rank] >= m.n }

// order holds what is global to the checker. Protected by Driver.mu.
type order struct {
	host    vector   // work that the host has seen complete
	count   []uint64 // by rank
	owner   []uint64 // by rank: the id of the stream that has or had it
	free    []int
	retired []int
	remote  []remoteRank // by rank: whose it is where it is another driver's
	ranks   map[remoteRank]int
}

// enter gives a stream a rank. The rank of a destroyed stream is reused once the host has seen its work complete, so
// that the new stream's work really comes after and clocks do not grow with streams made and destroyed.
func (o *order) enter(id uint64) int {
	o.retired = slices.DeleteFunc(o.retired, func(r int) bool {
		done := o.host.covers(mark{r, o.count[r]})
		if done {
			o.free = append(o.free, r)
		}
		return done
	})
	if n := len(o.free); n > 0 {
		r := o.free[n-1]
		o.free = o.free[:n-1]
		o.owner[r] = id
		return r
	}
	return o.add(id, remoteRank{})
}

func (o *order) add(id uint64, r remoteRank) int {
	o.count = append(o.count, 0)
	o.owner = append(o.owner, id)
	o.remote = append(o.remote, r)
	return len(o.count) - 1
}

func (o *order) retire(rank int) { o.retired = append(o.retired, rank) }

// prepare brings the stream's clock up to what an operation queued now comes after: what the host has seen, and by
// the rules of the legacy default stream other streams' work.
func (o *order) prepare(s *stream) {
	s.seen.join(o.host)
	switch s.kind {
	case streamLegacy:
		s.seen.join(s.ctx.blockSeen)
	case streamBlocking:
		s.seen.join(s.ctx.legacy.seen)
	}
}

// publish makes what s knows known to those that wait for s implicitly.
func (o *order) publish(s *stream) {
	s.ctx.allSeen.join(s.seen)
	if s.kind == streamBlocking {
		s.ctx.blockSeen.join(s.seen)
	}
}

// next counts a new piece of work of s and returns its mark. The caller has called prepare.
func (o *order) next(s *stream) mark {
	o.count[s.rank]++
	m := mark{s.rank, o.count[s.rank]}
	s.seen.set(m.rank, m.n)
	o.publish(s)
	return m
}
