// Package magazine is memory that an arena's Go code shares with the C code of the library, so that a free, and the
// allocation of the same size that follows it, need no call into Go. Such a call takes longer than the engine does, and a
// hundred times as long when all threads of Go are idle.
//
// A magazine holds the blocks that C code took back most recently, what is needed to hand them out again, and what is needed
// to keep the engine's statistics exact meanwhile.
//
// # Life of a block in a magazine
//
// C puts a block into the magazine instead of passing it to Go. To the heap the block stays in use; it bears the stream's open
// epoch, and the statistics count it as a free block of its own. It leaves the magazine in one of two ways.
//
//   - C hands it out again, to a request of that size, if the heap has handed out nothing since it handed out this block. The
//     heap would choose the same block again, so the blocks of one thread lie where they would without magazines.
//   - Go code locks the arena. The lock excludes C. Its holder takes stock of what C did (Stock) and frees the blocks for good,
//     so that they merge and may be parked or moved.
//
// So no other part of the engine ever sees a block that is neither used nor free.
//
// Go sets limits whenever it unlocks the arena: as much as the arena's allowances leave (internal/engine/quota), and as many
// bytes of frees as may come before an epoch has to be closed. Beyond these limits C calls Go. C never waits for a magazine that
// is locked: it calls Go, which can wait.
//
// # Tokens
//
// C remembers which blocks it may put into a magazine, in a table of its own; Go gives it a token for each. A thread that
// pauses memory or restores a pool to an earlier state raises a number (magazine_hold) and then empties the table. C enters a
// block, or puts one into a magazine, only if the number has not changed since before the block was handed out or its entry was
// taken. The head of cmd/libcistern/magazine.c states the memory order of each access; internal/magazine/model checks them
// exhaustively.
//
// # Layout
//
// A Magazine has no pointers, and none into Go memory; Go code that gives it to C pins it. cmd/libcistern/magazine.h has the same
// layout, which magazine.go compares before the first magazine is used. Take and Put are the same steps in Go, for calls that
// found the magazine locked, and for tests.
package magazine

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/deadline"
)

// Capacity is how many blocks a magazine has room for. Programs that free many blocks in a row and then allocate the same sizes
// again are few; what matters are temporaries, and threads that share a stream.
const Capacity = 16

// Classes is how many size classes an arena has.
const Classes = 2

// Amount is a number of blocks with their bytes, rounded and as asked for.
type Amount struct{ Blocks, Bytes, Requested int64 }

func (a *Amount) add(blocks, bytes, requested int64) {
	a.Blocks += blocks
	a.Bytes += bytes
	a.Requested += requested
}

// Slot is a block in the magazine.
type Slot struct {
	Addr      uint64
	Requested uint64 // bytes asked for; written by set alone
	Stamp     uint64 // the epoch of the stream in which it was given back
	Mark      uint32 // the version of the heap that handed it out, 0 for one long ago
	_         uint32
}

// set fills an entry. C code reads Requested without the lock (has, in magazine.c), hence the atomic store.
func (e *Slot) set(addr, requested, stamp uint64, mark uint32) {
	e.Addr, e.Stamp, e.Mark = addr, stamp, mark
	atomic.StoreUint64(&e.Requested, requested)
}

// Magazine is shared by the threads of one stream. The first two cache lines are all that every operation changes but for
// the magazine itself; what only Go changes lies apart.
//
// # Which block is taken
//
// The heap gives a request the block that leaves the rest most useful. A block in the magazine has the size, but the heap
// might have merged it and chosen another. So it is taken only if the heap has handed nothing out since it handed out
// this block: then it would choose the same again. That is what temporaries are. Where threads share a stream, one's
// request would spoil another's block; so as long as they take turns, more is allowed.
type Magazine struct {
	word  atomic.Uint32 // 1 while locked
	count atomic.Uint32 // entries of the magazine; C code reads it without the lock
	// net is what was put into the magazine less what was taken from it since Go last took stock, by class.
	net   [Classes]Amount
	owner uint64 // the thread that was here last

	taken [Classes]Amount // what was taken from the magazine since Go last took stock
	polls uint32          // requests met from the magazine while frees waited for other streams
	turns uint32          // rises when another thread comes, falls when the same does
	_     [8]byte

	Limits Limits

	epoch    atomic.Uint64 // the stream's open epoch
	mask     uint64        // sizes of blocks are multiples of mask+1
	smallMax uint64        // the largest block of class 0
	version  uint32        // of the heap: how often it may have handed a block out
	limited  uint32        // takes is not 0
	routed   atomic.Uint32 // 1 while the stream allocates from another pool
	index    atomic.Uint32 // by which C knows the magazine; 0: C does not
	_        [56]byte

	slots [Capacity]Slot
}

// Limits are set by Go: by how much net may rise and fall since Go last took stock, of which the last is for the classes
// together and Requested matters for falls only; and the bytes that may be given back, whether taken again or not, before Go
// must hear of it.
type Limits struct {
	Puts  [Classes + 1]Amount
	takes [Classes + 1]Amount // by TakeLimits and NoTakes
	Frees [Classes]int64
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

// New makes the magazine of an arena whose sizes are rounded up to multiples of mask+1.
func New(mask, smallMax uint64) *Magazine { return &Magazine{mask: mask, smallMax: smallMax} }

// Lock excludes C and other Go code. C holds the lock for some nanoseconds at a time, unless its thread is interrupted.
func (m *Magazine) Lock() {
	for spins := 0; !m.word.CompareAndSwap(0, 1); spins++ {
		if spins > 100 {
			deadline.Nap(20 * time.Microsecond)
		} else if spins > 20 {
			runtime.Gosched()
		}
	}
}

// TryLock is one attempt.
func (m *Magazine) TryLock() bool { return m.word.CompareAndSwap(0, 1) }

func (m *Magazine) Unlock() { m.word.Store(0) }

// Index is the number by which C knows the magazine, 0 while it does not.
func (m *Magazine) Index() uint32     { return m.index.Load() }
func (m *Magazine) SetIndex(i uint32) { m.index.Store(i) }

// SetEpoch says which epoch of the stream is open. It is raised before the event that closes the last one is recorded.
func (m *Magazine) SetEpoch(e uint64) { m.epoch.Store(e) }

// SetRouted says whether the stream allocates from another pool: then nothing is taken from the magazine.
func (m *Magazine) SetRouted(on bool) {
	if on {
		m.routed.Store(1)
	} else {
		m.routed.Store(0)
	}
}

// Round is the size of the block that a request gets.
func (m *Magazine) Round(requested uint64) uint64 { return (requested + m.mask) &^ m.mask }

// ClassOf is the size class of a request.
func (m *Magazine) ClassOf(requested uint64) int {
	if m.Round(requested) <= m.smallMax {
		return 0
	}
	return 1
}

// All that follows is for holders of the lock.

// Token says that a block may be put into the magazine, with this mark. Without a Magazine it may not.
type Token struct {
	Magazine *Magazine
	Mark     uint32
}

// Outcome is what came of Take.
type Outcome int

const (
	Missed Outcome = iota // there is no such block, or a limit is in the way
	Due                   // it is time to look after frees that wait for other streams
	Taken
)

// Take takes the block from the magazine that was given back last of those that were asked for with this size. thread is any
// number that tells the calling thread from others, 0 if that does not matter.
func (m *Magazine) Take(requested uint64, waiting bool, thread uint64) (addr uint64, mark uint32, o Outcome) {
	if m.routed.Load() != 0 {
		return 0, 0, Missed
	}
	oldest := m.visit(thread)
	count := int(m.count.Load())
	for i := count - 1; i >= 0; i-- {
		if v := m.slots[i].Mark; m.slots[i].Requested != requested || v == 0 || (m.version-v)&markMask > oldest {
			continue
		}
		n, r, c := int64(m.Round(requested)), int64(requested), m.ClassOf(requested)
		own, all := &m.net[c], &m.net[1-c]
		if !below(own, n, r, &m.Limits.takes[c]) || !below(&Amount{own.Blocks + all.Blocks, own.Bytes + all.Bytes,
			own.Requested + all.Requested}, n, r, &m.Limits.takes[Classes]) {
			return 0, 0, Missed
		}
		if waiting {
			if m.polls%PollEvery == PollEvery-1 {
				return 0, 0, Due
			}
			m.polls++
		}
		addr, mark = m.slots[i].Addr, m.slots[i].Mark
		for ; i < count-1; i++ {
			next := &m.slots[i+1]
			m.slots[i].set(next.Addr, next.Requested, next.Stamp, next.Mark)
		}
		m.count.Store(uint32(count - 1))
		own.add(-1, -n, -r)
		m.taken[c].add(1, n, r)
		return addr, mark, Taken
	}
	return 0, 0, Missed
}

// visit notes the thread and returns the age of the oldest block that may be taken.
func (m *Magazine) visit(thread uint64) uint32 {
	switch {
	case thread == 0:
	case m.owner != thread:
		m.owner = thread
		m.turns = min(m.turns+turnsMany, turnsMost)
	case m.turns > 0:
		m.turns--
	}
	if m.turns > turnsMany {
		return ageShared
	}
	return 0
}

// Advance says that the heap may have handed a block out, and returns the mark of that block.
func (m *Magazine) Advance() uint32 {
	if m.version++; uint8(m.version) == 0 {
		m.version++ // 0 is no mark, also in 8 bits
	}
	return m.version & markMask
}

// Outdate makes the marks of all blocks that were handed out recently too old for the blocks to be taken.
func (m *Magazine) Outdate() {
	m.version += 2 * ageShared
	m.Advance()
}

// Recent is the mark whose last 8 bits these are, of a block that was handed out not long ago.
func (m *Magazine) Recent(low uint8) uint32 {
	if low == 0 {
		return 0
	}
	return (m.version - uint32(uint8(m.version)-low)) & markMask
}

// below reports whether net may fall by one block.
func below(net *Amount, n, r int64, limit *Amount) bool {
	return 1-net.Blocks <= limit.Blocks && n-net.Bytes <= limit.Bytes && r-net.Requested <= limit.Requested
}

// Polled says that waiting frees were looked after.
func (m *Magazine) Polled() { m.polls++ }

// Full reports whether the magazine has no room.
func (m *Magazine) Full() bool { return m.count.Load() == Capacity }

// Put puts a block into the magazine that was given back now, and reports whether there was room for it and the limits
// allowed it.
func (m *Magazine) Put(addr, requested uint64, mark uint32, thread uint64) bool {
	m.visit(thread)
	n, c := int64(m.Round(requested)), m.ClassOf(requested)
	own, all := &m.net[c], &m.net[1-c]
	if m.Full() || own.Blocks+1 > m.Limits.Puts[c].Blocks || own.Bytes+n > m.Limits.Puts[c].Bytes ||
		own.Blocks+all.Blocks+1 > m.Limits.Puts[Classes].Blocks || own.Bytes+all.Bytes+n > m.Limits.Puts[Classes].Bytes ||
		own.Bytes+m.taken[c].Bytes+n >= m.Limits.Frees[c] {
		return false
	}
	m.PutBeyond(addr, requested, mark)
	return true
}

// PutBeyond is Put whatever the limits say, for callers that update the statistics themselves. There must be room.
func (m *Magazine) PutBeyond(addr, requested uint64, mark uint32) {
	n := m.count.Load()
	m.slots[n].set(addr, requested, m.epoch.Load(), mark&markMask)
	m.count.Store(n + 1)
	m.net[m.ClassOf(requested)].add(1, int64(m.Round(requested)), int64(requested))
}

// Has reports whether a block is in the magazine.
func (m *Magazine) Has(addr uint64) bool {
	for _, e := range m.Slots() {
		if e.Addr == addr {
			return true
		}
	}
	return false
}

// Slots are the blocks of the magazine, oldest first. They are valid until the lock is released.
func (m *Magazine) Slots() []Slot { return m.slots[:m.count.Load()] }

// Empty forgets the blocks in the magazine, which the caller has freed.
func (m *Magazine) Empty() {
	if m.count.Load() != 0 { // a load costs less than a store, and most magazines are empty
		m.count.Store(0)
	}
}

// Stock is what happened to a class since it was last asked: net is what was put less what was taken.
func (m *Magazine) Stock(class int) (net, taken Amount) {
	net, taken = m.net[class], m.taken[class]
	m.net[class], m.taken[class] = Amount{}, Amount{}
	return net, taken
}

// TakeLimits are by how much net may fall.
func (m *Magazine) TakeLimits() *[Classes + 1]Amount {
	m.limited = 1
	return &m.Limits.takes
}

// NoTakes makes the limits of takes 0.
func (m *Magazine) NoTakes() {
	if m.limited != 0 {
		m.limited = 0
		m.Limits.takes = [Classes + 1]Amount{}
	}
}

// Layout is the offsets of the fields of a Magazine in the order in which they are declared, its size, and the offsets of
// Flags: magazine.h has the same.
func Layout() []uintptr {
	var m Magazine
	var g Flags
	limits := unsafe.Offsetof(m.Limits)
	return []uintptr{unsafe.Offsetof(m.word), unsafe.Offsetof(m.count), unsafe.Offsetof(m.net), unsafe.Offsetof(m.owner),
		unsafe.Offsetof(m.taken), unsafe.Offsetof(m.polls), unsafe.Offsetof(m.turns), limits + unsafe.Offsetof(m.Limits.Puts),
		limits + unsafe.Offsetof(m.Limits.takes), limits + unsafe.Offsetof(m.Limits.Frees), unsafe.Offsetof(m.epoch), unsafe.Offsetof(m.mask),
		unsafe.Offsetof(m.smallMax), unsafe.Offsetof(m.version), unsafe.Offsetof(m.limited), unsafe.Offsetof(m.routed),
		unsafe.Offsetof(m.index), unsafe.Offsetof(m.slots), unsafe.Sizeof(m), unsafe.Offsetof(m.slots[0].Mark),
		unsafe.Offsetof(g.Quick), unsafe.Offsetof(g.Waiting)}
}

// Constants are those that magazine.h has as well, in its order.
func Constants() []int {
	return []int{Capacity, Classes, PollEvery, MarkBits, turnsMany, turnsMost, ageShared}
}
