package sim

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// Each way of ordering two uses of the same bytes, and each way of failing to.
func TestOrderOfUses(t *testing.T) {
	via := func(t *testing.T, r rig, from, to cuda.Stream) {
		t.Helper()
		ok(t, r.StreamWaitEvent(0, to, eventOn(t, r.Driver, from)))
	}
	cases := []struct {
		name  string
		order func(t *testing.T, r rig) // between a use on n and one on m
		race  bool
	}{
		{"nothing", func(t *testing.T, r rig) {}, true},
		{"time alone", func(t *testing.T, r rig) { r.Advance(1000 * ms) }, true},
		{"an event", func(t *testing.T, r rig) { via(t, r, r.n, r.m) }, false},
		{"events through a third stream", func(t *testing.T, r rig) { via(t, r, r.n, r.a); via(t, r, r.a, r.m) }, false},
		{"an event the wrong way", func(t *testing.T, r rig) { via(t, r, r.m, r.n) }, true},
		{"an event of the third stream alone", func(t *testing.T, r rig) { via(t, r, r.a, r.m) }, true},
		{"an event queried complete", func(t *testing.T, r rig) {
			e := eventOn(t, r.Driver, r.n)
			r.Advance(1000 * ms)
			if !must[bool](t)(r.EventQuery(0, e)) {
				t.Fatal("not complete")
			}
		}, false},
		{"an event queried too early", func(t *testing.T, r rig) {
			if must[bool](t)(r.EventQuery(0, eventOn(t, r.Driver, r.n))) {
				t.Fatal("complete")
			}
		}, true},
		{"an event synchronised", func(t *testing.T, r rig) { ok(t, r.EventSynchronize(0, eventOn(t, r.Driver, r.n))) }, false},
		{"the stream synchronised", func(t *testing.T, r rig) { ok(t, r.StreamSynchronize(0, r.n)) }, false},
		{"another stream synchronised", func(t *testing.T, r rig) { ok(t, r.StreamSynchronize(0, r.m)) }, true},
		{"the context synchronised", func(t *testing.T, r rig) { ok(t, r.ContextSynchronize(0)) }, false},
		{"the legacy stream, which non-blocking streams ignore", func(t *testing.T, r rig) {
			ok(t, r.Use(0, cuda.StreamNull, r.p+mib, 512))
		}, true},
		{"the stream destroyed", func(t *testing.T, r rig) { ok(t, r.DestroyStream(0, r.n)) }, true},
		{"the context synchronised after the stream was destroyed", func(t *testing.T, r rig) {
			ok(t, r.DestroyStream(0, r.n))
			ok(t, r.ContextSynchronize(0))
		}, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Options{Check: CheckOrder, Lag: 20 * ms})
			ok(t, r.Use(0, r.n, r.p+1000, 1000))
			c.order(t, r)
			ok(t, r.Use(0, r.m, r.p, 1000)) // beside it
			err := r.Use(0, r.m, r.p+1999, 1)
			if !c.race {
				ok(t, err)
				return
			}
			f := wantFault(t, err, FaultRace)
			if r.Fault() != error(f) {
				t.Error("the fault was not kept")
			}
		})
	}
}

func TestOrderOfBlockingStreams(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder})
	ok(t, r.Use(0, r.a, r.p, 512))
	ok(t, r.Use(0, cuda.StreamNull, r.p, 512)) // after all blocking streams
	ok(t, r.Use(0, r.b, r.p, 512))             // after the legacy stream
	ok(t, r.Use(0, cuda.StreamPerThread, r.p+512, 512))
	wantFault(t, r.Use(0, r.b, r.p+512, 512), FaultRace)
}

// A stream that takes a destroyed one's handle does not take its place in order.
func TestNewStreamIsNotTheDestroyedOne(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Lag: 20 * ms})
	ok(t, r.Use(0, r.n, r.p, 512))
	ok(t, r.DestroyStream(0, r.n))
	s := r.NewStreamNonBlocking(0)
	if s != r.n {
		t.Fatal("the handle was not recycled")
	}
	wantFault(t, r.Use(0, s, r.p, 512), FaultRace)
}

func TestReadsNeedNoOrderAmongThemselves(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder})
	ok(t, r.Use(0, r.n, r.p, 4096))
	e := eventOn(t, r.Driver, r.n)
	ok(t, r.StreamWaitEvent(0, r.m, e))
	ok(t, r.StreamWaitEvent(0, r.a, e))
	ok(t, r.Read(0, r.n, r.p, 4096))
	ok(t, r.Read(0, r.m, r.p+512, 1024))
	ok(t, r.Read(0, r.a, r.p+1024, 1024))
	wantFault(t, r.Read(0, r.b, r.p, 512), FaultRace) // does not come after the write
	ok(t, r.StreamWaitEvent(0, r.m, eventOn(t, r.Driver, r.a)))
	wantFault(t, r.Use(0, r.m, r.p+1024, 512), FaultRace) // comes after the read on a, not the one on n
	ok(t, r.StreamWaitEvent(0, r.m, eventOn(t, r.Driver, r.n)))
	ok(t, r.Use(0, r.m, r.p+1536, 2560))
}

// The same bytes through another mapping are the same bytes.
func TestRaceThroughAnotherMapping(t *testing.T) {
	d := New(Options{Check: CheckOrder})
	a, b := d.NewStreamNonBlocking(0), d.NewStreamNonBlocking(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	h := chunkAt(t, d, p, 2*mib)
	ok(t, d.MemMap(p+32*mib, 2*mib, h))
	ok(t, d.MemSetAccess(p+32*mib, 2*mib, []cuda.Device{0}))
	ok(t, d.Use(0, a, p+4096, 512))
	ok(t, d.Use(0, b, p+32*mib, 4096))
	f := wantFault(t, d.Use(0, b, p+32*mib+4000, 200), FaultRace)
	text := f.Error()
	for _, want := range []string{"unordered use", "not ordered after a use of the same bytes on stream 2",
		fmt.Sprintf("mapped %#x+2097152 chunk", uint64(p)), fmt.Sprintf("mapped %#x+2097152 chunk", uint64(p+32*mib)),
		fmt.Sprintf("used %#x+512 chunk 1+4096 on stream 2", uint64(p+4096))} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	// On the same stream the second mapping needs no order.
	d2 := New(Options{Check: CheckOrder})
	s := d2.NewStream(0)
	q := must[cuda.Ptr](t)(d2.AddressReserve(64*mib, 0, 0))
	k := chunkAt(t, d2, q, 2*mib)
	ok(t, d2.MemMap(q+8*mib, 2*mib, k))
	ok(t, d2.MemSetAccess(q+8*mib, 2*mib, []cuda.Device{0}))
	ok(t, d2.Use(0, s, q, 2*mib))
	ok(t, d2.Use(0, s, q+8*mib, 2*mib))
}

// Unmapping needs the host to know that work through that mapping is done; another mapping of the chunk may stay in
// use.
func TestUnmapNeedsHostOrder(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Lag: 20 * ms})
	h := must[cuda.Handle](t)(r.MemCreate(2*mib, cuda.MemProp{}))
	for _, at := range []cuda.Ptr{8 * mib, 16 * mib} {
		ok(t, r.MemMap(r.p+at, 2*mib, h))
		ok(t, r.MemSetAccess(r.p+at, 2*mib, []cuda.Device{0}))
	}
	ok(t, r.Use(0, r.n, r.p+8*mib, 512))
	e := eventOn(t, r.Driver, r.n)
	ok(t, r.MemUnmap(r.p+16*mib, 2*mib)) // not the mapping that is used
	ok(t, r.StreamWaitEvent(0, r.m, e))  // stream order is not host order
	f := wantFault(t, r.MemUnmap(r.p+8*mib, 2*mib), FaultInUse)
	if !strings.Contains(f.Detail, "until 20ms") {
		t.Error(f.Detail)
	}
	r.Advance(20 * ms) // complete, but the host has not looked
	f = wantFault(t, r.MemUnmap(r.p+8*mib, 2*mib), FaultInUse)
	if !strings.Contains(f.Detail, "the host has not seen") {
		t.Error(f.Detail)
	}
	ok(t, r.Use(0, r.n, r.p+8*mib, 1)) // a fault has no effect
	r.Advance(20 * ms)
	ok(t, r.EventRecord(0, e, r.n))
	if !must[bool](t)(r.EventQuery(0, e)) {
		t.Fatal("not done")
	}
	ok(t, r.MemUnmap(r.p+8*mib, 2*mib))
}

func TestUnmapWhileUsedByTime(t *testing.T) {
	r := newRig(t, Options{Check: CheckUse, Lag: 20 * ms})
	ok(t, r.Use(0, r.n, r.p, 3*mib))
	r.Advance(19 * ms)
	wantFault(t, r.MemUnmap(r.p+2*mib, 2*mib), FaultInUse)
	r.Advance(ms)
	ok(t, r.MemUnmap(r.p, 4*mib)) // CheckUse goes by the clock
}

// MemFree waits, but nothing may rely on that.
func TestFreeInUse(t *testing.T) {
	r := newRig(t, Options{Check: CheckUse, Lag: 20 * ms})
	a := must[cuda.Ptr](t)(r.MemAlloc(0, 4096))
	b := must[cuda.Ptr](t)(r.MemAlloc(0, 4096)) // in the same slab
	ok(t, r.Use(0, r.n, a, 4096))
	wantFault(t, r.MemFree(0, a), FaultInUse)
	if r.Calls().DeviceSyncs != 0 {
		t.Error("the call that failed has waited")
	}
	ok(t, r.MemFree(0, b))
	ok(t, r.MemFree(0, a)) // freeing b has waited for all
	if r.Now() != 20*ms {
		t.Error(r.Now())
	}
}

// The wait within MemFree takes time, and is no proof to the host that anything is done.
func TestMemFreeGivesNoOrder(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Lag: 20 * ms})
	a := must[cuda.Ptr](t)(r.MemAlloc(0, 4096))
	ok(t, r.Use(0, r.n, r.p, 512))
	ok(t, r.MemFree(0, a))
	if r.Now() != 20*ms {
		t.Error(r.Now())
	}
	wantFault(t, r.MemUnmap(r.p, 2*mib), FaultInUse)
	wantFault(t, r.Use(0, r.m, r.p, 512), FaultRace)
	ok(t, r.ContextSynchronize(0))
	ok(t, r.MemUnmap(r.p, 2*mib))
}

func TestCheckNoneChecksNothing(t *testing.T) {
	r := newRig(t, Options{Lag: 20 * ms})
	ok(t, r.Use(0, r.n, 12345, 1<<40))
	ok(t, r.MemUnmap(r.p, 2*mib))
	if r.Fault() != nil {
		t.Error(r.Fault())
	}
}

func TestUseAtTheEndOfTheAddressSpace(t *testing.T) {
	r := newRig(t, Options{Check: CheckUse})
	wantFault(t, r.Use(0, r.n, ^cuda.Ptr(0)-10, 100), FaultUnmapped)
	wantFault(t, r.Use(0, r.n, 0, 100), FaultUnmapped)
	wantFault(t, r.Use(0, r.n, r.p+3*mib, ^uint64(0)), FaultUnmapped)
}

func TestOnFault(t *testing.T) {
	var d *Driver
	var got []error
	d = New(Options{Check: CheckUse, OnFault: func(err error) {
		got = append(got, err)
		_ = d.Fault() // no lock is held
	}})
	s := d.NewStream(0)
	err := d.Use(0, s, 4096, 1)
	if len(got) != 1 || got[0] != err || d.Fault() != err {
		t.Errorf("%v, %v", got, err)
	}
	var ce *cuda.Error
	if !errors.As(err, &ce) || ce.Code != cuda.ErrIllegalAddress || ce.Op != "cuLaunchKernel" {
		t.Errorf("%v", ce)
	}
	for range 2 * maxFaults {
		_ = d.Use(0, s, 4096, 1)
	}
	if all, n := d.Faults(); len(all) != maxFaults || n != 2*maxFaults+1 {
		t.Errorf("%d kept of %d", len(all), n)
	}
}

// What is remembered of uses does not grow with their number, nor with streams made and destroyed.
func TestCheckerMemoryIsBounded(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Lag: ms})
	for i := range 200_000 {
		s := r.NewStreamNonBlocking(0)
		ok(t, r.Use(0, s, r.p+cuda.Ptr(i*512%(2*mib)), 512))
		e := eventOn(t, r.Driver, s)
		ok(t, r.DestroyStream(0, s))
		if i%10 == 0 {
			ok(t, r.EventSynchronize(0, e))
			ok(t, r.ContextSynchronize(0))
		}
		ok(t, r.EventDestroy(0, e))
	}
	c := r.space.find(uint64(r.p)).chunk
	if n := c.uses.count(); n > 200 {
		t.Errorf("%d spans are remembered", n)
	}
	if n := len(r.order.count); n > 50 {
		t.Errorf("%d ranks for %d streams at a time", n, 15)
	}
	if n := len(r.log); n > logSize {
		t.Errorf("%d records", n)
	}
	if n := len(r.space.find(uint64(r.p)).uses); n > 50 {
		t.Errorf("%d marks on the mapping", n)
	}
}

func (r *ranges) count() int {
	if r.halves != nil {
		return r.halves[0].count() + r.halves[1].count()
	}
	return len(r.spans)
}

func TestConcurrentUse(t *testing.T) {
	d := New(Options{Check: CheckOrder, Lag: 20})
	d.NewStream(0)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			p, err := d.AddressReserve(8*mib, 0, 0)
			if err != nil {
				t.Error(err)
				return
			}
			for i := range 300 {
				s := d.NewStream(0)
				h, err := d.MemCreate(2*mib, cuda.MemProp{})
				e, err2 := d.EventCreate(0)
				errs := []error{err, err2, d.MemMap(p, 2*mib, h), d.MemSetAccess(p, 2*mib, []cuda.Device{0}), d.MemRelease(h),
					d.Use(0, s, p, 2*mib), d.EventRecord(0, e, s), d.EventSynchronize(0, e), d.MemUnmap(p, 2*mib),
					d.EventDestroy(0, e), d.DestroyStream(0, s)}
				d.Advance(1)
				_, _, _ = d.Calls(), d.Mappings(0), d.Leaks()
				if err := errors.Join(errs...); err != nil {
					t.Errorf("goroutine %d, round %d: %v", g, i, err)
					return
				}
			}
			if err := d.AddressFree(p, 8*mib); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if d.Fault() != nil || d.Leaks() != (Live{Streams: 1}) || d.ReservedBytes(0) != 0 {
		t.Errorf("%v, %+v", d.Fault(), d.Leaks())
	}
}
