package engine

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Pool is a set of blocks apart from the others of its device: nothing allocated from it shares a chunk with another
// pool, though chunks that are wholly free move between pools, unless the pool is pinned.
type Pool struct {
	dev    *Device
	id     memory.PoolID
	number uint32 // by which events name it

	backing backing   // what it is made of
	onEnd   func()    // nil: none
	ask     *callback // asked for memory before others are; nil: none
	spill   *Pool     // where requests are met that nothing else meets; nil: nowhere
	parent  *Pool     // the pool whose spill this is
	mask    uint64    // sizes of blocks are multiples of mask+1

	heaps heapTable

	// +checklocks:dev.gpu.mu
	pinned   bool // a captured graph uses it, so nothing of it moves until Release
	released bool // +checklocks:dev.gpu.mu
	// +checklocks:dev.gpu.mu
	refs int // its stream heaps
	// idle are streams with an arena here that looked, when the device last looked for such, as if they were gone.
	idle []*Stream // +checklocks:dev.gpu.mu
	// +checklocks:dev.gpu.mu
	users int // routes and captures that end here

	// +checklocks:dev.gpu.mu
	limit uint64 // bytes that it may reserve, 0 none of its own
	// +checklocks:dev.gpu.mu
	reserved uint64 // the physical memory of its stream heaps
	// +checklocks:dev.gpu.mu
	inFlight uint64 // bytes being asked of its upstream, with no lock held
	// +checklocks:dev.gpu.mu
	peak uint64 // the most it has reserved
}

// ID is the pool's name.
func (p *Pool) ID() memory.PoolID { return p.id }

// Device is the device of the pool.
func (p *Pool) Device() *Device { return p.dev }

// DefaultPool is pool {0, 0}.
func (d *Device) DefaultPool() *Pool { return d.pool0 }

// Pool finds a pool by its name.
func (d *Device) Pool(id memory.PoolID) (*Pool, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, ok := d.state.pools.byID[id]
	return p, ok
}

// Release says that the program does not allocate from the pool again and that no graph uses its memory in a launch to come.
// Used blocks stay valid and are freed as always. Free memory can move to other pools, or, where the pool is made of segments,
// goes back to its upstream. The pool's addresses go when its last block does. Launches that are queued already may use the
// memory of a captured pool, on any stream. So Release waits for the context, or, while a stream is being captured, the end of
// that capture does.
func (p *Pool) Release() error {
	if err := p.release(); err != nil {
		return err
	}
	d := p.dev
	if err := d.Captures.unpin(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return p.backing.ended()
}

func (p *Pool) release() error {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if p == d.pool0 {
		return fmt.Errorf("the default pool cannot be released")
	}
	if p.released {
		return fmt.Errorf("pool {%d, %d} was released already", p.id[0], p.id[1])
	}
	if p.users > 0 {
		return fmt.Errorf("pool {%d, %d}: %d streams still allocate from it", p.id[0], p.id[1], p.users)
	}
	d.state.endings.endPool(p)
	return nil
}

// enter gives a pool a number. The caller holds Device.mu, or is the first to have the device.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) enter(p *Pool) {
	p.heaps.list.Store(new([]atomic.Pointer[streamHeap]))
	i := pt.gpu.journal.Pools.Take()
	if i == len(pt.byNumber) {
		pt.byNumber, pt.names = append(pt.byNumber, nil), append(pt.names, memory.PoolID{})
	}
	p.number = uint32(i)
	pt.byNumber[i], pt.names[i] = p, p.id
}

// endPool marks a pool as released: it is gone when it holds nothing any more. The caller holds Device.mu and no arena's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) endPool(p *Pool) {
	for _, x := range p.parts() {
		x.released = true
	}
	delete(en.pools.byID, p.id)
	en.pools.ending = append(en.pools.ending, p)
	en.sweep()
}

// parts are the pools that a pool of the program's is made of: it, and its spill.
func (p *Pool) parts() []*Pool {
	if p.spill != nil {
		return []*Pool{p, p.spill}
	}
	return []*Pool{p}
}

// forgetEnded forgets the released pools that hold nothing any more, and calls their functions for that.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) forgetEnded() {
	pt.ending = slices.DeleteFunc(pt.ending, func(p *Pool) bool {
		parts := p.parts()
		if slices.ContainsFunc(parts, func(x *Pool) bool { return x.refs > 0 }) {
			return false
		}
		for _, x := range parts {
			x.backing.closeOwn()
			pt.byNumber[x.number] = nil
			pt.gpu.journal.Pools.Put(int(x.number))
		}
		n := pt.gpu.journal.Pools.Count()
		pt.byNumber, pt.names = pt.byNumber[:n], pt.names[:n]
		if p.onEnd != nil {
			go p.onEnd()
		}
		return true
	})
	pt.closeUnused()
}

// owner is the pool that the program knows: the pool itself, or the one whose spill it is.
func (p *Pool) owner() *Pool {
	if p.parent != nil {
		return p.parent
	}
	return p
}

// Trim gives the free memory of the pool back to the driver, unless the pool is pinned; that of the default pool with what
// released pools left.
func (p *Pool) Trim() error { return p.dev.trim(p) }

// releasedError is that of a request to a pool that was released.
type releasedError struct{ id memory.PoolID }

func (e *releasedError) Error() string {
	return fmt.Sprintf("pool {%d, %d} was released", e.id[0], e.id[1])
}

// streamHeap is the stream heap of (pool, stream, class), made if there is none.
//
// +checklocks:p.dev.gpu.mu
func (p *Pool) streamHeap(st *Stream, class int) (*streamHeap, error) {
	if s := p.heaps.of(st, class); s != nil {
		return s, nil
	}
	if p.released {
		return nil, &releasedError{p.id}
	}
	d := p.dev
	if st.gpu != &d.gpu {
		return nil, fmt.Errorf("a stream of device %d cannot allocate on device %d", st.gpu.id, d.id)
	}
	d.state.streams.enlist(st)
	d.state.endings.inherit(p, st)
	if s := p.heaps.of(st, class); s != nil {
		return s, nil
	}
	s := &streamHeap{arena: p.heaps.arenaOf(st), dev: d, pool: p, stream: st, class: class, blocks: heap.New()}
	if s.arena == nil {
		s.arena = arena.New(d.health, &d.state.frees.late)
		d.state.pools.arenas = append(d.state.pools.arenas, s.arena)
		d.state.phys.quota.AddArena(&s.arena.Quota)
	}
	s.hot = s.arena.Add(class, &st.timeline, s.blocks)
	s.gauges = &s.arena.Quota.Classes[class]
	s.blocks.Stacks.Keep(d.state.usage.keepStacks)
	s.backing = p.backing.newHeap(s)
	s.index = int32(d.state.pools.places.Take())
	if int(s.index) == len(d.state.pools.heaps) {
		d.state.pools.heaps = append(d.state.pools.heaps, nil)
	}
	d.state.pools.heaps[s.index] = s
	p.refs++
	d.state.pools.list(s)
	return s, nil
}

// list makes a stream heap known to its pool, and its stream as one that allocates.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) list(s *streamHeap) {
	s.pool.heaps.add(s)
	if st := s.stream; !st.active {
		st.active = true
		if pt.using++; pt.using > 1 {
			pt.gpu.timeline.SetShared()
		}
	}
}

// sweep dissolves released pools that have no block left: their chunks become spare, their addresses go back when no
// old mapping is left in them. The caller holds Device.mu and no stream heap's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) sweep() {
	kept, spared := 0, uint64(0)
	for _, s := range en.pools.heaps {
		if s == nil || !s.pool.released || s.pool.pinned {
			continue
		}
		kept++
		s.arena.Lock()
		if s.blocks.UsedBlocks == 0 && s.requestsUnderWay == 0 {
			spared += s.backing.detach(everything)
			if en.dissolve(s) {
				kept--
			}
		}
		s.arena.Unlock()
	}
	en.dropArenas()
	if spared > 0 {
		en.phys.rebalanceAll(nil, nil)
	}
	en.pools.dissolving = kept > 0
	if len(en.pools.ending) > 0 {
		en.pools.forgetEnded()
	}
}

// dissolve removes a stream heap that holds nothing but unmapped ranges; its arena is left to dropArenas. The
// caller holds Device.mu and the arena's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) dissolve(s *streamHeap) bool {
	if s.blocks.FreeBlocks != 0 {
		return false
	}
	if s.backing.dropRanges() != nil || len(s.blocks.Ranges()) > 0 {
		return false
	}
	en.phys.quota.Retire(s.class, s.gauges)
	s.arena.Remove(s.class)
	en.pools.heaps[s.index] = nil
	en.pools.places.Put(int(s.index))
	en.pools.heaps = en.pools.heaps[:en.pools.places.Count()]
	s.pool.refs--
	s.pool.heaps.remove(s)
	return true
}

// dropArenas removes the arenas without stream heaps.
//
// +checklocks:en.gpu.mu
func (en *endings) dropArenas() {
	en.pools.arenas = slices.DeleteFunc(en.pools.arenas, func(l *arena.Arena) bool { return l.Quota.Gone })
	en.phys.quota.RemoveGone()
}

// has reports whether a stream heap was not dissolved.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) has(s *streamHeap) bool {
	return int(s.index) < len(pt.heaps) && pt.heaps[s.index] == s
}
