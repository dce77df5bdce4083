package analyze

import (
	"context"
	"math"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// A request that no device meets has no smallest capacity, and the search for one ends.
func TestTuneBeyondDevices(t *testing.T) {
	const size = 16 << 40
	tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true,
		Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 20, Size: size}, {Kind: event.FreeCompleted, Addr: 1 << 20, Size: size}}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	replays := 0
	tn, err := Tune(ctx, tr, TuneOptions{Progress: func(int, int) {
		if replays++; replays > 1000 {
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
	tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true,
		Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 20, Size: 512}, {Kind: event.OOM, Size: 1 << 40}}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	replays := 0
	tn, err := Tune(ctx, tr, TuneOptions{Progress: func(int, int) {
		if replays++; replays > 1000 {
			cancel()
		}
	}})
	if err != nil || len(tn.Floors) != 0 {
		t.Errorf("%v, floors %+v; expected none", err, tn)
	}
}

// Times that a file makes up are no circumstance of a replay: no lag is below 0.
func TestReportTimesBeyondAll(t *testing.T) {
	for _, us := range []int64{1 << 53, 3 << 52, math.MaxInt64/1000 + 1, 14e15, math.MaxInt64} {
		tr := &recording.Trace{Source: recording.FormatDriver, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true,
			Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 40, Size: 1 << 20, TimeUS: 1}, {Kind: event.OOM, Addr: 1 << 30, Size: 1 << 20, TimeUS: us}}}
		x := reportOn(t, tr, RemedyOptions{Capacity: 1 << 30}).Failures[0]
		if len(x.Remedies) == 0 || x.Remedies[0].Odds.Replays < replay.FewDraws {
			t.Errorf("at %d: %+v; expected a remedy that was tried in other circumstances", us, x.Remedies)
		}
	}
}
