package replay

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/trace"
)

// streamsInTurn is a run of n streams that each have one block, one after the other.
func streamsInTurn(n int) *trace.Trace {
	t := &trace.Trace{Streams: []uint64{0}, Pools: []trace.PoolID{{}}, Stacks: []trace.Stack{nil}, FromStart: true}
	for i := range n {
		t.Streams = append(t.Streams, uint64(i+1))
		e := event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 20, Size: 1 << 20, Stream: uint32(i + 1), TimeUS: int64(i)}
		t.Events = append(t.Events, e)
		e.Kind = event.FreeCompleted
		t.Events = append(t.Events, e)
	}
	return t
}

// Streams that come and go end in the replay as in the program: the engine gives up what it has for them, and what it does
// for a request does not grow with their number.
func TestStreamsInTurn(t *testing.T) {
	const n = 3000
	r, err := Run(streamsInTurn(n), Spec{Name: "cistern"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if gone := r.Calls["cuMemAddressFree"]; gone < n-4*lastingStreams {
		t.Errorf("the addresses of %d streams were given back; expected nearly all of %d", gone, n)
	}
	if r.PeakReserved > 1<<30 {
		t.Errorf("%d bytes reserved for a block at a time", r.PeakReserved)
	}
}

// What a replay may do is bounded by the size of the file.
func TestWorkIsBounded(t *testing.T) {
	remapped := &trace.Trace{Streams: []uint64{0}, Pools: []trace.PoolID{{}, {1}}, Stacks: []trace.Stack{nil}, FromStart: true, StoredBytes: 1000}
	for i := range 4000 {
		for _, kind := range []event.Kind{event.Alloc, event.FreeCompleted} {
			remapped.Events = append(remapped.Events, event.Event{Kind: kind, Addr: 1 << 40, Size: maxRequest - 1<<20, Pool: uint32(i % 2), TimeUS: int64(i)})
		}
	}
	plan := NewPlan(remapped)
	_, err := plan.Run(Spec{Name: "cistern"}, Options{Capacity: maxRequest})
	if !errors.Is(err, ErrWork) {
		t.Errorf("%v; expected that it takes too much", err)
	}
	if done := plan.work.done.Load(); done > 2*workBase {
		t.Errorf("%d steps were taken", done)
	}
	remapped.StoredBytes, remapped.Events = 0, remapped.Events[:80]
	if r, err := Run(remapped, Spec{Name: "cistern"}, Options{Capacity: maxRequest}); err != nil || !r.Completed {
		t.Errorf("of a trace that was not read from a file: %v", err)
	}
}

// No request is for more than a device has, whoever asks.
func TestRequestsBeyondDevices(t *testing.T) {
	for _, policy := range []string{"cistern", "torch", "torch:expandable_segments:True", "torch-async", "rmm-pool", "direct"} {
		spec, err := ParseSpec(policy)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(&trace.Trace{Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 30, Size: 16 << 40}, {Kind: event.FreeCompleted, Addr: 1 << 30, Size: 16 << 40}},
			Streams: []uint64{0}, Pools: []trace.PoolID{{}}, FromStart: true}, spec, Options{Unlimited: true})
		if err != nil {
			t.Fatal(err)
		}
		if r.Completed || r.PeakReserved > 1<<40 {
			t.Errorf("%s: completed %v with %d bytes", policy, r.Completed, r.PeakReserved)
		}
	}
}
