// Package lockrank states the order in which the engine takes its locks and, in tests, checks it at every lock.
//
// # The order
//
// A goroutine locks a mutex only while every mutex that it holds has a lower rank. The ranks below are the order.
//
//   - Several mutexes of rank [Arena] are held only by a holder of [Device].
//   - The mutex of an arena with a magazine covers the magazine's word, which C code takes by itself.
//   - The ranks after [Allocator] are leaves: their holders lock nothing more.
//
// Mutexes that are held over no call that locks or waits, as those of internal/stacks and of adaptors, have no rank. Python's
// interpreter lock and the locks of the PyTorch adapter come before all of these.
//
// # The check
//
// A second lock of the same mutex, and a lock against the order, panic with the names of both mutexes. The check is on
// where a test imports package internal/lockrank/checked, which package internal/lint demands of each test that runs the
// engine, and in builds with the tag lockrank, which tests use for the libraries and programs that they build. Elsewhere a
// Mutex is a sync.Mutex behind one branch.
//
// Annotations (// +checklocks:) say which lock guards a field and which lock the caller of a function holds. An analyser,
// gVisor's checklocks, checks them in internal/lint. It does not follow the locks of arenas, of which several are held at once,
// nor function literals.
package lockrank

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// Rank is the place of a mutex in the order.
type Rank uint8

// The ranks, in the order in which they are locked.
const (
	none      Rank = iota
	Keeping        // engine.Stacks.keeping
	Pausing        // engine.pausedMemory.mu
	Private        // engine.upstreams.mu
	Glance         // glance.mu
	Device         // Device.mu
	Arena          // arena.Arena.mu, and the magazine's word behind it
	Waits          // timeline.gpuWaits.mu
	Stream         // timeline.epochs.mu
	Allocator      // Allocator.mu
	Opened         // opened.mu
	Gate           // timeline.Gate.mu
	Events         // timeline.Device.mu
	History        // journal.Journal.mu
	Segments       // resource.SingleHandle.mu
	ranks
)

var names = [ranks]string{"a mutex without rank", "Stacks.keeping", "pausedMemory.mu", "upstreams.mu", "glance.mu", "Device.mu",
	"arena.Arena.mu", "timeline.gpuWaits.mu", "timeline.epochs.mu", "Allocator.mu", "opened.mu", "timeline.Gate.mu", "timeline.Device.mu",
	"journal.Journal.mu", "resource.SingleHandle.mu"}

func (r Rank) String() string { return names[r] }

// leaf reports whether nothing is locked by holders.
func (r Rank) leaf() bool { return r > Allocator }

// Mutex is a sync.Mutex with a rank.
type Mutex struct {
	sync.Mutex // locked and unlocked by itself only where nothing is checked
	Rank       Rank
	owner      atomic.Uintptr // the goroutine that holds it; 0 while nothing is checked
}

// Checking reports whether locks are checked. Where the hot path locks, it calls the methods of m.Mutex itself while they are
// not: those are inlined, and Lock and Unlock are not.
func Checking() bool { return checking }

// Lock is sync.Mutex.Lock.
//
// +checklocksignore: it is the lock
func (m *Mutex) Lock() {
	if checking {
		m.lockChecked()
		return
	}
	m.Mutex.Lock()
}

// TryLock is sync.Mutex.TryLock. It never waits, so it may be called against the order.
func (m *Mutex) TryLock() bool {
	if !m.Mutex.TryLock() {
		return false
	}
	if checking {
		m.own(Goroutine())
	}
	return true
}

// Unlock is sync.Mutex.Unlock.
//
// +checklocksignore: it is the lock
func (m *Mutex) Unlock() {
	if checking {
		m.unlockChecked()
		return
	}
	m.Mutex.Unlock()
}

// HoldsNone panics where the goroutine holds a mutex of that rank or a higher one. It is for what must not be done under
// such locks, in words.
func HoldsNone(from Rank, what string) {
	if !checking {
		return
	}
	held := holds(Goroutine())
	for r := from; r < ranks; r++ {
		if held[r] != 0 {
			panic(fmt.Sprintf("lockrank: %s while %s is held", what, r))
		}
	}
}

// check panics where the goroutine must not lock m.
func (m *Mutex) check(g uintptr) {
	if m.Rank == none {
		panic("lockrank: " + none.String())
	}
	if m.owner.Load() == g {
		panic(fmt.Sprintf("lockrank: %s is locked a second time by the goroutine that holds it", m.Rank))
	}
	held := holds(g)
	for r, n := range held {
		r := Rank(r)
		if n == 0 || r < m.Rank && !r.leaf() || r == Arena && m.Rank == Arena && held[Device] != 0 {
			continue
		}
		panic(fmt.Sprintf("lockrank: %s is locked while %s is held, against the order", m.Rank, r))
	}
}

// +checklocksignore: it is the lock
func (m *Mutex) lockChecked() {
	g := Goroutine()
	m.check(g)
	if !m.Mutex.TryLock() {
		waits.Store(g, m)
		m.Mutex.Lock()
		waits.Delete(g)
	}
	m.own(g)
}

func (m *Mutex) own(g uintptr) {
	m.owner.Store(g)
	count(g, m.Rank, 1)
}

// unlockChecked forgets the owner also where it is not the goroutine that unlocks.
//
// +checklocksignore: it is the lock
func (m *Mutex) unlockChecked() {
	if g := m.owner.Swap(0); g != 0 {
		count(g, m.Rank, -1)
	}
	m.Mutex.Unlock()
	if f := onUnlock.Load(); f != nil {
		(*f)()
	}
}

// MayWait checks that no lock is held over a wait for the GPU but that of threads that pause or resume.
func MayWait() { HoldsNone(Private, "a wait for the GPU") }

// MayCall checks the same of a call of a user's function.
func MayCall() { HoldsNone(Private, "a call of the user's function") }
