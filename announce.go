package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// Those who register memory elsewhere, with a network card or with NCCL, must know what is mapped. They are told of it
// when it is out of everybody's reach: of new memory before any of it is handed out, of memory that goes when the GPU is
// done with it and before it is unmapped. No lock is held meanwhile.

// OnUnmap sets the one function (nil: none) that is called before memory of the device is unmapped or given back to
// where it came from, once for each chunk or segment. The GPU is done with the memory then, and nobody is handed any of
// it. While there is such a function memory stays where it was mapped: nothing moves, and what unmaps are Trim, the end
// of a pool, and the last rung before a request fails, which takes free memory from all pools as RungLend.
//
// The function is called with no lock held, by one thread at a time. It may free, and ask, but it must not allocate from
// the device, trim it, or wait for a thread that does: whoever has new memory to tell of, or would fail otherwise, waits
// for it. When OnUnmap returns, no call of a former function is under way, so a function must not replace itself.
func (d *Device) OnUnmap(f func(addr cuda.Ptr, size uint64)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onUnmap = f
	d.quiet()
}

// OnMap sets the one function (nil: none) that is told of new memory of the device, chunk by chunk or segment by segment,
// before any of it is handed out. Snapshot tells what was mapped before. What is said of the function of OnUnmap holds
// for this one.
func (d *Device) OnMap(f func(addr cuda.Ptr, size uint64)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onMap = f
	d.quiet()
}

// quiet waits until nobody is being told anything. The caller holds Device.mu and nothing else; it is let go meanwhile.
func (d *Device) quiet() {
	for d.telling != nil {
		done := d.telling
		d.mu.Unlock()
		<-done
		d.mu.Lock()
	}
}

// tell calls the function of OnMap or OnUnmap, if there is one, for ranges that are out of everybody's reach. The caller
// holds Device.mu and nothing else; it is let go meanwhile.
func (d *Device) tell(mapped bool, ranges []run) {
	d.quiet()
	f := d.onUnmap
	if mapped {
		f = d.onMap
	}
	if f == nil || len(ranges) == 0 {
		return
	}
	done := make(chan struct{})
	d.telling = done
	d.mu.Unlock()
	defer func() { // also if f panics
		d.mu.Lock()
		d.telling = nil
		close(done)
	}()
	for _, r := range ranges {
		f(cuda.Ptr(r.addr), r.size)
	}
}

// unmapReady unmaps the old mappings that the GPU is known to be done with, telling of them before where somebody wants
// to know. The caller holds Device.mu and nothing else; it is let go meanwhile.
func (d *Device) unmapReady() {
	defer d.reap(nil)
	if d.onUnmap == nil || d.zombies.Len() == 0 || d.poisoned() != nil {
		return
	}
	d.quiet()
	var ranges []run
	d.zombies.Filter(func(z *vm.Zombie) bool {
		if z.Told == vm.Untold && d.streams[z.Stream].isOver(z.Epoch) {
			z.Told = vm.BeingTold
			ranges = append(ranges, run{z.Addr, d.chunks.At(z.Chunk).Size})
		}
		return false
	})
	defer d.zombies.Filter(func(z *vm.Zombie) bool {
		if z.Told == vm.BeingTold { // nobody else tells before this thread has gone on
			z.Told = vm.Told
		}
		return false
	})
	d.tell(false, ranges)
}

// introduce tells of new memory that was mapped at block, the last part of which has just become free, and makes it free
// memory of the request's space. stamp is until when the space's stream uses it. The caller holds Device.mu and the
// space's lock; both are let go meanwhile, so that the request may find less than it was meant to.
func (c *climb) introduce(block heap.ID, at run, stamp uint64, pieces []run) {
	d, s := c.d, c.s
	block = s.heap.Unmap(block, at.addr, at.size) // a block that nobody takes, looks up or merges with
	d.spareBytes += at.size
	d.settleAll(s, nil)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		d.spareBytes -= at.size
		s.heap.Map(s.heap.Reap(block), at.addr, at.size, stamp)
		s.gauges.setFree(s.heap.FreeBlocks, int64(at.size))
	}()
	d.tell(true, pieces)
}
