package model

import "encoding/binary"

// op is the next step of a thread. It names what may happen; explore tries all of it.
type op struct {
	kind     kind
	location location
	order    order
	failed   order                       // of a read-modify-write that changes nothing
	value    uint64                      // to be stored
	change   func(uint64) (uint64, bool) // what a read-modify-write makes of a value, and whether it does
	waits    bool                        // it happens only where the value is changed, or (await) accepted
	cell     int
	with     func(*data) uint64
	ghost    func(*ghost) uint64
	broken   string
}

type kind uint8

const (
	loads kind = iota
	stores
	changes
	touches // a cell
	notes   // the ghost, or that something is broken
)

// thread runs a function from its start each time, with the results of the steps that it has made.
type thread struct {
	results []uint64
	next    int
	pending op
}

type stop struct{}

func (t *thread) do(o op) uint64 {
	if t.next < len(t.results) {
		r := t.results[t.next]
		t.next++
		return r
	}
	t.pending = o
	panic(stop{})
}

// run finds the thread's next step, or what its function returned.
func (t *thread) run(f func(*thread) uint64) (o op, result uint64, done bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(stop); !ok {
				panic(r)
			}
			o, done = t.pending, false
		}
	}()
	return op{}, f(t), true
}

func (t *thread) load(l location, o order) uint64 {
	return t.do(op{kind: loads, location: l, order: o})
}

// await is a load in a loop that ends when the value is accepted.
func (t *thread) await(l location, o order, accepted func(uint64) bool) uint64 {
	return t.do(op{kind: loads, location: l, order: o, waits: true,
		change: func(v uint64) (uint64, bool) { return v, accepted(v) }})
}

func (t *thread) store(l location, v uint64, o order) {
	t.do(op{kind: stores, location: l, order: o, value: v})
}

// exchange stores a value and returns the one before.
func (t *thread) exchange(l location, v uint64, o order) uint64 {
	return t.do(op{kind: changes, location: l, order: o, change: func(uint64) (uint64, bool) { return v, true }})
}

// add adds to a number.
func (t *thread) add(l location, n uint64, o order) {
	t.do(op{kind: changes, location: l, order: o, change: func(v uint64) (uint64, bool) { return v + n, true }})
}

func (t *thread) compareExchange(l location, old, new uint64, o, failed order) bool {
	return t.do(op{kind: changes, location: l, order: o, failed: failed,
		change: func(v uint64) (uint64, bool) { return new, v == old }}) == old
}

// acquireWhen is compareExchange in a loop that ends when it succeeds.
func (t *thread) acquireWhen(l location, old, new uint64, o order) {
	t.do(op{kind: changes, location: l, order: o, waits: true,
		change: func(v uint64) (uint64, bool) { return new, v == old }})
}

// touch is an access to a cell.
func (t *thread) touch(cell int, with func(*data) uint64) uint64 {
	return t.do(op{kind: touches, cell: cell, with: with})
}

// note is an access to the ghost, which the threads know nothing of.
func (t *thread) note(with func(*ghost) uint64) uint64 { return t.do(op{kind: notes, ghost: with}) }

// broken says what has happened although it must not.
func (t *thread) broken(what string) { t.do(op{kind: notes, broken: what}) }

// progress is how far a thread is.
type progress struct {
	results []uint64 // shared between states until it is changed
	view    view
	done    bool
	result  uint64
}

// state is a moment of an execution.
type state struct {
	memory
	threads [threads]progress
}

// outcome is what came of all executions.
type outcome struct {
	results map[uint64]int // what the last thread's function returned, and how many final states with that
	broken  map[string]int
	states  int
	stuck   int // states from which no thread goes on although not all have ended
}

// explore runs two functions beside one another from a state, and then a third, in every interleaving and with every value
// that a read may return. What it has seen once it does not try again: a state is what the threads have read, what they
// know, and what is in memory.
func explore(begin state, functions [threads]func(*thread) uint64) outcome {
	out := outcome{results: map[uint64]int{}, broken: map[string]int{}}
	known := map[string]bool{}
	stack := []state{begin}
	for len(stack) > 0 {
		s := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		moved := false
		for i := range functions {
			if s.threads[i].done || i == 2 && !(s.threads[0].done && s.threads[1].done) {
				continue
			}
			t := thread{results: s.threads[i].results}
			o, result, done := t.run(functions[i])
			if done {
				n := s
				n.threads[i].done, n.threads[i].result = true, result
				if i < 2 {
					n.threads[2].view.join(&n.threads[i].view)
				}
				stack, moved = append(stack, n), true
				break // nothing else depends on when it ends
			}
			for _, n := range s.steps(uint8(i), o) {
				moved = true
				if key := n.key(); !known[key] {
					known[key] = true
					stack = append(stack, n)
				}
			}
		}
		if moved || !ordered(s.total) {
			continue
		}
		switch {
		case s.broken != "":
			out.broken[s.broken]++
		case s.threads[2].done:
			out.results[s.threads[2].result]++
		default:
			out.stuck++
		}
	}
	out.states = len(known)
	return out
}

// steps is all that may come of a thread's next step.
func (s *state) steps(i uint8, o op) (all []state) {
	switch o.kind {
	case loads:
		for at := s.threads[i].view.seen[o.location]; int(at) < len(s.at[o.location]); at++ {
			if v := s.at[o.location][at].value; o.waits {
				if _, accepted := o.change(v); !accepted {
					continue
				}
			}
			all = append(all, s.read(i, o.location, at, o.order))
		}
	case stores:
		for at := s.threads[i].view.seen[o.location] + 1; int(at) <= len(s.at[o.location]); at++ {
			if int(at) == len(s.at[o.location]) || !s.at[o.location][at].behind {
				n := s.after(i, 0)
				n.write(i, o, at, message{value: o.value})
				all = append(all, n)
			}
		}
	case changes:
		all = s.changed(i, o)
	case touches:
		n := s.after(i, 0)
		c, own := &n.cells[o.cell], &n.threads[i].view
		for k, last := range c.last {
			if k != int(i) && own.clock[k] < last {
				n.breaks("a data race")
			}
		}
		own.clock[i]++
		c.last[i] = own.clock[i]
		n.answer(i, o.with(&c.data))
		all = append(all, n)
	case notes:
		n := s.after(i, 0)
		if o.broken != "" {
			n.breaks(o.broken)
		} else {
			n.answer(i, o.ghost(&n.ghost))
		}
		all = append(all, n)
	}
	return all
}

// changed is what may come of a read-modify-write.
func (s *state) changed(i uint8, o op) (all []state) {
	l := o.location
	for at := s.threads[i].view.seen[l]; int(at) < len(s.at[l]); at++ {
		m := s.at[l][at]
		value, does := o.change(m.value)
		switch {
		case !does && !o.waits:
			all = append(all, s.read(i, l, at, o.failed))
		case does && (int(at+1) == len(s.at[l]) || !s.at[l][at+1].behind):
			n := s.after(i, m.value)
			if o.order.acquires() {
				n.threads[i].view.join(&m.known)
			}
			// What it read may have been released: an acquire of this acquires that (a release sequence).
			n.write(i, o, at+1, message{value: value, behind: true, known: m.known})
			all = append(all, n)
		}
	}
	return all
}

// after is the state to which the thread's next step leads, which returns r.
func (s *state) after(i uint8, r uint64) state {
	n := *s
	n.threads[i].results = append(append(make([]uint64, 0, len(s.threads[i].results)+1), s.threads[i].results...), r)
	return n
}

func (s *state) answer(i uint8, r uint64) {
	p := &s.threads[i]
	p.results[len(p.results)-1] = r
}

func (s *state) breaks(what string) {
	if s.broken == "" {
		s.broken = what
	}
}

func (s *state) read(i uint8, l location, at uint8, o order) state {
	m := &s.at[l][at]
	n := s.after(i, m.value)
	own := &n.threads[i].view
	own.seen[l] = at
	if o.acquires() {
		own.join(&m.known)
	}
	n.inTotal(o, access{i, uint8(l), at, false})
	return n
}

// write stores a message, whose known is what it has from another that it is in the release sequence of.
func (s *state) write(i uint8, o op, at uint8, m message) {
	own := &s.threads[i].view
	s.insert(o.location, at, m)
	own.seen[o.location] = at
	known := &s.at[o.location][at].known
	known.seen[o.location] = at
	if o.order.releases() {
		known.join(own)
	}
	s.inTotal(o.order, access{i, uint8(o.location), at, true})
}

func (s *state) inTotal(o order, a access) {
	if o == seqCst {
		s.total = append(append(make([]access, 0, len(s.total)+1), s.total...), a)
	}
}

// key tells states apart.
func (s *state) key() string {
	b := make([]byte, 0, 1024)
	add := func(v *view) { b = append(append(b, v.seen[:]...), v.clock[:]...) }
	for i := range s.threads {
		p := &s.threads[i]
		b = append(b, byte(len(p.results)))
		for _, r := range p.results {
			b = binary.AppendUvarint(b, r)
		}
		add(&p.view)
	}
	for _, l := range s.at {
		b = append(b, byte(len(l)))
		for i := range l {
			b = binary.AppendUvarint(b, l[i].value)
			if l[i].behind {
				b = append(b, 1)
			}
			add(&l[i].known)
		}
	}
	for i := range s.cells {
		b = append(s.cells[i].data.append(b), s.cells[i].last[:]...)
	}
	b = s.ghost.append(b)
	b = append(b, byte(len(s.total)))
	for _, a := range s.total {
		b = append(b, a.thread, a.location, a.place, flag(a.wrote))
	}
	return string(append(b, s.broken...))
}

func flag(on bool) byte {
	if on {
		return 1
	}
	return 0
}
