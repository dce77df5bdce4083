package cistern

import (
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/front"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
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
// The function is called with no lock held, perhaps by several threads at once. It may free, and ask, but must not
// allocate from the device or trim it. A request that would fail while another thread is telling waits for that, for at
// most a second for each call of the function, so that locks of the caller's do no more harm. When OnUnmap returns no call of the former function is
// under way, so a function must not replace itself.
func (d *Device) OnUnmap(f func(addr cuda.Ptr, size uint64)) {
	d.setTeller(&d.onUnmap, f) // +checklocksignore: of the field only the address is taken
}

// OnMap sets the one function (nil: none) that is told of new memory of the device, chunk by chunk or segment by segment,
// before any of it is handed out. Snapshot tells what was mapped before. What is said of the function of OnUnmap holds
// for this one.
func (d *Device) OnMap(f func(addr cuda.Ptr, size uint64)) {
	d.setTeller(&d.onMap, f) // +checklocksignore: likewise
}

// teller is a function that is told of memory, and how often it is being called. Guarded by Device.mu.
type teller struct {
	f     func(addr cuda.Ptr, size uint64)
	calls int
}

func (d *Device) setTeller(at **teller, f func(addr cuda.Ptr, size uint64)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := *at
	*at = nil
	if f != nil {
		*at = &teller{f: f}
	}
	for old != nil && old.calls > 0 {
		d.awaitTold(nil)
	}
}

// patience is how long a request waits for a function that may be waiting for the request's own thread. It is counted in turns,
// and a turn that lasted longer counts no more: of the time in which a busy host let no thread of the process run, the function
// had nothing either.
// It begins anew when the call that was the oldest has ended: functions that come back, however slowly, fail no request. So that
// a request which nothing can meet fails while others never stop telling, that happens so many times at most.
const (
	patience     = time.Second
	patienceTurn = patience / 20
	patienceMost = 20
)

// waiter is a request's patience.
type waiter struct {
	last   time.Time // when it was asked for, zero: not yet
	spent  time.Duration
	oldest uint64 // the call that it waits for
	calls  int    // for how many it has waited
}

// waitFor has the waiter wait for the oldest call under way.
func (w *waiter) waitFor(oldest uint64) {
	if w.oldest != oldest && w.calls < patienceMost {
		*w = waiter{oldest: oldest, calls: w.calls + 1}
	}
}

// left is how much of it there is, negative or 0 for none.
func (w *waiter) left(now time.Time) time.Duration {
	if !w.last.IsZero() {
		w.spent += min(now.Sub(w.last), patienceTurn)
	}
	w.last = now
	return patience - w.spent
}

// awaitTold waits until somebody was told of what there is to tell now, or, where that is given, until patience is at an end.
// The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) awaitTold(w *waiter) {
	if d.told == nil {
		d.told = make(chan struct{})
	}
	told := d.told
	d.mu.Unlock()
	defer d.mu.Lock()
	if w == nil {
		<-told
		return
	}
	const least, most = 50 * time.Microsecond, time.Millisecond
	for nap := least; w.left(time.Now()) > 0; nap = min(2*nap, most) {
		select {
		case <-told:
			return
		default:
			front.Nap(nap) // no timer: see there
		}
	}
}

// tell calls a function, if there is one, for ranges that are out of everybody's reach. The caller holds Device.mu and
// nothing else; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) tell(t *teller, ranges []run) {
	if t == nil || len(ranges) == 0 {
		return
	}
	t.calls++
	d.tellings++
	d.telling = append(d.telling, d.tellings)
	defer d.toldBy(t, d.tellings) // also if f panics
	d.mu.Unlock()
	defer d.mu.Lock()
	lockrank.MayCall()
	for _, r := range ranges {
		t.f(cuda.Ptr(r.addr), r.size)
	}
}

// toldBy ends a call of tell.
//
// +checklocks:d.mu
func (d *Device) toldBy(t *teller, call uint64) {
	t.calls--
	i := slices.Index(d.telling, call)
	d.telling = slices.Delete(d.telling, i, i+1)
	if d.told != nil {
		close(d.told)
		d.told = nil
	}
}

// unmapReady unmaps the old mappings that the GPU is known to be done with, telling of them before where somebody wants
// to know. The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) unmapReady() {
	defer d.reap(nil)
	if d.onUnmap == nil || d.zombies.Len() == 0 || d.health.Broken() != nil {
		return
	}
	var ranges []run
	d.zombies.Filter(func(z *vm.Zombie) bool {
		if z.Told == vm.Untold && d.streams[z.Stream].timeline.IsOver(z.Epoch) {
			z.Told = vm.BeingTold
			ranges = append(ranges, run{z.Addr, d.chunks.At(z.Chunk).Size})
		}
		return false
	})
	defer func() {
		mine := map[uint64]bool{} // addresses: no two old mappings have the same
		for _, r := range ranges {
			mine[r.addr] = true
		}
		d.zombies.Filter(func(z *vm.Zombie) bool {
			if mine[z.Addr] {
				z.Told = vm.Told
			}
			return false
		})
	}()
	d.tell(d.onUnmap, ranges)
}

// introduce tells of new memory that was mapped at block, the last part of which has just become free, and makes it free
// memory of the request's space. stamp is until when the space's stream uses it. The caller holds Device.mu and the
// space's lock; both are let go meanwhile, so that the request may find less than it was meant to.
//
// +checklocks:c.d.mu
func (c *climb) introduce(block heap.ID, at run, stamp uint64, pieces []run) {
	d, s := c.d, c.s
	block = s.heap.Unmap(block, at.addr, at.size) // a block that nobody takes, looks up or merges with
	d.quota.Spare += at.size
	if s.area != nil {
		d.arriving = append(d.arriving, at)
	}
	d.rebalanceAll(s, nil)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		for i, r := range d.arriving {
			if r == at {
				d.arriving = append(d.arriving[:i], d.arriving[i+1:]...)
				break
			}
		}
		d.quota.Spare -= at.size
		s.heap.Map(s.heap.Reap(block), at.addr, at.size, stamp)
		s.gauges.SetFree(s.heap.FreeBlocks, int64(at.size))
	}()
	d.tell(d.onMap, pieces)
}
