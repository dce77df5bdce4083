package engine_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// order makes later work of one stream come after what another has queued or captured.
func (e *fixture) order(t *testing.T, from, to *engine.Stream) {
	t.Helper()
	ev, err := e.drv.EventCreate(0)
	must(t, err)
	must(t, e.drv.EventRecord(0, ev, from.Handle()))
	must(t, e.drv.StreamWaitEvent(0, to.Handle(), ev))
	must(t, e.drv.EventDestroy(0, ev))
}

// forked captures f on two streams, of which the second has joined the capture, into a pool of their own. The checker faults on
// memory that the graph would use unordered.
func (e *fixture) forked(t *testing.T, f func(a, b *engine.Stream)) {
	t.Helper()
	pool, ok := e.dev.Pool(memory.PoolID{0, 1})
	if !ok {
		var err error
		pool, err = e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
	}
	a, b := e.streams[0], e.streams[1]
	g := e.capture(t, a, pool, func() {
		e.use(t, a, 0, 0)
		e.order(t, a, b)
		must(t, e.dev.Captures.Begin(b, pool))
		f(a, b)
		e.order(t, b, a)
	})
	must(t, e.dev.Captures.End(b))
	for _, x := range pool.Blocks() {
		e.free(t, x.Base)
	}
	must(t, g.Launch(0, e.streams[2].Handle()))
	must(t, e.drv.ContextSynchronize(0))
	must(t, pool.Release())
	must(t, e.a.Trim())
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes are reserved at the end", n)
	}
}

const shared = 30 * mib

// onBoth is memory of stream a that both streams use and that is given back.
func (e *fixture) onBoth(t *testing.T, a, b *engine.Stream) cuda.Ptr {
	t.Helper()
	p := e.alloc(t, shared, a)
	e.use(t, a, p, shared)
	e.order(t, a, b)
	e.use(t, b, p, shared)
	must(t, e.a.RecordStream(p, b))
	return p
}

func reusing(t *testing.T, on bool) *fixture {
	t.Helper()
	return checked(t, config.Options{CaptureReuse: on}, 4*gib, 3)
}

// Memory that a capture used on two streams is its own again once it has joined them, and not before; without the setting, not
// at all.
func TestReuseWithinCapture(t *testing.T) {
	for _, how := range []string{"off", "option", "switch"} {
		t.Run(how, func(t *testing.T) {
			e := reusing(t, how == "option")
			if how == "switch" {
				e.dev.Captures.SetReuse(true)
			}
			e.forked(t, func(a, b *engine.Stream) {
				p := e.onBoth(t, a, b)
				e.free(t, p)
				if q := e.alloc(t, shared, a); q == p {
					t.Error("reused before the join")
				}
				e.order(t, b, a)
				q := e.alloc(t, shared, a)
				if (q == p) != (how != "off") {
					t.Errorf("after the join: the same memory is %v", q == p)
				}
				e.use(t, a, q, shared)
			})
		})
	}
}

// However often it forks and joins, a capture needs the memory of one round.
func TestReuseWithinCaptureAgain(t *testing.T) {
	e := reusing(t, true)
	e.forked(t, func(a, b *engine.Stream) {
		for i := range 50 {
			p := e.onBoth(t, a, b)
			if i%2 == 0 {
				e.order(t, b, a)
				e.free(t, p)
			} else {
				e.free(t, p)
				e.order(t, b, a)
			}
		}
		if n := e.dev.Views.Stats().Reserved.All.Peak; n > 2*shared {
			t.Errorf("%d bytes were reserved for rounds of %d", n, uint64(shared))
		}
	})
	if n := e.dev.Views.Stats().Active.All.Current; n != 0 {
		t.Errorf("%d blocks are active at the end", n)
	}
}

// What the graph's order does not cover waits for the end of the capture: memory from before it, and uses on streams that take
// no part in it or in another.
func TestNoReuseWithinCapture(t *testing.T) {
	for name, f := range map[string]func(t *testing.T, e *fixture, a, b *engine.Stream, before cuda.Ptr) (p cuda.Ptr){
		"memory from before": func(t *testing.T, e *fixture, a, b *engine.Stream, before cuda.Ptr) cuda.Ptr {
			e.use(t, b, before, shared)
			must(t, e.a.RecordStream(before, b))
			e.free(t, before)
			return before
		},
		"a stream outside": func(t *testing.T, e *fixture, a, b *engine.Stream, before cuda.Ptr) cuda.Ptr {
			p := e.onBoth(t, a, b)
			must(t, e.a.RecordStream(p, e.streams[2]))
			e.free(t, p)
			return p
		},
		"another capture": func(t *testing.T, e *fixture, a, b *engine.Stream, before cuda.Ptr) cuda.Ptr {
			must(t, e.drv.BeginCapture(0, e.streams[2].Handle()))
			p := e.onBoth(t, a, b)
			must(t, e.a.RecordStream(p, e.streams[2]))
			e.free(t, p)
			_, err := e.drv.EndCapture(0, e.streams[2].Handle())
			must(t, err)
			return p
		},
		"a thread's own stream": func(t *testing.T, e *fixture, a, b *engine.Stream, before cuda.Ptr) cuda.Ptr {
			own, err := e.dev.Stream(cuda.StreamPerThread)
			must(t, err)
			p := e.onBoth(t, a, b)
			must(t, e.a.RecordStream(p, own))
			e.drv.SetThread(func() uint64 { return 2 }) // whose own stream takes part in the capture
			ev, err := e.drv.EventCreate(0)
			must(t, err)
			must(t, e.drv.EventRecord(0, ev, a.Handle()))
			must(t, e.drv.StreamWaitEvent(0, cuda.StreamPerThread, ev))
			e.free(t, p)
			e.drv.SetThread(nil)
			return p
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := reusing(t, true)
			pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
			must(t, err)
			before, err := pool.Alloc(shared, e.streams[0])
			must(t, err)
			e.forked(t, func(a, b *engine.Stream) {
				p := f(t, e, a, b, before)
				e.order(t, b, a)
				for range 2 {
					if q := e.alloc(t, shared, a); q == p {
						t.Error("reused")
					}
				}
				if p != before {
					e.free(t, before)
				}
			})
		})
	}
}

// rewiring is a driver under which a program has changed what a captured stream's next work comes after
// (cuStreamUpdateCaptureDependencies), and in which work of a graph may begin before that is over which it comes after.
type rewiring struct {
	cuda.Driver
	next     map[cuda.Stream][]cuda.GraphNode
	overlaps cuda.GraphNode
}

func (r *rewiring) GraphNodeDependencies(d cuda.Device, n cuda.GraphNode) ([]cuda.GraphNode, error) {
	if n == r.overlaps {
		return nil, &cuda.Error{Op: "cuGraphNodeGetDependencies", Device: d, Code: cuda.ErrLossyQuery}
	}
	return r.Driver.GraphNodeDependencies(d, n)
}

func (r *rewiring) StreamCaptureNodes(d cuda.Device, s cuda.Stream) (uint64, []cuda.GraphNode, error) {
	capture, nodes, err := r.Driver.StreamCaptureNodes(d, s)
	if n, ok := r.next[s]; ok {
		nodes = n
	}
	return capture, nodes, err
}

// What came before a stream's work once need not come before its next.
func TestReuseAfterRewiring(t *testing.T) {
	machine := checked(t, config.Options{}, 4*gib, 0).drv
	seen := &rewiring{Driver: machine, next: map[cuda.Stream][]cuda.GraphNode{}}
	e := newEngineOver(t, machine, seen, config.Options{CaptureReuse: true}, 3)
	e.forked(t, func(a, b *engine.Stream) {
		_, first, err := machine.StreamCaptureNodes(0, a.Handle())
		must(t, err)
		p, other := e.onBoth(t, a, b), e.onBoth(t, a, b)
		e.order(t, b, a)
		e.free(t, other)
		if q := e.alloc(t, shared, a); q != other { // the order is read up to here
			t.Error("not reused after the join")
		}
		e.free(t, p)
		seen.next[a.Handle()] = first
		if q := e.alloc(t, shared, a); q == p {
			t.Error("reused, though the stream goes on before the join")
		}
		delete(seen.next, a.Handle())
		if q := e.alloc(t, shared, a); q != p {
			t.Error("not reused after the join")
		}
	})
}

// Where work in the graph overlaps, the end of later work says nothing of it, and nothing is reused.
func TestNoReuseWithOverlap(t *testing.T) {
	machine := checked(t, config.Options{}, 4*gib, 0).drv
	seen := &rewiring{Driver: machine}
	e := newEngineOver(t, machine, seen, config.Options{CaptureReuse: true}, 3)
	e.forked(t, func(a, b *engine.Stream) {
		_, first, err := machine.StreamCaptureNodes(0, a.Handle())
		must(t, err)
		seen.overlaps = first[0]
		p := e.onBoth(t, a, b)
		e.free(t, p)
		e.order(t, b, a)
		for range 2 {
			if q := e.alloc(t, shared, a); q == p {
				t.Error("reused")
			}
		}
	})
}

// Memory from before a capture that other streams used before it waits for them, also when the capture gives it back.
func TestMemoryFromBeforeCapture(t *testing.T) {
	e := reusing(t, true)
	a, b := e.streams[0], e.streams[1]
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	p, err := pool.Alloc(shared, a)
	must(t, err)
	e.order(t, a, b)
	must(t, e.drv.UseFor(0, b.Handle(), p, shared, time.Hour))
	must(t, e.a.RecordStream(p, b))
	g := e.capture(t, a, pool, func() {
		e.use(t, a, 0, 0)
		e.order(t, a, b)
		e.use(t, a, e.alloc(t, shared, a), shared)
		e.free(t, p)
		e.order(t, b, a)
		e.use(t, a, e.alloc(t, shared, a), shared)
	})
	q, err := pool.Alloc(shared, a)
	must(t, err)
	e.use(t, a, q, shared)
	must(t, g.Launch(0, e.streams[2].Handle()))
}

// Random forks, joins, uses and frees of four streams in a capture: the checker finds nothing unordered, and memory is reused.
func TestReuseWithinCaptureRandom(t *testing.T) {
	reused := 0
	for seed := range uint64(200) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { reused += randomCapture(t, seed) })
	}
	if reused < 1000 {
		t.Errorf("memory that other streams used was reused %d times", reused)
	}
}

func randomCapture(t *testing.T, seed uint64) (reused int) {
	rng := rand.New(rand.NewPCG(seed, 11))
	e := checked(t, config.Options{CaptureReuse: true}, 4*gib, 4)
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	type block struct {
		p     cuda.Ptr
		size  uint64
		owner int
		uses  []int
	}
	var live []block
	other := map[cuda.Ptr]bool{} // memory that other streams used, given back
	any := func() int { return rng.IntN(len(e.streams)) }
	g := e.capture(t, e.streams[0], pool, func() {
		e.use(t, e.streams[0], 0, 0)
		for _, st := range e.streams[1:] {
			e.order(t, e.streams[0], st)
			must(t, e.dev.Captures.Begin(st, pool))
		}
		for range 300 {
			switch k := rng.IntN(8); {
			case k < 3:
				b := block{size: uint64(1+rng.IntN(16)) * mib, owner: any()}
				b.p = e.alloc(t, b.size, e.streams[b.owner])
				e.use(t, e.streams[b.owner], b.p, b.size)
				if other[b.p] {
					reused++
				}
				live = append(live, b)
			case k < 5 && len(live) > 0: // another stream uses it, in order
				b := &live[rng.IntN(len(live))]
				st := any()
				for _, u := range append(b.uses, b.owner) {
					if u != st {
						e.order(t, e.streams[u], e.streams[st])
					}
				}
				e.use(t, e.streams[st], b.p, b.size)
				must(t, e.a.RecordStream(b.p, e.streams[st]))
				b.uses = append(b.uses, st)
			case k == 5:
				if from, to := any(), any(); from != to {
					e.order(t, e.streams[from], e.streams[to])
				}
			case len(live) > 0:
				i := rng.IntN(len(live))
				b := live[i]
				e.free(t, b.p)
				if len(b.uses) > 0 {
					other[b.p] = true
				} else {
					delete(other, b.p)
				}
				live = append(live[:i], live[i+1:]...)
			}
		}
		for _, st := range e.streams[1:] {
			e.order(t, st, e.streams[0])
		}
	})
	for _, st := range e.streams[1:] {
		must(t, e.dev.Captures.End(st))
	}
	for _, b := range live {
		e.free(t, b.p)
	}
	null, err := e.dev.Stream(cuda.StreamNull)
	must(t, err)
	must(t, g.Launch(0, null.Handle()))
	must(t, e.drv.ContextSynchronize(0))
	must(t, pool.Release())
	must(t, e.a.Trim())
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes are reserved at the end", n)
	}
	return reused
}
