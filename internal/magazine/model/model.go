// Package model checks the protocol between C and Go over magazines: every interleaving of two threads, with every value that
// C11 lets a read return.
//
// A method of protocol has the name, the steps and the orders of its counterpart: magazine_c.go those of
// cmd/libcistern/magazine.c (magazineTake is magazine_take), engine.go those of the engine and of shim.c around it. ordersOfC is the
// list of orders at the top of magazine.c, which TestOrders compares. The tests run pairs of these functions beside one another.
// Beside them stand the steps as they once were (old), and weaker orders: the model finds what is wrong with each.
//
//	word, count, requested, epochOfC   fields of struct magazine that one side writes while the other may read
//	cellLocked                         what holders of the magazine's lock alone touch: magazine, statistics, the stream's heap
//	shut, keys, infos                  magazine_shut, and one set of magazine.c's table of blocks
//	nameIndex, namesWord, cellHandle,  magazine.c's tables of streams and magazines, with one of each
//	cellMagazine
//	quickFlag, history, poison         Device.quick, and what it is computed from
//	epochOfGo, driver, cellDriver      Stream.epoch; the driver's order of calls on one stream, and a kernel
//
// There is one block, a magazine of one slot, a set of two entries.
//
// # How it checks
//
// Memory is that of RC11 (Lahav et al., Repairing Sequential Consistency in C/C++11, 2017) without fences. Each location has
// its messages in modification order, each thread and each message a view of what is known; a thread reads any message that
// is not older than its view, and a store goes to any place behind it. So every combination of reads-from and modification
// order that is coherent is tried, in every interleaving; states that were seen are not tried again (explore). An access
// with seq_cst is one with acquire and release; and an execution is dropped in which those have no total order. Data that is
// not atomic is in cells, and two accesses to one that are not ordered are a data race. TestLitmus holds this against what
// C11 is known to allow and to forbid.
//
// # What it does not show
//
//   - Like RC11 it has no executions in which a value is read that depends on the read (load buffering). C11 allows those for
//     relaxed accesses; keyTake, keyGive and turnLower, which forbid them here, can therefore not be seen to be needed.
//   - Two threads, one pass each, over a fixed number of blocks and entries, are no proof for more.
//   - The driver is taken to put calls on one stream in an order, as a mutex does: a free that reads the old epoch behind a
//     launch then has its launch before the event.
//
// Loom (crates.io) was tried first, on the same model. It takes seq_cst for acquire and release, and it leaves out
// executions where a thread loads a location before it stores there (tokio-rs/loom issues 166 and 392), which most functions
// of magazine.c do.
package model

import "encoding/binary"

// location is an atomic variable.
type location uint8

const (
	word location = iota
	count
	requested
	epochOfC
	quickFlag
	shut
	keys
	infos = keys + setSize
	rest  = infos + setSize
)

const (
	nameIndex = rest + iota
	namesWord
	epochOfGo
	driver
	quickMu
	history
	poison
	locations
)

const (
	cellLocked = iota
	cellRequested
	cellHandle
	cellMagazine
	cellDriver
	cells
)

// block is the address of the one block; 0 and busy are none.
const block = 2

// data is what a cell holds: one value, or what the magazine's lock guards.
type data struct {
	value uint64

	slot, slotRequested, stamp uint64 // the one slot; slot is 0 where it is empty
	used, out, paused          bool   // of the block: the heap takes it for used; a thread has it; it has no memory
	requested                  uint64
	over                       uint64 // the last epoch that is over
	covered                    bool   // and the kernel was launched before its end
}

func (d *data) append(b []byte) []byte {
	return append(b, byte(d.value), byte(d.slot), byte(d.slotRequested), byte(d.stamp), flag(d.used), flag(d.out), flag(d.paused),
		byte(d.requested), byte(d.over), flag(d.covered))
}

// ghost is what the threads do not know, in the order in which things happen.
type ghost struct {
	history    bool   // SetHistory has returned
	one, other uint64 // what threads found, for TestLitmus
}

func (g *ghost) append(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(append(b, flag(g.history)), g.one), g.other)
}

// protocol is the functions under test, with the orders that they use and steps as they once were.
type protocol struct {
	o   orders
	old old
}

// old are steps that have been found to be wrong.
type old struct {
	publishFirst       bool // block_add stored the address and looked at the turn then; magazine_forget_all passed by claimed entries
	passClaimed        bool // magazine_forget_all passed by claimed entries
	lowerHalf          bool // put looked only whether a thread holds
	restoreWithoutHold bool // cistern_pool_restore did not hold
	plainEntries       bool // sizes in the magazine were written by plain stores
	epochUnseen        bool // Stream.syncEvent raised the epoch without SetEpoch
	eventFirst         bool // (never so) an event is recorded before the epoch is raised
	quickBeforeLock    bool // put asked for quick before it had the lock, not with it
	historyAtOnce      bool // SetHistory did not lock the arenas
	quickUnlocked      bool // updateQuick had no lock
}
