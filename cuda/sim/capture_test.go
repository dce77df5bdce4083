package sim

import (
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// rig is two blocking and two non-blocking streams, and memory to use.
type rig struct {
	*Driver
	a, b, n, m cuda.Stream
	p          cuda.Ptr // 64 MiB reserved, 4 MiB mapped in two chunks
}

func newRig(t testing.TB, o Options) rig {
	t.Helper()
	d := New(o)
	r := rig{Driver: d, a: d.NewStream(0), b: d.NewStream(0), n: d.NewStreamNonBlocking(0), m: d.NewStreamNonBlocking(0)}
	r.p = must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	chunkAt(t, d, r.p, 2*mib)
	chunkAt(t, d, r.p+2*mib, 2*mib)
	return r
}

func (r rig) status(t testing.TB, s cuda.Stream) cuda.CaptureStatus {
	t.Helper()
	st, id, err := r.StreamCapture(0, s)
	ok(t, err)
	if (id != 0) != (st != cuda.CaptureNone) || id != r.CaptureID(0, s) {
		t.Errorf("status %d with capture %d", st, id)
	}
	return st
}

// What each call answers while a stream is being captured, and whether the capture survives it, as seen on an H200
// with driver 580.
func TestCallsDuringCapture(t *testing.T) {
	const fine = cuda.Success
	cases := []struct {
		name     string
		blocking bool // the captured stream is a, not n
		call     func(r rig, s cuda.Stream, e, before cuda.Event) error
		want     cuda.Code
		spoils   bool
	}{
		{"query of a captured event", false, func(r rig, s cuda.Stream, e, _ cuda.Event) error {
			_, err := r.EventQuery(0, e)
			return err
		}, cuda.ErrCapturedEvent, true},
		{"wait of the host for a captured event", false, func(r rig, s cuda.Stream, e, _ cuda.Event) error {
			return r.EventSynchronize(0, e)
		}, cuda.ErrCapturedEvent, true},
		{"wait for the stream", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.StreamSynchronize(0, s)
		}, cuda.ErrStreamCaptureUnsupported, true},
		{"wait for another stream", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.StreamSynchronize(0, r.a)
		}, fine, false},
		{"wait for the context", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.ContextSynchronize(0)
		}, cuda.ErrStreamCaptureUnsupported, true},
		{"record on the legacy stream", false, func(r rig, s cuda.Stream, _, before cuda.Event) error {
			return r.EventRecord(0, before, cuda.StreamNull)
		}, fine, false},
		{"record on the legacy stream, blocking capture", true, func(r rig, s cuda.Stream, _, before cuda.Event) error {
			return r.EventRecord(0, before, cuda.StreamNull)
		}, cuda.ErrStreamCaptureImplicit, true},
		{"work on the legacy stream, blocking capture", true, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.Use(0, cuda.StreamNull, r.p, 512)
		}, cuda.ErrStreamCaptureImplicit, true},
		{"wait for the legacy stream, blocking capture", true, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.StreamSynchronize(0, cuda.StreamNull)
		}, cuda.ErrStreamCaptureImplicit, true},
		{"status of the legacy stream, blocking capture", true, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			_, _, err := r.StreamCapture(0, cuda.StreamNull)
			return err
		}, cuda.ErrStreamCaptureImplicit, false},
		{"status of the legacy stream", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			_, _, err := r.StreamCapture(0, cuda.StreamNull)
			return err
		}, fine, false},
		{"record on another blocking stream", true, func(r rig, s cuda.Stream, _, before cuda.Event) error {
			return r.EventRecord(0, before, r.b)
		}, fine, false},
		{"legacy stream waits for a captured event", false, func(r rig, s cuda.Stream, e, _ cuda.Event) error {
			return r.StreamWaitEvent(0, cuda.StreamNull, e)
		}, cuda.ErrStreamCaptureImplicit, true},
		{"wait for uncaptured work", false, func(r rig, s cuda.Stream, _, before cuda.Event) error {
			return r.StreamWaitEvent(0, s, before)
		}, cuda.ErrStreamCaptureIsolation, true},
		{"wait for an event that was never recorded", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			e, err := r.EventCreate(0)
			if err != nil {
				return err
			}
			return r.StreamWaitEvent(0, s, e)
		}, fine, false},
		{"begin again", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.BeginCapture(0, s)
		}, cuda.ErrIllegalState, false},
		{"begin on the legacy stream", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			return r.BeginCapture(0, cuda.StreamNull)
		}, cuda.ErrStreamCaptureUnsupported, false},
		{"allocate and free", true, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			p, err := r.MemAlloc(0, 8*mib)
			if err != nil {
				return err
			}
			return r.MemFree(0, p)
		}, fine, false},
		{"create, map, unmap", false, func(r rig, s cuda.Stream, _, _ cuda.Event) error {
			h, err := r.MemCreate(2*mib, cuda.MemProp{})
			if err == nil {
				err = r.MemMap(r.p+8*mib, 2*mib, h)
			}
			if err == nil {
				err = r.MemUnmap(r.p+8*mib, 2*mib)
			}
			return err
		}, fine, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Options{Check: CheckOrder})
			s := r.n
			if c.blocking {
				s = r.a
			}
			before := eventOn(t, r.Driver, r.b)
			ok(t, r.BeginCapture(0, s))
			e := eventOn(t, r.Driver, s)
			if err := c.call(r, s, e, before); c.want == fine {
				ok(t, err)
			} else {
				wantCode(t, err, c.want)
			}
			want := cuda.CaptureActive
			if c.spoils {
				want = cuda.CaptureInvalidated
			}
			if got := r.status(t, s); got != want {
				t.Errorf("status %d, want %d", got, want)
			}
			g, err := r.EndCapture(0, s)
			if c.spoils {
				wantCode(t, err, cuda.ErrStreamCaptureInvalidated)
			} else if ok(t, err); g == nil {
				t.Error("no graph")
			}
			if r.status(t, s) != cuda.CaptureNone {
				t.Errorf("after the end: status %d", r.status(t, s))
			}
			// A driver call that spoils a capture is a fault; work of the program itself is not a call.
			wantFaults := c.spoils && !strings.HasPrefix(c.name, "work")
			if (r.Fault() != nil) != wantFaults {
				t.Errorf("fault %v", r.Fault())
			} else if wantFaults {
				wantFault(t, r.Fault(), FaultCapture)
			}
			ok(t, r.ContextSynchronize(0))
		})
	}
}

func TestCaptureDrawsStreamsIn(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder})
	fork := func() cuda.Event {
		ok(t, r.BeginCapture(0, r.n))
		e := eventOn(t, r.Driver, r.n)
		ok(t, r.StreamWaitEvent(0, r.m, e))
		if r.status(t, r.m) != cuda.CaptureActive || r.CaptureID(0, r.m) != r.CaptureID(0, r.n) {
			t.Fatal("the waiting stream did not join the capture")
		}
		return e
	}
	// Joined back: a graph of three pieces of work.
	fork()
	ok(t, r.Use(0, r.n, r.p, 512))
	ok(t, r.Use(0, r.m, r.p+512, 512))
	ok(t, r.StreamWaitEvent(0, r.n, eventOn(t, r.Driver, r.m)))
	ok(t, r.Use(0, r.n, r.p, 1024))
	g := must[*Graph](t)(r.EndCapture(0, r.n))
	if g.Nodes() != 3 || r.status(t, r.m) != cuda.CaptureNone {
		t.Errorf("%d nodes", g.Nodes())
	}
	// Drawn in without work: nothing to join.
	e := fork()
	must[*Graph](t)(r.EndCapture(0, r.n))
	wantCode(t, r.StreamWaitEvent(0, r.a, e), cuda.ErrInvalidValue) // events of an ended capture mean nothing
	_, err := r.EventQuery(0, e)
	wantCode(t, err, cuda.ErrInvalidValue)
	ok(t, r.EventRecord(0, e, r.a))
	_, err = r.EventQuery(0, e)
	ok(t, err)
	// Work that was not joined.
	fork()
	ok(t, r.Use(0, r.m, r.p, 512))
	_, err = r.EndCapture(0, r.n)
	wantCode(t, err, cuda.ErrStreamCaptureUnjoined)
	if r.status(t, r.m) != cuda.CaptureNone || r.status(t, r.n) != cuda.CaptureNone {
		t.Error("streams are left in the capture")
	}
	// Ended on the wrong stream.
	fork()
	_, err = r.EndCapture(0, r.m)
	wantCode(t, err, cuda.ErrStreamCaptureUnmatched)
	_, err = r.EndCapture(0, r.n)
	wantCode(t, err, cuda.ErrStreamCaptureInvalidated)
	_, err = r.EndCapture(0, r.n)
	wantCode(t, err, cuda.ErrIllegalState)
	// Two captures do not mix.
	ok(t, r.BeginCapture(0, r.n))
	ok(t, r.BeginCapture(0, r.m))
	wantCode(t, r.StreamWaitEvent(0, r.m, eventOn(t, r.Driver, r.n)), cuda.ErrStreamCaptureMerge)
	if r.status(t, r.n) != cuda.CaptureInvalidated || r.status(t, r.m) != cuda.CaptureInvalidated {
		t.Error("both captures are spoilt")
	}
	if all, n := r.Faults(); n != 1 || all[0].Kind != FaultCapture { // the merge
		t.Error(n, r.Fault())
	}
}

func TestRaceWithinACapture(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder})
	ok(t, r.BeginCapture(0, r.n))
	ok(t, r.StreamWaitEvent(0, r.m, eventOn(t, r.Driver, r.n)))
	ok(t, r.Use(0, r.n, r.p, 1024))
	ok(t, r.Use(0, r.m, r.p+1024, 1024))
	wantFault(t, r.Use(0, r.m, r.p+512, 1024), FaultRace)
}

// Captured work runs only when the graph is launched, as often as it is.
func TestGraphWorkRunsAtLaunch(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Lag: 10 * ms})
	ok(t, r.BeginCapture(0, r.n))
	ok(t, r.Use(0, r.n, r.p, 512))
	g := must[*Graph](t)(r.EndCapture(0, r.n))
	ok(t, r.ContextSynchronize(0))
	if r.Now() != 0 {
		t.Errorf("captured work ran: %v", r.Now())
	}
	ok(t, g.Launch(0, r.m))
	wantFault(t, r.Use(0, r.n, r.p, 512), FaultRace) // unordered with the launch on m
	ok(t, r.StreamSynchronize(0, r.m))
	if r.Now() != 10*ms {
		t.Errorf("launched work is done at %v", r.Now())
	}
	ok(t, r.BeginCapture(0, r.n))
	wantCode(t, g.Launch(0, r.n), cuda.ErrStreamCaptureUnsupported)
}

// Memory that a graph uses must be the same memory at every launch.
func TestGraphMemoryIsPinned(t *testing.T) {
	capture := func(t *testing.T) (rig, *Graph) {
		r := newRig(t, Options{Check: CheckUse})
		ok(t, r.BeginCapture(0, r.n))
		ok(t, r.Use(0, r.n, r.p+mib, 2*mib)) // in both chunks
		g := must[*Graph](t)(r.EndCapture(0, r.n))
		ok(t, g.Check())
		return r, g
	}
	t.Run("unmapped", func(t *testing.T) {
		r, g := capture(t)
		ok(t, r.MemUnmap(r.p+2*mib, 2*mib))
		wantFault(t, g.Check(), FaultGraph)
		wantFault(t, g.Launch(0, r.m), FaultGraph)
	})
	t.Run("mapped anew", func(t *testing.T) {
		r, g := capture(t)
		ok(t, r.MemUnmap(r.p+2*mib, 2*mib))
		chunkAt(t, r.Driver, r.p+2*mib, 2*mib)
		wantFault(t, g.Launch(0, r.m), FaultGraph)
	})
	t.Run("as it was", func(t *testing.T) {
		r, g := capture(t)
		chunkAt(t, r.Driver, r.p+8*mib, 2*mib)
		ok(t, g.Launch(0, r.m))
	})
	t.Run("captured on memory that is not there", func(t *testing.T) {
		r, _ := capture(t)
		ok(t, r.BeginCapture(0, r.n))
		wantFault(t, r.Use(0, r.n, r.p+4*mib, 512), FaultUnmapped)
	})
}

func TestDestroyingACapturedStreamSpoilsTheCapture(t *testing.T) {
	r := newRig(t, Options{})
	ok(t, r.BeginCapture(0, r.n))
	ok(t, r.StreamWaitEvent(0, r.m, eventOn(t, r.Driver, r.n)))
	ok(t, r.DestroyStream(0, r.m))
	_, err := r.EndCapture(0, r.n)
	wantCode(t, err, cuda.ErrStreamCaptureInvalidated)
	ok(t, r.ContextSynchronize(0))
}
