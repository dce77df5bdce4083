package engine

import (
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// The C library hands blocks of the default pool out again, and takes them back, without a call into Go: packages
// internal/magazine and internal/engine/arena. Here is what the engine itself does for that.

// OnTokensEnd sets the function that is called when C code must forget which blocks it may put into magazines, because some
// are paused. It is called with locks held and must neither call the allocator nor wait for a lock.
func (mz *Magazines) OnTokensEnd(f func()) {
	mz.gpu.mu.Lock()
	mz.pools.onTokensEnd = f
	mz.gpu.mu.Unlock()
}

// endTokens makes C code give all blocks back to the engine, and keeps it from taking those that get into magazines all the
// same (freeLate). The caller holds Device.mu and all arenas' locks.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) endTokens() {
	if pt.onTokensEnd != nil {
		pt.onTokensEnd()
	}
	for _, l := range pt.arenas {
		l.Outdate()
	}
}

// freeLate frees the blocks that C code gave back while they were being paused. held is the stream heap whose lock the caller
// holds with Device.mu; it may be nil.
//
// +checklocks:fr.gpu.mu
func (fr *frees) freeLate(held *streamHeap) {
	for _, p := range fr.late.Take() {
		s := fr.gpu.a.heapOf(p)
		if s == nil {
			continue // the program freed it twice
		}
		s.lockBeside(held)
		if id, _, ok := s.blocks.Lookup(uint64(p)); ok && s.blocks.At(id).State == heap.Used {
			fr.free(s, id, FreeOptions{}) // an error is for the caller of a free
			fr.phys.rebalance(s, held)
		}
		s.unlockBeside(held)
	}
}

// Alloc is Device.Alloc for the C library. A token says that the block may be given back, once, by putting it into the stream's
// magazine on this device instead of calling Free.
func (mz *Magazines) Alloc(size uint64, st *Stream) (cuda.Ptr, magazine.Token, error) {
	if f := st.timeline.Magazine(); f != nil && st.gpu == mz.gpu && st.route.Load() == nil && mz.gpu.health.Quick() && size-1 < maxRequest {
		if s := mz.gpu.pool0.heaps.of(st, f.ClassOf(size)); s != nil {
			if p, mark := s.hot.AllocMagazine(f, size); p != 0 {
				return p, magazine.Token{Magazine: f, Mark: mark}, nil
			}
			p, err := mz.gpu.pool0.allocSlow(size, mz.gpu.pool0.round(size), st, origin{})
			if err != nil {
				return 0, magazine.Token{}, err
			}
			return p, mz.token(p, size, st), nil
		}
	}
	pool := st.poolOn(mz.gpu)
	p, err := pool.alloc(size, st, origin{}) // what may go into a magazine has no stack
	for err != nil && replaced(pool, st, err) {
		pool = st.poolOn(mz.gpu)
		p, err = pool.alloc(size, st, origin{})
	}
	if err != nil || p == 0 {
		return p, magazine.Token{}, err
	}
	return p, mz.token(p, size, st), nil
}

// token is that of a block which was just handed out: none unless the block lies in the default pool where a request of
// its size belongs, and the stream lasts. It has no mark, because others may have been handed out since.
func (mz *Magazines) token(p cuda.Ptr, size uint64, st *Stream) magazine.Token {
	return magazine.Token{Magazine: mz.magazineOf(p, size, st)}
}

// magazineOf is the stream's magazine, made if need be, if the block may be put there.
func (mz *Magazines) magazineOf(p cuda.Ptr, size uint64, st *Stream) *magazine.Magazine {
	s := mz.gpu.a.heapOf(p)
	if mz.gpu.opts.Magazine == config.SwitchOff || s.pool != mz.gpu.pool0 || s.stream != st || !st.timeline.Queue.Durable() || st.timeline.Queue.PerThread() || s.class != classOf(mz.gpu.pool0.round(size)) {
		return nil
	}
	if f := st.timeline.Magazine(); f != nil {
		return f
	}
	mz.gpu.mu.Lock()
	defer mz.gpu.mu.Unlock()
	if f := st.timeline.Magazine(); f != nil {
		return f
	}
	f := magazine.New(mz.gpu.pool0.mask, smallMax)
	f.SetRouted(st.route.Load() != nil)
	s.arena.SetMagazine(f, &st.timeline)
	return f
}

// Flags are the device's flags for C code.
func (mz *Magazines) Flags() *magazine.Flags { return mz.gpu.health.Flags() }
