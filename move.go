package cistern

import (
	"errors"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// planner holds what one move is made of; its slices are reused.
type planner struct {
	found   []source
	sources []source
	held    []*lane // locked since their chunks were found free, until they have moved
	narrow  bool    // a free chunk was left that is larger than the room for it
}

// hold locks the lane of o until letGo, unless that is held's, whose lock the caller has, or held already.
func (p *planner) hold(o, held *space) {
	if held.in(o.lane) || o.lane.planned {
		return
	}
	o.mu.Lock()
	o.lane.planned = true
	p.held = append(p.held, o.lane)
}

func (p *planner) letGo() {
	for _, l := range p.held {
		l.planned = false
		l.mu.Unlock()
	}
	p.held = p.held[:0]
}

// source is a chunk that can be had.
type source struct {
	chunk vm.ChunkID
	size  uint64
	space *space  // where it is mapped and free; nil for a spare or new chunk
	block heap.ID // the free block it lies in
	run   uint64  // size of that block
	stamp uint64  // epoch of its last free on its stream
	// stream used it last; nil for new memory
	stream *Stream
}

// place is where new memory goes: at the start of a hole, behind the free block left of it if there is one, or at its
// end, before the free block to its right.
type place struct {
	hole  heap.ID
	need  uint64  // bytes to map there
	room  uint64  // bytes that could be mapped there
	atEnd bool    // map at the end of the hole
	joins heap.ID // the free block that the new memory extends, 0 none
}

// errNarrow is that free chunks are larger than the room for them.
var errNarrow = errors.New("free chunks are larger than the room for them")

// obtain makes the request fit by mapping memory into the space: free chunks from elsewhere, and new ones. Which, is
// said by rungs; with pressure it takes also what it would rather leave. It returns 0 and no error when there is not
// enough memory. Between its attempts only the space's lane is locked, as finding a place locks others.
//
// +checklocks:c.d.mu
func (c *climb) obtain(rungs Rungs, pressure bool) (heap.ID, error) {
	if rungs == 0 {
		return 0, nil
	}
	for spare := uint64(0); ; {
		at, err := c.place(spare)
		if err != nil || at.hole == 0 {
			return 0, err
		}
		id, err := c.fill(at, rungs, pressure)
		switch {
		case err == errNarrow && spare == 0:
			spare = c.d.opts.ChunkMax // what is free does not go where the least would do, but may elsewhere
		case err == errNarrow:
			return 0, nil
		case timeline.Unordered(err) && !c.alone:
			// A capture that nobody announced is in the way: only memory that the host knows to be free will do.
			c.alone = true
		default:
			return id, err
		}
	}
}

// place finds where the request's memory is to be mapped, with so much room beyond what is needed, within the pool's own
// limit; no place where there is none. It locks other lanes.
//
// +checklocks:c.d.mu
func (c *climb) place(spare uint64) (place, error) {
	d, s := c.d, c.s
	find := func() (place, bool) { return s.placeFor(c.n, d.upstream.Granularity(), spare) }
	at, ok := find()
	if !ok {
		if err := d.reserve(s, c.n); err != nil {
			if isOutOfMemory(err) {
				c.oom, c.of(RungGrow).err = err, err // the first that needs addresses
				return place{}, nil
			}
			return place{}, err
		}
		if at, ok = find(); !ok {
			return place{}, nil
		}
	}
	for !s.pool.mayHold(at.need) {
		if !c.shed(at.need) {
			c.full = true
			c.try(RungGrow).stop = stopPoolLimit
			return place{}, nil
		}
		if at, ok = find(); !ok {
			return place{}, nil
		}
	}
	if s.pool.limit != 0 {
		at.room = min(at.room, s.pool.limit-s.pool.reserved)
	}
	return at, nil
}

// fill is one attempt to map memory at a place: errNarrow where a roomier one might do.
//
// +checklocks:c.d.mu
func (c *climb) fill(at place, rungs Rungs, pressure bool) (heap.ID, error) {
	d, s := c.d, c.s
	p := &d.plan
	defer p.letGo()
	p.sources, p.narrow = p.sources[:0], false
	have := uint64(0)
	var err error
	c.start()
	start := c.began
	d.pace.until(start)
	if rungs&RungGrow != 0 && !pressure && d.growFirst(at.need) {
		rungs = RungGrow
	}
	if d.onUnmap != nil {
		rungs &^= RungRemap | RungLend // but spare chunks that are mapped nowhere
	}
	if rungs&(RungRemap|RungLend) != 0 || d.onUnmap != nil {
		for _, r := range [2]Rungs{RungRemap, RungLend} {
			if rungs&r != 0 {
				c.try(r)
			}
		}
		have = d.gather(c, at, rungs, pressure)
	}
	grown := false
	if have < at.need {
		ok := false
		if rungs&RungGrow != 0 {
			c.try(RungGrow)
			have, ok, err = d.create(c, at.need-have, have)
		}
		if !ok && err == nil && p.narrow {
			err = errNarrow
		}
		if !ok {
			return 0, err
		}
		grown = true
	}
	lent := slices.ContainsFunc(p.sources, func(x source) bool { return x.space != nil && x.space.pool != s.pool })
	block, base, stamp, err := d.move(c, at, have)
	if !grown {
		d.pace.moved(start, d.drv.Now())
	}
	if err != nil {
		c.waits = c.waits[:0] // for what is not moved after all
	}
	if err != nil {
		if isOutOfMemory(err) { // the driver may lack memory for page tables
			c.oom, c.of(RungGrow).err = err, err
			return 0, nil
		}
		return 0, err
	}
	c.met = RungRemap
	if grown {
		c.met = RungGrow
	} else if lent {
		c.met = RungLend
	}
	s.heap.MinRest = d.minRest(s.class)
	if d.onMap != nil {
		pieces := make([]run, 0, len(p.sources))
		addr := base
		for _, x := range p.sources {
			pieces = append(pieces, run{addr, x.size})
			addr += x.size
		}
		p.letGo()
		c.introduce(block, run{base, have}, stamp, pieces)
		c.waits = c.waits[:0]
		return c.take(s)
	}
	s.gauges.SetFree(s.heap.FreeBlocks, int64(have))
	if c.align != 0 {
		return c.take(s)
	}
	s.heap.TakeBlock(block, c.n, c.size)
	return block, nil
}

// placeFor chooses where a request of n bytes is to be met: where the least must be mapped, and of such places the
// smallest hole that has spare bytes of room beyond.
func (s *space) placeFor(n, granularity, spare uint64) (place, bool) {
	var best place
	up := func(x uint64) uint64 { return (x + granularity - 1) / granularity * granularity }
	better := func(p place) {
		if p.room >= p.need+spare && (best.hole == 0 || p.need < best.need || p.need == best.need && p.room < best.room) {
			best = p
		}
	}
	s.heap.EachHole(granularity, func(id heap.ID, b *heap.Block) bool {
		p := place{hole: id, need: up(n), room: b.Size}
		better(p)
		if l := s.heap.Prev(id); l != 0 && s.heap.At(l).State == heap.Free {
			p.need, p.joins = up(n-min(n, s.heap.At(l).Size)), l
			better(p)
		}
		if r := s.heap.Next(id); r != 0 && s.heap.At(r).State == heap.Free {
			p.need, p.joins, p.atEnd = up(n-min(n, s.heap.At(r).Size)), r, true
			better(p)
		}
		return true
	})
	return best, best.hole != 0
}

// gather chooses free chunks to move, at most what is needed or little more, and returns their bytes.
//
// +checklocks:d.mu
func (d *Device) gather(c *climb, at place, rungs Rungs, pressure bool) uint64 {
	p, s := &d.plan, c.s
	have := uint64(0)
	pick := func() bool {
		have = p.pick(at.need, at.room, have, d.overshoot(s.class, pressure))
		return have >= at.need
	}
	p.found = p.found[:0]
	for _, id := range d.spares {
		k := d.chunks.At(id)
		if k.Mappings > 0 && d.onUnmap != nil {
			continue
		}
		var t *Stream
		if k.Stream >= 0 {
			t = d.streams[k.Stream]
		}
		if d.orderable(c, t, k.Stamp) {
			p.found = append(p.found, source{chunk: id, size: k.Size, stamp: k.Stamp, stream: t})
		}
	}
	if pick() {
		return have
	}
	spare := have
	if rungs&RungRemap != 0 && !s.pool.pinned {
		p.found = p.found[:0]
		d.offers(c, s, at.joins)
		if pick() {
			return have
		}
		p.found = p.found[:0]
		for _, o := range d.spaces {
			if o != nil && o != s && o.pool == s.pool && o.stream == s.stream {
				d.offers(c, o, 0)
			}
		}
		if pick() {
			return have
		}
		p.found = p.found[:0]
		for _, o := range d.spaces {
			if o != nil && o.pool == s.pool && o.stream != s.stream {
				d.offers(c, o, 0)
			}
		}
		if pick() {
			return have
		}
	}
	if rungs&RungRemap != 0 {
		s := c.of(RungRemap)
		s.found = max(s.found, have-spare)
		c.lap(RungRemap, 0)
	}
	if rungs&RungLend != 0 {
		before := have
		p.found = p.found[:0]
		for _, o := range d.spaces {
			if o != nil && o.pool != s.pool {
				d.offers(c, o, 0)
			}
		}
		pick()
		s := c.of(RungLend)
		s.found = max(s.found, have-before)
		c.lap(RungLend, 0)
	}
	return have
}

// offers lists the wholly free chunks of a space, except those of one block.
//
// +checklocks:d.mu
func (d *Device) offers(c *climb, o *space, except heap.ID) {
	if o.pool.pinned || o.area == nil || o.chunkBytes == 0 {
		return
	}
	// Held until the move is done: once it were let go, another thread could be handed what was found free.
	d.plan.hold(o, c.s)
	p := &d.plan
	o.heap.EachFree(d.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		if id == except || !d.orderable(c, o.stream, b.Stamp) {
			return true
		}
		o.area.Whole(&d.chunks, b.Addr, b.Size, func(k vm.ChunkID, ch *vm.Chunk) bool {
			p.found = append(p.found, source{chunk: k, size: ch.Size, space: o, block: id, run: b.Size, stamp: b.Stamp, stream: o.stream})
			return true
		})
		return true
	})
}

// orderable reports whether memory last used on a stream, until the epoch, may be used by the request's stream: by
// stream order, by host order, or by an event that the options allow to wait for. A capture gets host order only.
func (d *Device) orderable(c *climb, t *Stream, epoch uint64) bool {
	to := c.s.stream
	if t == nil || t == to && to.timeline.Capture() == 0 && !c.strict {
		return true
	}
	if t.timeline.IsOver(epoch) {
		return true
	}
	if epoch >= t.timeline.Epoch() && (d.opts.CrossStream == CrossStreamReady || to.timeline.Capture() != 0 || c.alone) && t.timeline.CloseLate() == nil && t.timeline.IsOver(epoch) {
		return true // an epoch that nobody closes is never seen to be over
	}
	if t.timeline.Capture() != 0 || to.timeline.Capture() != 0 || t.timeline.PerThread() || to.timeline.PerThread() || c.alone {
		return false
	}
	return d.opts.CrossStream == CrossStreamWait
}

// pick adds sources from found, the largest first, until need bytes are had: handles cost by number, not by size. Of
// equal chunks those in smaller free blocks go first, which leaves large blocks whole. A last chunk may be larger
// than what is missing by up to over bytes if there is room.
func (p *planner) pick(need, room, have, over uint64) uint64 {
	if have >= need {
		return have
	}
	f := p.found
	for i := len(f)/2 - 1; i >= 0; i-- {
		sink(f, i)
	}
	before := have
	larger := source{} // the smallest chunk so far that is larger than what is missing; size 0 is none
	tail := -1         // where in sources the chunks smaller than that begin
	for len(f) > 0 && have < need {
		x := f[0]
		f[0] = f[len(f)-1]
		f = f[:len(f)-1]
		sink(f, 0)
		if x.size > need-have {
			larger, tail = x, len(p.sources)
			before = have
			continue
		}
		p.sources = append(p.sources, x)
		have += x.size
	}
	if larger.size == 0 || have >= need && len(p.sources)-tail <= 1 {
		return have
	}
	// One chunk that is larger than what is missing at that point, in place of several smaller ones or of none at all.
	if before+larger.size > room {
		p.narrow = true
	} else if before+larger.size-need <= over {
		p.sources = append(p.sources[:tail], larger)
		have = before + larger.size
	}
	return have
}

// before is the order in which pick takes sources.
func (a *source) before(b *source) bool {
	if a.size != b.size {
		return a.size > b.size
	}
	if a.run != b.run {
		return a.run < b.run
	}
	return a.chunk < b.chunk
}

// sink restores a binary heap below i. Few of many sources are taken, so they are not sorted.
func sink(f []source, i int) {
	for {
		c := 2*i + 1
		if c >= len(f) {
			return
		}
		if c+1 < len(f) && f[c+1].before(&f[c]) {
			c++
		}
		if !f[c].before(&f[i]) {
			return
		}
		f[i], f[c] = f[c], f[i]
		i = c
	}
}

// create gets new chunks of missing bytes together. It reports false when there is no memory, or the driver fails with
// another error than that, which is returned; what was got until then stays as spare chunks.
//
// +checklocks:d.mu
func (d *Device) create(c *climb, missing, have uint64) (uint64, bool, error) {
	p, s, before := &d.plan, c.of(RungGrow), have
	s.stop = stopNot
	if !d.quota.MayHold(missing) {
		s.stop = stopLimit
		return have, false, nil
	}
	if d.lacks(missing) {
		c.oom, s.stop = cuda.ErrOutOfMemory, stopLacks
		return have, false, nil
	}
	for missing > 0 {
		size := d.chunkSize(c.s.class, c.n, missing)
		h, err := d.upstream.Create(size)
		if isOutOfMemory(err) {
			c.oom, s.err = err, err
			c.lap(RungGrow, have-before)
			return have, false, nil
		} else if err != nil {
			return have, false, d.health.Failed(err)
		}
		id := d.chunks.Add(h, size, 0)
		d.got(size, true)
		d.addSpare(id, nil, 0)
		p.sources = append(p.sources, source{chunk: id, size: size})
		missing -= size
		have += size
	}
	return have, true, nil
}

// lacks reports whether the device is known not to have that much memory, so that a request which cannot be met does not
// take all there is from other processes first. Asking the driver costs 3 us, so it is asked about large amounts only.
//
// +checklocks:d.mu
func (d *Device) lacks(bytes uint64) bool {
	if d.quota.Reserved+bytes > d.info.TotalBytes {
		return true
	}
	if bytes < askedFrom {
		return false
	}
	free, _, err := d.drv.MemInfo(d.id)
	return err == nil && free < bytes
}

const askedFrom = 256 << 20

// +checklocks:d.mu
func (d *Device) addSpare(id vm.ChunkID, t *Stream, stamp uint64) {
	k := d.chunks.At(id)
	k.Owner, k.Addr, k.Stamp, k.Stream = -1, 0, stamp, -1
	if t != nil {
		k.Stream = t.index.Load()
	}
	d.spares = append(d.spares, id)
	d.quota.AddSpare(k.Size)
}

// +checklocks:d.mu
func (d *Device) takeSpare(id vm.ChunkID) {
	for i, x := range d.spares {
		if x == id {
			d.spares = append(d.spares[:i], d.spares[i+1:]...)
			d.quota.TakeSpare(d.chunks.At(id).Size)
			return
		}
	}
}

// move maps the planned sources into the space and returns the free block that results, whose free bytes are still to
// be counted, where they were mapped, and until when the space's stream uses them. Every driver call that can fail comes
// before the first change of the engine's own state, and those made are undone when a later one fails.
//
// +checklocks:d.mu
func (d *Device) move(c *climb, at place, total uint64) (block heap.ID, base, stamp uint64, err error) {
	p, s := &d.plan, c.s
	hole := s.heap.At(at.hole)
	base = hole.Addr
	if at.atEnd {
		base += hole.Size - total
	}
	if c.host {
		c.awaitPlan(at, total)
	}
	waited := false
	for i := range p.sources {
		x := &p.sources[i]
		switch {
		case x.stream == nil, s.capture != 0, c.strict: // given only what is known to be free
		case x.stream == s.stream:
			stamp = max(stamp, x.stamp)
		default:
			if err := s.stream.timeline.WaitFor(&x.stream.timeline, x.stamp); err != nil {
				return 0, 0, 0, err
			}
			stamp, waited = s.stream.timeline.Epoch(), true
		}
	}
	if waited {
		s.stream.timeline.Freed() // what of it stays free may be wanted when the stream is gone, whatever is freed until then
	}
	addr := base
	n := 0
	for ; n < len(p.sources); n++ {
		k := d.chunks.At(p.sources[n].chunk)
		if err = d.drv.MemMap(cuda.Ptr(addr), k.Size, k.Handle); err != nil {
			break
		}
		k.Mappings++
		addr += k.Size
	}
	if err == nil {
		err = d.setAccess(cuda.Ptr(base), total)
	}
	if err != nil {
		d.health.Failed(err)
		addr = base
		rest := at.hole
		for _, x := range p.sources[:n] {
			k := d.chunks.At(x.chunk)
			if d.drv.MemUnmap(cuda.Ptr(addr), k.Size) == nil {
				k.Mappings--
			} else {
				// The mapping stays, unused, until it can be undone: these addresses are no hole any more.
				z := s.heap.Unmap(s.heap.Map(rest, addr, k.Size, 0), addr, k.Size)
				d.zombies.Push(vm.Zombie{Addr: addr, Chunk: x.chunk, Block: int32(z), Owner: s.index, Stream: s.stream.index.Load(), Told: vm.Told, Recorded: true})
				rest = s.heap.Next(z)
			}
			addr += k.Size
		}
		return 0, 0, 0, err
	}
	// From here on nothing fails.
	addr = base
	var last takenOut
	for i := range p.sources {
		x := &p.sources[i]
		k := d.chunks.At(x.chunk)
		old := k.Addr
		if x.space != nil {
			d.leave(&last, x.space, x.block, x.chunk, true)
			d.counts.Remaps++
		} else {
			d.takeSpare(x.chunk)
		}
		k.Addr, k.Owner, k.Stamp, k.Stream = addr, s.index, 0, -1
		s.area.Set(addr, k.Size, x.chunk)
		s.gain(k.Size)
		d.quota.Physical[quota.GroupOf(s.class)].Join(k.Size)
		d.record(event.Event{Kind: event.SegmentMap, Addr: addr, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number, Stack: c.by.stack, Thread: c.by.thread})
		if x.space != nil {
			d.recordLeft(x.space, old, k)
		}
		addr += k.Size
	}
	return s.heap.Map(at.hole, base, total, stamp), base, stamp, nil
}

// takenOut is the chunk that leave took out before. A block can have a hundred thousand chunks, which leave in the order of
// their addresses: what is left of it is not searched from its beginning for each.
type takenOut struct {
	space *space
	block heap.ID // that the chunk lay in
	left  heap.ID // the zombie in its place
}

// leave takes a wholly free chunk out of a space: its mapping there becomes a zombie. near is the free block that it
// lay in, or what is left of it; recorded says that the caller tells the history. The caller holds Device.mu and has held the
// lane's lock since the chunk was found free, and since the call before with the same last.
//
// +checklocks:d.mu
func (d *Device) leave(last *takenOut, o *space, near heap.ID, id vm.ChunkID, recorded bool) {
	k := d.chunks.At(id)
	block := near
	if last.space == o && last.block == near && o.heap.At(last.left).Addr < k.Addr {
		block = last.left
	}
	for b := o.heap.At(block); k.Addr >= b.Addr+b.Size; b = o.heap.At(block) {
		block = o.heap.Next(block) // chunks that left before it have cut the block up
	}
	stamp := o.heap.At(block).Stamp
	z := o.heap.Unmap(block, k.Addr, k.Size)
	*last = takenOut{o, near, z}
	o.area.Set(k.Addr, k.Size, 0)
	o.lose(k.Size)
	d.quota.Physical[quota.GroupOf(o.class)].Leave(k.Size)
	o.gauges.SetFree(o.heap.FreeBlocks, -int64(k.Size))
	d.zombies.Push(vm.Zombie{Addr: k.Addr, Chunk: id, Block: int32(z), Owner: o.index, Stream: o.stream.index.Load(), Epoch: stamp, Recorded: recorded})
	if t := o.stream; stamp >= t.timeline.Epoch() && t.timeline.Capture() == 0 {
		t.timeline.CloseLate() // so that the end of the epoch can be seen; on error the reaper tries again
	}
}

// recordLeft notes that a chunk is not at addr of a space any more. The history tells it when it happens, not when the old
// mapping is undone, which nobody uses until then: so what the history has mapped is what Snapshot lists, at every moment.
//
// +checklocks:d.mu
func (d *Device) recordLeft(o *space, addr uint64, k *vm.Chunk) {
	d.record(event.Event{Kind: event.SegmentUnmap, Addr: addr, Size: k.Size, Handle: uint64(k.Handle),
		Stream: o.stream.number(), Pool: o.pool.number})
}

// reap unmaps the old mappings whose work is done. The caller holds Device.mu and held's lock.
//
// +checklocks:d.mu
func (d *Device) reap(held *space) {
	if d.zombies.Len() == 0 || d.health.Broken() != nil || d.unsure.Load() {
		return
	}
	var busy *Stream
	var from uint64
	d.zombies.Filter(func(z *vm.Zombie) bool {
		t := d.streams[z.Stream]
		if t == busy && z.Epoch >= from {
			return false
		}
		if !t.timeline.IsOver(z.Epoch) {
			if z.Epoch >= t.timeline.Epoch() && t.timeline.Capture() == 0 {
				t.timeline.CloseLate()
			}
			busy, from = t, z.Epoch
			return false
		}
		if z.Told == vm.BeingTold || z.Told == vm.Untold && d.onUnmap != nil {
			return false // unmapReady's
		}
		k := d.chunks.At(z.Chunk)
		if err := d.drv.MemUnmap(cuda.Ptr(z.Addr), k.Size); err != nil {
			d.health.Failed(err)
			return false
		}
		k.Mappings--
		o := d.spaces[z.Owner]
		o.lockBeside(held)
		defer o.unlockBeside(held)
		if !z.Recorded {
			d.recordLeft(o, z.Addr, k)
		}
		o.heap.Reap(heap.ID(z.Block))
		return true
	})
}
