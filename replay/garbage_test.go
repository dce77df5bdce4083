package replay

import (
	"math/rand/v2"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// TestGarbageTraces replays traces that no allocator made: frees of nothing, blocks over one another, segments that
// overlap, sizes beyond reason. Every policy ends, with a result or an error, and never panics.
func TestGarbageTraces(t *testing.T) {
	kinds := []event.Kind{event.Alloc, event.Alloc, event.Alloc, event.FreeRequested, event.FreeCompleted, event.FreeCompleted,
		event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap, event.OOM, event.Snapshot, event.Annotation}
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		num := func() uint64 {
			switch rnd.IntN(8) {
			case 0:
				return rnd.Uint64()
			case 1:
				return 0
			case 2:
				return ^uint64(0) - rnd.Uint64N(1000)
			}
			return rnd.Uint64N(40) * mib / 2
		}
		tr := &recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0, 9, 4}, Pools: []recording.PoolID{{}, {0, 1}}, FromStart: seed%3 != 0}
		tr.Settings = recording.Settings{Known: true, Expandable: seed%2 == 0, MaxSplitSize: -1, GCThreshold: float64(seed%5) / 5}
		for range rnd.IntN(400) {
			tr.Events = append(tr.Events, event.Event{Kind: kinds[rnd.IntN(len(kinds))], Addr: num(), Size: num(),
				Stream: uint32(rnd.IntN(3)), Pool: uint32(rnd.IntN(2)), TimeUS: int64(rnd.Uint64N(1000)) - 500, Handle: rnd.Uint64N(2)})
		}
		if seed%3 == 0 {
			for range rnd.IntN(20) {
				tr.Initial = append(tr.Initial, recording.Block{Addr: num(), Size: num(), Requested: num(), Stream: uint32(rnd.IntN(3))})
				tr.InitialSegments = append(tr.InitialSegments, recording.Segment{Addr: num(), Size: num(), Stream: uint32(rnd.IntN(3)),
					Pool: uint32(rnd.IntN(2)), Large: rnd.IntN(2) == 0, Expandable: seed%2 == 0})
			}
		}
		for _, s := range append([]string{"torch"}, modelled...) {
			spec, err := ParseSpec(s)
			if err != nil {
				t.Fatal(err)
			}
			for _, capacity := range []uint64{0, 100 * mib} {
				func() {
					defer func() {
						if r := recover(); r != nil {
							t.Errorf("seed %d, %s at %d: panic: %v", seed, s, capacity, r)
							panic(r)
						}
					}()
					_, _ = Run(tr, spec, Options{Capacity: capacity, Verify: true, Record: &Recording{}, Samples: 10})
				}()
			}
		}
	}
}
