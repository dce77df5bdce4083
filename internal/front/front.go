// Package front is the memory that a lane's Go code shares with C code in front of the library, so that a free, and the
// allocation of the same size that follows it, cost no call into Go: the call takes longer than the engine does, and a
// hundred times as long when all of Go is asleep.
//
// A front has a *tray* of the blocks that C code took back most recently, and what is needed to hand them out again and
// to keep the engine's statistics exact meanwhile. To the heap they are blocks in use. Go code that locks the lane takes
// stock of what happened (Stock) and really frees the blocks in the tray before it looks at anything, so no other part of
// the engine ever sees a block that is neither used nor free.
//
// What C may do is bounded by limits that Go sets whenever it lets the lane go: as much as the lane's allowances leave
// (gauges.go in package cistern). Beyond them it calls Go.
//
// There are no pointers in a Front, and none into Go memory: the Go code that hands it to C pins it. C's side of it is
// cmd/libcistern/front.c, whose structures have the same layout; Take and Put are the same steps in Go, for the calls
// that found the front busy and for tests.
package front

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// Slots is how many blocks a tray has room for. Programs that free many blocks in a row and then allocate the same sizes
// again are few; what matters are temporaries, and threads that share a stream.
const Slots = 16

// Classes is how many size classes a lane has.
const Classes = 2

// Amount is a number of blocks with their bytes, rounded and as asked for.
type Amount struct{ Blocks, Bytes, Requested int64 }

func (a *Amount) add(blocks, bytes, requested int64) {
	a.Blocks += blocks
	a.Bytes += bytes
	a.Requested += requested
}

// Entry is a block in the tray.
type Entry struct {
	Addr      uint64
	Requested uint64 // bytes asked for
	Stamp     uint64 // the epoch of the stream in which it was given back
}

// Front is shared by the threads of one stream. The first cache line is all that every operation changes; what only Go
// changes lies apart.
type Front struct {
	word  atomic.Uint32 // 1 while locked
	count uint32        // entries of the tray
	// net is what was put into the tray less what was taken from it since Go last took stock, by class.
	net   [Classes]Amount
	polls uint32        // requests met from the tray while frees waited for other streams
	index atomic.Uint32 // by which C knows the front; 0: C does not

	taken [Classes]Amount // what was taken from the tray since Go last took stock
	_     [16]byte

	// Limits are set by Go: by how much net may rise and fall. The last of each is for the classes together.
	puts  [Classes + 1]Amount
	takes [Classes + 1]Amount

	epoch    atomic.Uint64 // the stream's open epoch
	mask     uint64        // sizes of blocks are multiples of mask+1
	smallMax uint64        // the largest block of class 0
	routed   atomic.Uint32 // 1 while the stream allocates from another pool
	_        [4]byte
	_        [16]byte

	tray [Slots]Entry
}

// Flags are a device's. C code reads them before it does anything.
type Flags struct {
	Quick   Flag // off: every request and every free is Go's
	Waiting Flag // frees wait for other streams, so one request in PollEvery is Go's
	_       [120]byte
}

// Flag is a bool that C can read.
type Flag struct{ v atomic.Uint32 }

func (f *Flag) Load() bool { return f.v.Load() != 0 }

func (f *Flag) Store(on bool) {
	if on {
		f.v.Store(1)
	} else {
		f.v.Store(0)
	}
}

// PollEvery is how many requests are met without asking how far frees are that wait for other streams.
const PollEvery = 16

// New makes the front of a lane whose sizes are rounded up to multiples of mask+1.
func New(mask, smallMax uint64) *Front { return &Front{mask: mask, smallMax: smallMax} }

// Lock excludes C and other Go code. C holds the lock for some nanoseconds at a time, unless its thread is interrupted.
func (f *Front) Lock() {
	for spins := 0; !f.word.CompareAndSwap(0, 1); spins++ {
		if spins > 100 {
			time.Sleep(20 * time.Microsecond)
		} else if spins > 20 {
			runtime.Gosched()
		}
	}
}

// TryLock is one attempt.
func (f *Front) TryLock() bool { return f.word.CompareAndSwap(0, 1) }

func (f *Front) Unlock() { f.word.Store(0) }

// Index is the number by which C knows the front, 0 while it does not.
func (f *Front) Index() uint32     { return f.index.Load() }
func (f *Front) SetIndex(i uint32) { f.index.Store(i) }

// SetEpoch says which epoch of the stream is open. It is raised before the event that closes the last one is recorded.
func (f *Front) SetEpoch(e uint64) { f.epoch.Store(e) }

// SetRouted says whether the stream allocates from another pool: then nothing is taken from the tray.
func (f *Front) SetRouted(on bool) {
	if on {
		f.routed.Store(1)
	} else {
		f.routed.Store(0)
	}
}

// round is the size of the block that a request gets.
func (f *Front) round(requested uint64) uint64 { return (requested + f.mask) &^ f.mask }

// ClassOf is the size class of a request.
func (f *Front) ClassOf(requested uint64) int {
	if f.round(requested) <= f.smallMax {
		return 0
	}
	return 1
}

// All that follows is for holders of the lock.

// Outcome is what came of Take.
type Outcome int

const (
	Missed Outcome = iota // there is no such block, or a limit is in the way
	Due                   // it is time to look after frees that wait for other streams
	Taken
)

// Take takes the block from the tray that was given back last of those that were asked for with this size.
func (f *Front) Take(requested uint64, waiting bool) (addr uint64, o Outcome) {
	if f.routed.Load() != 0 {
		return 0, Missed
	}
	for i := int(f.count) - 1; i >= 0; i-- {
		if f.tray[i].Requested != requested {
			continue
		}
		n, r, c := int64(f.round(requested)), int64(requested), f.ClassOf(requested)
		own, all := &f.net[c], &f.net[1-c]
		if !below(own, n, r, &f.takes[c]) || !below(&Amount{own.Blocks + all.Blocks, own.Bytes + all.Bytes,
			own.Requested + all.Requested}, n, r, &f.takes[Classes]) {
			return 0, Missed
		}
		if waiting {
			if f.polls%PollEvery == PollEvery-1 {
				return 0, Due
			}
			f.polls++
		}
		addr = f.tray[i].Addr
		copy(f.tray[i:f.count-1], f.tray[i+1:f.count])
		f.count--
		own.add(-1, -n, -r)
		f.taken[c].add(1, n, r)
		return addr, Taken
	}
	return 0, Missed
}

// below reports whether net may fall by one block.
func below(net *Amount, n, r int64, limit *Amount) bool {
	return 1-net.Blocks <= limit.Blocks && n-net.Bytes <= limit.Bytes && r-net.Requested <= limit.Requested
}

// Polled says that waiting frees were looked after.
func (f *Front) Polled() { f.polls++ }

// Full reports whether the tray has no room.
func (f *Front) Full() bool { return f.count == Slots }

// Put puts a block into the tray that was given back now, and reports whether there was room for it and the limits
// allowed it.
func (f *Front) Put(addr, requested uint64) bool {
	n, c := int64(f.round(requested)), f.ClassOf(requested)
	own, all := &f.net[c], &f.net[1-c]
	if f.Full() || own.Blocks+1 > f.puts[c].Blocks || own.Bytes+n > f.puts[c].Bytes ||
		own.Blocks+all.Blocks+1 > f.puts[Classes].Blocks || own.Bytes+all.Bytes+n > f.puts[Classes].Bytes {
		return false
	}
	f.PutBeyond(addr, requested)
	return true
}

// PutBeyond is Put whatever the limits say, for a caller who settles the statistics. There must be room.
func (f *Front) PutBeyond(addr, requested uint64) {
	f.tray[f.count] = Entry{addr, requested, f.epoch.Load()}
	f.count++
	f.net[f.ClassOf(requested)].add(1, int64(f.round(requested)), int64(requested))
}

// Has reports whether a block is in the tray.
func (f *Front) Has(addr uint64) bool {
	for _, e := range f.tray[:f.count] {
		if e.Addr == addr {
			return true
		}
	}
	return false
}

// Entries are the blocks of the tray, oldest first. They are valid until the lock is let go.
func (f *Front) Entries() []Entry { return f.tray[:f.count] }

// Empty forgets the blocks in the tray, which the caller has freed.
func (f *Front) Empty() { f.count = 0 }

// Stock is what happened to a class since it was last asked: net is what was put less what was taken.
func (f *Front) Stock(class int) (net, taken Amount) {
	net, taken = f.net[class], f.taken[class]
	f.net[class], f.taken[class] = Amount{}, Amount{}
	return net, taken
}

// SetLimits says by how much the blocks in the tray may change from now on: puts and takes, for each class, and last for
// the classes together. Requested does not matter of puts.
func (f *Front) SetLimits(puts, takes *[Classes + 1]Amount) { f.puts, f.takes = *puts, *takes }

// Layout is the offsets of the fields of a Front in the order in which they are declared, its size, and the offsets of
// Flags: front.h has the same.
func Layout() []uintptr {
	var f Front
	var g Flags
	return []uintptr{unsafe.Offsetof(f.word), unsafe.Offsetof(f.count), unsafe.Offsetof(f.net), unsafe.Offsetof(f.polls),
		unsafe.Offsetof(f.index), unsafe.Offsetof(f.taken), unsafe.Offsetof(f.puts), unsafe.Offsetof(f.takes),
		unsafe.Offsetof(f.epoch), unsafe.Offsetof(f.mask), unsafe.Offsetof(f.smallMax), unsafe.Offsetof(f.routed),
		unsafe.Offsetof(f.tray), unsafe.Sizeof(f), unsafe.Offsetof(g.Quick), unsafe.Offsetof(g.Waiting)}
}
