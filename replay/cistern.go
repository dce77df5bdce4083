package replay

import (
	"cmp"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

func init() { Register("cistern", newEngine) }

// engine is policy "cistern": the engine itself, through its public API, over the simulated GPU. Every block counts as
// used by work on its stream when it is handed out and when it is given back, and the simulator checks the order of
// those uses: a replay in which the engine breaks a rule ends with the fault.
type engine struct {
	env     *Env
	drv     *sim.Driver
	alloc   *cistern.Allocator
	dev     cistern.Device
	streams []cistern.Stream // nil before the first use and after the last one of streams that come and go
	uses    []int            // by stream: allocations and frees to come; nil where all streams last
	pools   []cistern.Pool
	blocks  []engineBlock // by block number
	drained []event.Event

	released int64                // steps of releases, of pools and of free memory, since steps were last asked for
	arenas   map[streamOfPool]int // blocks that are out
	inUse    int                  // of arenas
	called   uint64               // steps of driver calls when they were last asked for
	pieces   uint64               // and of memory that work uses

	limited bool          // free memory is
	looked  time.Duration // when the limit was last looked after
	failed  error         // of that
	started time.Duration // what starting took of the driver's time
}

type streamOfPool struct{ stream, pool uint32 }

// lastingStreams are as many as PyTorch has of its own on a device: 32 of each priority, and the default one. They last as
// long as the program. Where a run has more streams, streams came and went: each exists from its first use to its last, and
// the engine is not promised more.
const lastingStreams = 4*32 + 1

// What the simulated GPU has at most: as the engine and the simulator have about 700 bytes for each chunk, chunksOfLargest of the
// largest that the settings allow, but as much as any GPU has.
const (
	chunksOfLargest = 1 << 16
	anyGPU          = 288 << 30
)

type engineBlock struct {
	addr   cuda.Ptr
	size   uint64
	stream uint32
	pool   uint32
}

func newEngine(env *Env) (Policy, string, error) {
	return newEngineOver(env, func(drv cuda.Driver) cuda.Driver { return drv })
}

// newEngineOver is newEngine for an engine that calls the driver through what observe returns.
func newEngineOver(env *Env, observe func(cuda.Driver) cuda.Driver) (Policy, string, error) {
	opts, err := cistern.ParseOptions(env.Spec.Conf)
	if err != nil {
		return nil, "", fmt.Errorf("cistern: %w", err)
	}
	if opts.Driver != "" {
		return nil, "", fmt.Errorf("cistern: setting driver:%s: a replay has a simulated device of its own", opts.Driver)
	}
	conf := opts.String()
	if opts.Upstream != "" { // of the machine that was recorded: nothing of it is loaded here
		opts.Upstream, opts.Backend = "", cistern.BackendMalloc
	}
	if env.Capacity != 0 && (opts.Limit == 0 || env.Capacity < opts.Limit) {
		opts.Limit = env.Capacity
	}
	e := &engine{env: env, blocks: make([]engineBlock, env.Plan.Blocks), arenas: map[streamOfPool]int{}}
	needed := min(2*env.Plan.PeakLive, max(anyGPU, chunksOfLargest*opts.WithDefaults().ChunkMax), 2*maxLive)
	device := max(sim.DefaultCapacity, needed)
	if env.Device > 0 {
		device = max(env.Device, env.Capacity)
		if env.Capacity == 0 {
			device = max(device, needed)
		}
	}
	e.drv = sim.New(sim.Options{
		Capacity: device,
		Lag:      env.GPULag, Busy: true, Check: sim.CheckOrder,
	})
	if e.alloc, err = cistern.New(observe(e.drv), opts); err != nil {
		return nil, "", err
	}
	e.alloc.CatchStacks(nil) // the settings may be those of a program, but the caller here is a file
	e.alloc.KeepStacks(false)
	if e.dev, err = e.alloc.Device(0); err != nil {
		return nil, "", err
	}
	e.streams = make([]cistern.Stream, env.Plan.numStreams())
	if len(e.streams) > lastingStreams {
		e.uses = env.Plan.streamUses()
	}
	for i := range e.streams {
		if e.uses != nil {
			break
		}
		if err := e.makeStream(uint32(i), cistern.StreamDurable); err != nil {
			return nil, "", err
		}
	}
	e.pools = make([]cistern.Pool, len(env.Plan.Pools))
	e.pools[0] = e.dev.DefaultPool()
	if env.Emit != nil {
		e.dev.SetHistory(1 << 16)
	}
	if e.limited = opts.CacheLimit > 0; e.limited {
		e.dev.SetHistoryClock(func() int64 { return e.drv.Now().Microseconds() })
	}
	e.drv.ResetCalls() // starting costs every allocator the same
	e.started = e.drv.Spent()
	return e, conf, nil
}

// pool is the engine's pool for one of the plan's, made when first used.
func (e *engine) pool(i uint32) (cistern.Pool, error) {
	for int(i) >= len(e.pools) {
		e.pools = append(e.pools, cistern.Pool{})
	}
	if e.pools[i] == (cistern.Pool{}) {
		p, err := e.dev.NewPool(cistern.PoolID{1 << 63, uint64(i)})
		if err != nil {
			return cistern.Pool{}, err
		}
		e.pools[i] = p
	}
	return e.pools[i], nil
}

func (e *engine) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	p, err := e.pool(pool)
	if err != nil {
		return 0, err
	}
	if int(stream) >= len(e.streams) {
		return 0, fmt.Errorf("stream %d of %d", stream, len(e.streams))
	}
	if e.streams[stream] == (cistern.Stream{}) {
		if err := e.makeStream(stream); err != nil {
			return 0, err
		}
	}
	st := e.streams[stream]
	addr, err := p.Alloc(size, st)
	e.drain()
	if err != nil {
		e.used(stream, 2) // it is not freed
		return 0, err
	}
	e.used(stream, 1)
	e.blocks[b] = engineBlock{addr, size, stream, pool}
	e.out(streamOfPool{stream, pool}, 1)
	return uint64(addr), e.drv.Use(0, st.Handle(), addr, size)
}

// out notes that a block was handed out, or came back.
func (e *engine) out(at streamOfPool, n int) {
	before := e.arenas[at]
	if e.arenas[at] = before + n; before == 0 {
		e.inUse++
	} else if before+n == 0 {
		e.inUse--
	}
}

// mappingsPerStep is how many mappings the engine looks at in the time of a step, and piecesPerStep how many chunks that work
// uses the order checker does.
const (
	mappingsPerStep = 4
	piecesPerStep   = 4
)

// stepsPerRelease is what the release of a pool takes for each mapping there is: at most so many released pools have memory that
// the GPU still uses, and each release and request looks at all of them.
const stepsPerRelease = 16

// steps is stepper.steps. The engine takes four times as long as a model for an event, eight times for a call of the driver
// and half of that where a call asks for the state of an event. What it does outside its hot path, where it calls the driver,
// looks at all mappings that are free or stale, and at all pairs of stream and pool that have memory; of streams that come and
// go it gives up what it has for them.
func (e *engine) steps() int64 {
	calls, queries := e.drv.CallCount()
	calls = 8*calls - 4*queries
	pieces := e.drv.UseCount()
	n := 3 + int64(calls-e.called) + int64(pieces-e.pieces)/piecesPerStep + e.released
	arenas := len(e.arenas)
	if e.uses != nil {
		arenas = min(arenas, lastingStreams+2*e.inUse)
	}
	if calls != e.called {
		n += int64(e.drv.Leaks().Mappings)/mappingsPerStep + 3*int64(arenas)
	}
	e.called, e.pieces, e.released = calls, pieces, 0
	return n + int64(arenas)
}

func (e *engine) FreeRequested(int) {}

func (e *engine) Free(b int) error {
	x := e.blocks[b]
	e.blocks[b] = engineBlock{}
	if x.addr == 0 {
		return nil
	}
	e.out(streamOfPool{x.stream, x.pool}, -1)
	if err := e.drv.Use(0, e.streams[x.stream].Handle(), x.addr, x.size); err != nil {
		return err
	}
	err := e.alloc.Free(x.addr)
	e.used(x.stream, 1)
	e.drain()
	return err
}

// makeStream makes a stream of the record's.
func (e *engine) makeStream(i uint32, promise ...cistern.StreamOption) error {
	h := cuda.StreamNull
	if recorded := e.env.Plan.Trace.Streams; int(i) < len(recorded) && recorded[i] != 0 {
		h = e.drv.NewStreamNonBlocking(0) // as PyTorch's streams are
	}
	st, err := e.dev.Stream(h, promise...)
	e.streams[i] = st
	return err
}

// used notes n uses of a stream, which ends with the last one.
func (e *engine) used(i uint32, n int) {
	if e.uses == nil {
		return
	}
	if e.uses[i] -= n; e.uses[i] > 0 || e.streams[i] == (cistern.Stream{}) || e.streams[i].Handle() == cuda.StreamNull {
		return
	}
	e.drv.DestroyStream(0, e.streams[i].Handle())
	e.streams[i] = cistern.Stream{}
}

// drain passes the engine's segment events on.
func (e *engine) drain() {
	if e.env.Emit == nil {
		return
	}
	e.drained = e.dev.DrainHistory(e.drained[:0])
	for _, x := range e.drained {
		switch x.Kind {
		case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap:
			x.Pool = e.planPool(x.Pool)
			e.env.Emit(x)
		}
	}
}

// planPool is the plan's number of one of the engine's pools.
func (e *engine) planPool(number uint32) uint32 {
	id := e.dev.Pools()[number]
	if id == (cistern.PoolID{}) {
		return 0
	}
	return uint32(id[1])
}

func (e *engine) Advance(us int64) {
	now := time.Duration(us) * time.Microsecond
	if e.limited {
		e.lookAfterLimit(now)
	}
	e.drv.AdvanceTo(now)
}

// limitEvery is how often the C library looks after the limit of free memory, beside what requests and frees do. Where nothing
// happens for long it makes no difference how often: after limitOften times it is done at longer and longer distances.
const (
	limitEvery = time.Second
	limitOften = 20
)

// lookAfterLimit does what the library does up to a time.
func (e *engine) lookAfterLimit(now time.Duration) {
	every := limitEvery
	for n := 1; e.looked+every <= now && e.failed == nil; n++ {
		e.looked += every
		e.drv.AdvanceTo(e.looked)
		e.env.mean.until(e.looked.Microseconds(), e.Reserved())
		_, e.failed = e.dev.ReleaseUnused()
		e.released += int64(len(e.arenas))
		e.drain()
		if n >= limitOften {
			every *= 2
		}
	}
}

// Reserved is Policy.Reserved: all memory is the device's.
func (e *engine) Reserved() uint64 { return e.drv.ReservedBytes(0) }

// Spent is Policy.Spent.
func (e *engine) Spent() time.Duration { return e.drv.Spent() - e.started }

func (e *engine) Usage() (allocated, reserved uint64) { return e.dev.Usage() }

func (e *engine) Stats() Stats {
	s, c := e.dev.Stats(), e.drv.Calls()
	out := Stats{
		PeakReserved: uint64(s.Reserved.All.Peak),
		Calls:        map[string]int64{},
		DriverTime:   c.Time,
		SyncWait:     c.Waited,
		StreamSyncs:  int64(c.StreamSyncs + c.EventSyncs),
		DeviceSyncs:  int64(c.DeviceSyncs),
		Retries:      s.Retries,
		OOMs:         s.OOMs,
	}
	for name, x := range c.Calls {
		out.Calls[name] = int64(x.Count)
	}
	return out
}

// EmptyCache is Releaser.EmptyCache.
func (e *engine) EmptyCache() error {
	err := e.dev.DefaultPool().Trim()
	e.drain()
	return err
}

// ReleasePool is Releaser.ReleasePool.
func (e *engine) ReleasePool(pool uint32) error {
	p, err := e.pool(pool)
	if err != nil {
		return err
	}
	err = p.Release()
	e.pools[pool] = cistern.Pool{}
	e.released += stepsPerRelease * int64(e.drv.Leaks().Mappings)
	e.drain()
	return err
}

// Segments is Snapshotter.Segments.
func (e *engine) Segments() []recording.Segment {
	var out []recording.Segment
	for _, g := range e.dev.Snapshot() {
		s := recording.Segment{Addr: g.Addr, Size: g.Size, Pool: e.planPool(g.Number), Large: g.Large, Expandable: g.Chunks != nil}
		if g.Stream > 0 {
			s.Stream = uint32(g.Stream)
		}
		for _, b := range g.Blocks {
			x := recording.Block{Addr: b.Addr, Size: b.Size, Requested: b.Requested, Stream: s.Stream, Pool: s.Pool}
			switch b.State {
			case cistern.BlockUsed:
				x.State = recording.Active
			case cistern.BlockPending:
				x.State = recording.PendingFree
			}
			s.Blocks = append(s.Blocks, x)
		}
		out = append(out, s)
	}
	return out
}

// Close ends the replay with the first fault that the simulator found.
func (e *engine) Close() error { return cmp.Or(e.drv.Fault(), e.failed) }
