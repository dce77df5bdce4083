// Package lockrank states the order in which the engine takes its locks and, in tests, checks it at every lock.
//
// # The order
//
// A goroutine locks a mutex only while every mutex that it holds has a lower rank. The ranks below are the order.
//
//   - Several mutexes of rank [Lane] are held only by a holder of [Device].
//   - The ranks after [Allocator] are leaves: their holders lock nothing more.
//
// Packages below the engine (internal/stacks, resource) have mutexes of their own that are not ranked: they hold them over
// no call into the engine.
//
// # The check
//
// A second lock of the same mutex, and a lock against the order, panic with the names of both mutexes. The check is on
// where a test imports package internal/lockrank/checked, which package internal/lint demands of each test that runs the
// engine, and in builds with the tag lockrank, which tests use for the libraries and programs that they build. Elsewhere a
// Mutex is a sync.Mutex behind one branch.
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
	Keeping        // Allocator.keeping
	Pausing        // Device.pausing
	Private        // Device.privateMu
	Glance         // glance.mu
	Device         // Device.mu
	Lane           // lane.mu, and the front's word behind it
	Stream         // Stream.mu
	Allocator      // Allocator.mu
	Opened         // opened.mu
	Gate           // captureGate.mu
	Events         // Device.eventMu
	History        // history.mu
	ranks
)

var names = [ranks]string{"a mutex without rank", "Allocator.keeping", "Device.pausing", "Device.privateMu", "glance.mu", "Device.mu",
	"lane.mu", "Stream.mu", "Allocator.mu", "opened.mu", "captureGate.mu", "Device.eventMu", "history.mu"}

func (r Rank) String() string { return names[r] }

// leaf reports whether nothing is locked by holders.
func (r Rank) leaf() bool { return r > Allocator }

// Mutex is a sync.Mutex with a rank.
type Mutex struct {
	sync.Mutex // locked and unlocked by itself only between calls of Locking, Locked and Unlocking
	Rank       Rank
	owner      atomic.Uintptr // the goroutine that holds it; 0 while nothing is checked
}

// Lock is sync.Mutex.Lock.
func (m *Mutex) Lock() {
	m.Locking()
	m.Mutex.Lock()
	m.Locked()
}

// TryLock is sync.Mutex.TryLock. It waits for nobody, so it may be called against the order.
func (m *Mutex) TryLock() bool {
	if !m.Mutex.TryLock() {
		return false
	}
	m.Locked()
	return true
}

// Unlock is sync.Mutex.Unlock.
func (m *Mutex) Unlock() {
	m.Unlocking()
	m.Mutex.Unlock()
}

// Locking, Locked and Unlocking are what Lock and Unlock do beside locking and unlocking m.Mutex. They are for the lock of
// the hot path: they are inlined, as sync.Mutex's methods are, but Lock and Unlock are not.

// Locking checks, where checks are on, that the goroutine may lock m.
func (m *Mutex) Locking() {
	if checking {
		m.check()
	}
}

// Locked notes, where checks are on, that the goroutine has locked m.
func (m *Mutex) Locked() {
	if checking {
		m.own()
	}
}

// Unlocking notes, where checks are on, that m is about to be unlocked.
func (m *Mutex) Unlocking() {
	if checking {
		m.disown()
	}
}

// HoldsNone panics where the goroutine holds a mutex of that rank or a higher one. It is for what must not be done under
// such locks, in words.
func HoldsNone(from Rank, what string) {
	if !checking {
		return
	}
	held := holds(goroutine())
	for r := from; r < ranks; r++ {
		if held[r] != 0 {
			panic(fmt.Sprintf("lockrank: %s while %s is held", what, r))
		}
	}
}

// check panics where the goroutine must not lock m.
func (m *Mutex) check() {
	g := goroutine()
	if m.Rank == none {
		panic("lockrank: " + none.String())
	}
	if m.owner.Load() == g {
		panic(fmt.Sprintf("lockrank: %s is locked a second time by the goroutine that holds it", m.Rank))
	}
	held := holds(g)
	for r, n := range held {
		r := Rank(r)
		if n == 0 || r < m.Rank && !r.leaf() || r == Lane && m.Rank == Lane && held[Device] != 0 {
			continue
		}
		panic(fmt.Sprintf("lockrank: %s is locked while %s is held, against the order", m.Rank, r))
	}
}

func (m *Mutex) own() {
	g := goroutine()
	m.owner.Store(g)
	count(g, m.Rank, 1)
}

// disown undoes own, also where another goroutine than the owner unlocks.
func (m *Mutex) disown() {
	if g := m.owner.Swap(0); g != 0 {
		count(g, m.Rank, -1)
	}
}
