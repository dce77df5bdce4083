package sim

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

const ms = time.Millisecond

// eventOn records a new event on the stream.
func eventOn(t testing.TB, d *Driver, s cuda.Stream) cuda.Event {
	t.Helper()
	e := must[cuda.Event](t)(d.EventCreate(0))
	ok(t, d.EventRecord(0, e, s))
	return e
}

// doneAt finds when an event completes by synchronising with it.
func doneAt(t testing.TB, d *Driver, e cuda.Event) time.Duration {
	t.Helper()
	ok(t, d.EventSynchronize(0, e))
	return d.Now()
}

func wantFault(t testing.TB, err error, kind FaultKind) *Fault {
	t.Helper()
	var f *Fault
	if !errors.As(err, &f) || f.Kind != kind {
		t.Fatalf("got %v, want the fault %q", err, kind)
	}
	return f
}

func TestLagCountsFromQueueing(t *testing.T) {
	d := New(Options{Lag: 20 * ms})
	s := d.NewStream(0)
	ok(t, d.Use(0, s, 0, 0))
	d.Advance(5 * ms)
	ok(t, d.Use(0, s, 0, 0))
	if got := doneAt(t, d, eventOn(t, d, s)); got != 25*ms {
		t.Errorf("two pieces of work queued at 0 and 5 ms with 20 ms of lag complete at %v", got)
	}
}

func TestWorkRunsInStreamOrder(t *testing.T) {
	d := New(Options{})
	s := d.NewStream(0)
	ok(t, d.UseFor(0, s, 0, 0, 30*ms))
	first := eventOn(t, d, s)
	ok(t, d.UseFor(0, s, 0, 0, 10*ms))
	second := eventOn(t, d, s)
	d.AdvanceTo(29 * ms)
	if done := must[bool](t)(d.EventQuery(0, first)); done {
		t.Error("the first is done before its time")
	}
	d.AdvanceTo(30 * ms)
	if done := must[bool](t)(d.EventQuery(0, first)); !done {
		t.Error("the first is not done at its time")
	}
	if done := must[bool](t)(d.EventQuery(0, second)); done {
		t.Error("the second is done with the first")
	}
	if got := doneAt(t, d, second); got != 40*ms {
		t.Errorf("the second is done at %v", got)
	}
	if w := d.Calls().Waited; w != 10*ms {
		t.Errorf("waited %v", w)
	}
}

func TestEventsCarryTimeBetweenStreamsAndDevices(t *testing.T) {
	d := New(Options{Devices: 2})
	a, b := d.NewStream(0), d.NewStream(1)
	ok(t, d.UseFor(0, a, 0, 0, 30*ms))
	e := eventOn(t, d, a)
	ok(t, d.StreamWaitEvent(1, b, e))
	ok(t, d.EventDestroy(0, e)) // the wait stands
	ok(t, d.UseFor(1, b, 0, 0, ms))
	ok(t, d.StreamSynchronize(1, b))
	if d.Now() != 31*ms {
		t.Errorf("work behind the event is done at %v", d.Now())
	}
	other := must[cuda.Event](t)(d.EventCreate(0))
	wantCode(t, d.EventRecord(1, other, b), cuda.ErrInvalidHandle)
	wantCode(t, d.EventDestroy(0, e), cuda.ErrInvalidHandle)
	wantCode(t, d.StreamWaitEvent(1, b, e), cuda.ErrInvalidHandle)
}

func TestEventWithoutRecordIsComplete(t *testing.T) {
	d := New(Options{Lag: ms})
	s := d.NewStream(0)
	e := must[cuda.Event](t)(d.EventCreate(0))
	if !must[bool](t)(d.EventQuery(0, e)) {
		t.Error("not complete")
	}
	ok(t, d.EventSynchronize(0, e))
	ok(t, d.StreamWaitEvent(0, s, e))
	if d.Now() != 0 {
		t.Error("waited for nothing")
	}
}

func TestBusyStreamsDelayEvents(t *testing.T) {
	for _, busy := range []bool{false, true} {
		d := New(Options{Lag: 20 * ms, Busy: busy})
		e := eventOn(t, d, d.NewStream(0))
		if done := must[bool](t)(d.EventQuery(0, e)); done == busy {
			t.Errorf("busy %v: event on a stream without known work: done %v", busy, done)
		}
		want := time.Duration(0)
		if busy {
			want = 20 * ms
		}
		if got := doneAt(t, d, e); got != want {
			t.Errorf("busy %v: done at %v", busy, got)
		}
		for i, wait := range []func() error{
			func() error { return d.StreamSynchronize(0, 0) },
			func() error { return d.ContextSynchronize(0) },
		} {
			ok(t, wait())
			if got := d.Now(); got != want*time.Duration(i+2) {
				t.Errorf("busy %v: wait %d ends at %v", busy, i, got)
			}
		}
	}
}

// The legacy default stream and blocking streams wait for each other; non-blocking streams do not take part.
// (The same was seen on an H200, a wait on the idle legacy stream included.)
func TestLegacyDefaultStream(t *testing.T) {
	cases := []struct {
		name string
		do   func(d *Driver, a, b, n cuda.Stream) cuda.Stream // the stream whose next event is looked at
		want time.Duration
	}{
		{"legacy waits for blocking", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, a, 0, 0, 30*ms)
			return cuda.StreamNull
		}, 30 * ms},
		{"legacy does not wait for non-blocking", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, n, 0, 0, 30*ms)
			return cuda.StreamLegacy
		}, 0},
		{"blocking waits for legacy", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, cuda.StreamNull, 0, 0, 30*ms)
			return b
		}, 30 * ms},
		{"the per-thread stream is a blocking one", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, cuda.StreamNull, 0, 0, 30*ms)
			return cuda.StreamPerThread
		}, 30 * ms},
		{"non-blocking does not wait for legacy", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, cuda.StreamNull, 0, 0, 30*ms)
			return n
		}, 0},
		{"blocking does not wait for blocking", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, a, 0, 0, 30*ms)
			return b
		}, 0},
		{"blocking waits for blocking through work on legacy", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, a, 0, 0, 30*ms)
			_ = d.UseFor(0, cuda.StreamNull, 0, 0, ms)
			return b
		}, 31 * ms},
		{"blocking waits for blocking through a record on legacy", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, a, 0, 0, 30*ms)
			e, _ := d.EventCreate(0)
			_ = d.EventRecord(0, e, cuda.StreamNull)
			return b
		}, 30 * ms},
		{"blocking waits for blocking through a wait on legacy", func(d *Driver, a, b, n cuda.Stream) cuda.Stream {
			_ = d.UseFor(0, a, 0, 0, 30*ms)
			e, _ := d.EventCreate(0)
			_ = d.EventRecord(0, e, n)
			_ = d.StreamWaitEvent(0, cuda.StreamNull, e)
			return b
		}, 30 * ms},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d := New(Options{})
			a, b, n := d.NewStream(0), d.NewStream(0), d.NewStreamNonBlocking(0)
			s := c.do(d, a, b, n)
			if got := doneAt(t, d, eventOn(t, d, s)); got != c.want {
				t.Errorf("done at %v, want %v", got, c.want)
			}
		})
	}
}

func TestStreamHandlesAreRecycledAndIDsAreNot(t *testing.T) {
	d := New(Options{})
	a := d.NewStream(0)
	first := must[cuda.StreamID](t)(d.StreamID(0, a))
	ok(t, d.UseFor(0, a, 0, 0, 50*ms))
	ok(t, d.DestroyStream(0, a))
	wantFault(t, d.DestroyStream(0, a), FaultStream)
	b := d.NewStream(0)
	if a != b {
		t.Errorf("handle %#x was not recycled, got %#x", a, b)
	}
	if second := must[cuda.StreamID](t)(d.StreamID(0, b)); second.ID == first.ID || second.Context != first.Context {
		t.Errorf("ids %v and %v", first, second)
	}
	ok(t, d.StreamSynchronize(0, b))
	if d.Now() != 0 {
		t.Error("the new stream has the old one's work")
	}
	ok(t, d.ContextSynchronize(0))
	if d.Now() != 50*ms {
		t.Errorf("work of the destroyed stream is done at %v", d.Now())
	}
}

func TestSpecialStreamIDs(t *testing.T) {
	d := New(Options{Devices: 2})
	ok(t, d.RetainContext(0))
	ok(t, d.RetainContext(1))
	id := func(dev cuda.Device, s cuda.Stream) cuda.StreamID { return must[cuda.StreamID](t)(d.StreamID(dev, s)) }
	if id(0, cuda.StreamNull) != id(0, cuda.StreamLegacy) {
		t.Error("the null stream is the legacy one")
	}
	if id(0, cuda.StreamNull) == id(1, cuda.StreamNull) {
		t.Error("two devices share a default stream")
	}
	var thread uint64
	d.SetThread(func() uint64 { return thread })
	one := id(0, cuda.StreamPerThread)
	thread = 7
	two := id(0, cuda.StreamPerThread)
	if one == two {
		t.Error("two threads share a per-thread stream")
	}
	thread = 0
	if id(0, cuda.StreamPerThread) != one {
		t.Error("a thread's stream has changed")
	}
}

func TestUseOfDestroyedStreamIsAFault(t *testing.T) {
	d := New(Options{})
	s := d.NewStream(0)
	e := eventOn(t, d, s)
	ok(t, d.DestroyStream(0, s))
	err := d.EventRecord(0, e, s)
	wantFault(t, err, FaultStream)
	wantCode(t, err, cuda.ErrInvalidHandle)
	wantFault(t, d.Use(0, s, 0, 0), FaultStream)
	wantFault(t, d.StreamWaitEvent(0, cuda.Stream(12345), e), FaultStream)
	if all, n := d.Faults(); n != 3 || len(all) != 3 || d.Fault() != all[0] {
		t.Errorf("%d faults: %v", n, all)
	}
}

func TestSyncsAreCounted(t *testing.T) {
	d := New(Options{Lag: 10 * ms})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.MemAlloc(0, 100))
	ok(t, d.Use(0, s, 0, 0))
	ok(t, d.StreamSynchronize(0, s))
	ok(t, d.Use(0, s, 0, 0))
	ok(t, d.ContextSynchronize(0))
	ok(t, d.Use(0, s, 0, 0))
	ok(t, d.MemFree(0, p)) // waits implicitly
	ok(t, d.EventSynchronize(0, eventOn(t, d, s)))
	c := d.Calls()
	if c.StreamSyncs != 1 || c.DeviceSyncs != 2 || c.EventSyncs != 1 || c.Waited != 30*ms || d.Now() != 30*ms {
		t.Errorf("%+v at %v", c, d.Now())
	}
}

// MemFree waits for the primary context, and with the option (as ROCm does) for every context of the device.
func TestMemFreeWaitsForContexts(t *testing.T) {
	for _, all := range []bool{false, true} {
		d := New(Options{FreeWaitsAllContexts: all})
		own, other := d.NewStreamNonBlocking(0), d.NewStreamIn(d.NewContext(0), true)
		p := must[cuda.Ptr](t)(d.MemAlloc(0, 100))
		ok(t, d.UseFor(0, own, 0, 0, 10*ms))
		ok(t, d.UseFor(0, other, 0, 0, 50*ms))
		ok(t, d.MemFree(0, p))
		want := 10 * ms
		if all {
			want = 50 * ms
		}
		if d.Now() != want {
			t.Errorf("all contexts %v: free returned at %v, want %v", all, d.Now(), want)
		}
	}
}

func TestRealTimeFollowsTheWall(t *testing.T) {
	d := New(Options{RealTime: true, Lag: 2 * ms})
	s := d.NewStream(0)
	began := time.Now()
	ok(t, d.Use(0, s, 0, 0))
	e := eventOn(t, d, s)
	for !must[bool](t)(d.EventQuery(0, e)) {
		if time.Since(began) > time.Minute {
			t.Fatal("the lag never passed")
		}
	}
	if took := time.Since(began); took < 2*ms {
		t.Errorf("2 ms of lag passed in %v", took)
	}
	before := d.Now()
	ok(t, d.UseFor(0, s, 0, 0, time.Hour))
	ok(t, d.StreamSynchronize(0, s))
	if d.Now()-before < time.Hour || time.Since(began) > 30*time.Minute {
		t.Error("a wait is skipped over, and counts")
	}
}

func TestClockNeverGoesBack(t *testing.T) {
	d := New(Options{})
	d.AdvanceTo(10 * ms)
	d.AdvanceTo(5 * ms)
	d.Advance(-ms)
	if d.Now() != 10*ms {
		t.Error(d.Now())
	}
}
