package lockrank

import (
	"sync"
	"sync/atomic"
)

// checking is on where locks are checked. It is set before anything is locked.
var checking bool

// Check turns the check on. It is called by init functions only.
func Check() { checking = true }

// Goroutine is a number of the calling goroutine that no other has while it runs.
func Goroutine() uintptr { return goroutine() }

// waits is the mutex that a goroutine waits for, while it does.
var waits sync.Map

// Blocked reports whether a goroutine waits for a mutex that another one holds, or for one whose holder waits for that. It is
// for tests that decide in which order goroutines go on.
func Blocked(g, by uintptr) bool {
	for range maxChain {
		m, ok := waits.Load(g)
		if !ok {
			return false
		}
		if g = m.(*Mutex).owner.Load(); g == by {
			return true
		}
	}
	return false
}

// maxChain bounds how many goroutines wait for one another in a row.
const maxChain = 16

var onUnlock atomic.Pointer[func()]

// OnUnlock has a function called after each Unlock, by the goroutine that unlocks; nil: none. It is for such tests, too.
func OnUnlock(f func()) {
	if f == nil {
		onUnlock.Store(nil)
		return
	}
	onUnlock.Store(&f)
}

// holder is how many mutexes of each rank a goroutine holds.
type holder struct {
	goroutine uintptr
	total     int
	held      [ranks]int32
}

// holders are the goroutines that hold any, by a hash of the goroutine. An entry without mutexes is free for the next
// goroutine, so that in steady state nothing is allocated.
var holders [256]struct {
	mu   sync.Mutex
	list []holder // guarded by mu
}

// slot is where in holders a goroutine is.
func slot(g uintptr) uintptr { return (g >> 6 * 0x9e3779b1) >> 16 % uintptr(len(holders)) }

// holds is how many mutexes of each rank the goroutine holds.
func holds(g uintptr) [ranks]int32 {
	x := &holders[slot(g)]
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := range x.list {
		if x.list[i].goroutine == g {
			return x.list[i].held
		}
	}
	return [ranks]int32{}
}

// count notes that the goroutine holds one mutex more, or less.
func count(g uintptr, r Rank, change int32) {
	x := &holders[slot(g)]
	x.mu.Lock()
	defer x.mu.Unlock()
	at := -1
	for i := range x.list {
		if x.list[i].goroutine == g {
			at = i
			break
		}
		if x.list[i].total == 0 {
			at = i
		}
	}
	if at < 0 {
		at = len(x.list)
		x.list = append(x.list, holder{})
	}
	h := &x.list[at]
	h.goroutine = g
	h.held[r] += change
	h.total += int(change)
	if h.total == 0 {
		h.goroutine = 0
	}
}
