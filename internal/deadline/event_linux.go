package deadline

import (
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// Event happens once. Any number of goroutines wait for it, each with its thread and without a timer of Go's.
type Event struct{ futex atomic.Uint32 }

// FUTEX_WAIT and FUTEX_WAKE, with FUTEX_PRIVATE_FLAG.
const futexWait, futexWake = 0 | 128, 1 | 128

// Set ends all waits, now and from now on.
func (e *Event) Set() {
	e.futex.Store(1)
	_, _, _ = syscall.Syscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(&e.futex)), futexWake, 1<<30, 0, 0, 0)
}

// IsSet reports whether it has happened.
func (e *Event) IsSet() bool { return e.futex.Load() != 0 }

// Wait waits for so long at most, and reports whether it has happened.
func (e *Event) Wait(d time.Duration) bool {
	for end := time.Now().Add(d); !e.IsSet(); d = time.Until(end) {
		if d <= 0 {
			return false
		}
		ts := syscall.NsecToTimespec(int64(d))
		_, _, _ = syscall.Syscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(&e.futex)), futexWait, 0, uintptr(unsafe.Pointer(&ts)), 0, 0)
	}
	return true
}
