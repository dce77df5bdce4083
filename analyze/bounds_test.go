package analyze

import (
	"context"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/trace"
)

// A request that no device meets has no smallest capacity, and the search for one ends.
func TestTuneBeyondDevices(t *testing.T) {
	const size = 16 << 40
	tr := &trace.Trace{Streams: []uint64{0}, Pools: []trace.PoolID{{}}, Stacks: []trace.Stack{nil}, FromStart: true,
		Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 20, Size: size}, {Kind: event.FreeCompleted, Addr: 1 << 20, Size: size}}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tn, err := Tune(ctx, tr, TuneOptions{Progress: func(done, _ int) {
		if done > 1000 {
			cancel()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(tn.Floors) != 0 {
		t.Errorf("floors %+v; expected none", tn.Floors)
	}
}

// Nor has a request that failed when it was recorded, and would on any device.
func TestTuneFailureBeyondDevices(t *testing.T) {
	tr := &trace.Trace{Streams: []uint64{0}, Pools: []trace.PoolID{{}}, Stacks: []trace.Stack{nil}, FromStart: true,
		Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 20, Size: 512}, {Kind: event.OOM, Size: 1 << 40}}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tn, err := Tune(ctx, tr, TuneOptions{Progress: func(done, _ int) {
		if done > 1000 {
			cancel()
		}
	}})
	if err != nil || len(tn.Floors) != 0 {
		t.Errorf("%v, floors %+v; expected none", err, tn)
	}
}
