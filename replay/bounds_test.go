package replay

import (
	"errors"
	"runtime"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// streamsInTurn is a run of n streams that each have one block, one after the other.
func streamsInTurn(n int) *recording.Trace {
	t := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
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
	remapped := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}, {1}}, Stacks: []recording.Stack{nil}, FromStart: true, StoredBytes: 1000}
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

// No request is for more than a device has, under any policy.
func TestRequestsBeyondDevices(t *testing.T) {
	for _, policy := range []string{"cistern", "torch", "torch:expandable_segments:True", "torch-async", "rmm-pool", "direct"} {
		spec, err := ParseSpec(policy)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(&recording.Trace{Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 30, Size: 16 << 40}, {Kind: event.FreeCompleted, Addr: 1 << 30, Size: 16 << 40}},
			Streams: []uint64{0}, Pools: []recording.PoolID{{}}, FromStart: true}, spec, Options{Unlimited: true})
		if err != nil {
			t.Fatal(err)
		}
		if r.Completed || r.PeakReserved > 1<<40 {
			t.Errorf("%s: completed %v with %d bytes", policy, r.Completed, r.PeakReserved)
		}
	}
}

// What the engine looks at where it calls the driver is work too: all mappings.
func TestMappingsAreWork(t *testing.T) {
	run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
	for i := range 102 {
		size := uint64(64 << 20)
		if i < 2 {
			size = 60 << 30
		}
		run.Events = append(run.Events, event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 40, Size: size, TimeUS: int64(i)})
	}
	p, _, err := newEngine(&Env{Plan: NewPlan(run), Note: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	e := p.(*engine)
	var mappings int
	steps := int64(0)
	for i := range run.Events {
		if _, err := e.Alloc(i, run.Events[i].Size, 0, 0); err != nil {
			t.Fatal(err)
		}
		if n := e.steps(); i < 2 {
			mappings = e.drv.Leaks().Mappings
		} else {
			steps += n
		}
	}
	if want := int64(100 * mappings / 16); mappings < 1000 || steps < want {
		t.Errorf("100 requests beside %d mappings take %d steps; expected at least %d", mappings, steps, want)
	}
}

// atOneAddress is the model of PyTorch over a record in which two segments lie at one address.
func atOneAddress(t *testing.T, kind event.Kind, size uint64, conf string) *torch {
	run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
	for i := range 8 {
		run.Events = append(run.Events, event.Event{Kind: event.Alloc, Addr: uint64(i + 1), Size: size})
	}
	run.Events[0].Kind, run.Events[0].Addr = kind, 1<<40
	run.Events[1].Kind, run.Events[1].Addr = kind, 1<<40
	c, err := ParseTorchConf(conf)
	if err != nil {
		t.Fatal(err)
	}
	plan := NewPlan(run)
	plan.PeakLive = 0 // a range is made for the request alone
	m := newTorch(&Env{Plan: plan, verify: newVerifier(plan)}, c)
	m.env.verify.expect(len(run.Events))
	return m
}

// A file may say that several segments lie at one address: the model tells their free blocks apart.
func TestSegmentsAtOneAddress(t *testing.T) {
	const size, part = 20 << 20, 12 << 20
	m := atOneAddress(t, event.SegmentAlloc, size, "")
	var addr [6]uint64
	alloc := func(b int, size uint64) {
		t.Helper()
		var err error
		if addr[b], err = m.Alloc(b, size, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	free := func(b ...int) {
		t.Helper()
		for _, b := range b {
			if err := m.Free(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	alloc(0, size)
	alloc(1, size)
	if addr[0] != addr[1] {
		t.Fatalf("segments at %#x and %#x", addr[0], addr[1])
	}
	free(0, 1)
	alloc(2, part) // each leaves a rest, and these lie at one address too
	alloc(3, part)
	free(2)
	alloc(4, size-part) // the rest beside 3
	free(3, 4)
	if n := m.pools[1].free[0].len(); n != 2 || m.reserved != 2*size || m.allocated != 0 {
		t.Errorf("%d free blocks, %d bytes reserved and %d allocated; expected two whole segments", n, m.reserved, m.allocated)
	}
}

// The same of the unmapped ends of expandable segments.
func TestRangesAtOneAddress(t *testing.T) {
	const size = 1 << 39 // a range has no room for two
	m := atOneAddress(t, event.SegmentMap, size, "expandable_segments:True")
	for b := range 2 {
		if _, err := m.Alloc(b, size, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	for b, then := range []uint64{1 << 30, 0} {
		if err := errors.Join(m.Free(b), m.EmptyCache()); err != nil {
			t.Fatal(err)
		}
		if then == 0 {
			continue
		}
		if at, err := m.Alloc(2, then, 0, 0); err != nil || at != 1<<40+size {
			t.Fatalf("%v, placed at %#x; expected the end of the range that is left", err, at)
		}
	}
	if err := errors.Join(m.Free(2), m.EmptyCache()); err != nil {
		t.Fatal(err)
	}
	if n := len(m.pools[1].unmapped[0]); n != 0 || m.reserved != 0 {
		t.Errorf("%d ranges with %d bytes are left", n, m.reserved)
	}
}

// A record may have memory given back for a request that the model meets from its cache. Blocks that are free late are freed
// then, beside the one that was found.
func TestFreeLateBesideFound(t *testing.T) {
	const large, rest = 8 << 20, 12 << 20
	run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
	run.Events = []event.Event{{Kind: event.SegmentFree, Size: large}, {Kind: event.Alloc, Addr: 1, Size: large}, {Kind: event.Alloc, Addr: 2, Size: rest}, {Kind: event.Alloc, Addr: 3, Size: rest}}
	plan := NewPlan(run)
	m := newTorch(&Env{Plan: plan, verify: newVerifier(plan)}, TorchConf{MaxSplit: noMaxSplit, LargeSegment: large + rest})
	alloc := func(b int, size uint64) {
		if _, err := m.Alloc(b, size, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	alloc(0, large)
	alloc(1, rest)
	m.FreeRequested(0)
	if err := errors.Join(m.Free(1), m.Free(0)); err != nil { // 0 is freed later than it was given back
		t.Fatal(err)
	}
	m.env.verify.expect(1)
	alloc(2, rest)
	if n := m.pools[1].free[0].len(); n != 1 || m.allocated != rest || m.reserved != large+rest {
		t.Errorf("%d free blocks, %d bytes allocated and %d reserved; expected one beside the block that was found", n, m.allocated, m.reserved)
	}
}

// Plans of one file share what may be done, and searches leave a part of it to other replays.
func TestWorkIsShared(t *testing.T) {
	run := streamsInTurn(1000)
	run.StoredBytes = 1
	w := NewWork(run.StoredBytes)
	search := func() (runs int) {
		for plan := NewPlan(run); ; runs++ {
			if _, err := plan.Run(Spec{Name: "torch"}, Options{Work: w, Search: true}); errors.Is(err, ErrWork) {
				return runs
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	if first, second := search(), search(); first == 0 || second != 0 {
		t.Errorf("searches of %d and %d runs; expected that the first takes it all", first, second)
	}
	if done := w.done.Load(); done > workBase {
		t.Errorf("searches took %d steps of %d", done, workBase)
	}
	if _, err := NewPlan(run).Run(Spec{Name: "torch"}, Options{Work: w}); err != nil {
		t.Errorf("a run beside the searches: %v", err)
	}
}

// The order checker looks at each chunk that work uses, whatever its size: that is work too.
func TestUsesAreWork(t *testing.T) {
	run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
	for i := range 200 {
		run.Events = append(run.Events, event.Event{Kind: event.Alloc + event.Kind(i%2)*(event.FreeCompleted-event.Alloc), Addr: 1 << 40, Size: 1 << 30, TimeUS: int64(i)})
	}
	plan := NewPlan(run)
	plan.work.stored = 1
	if _, err := plan.Run(Spec{Name: "cistern", Conf: "chunk:2MiB", HasConf: true}, Options{}); err != nil {
		t.Fatal(err)
	}
	if done, want := plan.work.done.Load(), int64(200*512/piecesPerStep); done < want {
		t.Errorf("200 uses of 512 chunks are %d steps; expected at least %d", done, want)
	}
}

// A simulated GPU has about as many chunks as a real one at most, whatever a record says was allocated.
func TestChunksAreBounded(t *testing.T) {
	const mostChunks = 150_000
	for _, conf := range []string{"", "chunk:2MiB", "chunk:8MiB"} {
		run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
		for i := range 40 {
			run.Events = append(run.Events, event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 42, Size: 1 << 36, TimeUS: int64(i)})
		}
		p, _, err := newEngine(&Env{Plan: NewPlan(run), Spec: Spec{Name: "cistern", Conf: conf, HasConf: true}, Note: func(string) {}})
		if err != nil {
			t.Fatal(err)
		}
		e := p.(*engine)
		for i := range run.Events {
			if _, err = e.Alloc(i, run.Events[i].Size, 0, 0); err != nil {
				break
			}
		}
		if n := e.drv.Leaks().Mappings; n > mostChunks || !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%q: %d chunks, %v; expected that at most %d are made", conf, n, err, mostChunks)
		}
	}
}

// Few replays of a small file run at a time, however many processors there are, since each has memory of its own.
func TestSmallFilesAtOnce(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	for stored, want := range map[int64]int{0: 16, 1: 2, smallFile: 2, smallFile + 4096: 3, 1 << 20: 16, 1 << 60: 16} {
		run := streamsInTurn(1)
		run.StoredBytes = stored
		if n := NewPlan(run).AtOnce(); n != want {
			t.Errorf("%d replays at a time of a file of %d bytes; expected %d", n, stored, want)
		}
	}
}
