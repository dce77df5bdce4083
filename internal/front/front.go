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
// (internal/engine/quota). Beyond them it calls Go.
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
	Requested uint64 // bytes asked for; written by set alone
	Stamp     uint64 // the epoch of the stream in which it was given back
	Mark      uint32 // the version of the heap that handed it out, 0 for one long ago
	_         uint32
}

// set fills an entry. C code reads Requested without the lock (has, in front.c), hence the atomic store.
func (e *Entry) set(addr, requested, stamp uint64, mark uint32) {
	e.Addr, e.Stamp, e.Mark = addr, stamp, mark
	atomic.StoreUint64(&e.Requested, requested)
}

// Front is shared by the threads of one stream. The first two cache lines are all that every operation changes but for
// the tray itself; what only Go changes lies apart.
//
// # Which block is taken
//
// The heap gives a request the block that leaves the rest most useful. A block in the tray has the size, but the heap
// might have merged it and chosen another. So it is taken only if the heap has handed nothing out since it handed out
// this block: then it would choose the same again. That is what temporaries are. Where threads share a stream, one's
// request would spoil another's block; so as long as they take turns, more is allowed.
type Front struct {
	word  atomic.Uint32 // 1 while locked
	count atomic.Uint32 // entries of the tray; C code reads it without the lock
	// net is what was put into the tray less what was taken from it since Go last took stock, by class.
	net   [Classes]Amount
	owner uint64 // the thread that was here last

	taken [Classes]Amount // what was taken from the tray since Go last took stock
	polls uint32          // requests met from the tray while frees waited for other streams
	turns uint32          // rises when another thread comes, falls when the same does
	_     [8]byte

	// Limits are set by Go: by how much net may rise and fall, of which the last is for the classes together; and the
	// bytes that may be given back, whether taken again or not, before Go must hear of it.
	puts  [Classes + 1]Amount
	takes [Classes + 1]Amount
	frees [Classes]int64

	epoch    atomic.Uint64 // the stream's open epoch
	mask     uint64        // sizes of blocks are multiples of mask+1
	smallMax uint64        // the largest block of class 0
	version  uint32        // of the heap: how often it may have handed a block out
	limited  uint32        // takes is not 0
	routed   atomic.Uint32 // 1 while the stream allocates from another pool
	index    atomic.Uint32 // by which C knows the front; 0: C does not
	_        [56]byte

	tray [Slots]Entry
}

const (
	// MarkBits is how many bits of the version C keeps of a block.
	MarkBits = 12
	markMask = 1<<MarkBits - 1
	// Threads take turns when turns is above turnsMany; each change of thread adds that much, up to turnsMost.
	turnsMany = 16
	turnsMost = 64
	// ageShared is how many blocks the heap may have handed out since, where threads take turns.
	ageShared = 64
)

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
			Nap(20 * time.Microsecond)
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

// Ticket says that a block may be put into the tray of a front, with this mark. Without a Front it may not.
type Ticket struct {
	Front *Front
	Mark  uint32
}

// Outcome is what came of Take.
type Outcome int

const (
	Missed Outcome = iota // there is no such block, or a limit is in the way
	Due                   // it is time to look after frees that wait for other streams
	Taken
)

// Take takes the block from the tray that was given back last of those that were asked for with this size. thread is any
// number that tells the calling thread from others, 0 if that does not matter.
func (f *Front) Take(requested uint64, waiting bool, thread uint64) (addr uint64, mark uint32, o Outcome) {
	if f.routed.Load() != 0 {
		return 0, 0, Missed
	}
	oldest := f.visit(thread)
	count := int(f.count.Load())
	for i := count - 1; i >= 0; i-- {
		if m := f.tray[i].Mark; f.tray[i].Requested != requested || m == 0 || (f.version-m)&markMask > oldest {
			continue
		}
		n, r, c := int64(f.round(requested)), int64(requested), f.ClassOf(requested)
		own, all := &f.net[c], &f.net[1-c]
		if !below(own, n, r, &f.takes[c]) || !below(&Amount{own.Blocks + all.Blocks, own.Bytes + all.Bytes,
			own.Requested + all.Requested}, n, r, &f.takes[Classes]) {
			return 0, 0, Missed
		}
		if waiting {
			if f.polls%PollEvery == PollEvery-1 {
				return 0, 0, Due
			}
			f.polls++
		}
		addr, mark = f.tray[i].Addr, f.tray[i].Mark
		for ; i < count-1; i++ {
			next := &f.tray[i+1]
			f.tray[i].set(next.Addr, next.Requested, next.Stamp, next.Mark)
		}
		f.count.Store(uint32(count - 1))
		own.add(-1, -n, -r)
		f.taken[c].add(1, n, r)
		return addr, mark, Taken
	}
	return 0, 0, Missed
}

// visit notes who is here and returns the age of the oldest block that may be taken.
func (f *Front) visit(thread uint64) uint32 {
	switch {
	case thread == 0:
	case f.owner != thread:
		f.owner = thread
		f.turns = min(f.turns+turnsMany, turnsMost)
	case f.turns > 0:
		f.turns--
	}
	if f.turns > turnsMany {
		return ageShared
	}
	return 0
}

// Advance says that the heap may have handed a block out, and returns the mark of that block.
func (f *Front) Advance() uint32 {
	if f.version++; uint8(f.version) == 0 {
		f.version++ // 0 is no mark, also in 8 bits
	}
	return f.version & markMask
}

// Outdate makes the marks of all blocks that were handed out recently too old for the blocks to be taken.
func (f *Front) Outdate() {
	f.version += 2 * ageShared
	f.Advance()
}

// Recent is the mark whose last 8 bits these are, of a block that was handed out not long ago.
func (f *Front) Recent(low uint8) uint32 {
	if low == 0 {
		return 0
	}
	return (f.version - uint32(uint8(f.version)-low)) & markMask
}

// below reports whether net may fall by one block.
func below(net *Amount, n, r int64, limit *Amount) bool {
	return 1-net.Blocks <= limit.Blocks && n-net.Bytes <= limit.Bytes && r-net.Requested <= limit.Requested
}

// Polled says that waiting frees were looked after.
func (f *Front) Polled() { f.polls++ }

// Full reports whether the tray has no room.
func (f *Front) Full() bool { return f.count.Load() == Slots }

// Put puts a block into the tray that was given back now, and reports whether there was room for it and the limits
// allowed it.
func (f *Front) Put(addr, requested uint64, mark uint32, thread uint64) bool {
	f.visit(thread)
	n, c := int64(f.round(requested)), f.ClassOf(requested)
	own, all := &f.net[c], &f.net[1-c]
	if f.Full() || own.Blocks+1 > f.puts[c].Blocks || own.Bytes+n > f.puts[c].Bytes ||
		own.Blocks+all.Blocks+1 > f.puts[Classes].Blocks || own.Bytes+all.Bytes+n > f.puts[Classes].Bytes ||
		own.Bytes+f.taken[c].Bytes+n >= f.frees[c] {
		return false
	}
	f.PutBeyond(addr, requested, mark)
	return true
}

// PutBeyond is Put whatever the limits say, for a caller who settles the statistics. There must be room.
func (f *Front) PutBeyond(addr, requested uint64, mark uint32) {
	n := f.count.Load()
	f.tray[n].set(addr, requested, f.epoch.Load(), mark&markMask)
	f.count.Store(n + 1)
	f.net[f.ClassOf(requested)].add(1, int64(f.round(requested)), int64(requested))
}

// Has reports whether a block is in the tray.
func (f *Front) Has(addr uint64) bool {
	for _, e := range f.Entries() {
		if e.Addr == addr {
			return true
		}
	}
	return false
}

// Entries are the blocks of the tray, oldest first. They are valid until the lock is let go.
func (f *Front) Entries() []Entry { return f.tray[:f.count.Load()] }

// Empty forgets the blocks in the tray, which the caller has freed.
func (f *Front) Empty() {
	if f.count.Load() != 0 { // a load costs less than a store, and most trays are empty
		f.count.Store(0)
	}
}

// Stock is what happened to a class since it was last asked: net is what was put less what was taken.
func (f *Front) Stock(class int) (net, taken Amount) {
	net, taken = f.net[class], f.taken[class]
	f.net[class], f.taken[class] = Amount{}, Amount{}
	return net, taken
}

// PutLimits are by how much the blocks in the tray may rise after stock was taken: for each class, and last for the classes
// together. Requested does not matter.
func (f *Front) PutLimits() *[Classes + 1]Amount { return &f.puts }

// SetFrees limits the bytes of a class that may be put into the tray, whether they are taken again or not.
func (f *Front) SetFrees(class int, bytes int64) { f.frees[class] = bytes }

// TakeLimits are by how much they may fall below what they were then.
func (f *Front) TakeLimits() *[Classes + 1]Amount {
	f.limited = 1
	return &f.takes
}

// NoTakes makes the limits of takes 0.
func (f *Front) NoTakes() {
	if f.limited != 0 {
		f.limited = 0
		f.takes = [Classes + 1]Amount{}
	}
}

// Layout is the offsets of the fields of a Front in the order in which they are declared, its size, and the offsets of
// Flags: front.h has the same.
func Layout() []uintptr {
	var f Front
	var g Flags
	return []uintptr{unsafe.Offsetof(f.word), unsafe.Offsetof(f.count), unsafe.Offsetof(f.net), unsafe.Offsetof(f.owner),
		unsafe.Offsetof(f.taken), unsafe.Offsetof(f.polls), unsafe.Offsetof(f.turns), unsafe.Offsetof(f.puts),
		unsafe.Offsetof(f.takes), unsafe.Offsetof(f.frees), unsafe.Offsetof(f.epoch), unsafe.Offsetof(f.mask),
		unsafe.Offsetof(f.smallMax), unsafe.Offsetof(f.version), unsafe.Offsetof(f.limited), unsafe.Offsetof(f.routed),
		unsafe.Offsetof(f.index), unsafe.Offsetof(f.tray), unsafe.Sizeof(f), unsafe.Offsetof(f.tray[0].Mark),
		unsafe.Offsetof(g.Quick), unsafe.Offsetof(g.Waiting)}
}

// Constants are those that front.h has as well, in its order.
func Constants() []int {
	return []int{Slots, Classes, PollEvery, MarkBits, turnsMany, turnsMost, ageShared}
}
