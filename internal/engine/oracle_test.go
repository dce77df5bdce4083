package engine_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Random sequences of operations against the oracle in world_test.go. A sequence is known by its seed and is run under
// several configurations. CISTERN_SEED runs one seed again; CISTERN_SOAK says for how long new seeds are tried.

var steps = flag.Int("steps", 400, "operations of a random sequence")

// configs are the configurations that every sequence is run under.
func configs(seed uint64) map[string]setup {
	rng := rand.New(rand.NewPCG(seed, 99))
	lag := []time.Duration{0, 20 * time.Millisecond, 500 * time.Millisecond}[rng.IntN(3)]
	base := setup{devices: 1 + rng.IntN(2), capacity: uint64(256+rng.IntN(1024)) * mib, lag: lag, sharing: rng.IntN(2) == 0}
	out := map[string]setup{}
	add := func(name string, change func(*config.Options)) {
		c := base
		change(&c.opts)
		out[name] = c
	}
	add("default", func(o *config.Options) {})
	add("chunk:2MiB", func(o *config.Options) { o.ChunkMax = 2 * mib })
	add("ready", func(o *config.Options) { o.CrossStream = config.CrossStreamReady; o.ChunkMax = 8 * mib })
	add("malloc", func(o *config.Options) { o.Backend = config.BackendMalloc })
	add("stages", func(o *config.Options) {
		o.Stages = memory.StageGrow | memory.Stages(rng.Uint32())&memory.AllStages
		if rng.IntN(2) == 0 {
			o.Backend = config.BackendMalloc
		}
	})
	add("single", func(o *config.Options) { o.SingleHandle = true })
	add("history", func(o *config.Options) { o.History = 50 })
	add("limited", func(o *config.Options) {
		o.CacheLimit = 1 + rng.Uint64N(4*mib)
		o.CacheDecay = []time.Duration{-1, 10 * time.Millisecond, time.Second}[rng.IntN(3)]
		if rng.IntN(4) == 0 {
			o.Backend = config.BackendMalloc
		}
	})
	add("upstream", func(o *config.Options) { o.Upstream = []string{"device", "virtual"}[rng.IntN(2)] })
	for _, name := range []string{"default", "malloc", "stages", "limited", "upstream"} {
		c := out[name]
		c.magazines = true
		out["magazine of "+name] = c
	}
	for _, name := range []string{"default", "malloc", "ready", "history", "upstream"} {
		c := out[name]
		c.kinds = true
		out["kinds with "+name] = c
	}
	for _, name := range []string{"default", "malloc", "magazine of default", "kinds with history"} {
		c := out[name]
		c.stacks = true
		out["stacks with "+name] = c
	}
	for _, name := range []string{"default", "malloc", "single", "ready"} {
		c := out[name]
		c.observed = true
		out["observers of "+name] = c
	}
	for _, name := range []string{"default", "ready", "magazine of default", "observers of default"} {
		out["tight with "+name] = tight(out[name])
	}
	return out
}

func TestRandom(t *testing.T) {
	seen := map[string]int{}
	want := []string{"alloc", "oom", "share", "given", "freed without its stream", "double free", "foreign", "graph launched",
		"stream destroyed", "pool released", "trim", "limit", "upstream", "restored", "restore failed", "met by magazine",
		"kept by magazine", "registered", "host order", "stack held", "stacks forgotten", "spilled", "stream forgotten", "arena inherited", "pool limit", "upstream managed", "upstream async", "borrowed", "given back", "unused released", "upstream fails"}
	for seed := range seeds(t, quick(5, 1), seen, want) {
		for name, cfg := range configs(seed) {
			w := newWorld(t, cfg, fmt.Sprintf("CISTERN_SEED=%d, %s, %s lag %v", seed, name, cfg.opts, cfg.lag))
			w.play(seed, *steps)
			w.end()
			for k, n := range w.seen {
				seen[k] += n
			}
			if w.c != nil {
				seen["met by magazine"] += w.c.met
				seen["kept by magazine"] += w.c.kept
			}
			seen["sequences"]++
		}
	}
	t.Log(seen)
}

// play runs n random operations. Each step has random numbers of its own, so that a sequence stays much the same
// under another configuration, where some requests fail.
func (w *world) play(seed uint64, n int) {
	defer func() {
		if x := recover(); x != nil {
			w.t.Logf("%s, step %d", w.what, w.step)
			panic(x)
		}
	}()
	for _, d := range w.devs {
		d.dev.OnOutOfMemory(func(uint64) bool { return w.callback(d) })
	}
	for w.step = 0; w.step < n; w.step++ {
		w.rng = rand.New(rand.NewPCG(seed, uint64(w.step)))
		if w.cfg.stacks && (w.step == 0 || w.chance(2)) {
			w.toggleStacks()
		}
		d := pick(w, w.devs)
		before := d.sources.own(w.drv)
		if w.cfg.tight {
			w.opTight(d)
		} else {
			w.op(d)
		}
		if held := d.sources.own(w.drv); held > before && d.limit != 0 && held > d.limit {
			w.fail("device %d: grew to %d bytes over the limit of %d", d.id, held, d.limit)
		}
		w.raise(d)
		if w.chance(20) {
			for _, d := range w.devs {
				w.check(d)
			}
		}
	}
}

func (w *world) op(d *worldDevice) {
	switch n := w.rng.IntN(1000); {
	case n < 400:
		size := w.size()
		if w.cfg.magazines && w.chance(50) {
			size = max(w.freed, 1) // the same again, as temporaries are
		}
		w.alloc(d, size, pick(w, d.streams))
	case n < 740:
		if len(d.blocks) > 0 {
			w.free(d, w.rng.IntN(len(d.blocks)))
		}
	case n < 780:
		if len(d.blocks) > 0 {
			w.share(d, pick(w, d.blocks), pick(w, d.streams))
		}
	case n < 790:
		o := d
		if w.chance(20) {
			o = pick(w, w.devs)
		}
		to := pick(w, o.streams)
		if len(d.streams) < 8 && w.chance(50) { // memory whose stream goes before it does
			w.newStream(d)
			s := d.streams[len(d.streams)-1]
			for range 1 + w.rng.IntN(3) {
				if b := w.alloc(d, w.size(), s); b != nil {
					w.give(d, b, o, to)
				}
			}
			w.destroyStream(d, s)
		} else if len(d.blocks) > 0 {
			w.give(d, pick(w, d.blocks), o, to)
		}
	case n < 800:
		if len(d.blocks) > 0 {
			w.use(d, pick(w, d.blocks))
		}
	case n < 830:
		w.drv.Advance(time.Duration(w.rng.Int64N(int64(w.cfg.lag)*2 + 1000)))
	case n < 840:
		w.sync(d)
	case n < 860:
		w.invalid(d)
	case n < 875:
		if len(d.streams) < 8 {
			w.newStream(d)
		}
	case n < 890:
		w.destroyStream(d, pick(w, d.streams))
		w.forgetStreams(d)
	case n < 905:
		w.newPool(d)
	case n < 915:
		w.route(d)
	case n < 930:
		w.releasePool(d)
	case n < 945:
		w.beginCapture(d)
	case n < 960:
		w.endCapture(d)
	case n < 970:
		w.launch(d)
	case n < 974:
		w.trim(d)
	case n < 982:
		w.restore(d)
	case n < 985:
		w.setLimit(d, [3]uint64{0, w.drv.ReservedBytes(d.id) + w.rng.Uint64N(64*mib), w.rng.Uint64N(w.cfg.capacity) + 1}[w.rng.IntN(3)])
		if w.cfg.kinds && len(d.pools) > 0 {
			w.setPoolLimit(pick(w, d.pools), uint64(w.rng.IntN(3))*w.rng.Uint64N(50*mib))
		}
	case n < 990:
		w.drv.SetOutside(d.id, w.rng.Uint64N(w.cfg.capacity/2))
		if w.chance(70) {
			w.drv.SetOutside(d.id, 0)
		}
	case n < 993:
		d.dev.History.SetLimit(w.rng.IntN(2) * 20)
	case n < 996:
		w.check(d)
		d.dev.Views.ResetPeaks()
		w.drv.ResetPeak(d.id)
		d.peak, d.inactive, d.failed, d.most = d.now, 0, false, 0
		d.sources.peak.Store(d.sources.bytes.Load())
		w.raise(d)
	default:
		// A burst that empties the program.
		for len(d.blocks) > w.rng.IntN(5) {
			w.free(d, w.rng.IntN(len(d.blocks)))
		}
	}
}

func (w *world) setLimit(d *worldDevice, limit uint64) {
	d.limit = limit
	d.dev.SetLimit(limit)
	if d.dev.Limit() != limit {
		w.fail("Limit() = %d, want %d", d.dev.Limit(), limit)
	}
	w.seen["limit"]++
}

// callback is another library that can give memory back.
func (w *world) callback(d *worldDevice) bool {
	w.seen["callback"]++
	if len(d.blocks) == 0 || w.chance(50) {
		return false
	}
	w.raise(d)
	w.free(d, w.rng.IntN(len(d.blocks)))
	return true
}

func (w *world) sync(d *worldDevice) {
	s := pick(w, d.streams)
	if s.capture != nil || !d.mayQueue(s) {
		return
	}
	if err := w.drv.StreamSynchronize(d.id, s.handle); err != nil {
		w.fail("StreamSynchronize: %v", err)
	}
}

// invalid makes requests that must fail, or do nothing, alike under every configuration.
func (w *world) invalid(d *worldDevice) {
	s := pick(w, d.streams)
	if p, err := d.dev.Alloc(0, s.st); p != 0 || err != nil {
		w.fail("Alloc(0) = %#x, %v", p, err)
	}
	if err := w.a.Free(0); err != nil {
		w.fail("Free(0): %v", err)
	}
	if err := w.a.FreeOn(0, s.st); err != nil {
		w.fail("FreeOn(0): %v", err)
	}
	if err := w.a.RecordStream(0, s.st); err != nil {
		w.fail("RecordStream(0): %v", err)
	}
	for _, size := range []uint64{^uint64(0), ^uint64(0) - 511, 1 << 63, 1<<46 + 1, 1 << 46, 1 << 45, w.cfg.capacity + 1} {
		if w.cfg.kinds && size <= 1<<46 {
			continue // there is other memory than the device's
		}
		if b := w.alloc(d, size, s); b != nil {
			w.fail("Alloc(%d) succeeded on a device of %d bytes", size, w.cfg.capacity)
		}
	}
	unknown := []cuda.Ptr{1, 511, cuda.Ptr(w.rng.Uint64()), cuda.Ptr(w.rng.Uint64N(1 << 47)), ^cuda.Ptr(0), 1 << 48}
	if len(d.blocks) > 0 {
		b := pick(w, d.blocks)
		unknown = append(unknown, b.p+1, b.p+512, b.p-512, b.p+cuda.Ptr(b.rounded), b.p+1<<32)
	}
	for _, p := range unknown {
		if w.live.has(uint64(p)) {
			continue
		}
		if err := w.a.Free(p); !errors.Is(err, memory.ErrUnknownPointer) {
			w.fail("Free(%#x), which was never handed out: %v", p, err)
		}
		if err := w.a.FreeOn(p, s.st); !errors.Is(err, memory.ErrUnknownPointer) {
			w.fail("FreeOn(%#x), which was never handed out: %v", p, err)
		}
		if err := w.a.RecordStream(p, s.st); !errors.Is(err, memory.ErrUnknownPointer) {
			w.fail("RecordStream(%#x), which was never handed out: %v", p, err)
		}
		if _, err := w.a.Base(p); !errors.Is(err, memory.ErrUnknownPointer) {
			w.fail("Base(%#x), which was never handed out: %v", p, err)
		}
	}
	if len(w.devs) > 1 {
		o := w.devs[1-int(d.id)]
		if p, err := d.dev.Alloc(512, pick(w, o.streams).st); err == nil {
			w.fail("Alloc on device %d for a stream of device %d = %#x", d.id, o.id, p)
		}
	}
	w.seen["foreign"]++
}

func (w *world) newPool(d *worldDevice) {
	if len(d.pools) >= 5 {
		return
	}
	d.poolIDs++
	id := memory.PoolID{d.poolIDs%4 + 1, d.poolIDs}
	o := config.PoolOptions{SegmentPerBlock: w.chance(15)}
	var u *upstream
	switch n := w.rng.IntN(100); {
	case w.cfg.tight: // of chunks
	case n < 15:
		o.Kind = config.PoolMalloc
	case n < 30:
		o.Kind = config.PoolSingleHandle
	case n < 45:
		u = &upstream{Resource: resource.Device(w.drv, d.id), observe: func(string, uint64) {
			d.dev.Views.Stats() // which looks at the peaks
			w.raise(d)
			w.seen["upstream"]++
		}}
		o.Upstream = u
	}
	pool := &worldPool{id: id, whole: o.SegmentPerBlock, upstream: u}
	if w.cfg.kinds {
		w.kindOf(d, pool, &o)
	}
	p, err := d.dev.NewPool(id, o)
	if err != nil {
		w.fail("NewPool: %v", err)
	}
	pool.pool = p
	if _, err := d.dev.NewPool(id, config.PoolOptions{}); err == nil {
		w.fail("a second pool %v", id)
	}
	if q, ok := d.dev.Pool(id); !ok || q != p {
		w.fail("pool %v is not found", id)
	}
	d.pools = append(d.pools, pool)
	w.upstreams = append(w.upstreams, u)
}

func (w *world) route(d *worldDevice) {
	s := pick(w, d.streams)
	if s.capture != nil {
		return
	}
	if s.routed != nil {
		if err := d.dev.Captures.Unroute(s.st); err != nil {
			w.fail("Unroute: %v", err)
		}
		s.routed.users--
		s.routed = nil
		return
	}
	if len(d.pools) == 0 {
		return
	}
	p := pick(w, d.pools)
	if p.captured {
		return
	}
	if err := d.dev.Captures.Route(s.st, p.pool); err != nil {
		w.fail("Route: %v", err)
	}
	p.users++
	s.routed = p
	w.seen["routed"]++
}

func (w *world) releasePool(d *worldDevice) {
	if len(d.pools) == 0 {
		return
	}
	i := w.rng.IntN(len(d.pools))
	p := d.pools[i]
	if p.users > 0 {
		if err := p.pool.Release(); err == nil {
			w.fail("a pool that is allocated from was released")
		}
		return
	}
	if p.launches != nil { // no graph uses the memory any more
		if p.launches.capture != nil || !d.mayQueue(p.launches) {
			return
		}
		if err := w.drv.StreamSynchronize(d.id, p.launches.handle); err != nil {
			w.fail("StreamSynchronize: %v", err)
		}
	}
	if err := p.pool.Release(); err != nil {
		w.fail("Release: %v", err)
	}
	if err := p.pool.Release(); err == nil {
		w.fail("a pool was released twice")
	}
	d.pools = slices.Delete(d.pools, i, i+1)
	w.seen["pool released"]++
}

func (w *world) beginCapture(d *worldDevice) {
	s := pick(w, d.streams)
	if s.handle == cuda.StreamNull || s.capture != nil || s.routed != nil || len(d.pools) == 0 {
		return
	}
	p := pick(w, d.pools)
	routed := p.users
	for _, o := range d.streams {
		if o.capture == p {
			routed--
		}
	}
	if routed > 0 {
		return // what it allocates outside of captures would be the graphs' as well
	}
	if w.chance(50) {
		w.begin(d, s, p)
		w.beginSim(d, s)
	} else {
		if w.chance(50) {
			if err := d.dev.Captures.MarkFrees(); err != nil {
				w.fail("MarkFrees: %v", err)
			}
		}
		w.beginSim(d, s)
		w.begin(d, s, p)
	}
	p.captured = true
	p.users++
	s.capture = p
	w.seen["capture"]++
}

func (w *world) begin(d *worldDevice, s *worldStream, p *worldPool) {
	if err := d.dev.Captures.Begin(s.st, p.pool); err != nil {
		w.fail("BeginCapture: %v", err)
	}
}

func (w *world) beginSim(d *worldDevice, s *worldStream) {
	if err := w.drv.BeginCapture(d.id, s.handle); err != nil {
		w.fail("cuStreamBeginCapture: %v", err)
	}
}

func (w *world) endCapture(d *worldDevice) {
	for _, s := range d.streams {
		if p := s.capture; p != nil {
			g, err := w.drv.EndCapture(d.id, s.handle)
			if err != nil {
				w.fail("the capture was spoilt: %v", err)
			}
			if err := d.dev.Captures.End(s.st); err != nil {
				w.fail("EndCapture: %v", err)
			}
			p.graphs = append(p.graphs, g)
			p.users--
			s.capture = nil
			return
		}
	}
}

// launch runs a graph. All graphs of a pool share its memory, so the program runs them on one stream.
func (w *world) launch(d *worldDevice) {
	if len(d.pools) == 0 {
		return
	}
	p := pick(w, d.pools)
	if len(p.graphs) == 0 {
		return
	}
	if p.launches == nil {
		p.launches = pick(w, d.streams)
	}
	if p.launches.capture != nil || !d.mayQueue(p.launches) {
		return
	}
	if err := pick(w, p.graphs).Launch(d.id, p.launches.handle); err != nil {
		w.fail("graph launch: %v", err)
	}
	w.seen["graph launched"]++
}

// restore notes what a pool has live, or puts it back into a state that was noted.
func (w *world) restore(d *worldDevice) {
	if len(d.pools) == 0 {
		return
	}
	p := pick(w, d.pools)
	if p.captured {
		return // what came back would be the graphs' as well
	}
	now := p.pool.Blocks()
	live := map[cuda.Ptr]*worldBlock{}
	for _, b := range d.blocks {
		if b.pool == p {
			if b.given != nil {
				return // its own stream may be gone, and Restore frees on that
			}
			live[b.p] = b
		}
	}
	if len(now) != len(live) {
		w.fail("pool %v has %d blocks, want %d", p.id, len(now), len(live))
	}
	for _, b := range now {
		if x := live[b.Base]; x == nil || x.size != b.Requested || x.rounded != b.Size || x.stream.st.ID() != b.Stream {
			w.fail("pool %v: block %+v, want %+v", p.id, b, x)
		}
	}
	if p.noted == nil || w.chance(30) {
		p.noted = now
		return
	}
	for _, b := range p.noted { // streams that are gone cannot have anything
		if !slices.ContainsFunc(d.streams, func(s *worldStream) bool { return s.st.ID() == b.Stream }) {
			p.noted = nil
			return
		}
	}
	if err := p.pool.Restore(p.noted); err != nil {
		if again := p.pool.Blocks(); !slices.Equal(again, now) {
			w.fail("Restore failed (%v) and changed what is live from %+v to %+v", err, now, again)
		}
		w.seen["restore failed"]++
		return
	}
	want := withoutStacks(p.noted)
	for i, b := range want { // what was live as it is listed stays whose it was
		if k := slices.IndexFunc(now, func(x memory.Block) bool { return x.Base == b.Base && x.Size == b.Size && x.Requested == b.Requested }); k >= 0 {
			want[i].Tag, want[i].Library = now[k].Tag, now[k].Library
		}
	}
	if again := p.pool.Blocks(); !slices.Equal(withoutStacks(again), want) {
		w.fail("restored %+v, want %+v", again, want)
	}
	same := func(x *worldBlock, b memory.Block) bool {
		return x.p == b.Base && x.rounded == b.Size && x.size == b.Requested
	}
	d.blocks = slices.DeleteFunc(d.blocks, func(x *worldBlock) bool {
		gone := x.pool == p && !slices.ContainsFunc(p.noted, func(b memory.Block) bool { return same(x, b) })
		if gone {
			w.forget(d, x)
		}
		return gone
	})
	for _, b := range p.noted {
		if slices.ContainsFunc(d.blocks, func(x *worldBlock) bool { return same(x, b) }) {
			continue
		}
		s := d.streams[slices.IndexFunc(d.streams, func(s *worldStream) bool { return s.st.ID() == b.Stream })]
		x := w.have(d, b.Base, b.Requested, s, p)
		x.tag, x.library = b.Tag, b.Library
		if w.kept {
			x.stack = b.Stack
		}
		w.use(d, x)
	}
	w.seen["restored"]++
}

func (w *world) trim(d *worldDevice) {
	var err error
	switch n := w.rng.IntN(5); {
	case n > 2 || w.cfg.opts.CacheLimit > 0:
		w.giveBack(d)
		return
	case n == 0 && len(d.pools) > 0:
		err = pick(w, d.pools).pool.Trim()
	case n == 1:
		err = w.a.Trim()
		for _, d := range w.devs {
			w.raise(d)
		}
	default:
		err = d.dev.Trim()
	}
	if err != nil {
		w.fail("Trim: %v", err)
	}
	w.seen["trim"]++
}

// giveBack releases memory for other processes: what it says, and down to what is to stay.
func (w *world) giveBack(d *worldDevice) {
	before := uint64(d.dev.Views.Stats().Reserved.All.Current)
	if w.cfg.opts.CacheLimit > 0 && w.chance(80) && !d.capturing() { // an error then: events cannot be recorded
		if w.chance(50) { // nothing is asked for until a span is over, and the next one
			_, err := engine.ReleaseUnused(d.dev)
			must(w.t, err)
			before = uint64(d.dev.Views.Stats().Reserved.All.Current)
			w.drv.Advance(time.Second + 2*max(w.cfg.opts.CacheDecay, 0)) // the GPU is done, too
		}
		n, err := engine.ReleaseUnused(d.dev)
		if after := uint64(d.dev.Views.Stats().Reserved.All.Current); err != nil || after != before-n {
			w.fail("ReleaseUnused() = %d, %v: reserved went from %d to %d", n, err, before, after)
		}
		w.seen["unused released"] += int(min(n, 1))
		return
	}
	need, keep := w.rng.Uint64N(w.cfg.capacity), w.rng.Uint64N(3)*w.rng.Uint64N(before+1)
	n, err := d.dev.GiveBack(need, keep)
	after := uint64(d.dev.Views.Stats().Reserved.All.Current)
	if err != nil || after != before-n || n > 0 && (after < keep || w.cfg.observed) {
		w.fail("GiveBack(%d, %d) = %d, %v: reserved went from %d to %d", need, keep, n, err, before, after)
	}
	if n > 0 {
		w.seen["given back"]++
	}
}

// end frees everything, demands that all memory can be had for one request, and that nothing is left.
func (w *world) end() {
	w.ending = true
	for _, d := range w.devs {
		for d.capturing() { // on all: memory may wait for another device's stream
			w.endCapture(d)
		}
	}
	for _, d := range w.devs {
		for _, s := range d.streams {
			if s.routed != nil {
				d.dev.Captures.Unroute(s.st)
				s.routed.users--
				s.routed = nil
			}
		}
		for len(d.blocks) > 0 {
			w.free(d, w.rng.IntN(len(d.blocks)))
		}
		for len(d.pools) > 0 {
			w.releasePool(d)
		}
		w.check(d)
		w.drv.SetOutside(d.id, 0)
		all := memory.AllStages &^ memory.StageCallback
		if w.a.Options().Stages&all == all {
			d.dev.SetLimit(0)
			size := w.cfg.capacity &^ (2*mib - 1)
			if w.alloc(d, size, pick(w, d.streams)) == nil {
				_, err := d.dev.Alloc(size, d.streams[0].st)
				w.fail("device %d: nothing is out, and yet all memory cannot be had: %v\n%+v", d.id, err, d.dev.Views.Stats())
			}
			w.free(d, 0)
		}
	}
	if err := w.a.Trim(); err != nil {
		w.fail("Trim: %v", err)
	}
	for _, d := range w.devs {
		w.check(d)
		if n := d.sources.held(w.drv); n != 0 {
			w.fail("device %d: %d bytes held after everything was freed and trimmed\n%+v", d.id, n, d.dev.Views.Stats())
		}
	}
	for _, u := range w.upstreams {
		if u != nil && len(u.out) != 0 {
			w.fail("%d segments of a user's upstream are out", len(u.out))
		}
	}
	if err := w.a.Close(); err != nil {
		w.fail("Close: %v", err)
	}
	for _, d := range w.devs {
		if n := d.sources.bytes.Load(); n != 0 {
			w.fail("device %d: %d bytes are out of upstreams", d.id, n)
		}
		if err := d.sources.close(); err != nil {
			w.fail("closing upstreams: %v", err)
		}
	}
	for _, d := range w.devs {
		for _, s := range d.streams {
			if s.handle != cuda.StreamNull {
				w.drv.DestroyStream(d.id, s.handle)
			}
		}
	}
	if l := w.drv.Leaks(); l != (sim.Live{}) {
		w.fail("left behind in the driver: %+v", l)
	}
}
