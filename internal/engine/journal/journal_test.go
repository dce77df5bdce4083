package journal

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/memory"
)

func newJournal() *Journal { return New(health.New(sim.New(sim.Options{}), 0), &Thread{}) }

// The ring against a plain list of all events, under random calls.
func TestRing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, limit := range []int{1, 3, 64, 200} {
		j := newJournal()
		clock := int64(0)
		j.SetClock(func() int64 { clock++; return clock })
		j.Record(event.Event{})
		if got, lost := j.Events(); len(got) != 0 || lost != 0 || j.health.Recording() {
			t.Fatalf("%d events, %d lost before any is recorded", len(got), lost)
		}
		j.SetLimit(limit)
		var all []event.Event // those that can be read
		var lost, number uint64
		same := func(what string, got, want []event.Event, gotLost, wantLost uint64) {
			t.Helper()
			if len(got) != len(want) || gotLost != wantLost {
				t.Fatalf("limit %d: %s: %d events and %d lost, want %d and %d", limit, what, len(got), gotLost, len(want), wantLost)
			}
			for i := range got {
				if got[i] != want[i] {
					t.Fatalf("limit %d: %s: event %d is %+v, want %+v", limit, what, i, got[i], want[i])
				}
			}
		}
		for range 3000 {
			switch n := rng.IntN(limit + 3); rng.IntN(40) {
			case 0:
				got, older := j.Newest(n)
				n = min(n, len(all))
				same("newest", got, all[len(all)-n:], older, lost+uint64(len(all)-n))
			case 1:
				prefix := []event.Event{{Addr: 1}}
				got, l := j.Take(prefix, n)
				n = min(n, len(all))
				same("take", got, append(prefix, all[:n]...), l, lost)
				all, lost = all[n:], 0
			case 2:
				got, l := j.Events()
				same("events", got, all, l, lost)
			default:
				number++
				j.Record(event.Event{Addr: number})
				all = append(all, event.Event{Addr: number, TimeUS: clock})
				if len(all) > limit {
					all, lost = all[1:], lost+1
				}
			}
		}
		j.SetLimit(0)
		if got, l := j.Events(); len(got) != 0 || l != 0 {
			t.Errorf("%d events, %d lost after it stopped", len(got), l)
		}
	}
}

// The number of a stream that is gone is given to another once no event that can be read has it: none in the ring, and none
// that was taken last.
func TestNamesOfEvents(t *testing.T) {
	j := newJournal()
	j.SetLimit(2)
	take := func(want int) {
		t.Helper()
		if got := j.Streams.Take(); got != want {
			t.Errorf("%d is given, want %d", got, want)
		}
	}
	take(0)
	take(1)
	j.Record(event.Event{Stream: 0})
	j.Streams.Put(0)
	take(2)
	j.Take(nil, 1)
	take(3) // the event was read, and its stream may be asked for
	j.Take(nil, 1)
	take(0)
	j.Record(event.Event{Stream: 3})
	j.Streams.Put(3)
	j.Record(event.Event{Stream: 1})
	take(4)
	j.Record(event.Event{Stream: 1}) // which has the first one lost
	if j.Streams.Forget(); j.Streams.Gone() != 1 {
		t.Error("an event that Take may have returned is forgotten")
	}
	for range keptTaken + 2 {
		j.Record(event.Event{Stream: 1})
	}
	take(3)
	if n := j.Streams.Count(); n != 5 || j.Pools.Count() != 0 {
		t.Errorf("a table of %d streams and %d pools", n, j.Pools.Count())
	}
}

func TestThreadOfEvents(t *testing.T) {
	j := newJournal()
	j.SetLimit(3)
	j.Record(event.Event{})
	j.thread.Set(func() uint32 { return 7 })
	j.Record(event.Event{})
	j.Record(event.Event{Thread: 9})
	events, _ := j.Events()
	for i, want := range []uint32{0, 7, 9} {
		if events[i].Thread != want {
			t.Errorf("event %d is of thread %d, want %d", i, events[i].Thread, want)
		}
	}
	j.thread.Set(nil)
	j.Record(event.Event{})
	if events, _ = j.Newest(1); events[0].Thread != 0 {
		t.Errorf("thread %d", events[0].Thread)
	}
}

func TestLabels(t *testing.T) {
	for _, tag := range []uint32{0, 1, 77, memory.MaxTag} {
		for _, library := range []uint8{0, 1, memory.MaxLibrary} {
			if l := Label(tag, library); TagOf(l) != tag || LibraryOf(l) != library {
				t.Errorf("tag %d of library %d became %d of %d", tag, library, TagOf(l), LibraryOf(l))
			}
		}
	}
}

// Go catches the stack of its caller, of all requests from Sample bytes on and of none without bytes.
func TestGoStacks(t *testing.T) {
	s := Stacks{Sample: 1 << 20}
	if n := catch(&s, 0); n != 0 {
		t.Error("a request of nothing has a stack")
	}
	frames := s.GoFrames(catch(&s, 1<<20))
	if len(frames) == 0 || frames[0].Function != "github.com/cistern-gpu/cistern/internal/engine/journal.catch" {
		t.Errorf("%+v", frames)
	}
	caught := 0
	for range 10_000 {
		if catch(&s, 1<<19) != 0 {
			caught++
		}
	}
	if caught < 4500 || caught > 5500 {
		t.Errorf("%d of 10000 requests of half the sample have a stack", caught)
	}
	if s.GoFrames(0) != nil {
		t.Error("stack 0 has frames")
	}
}

// Functions of the module that stand between a program and Go are known by their names.
func TestOwnFunctions(t *testing.T) {
	const module = "github.com/cistern-gpu/cistern"
	for name, want := range map[string]bool{
		module + ".Device.Alloc":                      true,
		module + ".(*Allocator).FreeWith":             true,
		module + "/internal/engine.(*Device).Alloc":   true,
		module + "/internal/engine.New.func1":         true,
		module + "_test.TestGoStacks":                 false,
		module + "/internal/engine_test.TestGoStacks": false,
		module + "/replay.(*engine).Alloc":            false,
		module + "/resource.(*Limiting).Alloc":        false,
		"main.main":                                   false,
		"":                                            false,
	} {
		if ownFunction(name) != want {
			t.Errorf("%q: own is %v, want %v", name, !want, want)
		}
	}
	// A frame that is not remembered takes no Go memory either.
	s := new(Stacks)
	pcs := make([]uintptr, 8)
	pcs = pcs[:runtime.Callers(1, pcs)] // none of them inlined
	if n := testing.AllocsPerRun(100, func() {
		clear(s.known[:])
		for _, pc := range pcs {
			s.own(pc)
		}
	}); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
}

//go:noinline
func catch(s *Stacks, size uint64) uint32 { return s.Go(size) }

// The hash is of the sizes of requests in their order, whatever the ring still holds, and begins anew when it is taken.
func TestHash(t *testing.T) {
	j := newJournal()
	hash := func(sizes ...uint64) uint64 {
		h := uint64(event.HashStart)
		for _, n := range sizes {
			h = event.Mix(h, n)
		}
		return h
	}
	alloc := func(sizes ...uint64) {
		for _, n := range sizes {
			j.Record(event.Event{Kind: event.Alloc, Size: n})
			j.Record(event.Event{Kind: event.FreeRequested, Size: n})
		}
	}
	want := func(want uint64) {
		t.Helper()
		if got := j.TakeHash(); got != want {
			t.Errorf("%#x, want %#x", got, want)
		}
	}
	alloc(1)
	want(0) // nothing is recorded
	j.SetLimit(3)
	alloc(5, 7, 9)
	want(hash(5, 7, 9))
	want(hash())
	alloc(7)
	j.SetLimit(2) // as for the next part of a recording
	alloc(5)
	want(hash(7, 5))
	if hash(7, 5) == hash(5, 7) {
		t.Error("the order does not count")
	}
	j.SetLimit(0)
	alloc(1)
	want(0)
}
