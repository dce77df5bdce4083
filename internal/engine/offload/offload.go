// Package offload is the store of the contents of paused memory. It copies them, asynchronously and on a stream of its own, to
// page-locked host memory, or through that to a file, and back.
//
// # Host memory
//
// Page-locked memory comes in slabs (staging.go). The store keeps what it got for the next pause, because page-locking takes
// longer than copying. One slab is one registration, which no copy may cross.
//
// # Files
//
// A file has no name and is closed with the last contents in it (file.go). Checksums show whether the contents are another
// file's: the program may have closed the descriptor and opened another file under its number (sums.go).
//
// # Locks
//
// A [Store] is used by one goroutine at a time: the holder of the lock that serialises pauses. [Store.Unsure] is for all
// goroutines. [Contents] are guarded by the lock of the ranges that they belong to. Functions that read or change Contents need
// that lock; they make no driver call and wait for nothing. All other functions may wait for the GPU or for a file and need
// only the first lock. The package has no lock of its own but one among the goroutines of a transfer.
package offload

import (
	"cmp"
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
)

// Store is the store of one device.
type Store struct {
	health   *health.State
	timeline *timeline.Device
	copies   cuda.Stream // on which contents are copied; 0 until there are any
	unsure   atomic.Bool // copies may be under way: the driver failed to wait for them
	staging  staging
}

// New is an empty store. With lazy, the driver allocates page-locked memory without finding its pages (DeviceInfo.LazyHost).
func New(h *health.State, t *timeline.Device, lazy bool) *Store {
	return &Store{health: h, timeline: t, staging: staging{health: h, register: canMap && !lazy}}
}

// ErrUnsure is the reason not to unmap memory while Unsure.
var ErrUnsure = errors.New("copies may be under way")

// Unsure reports whether copies may be under way because the driver failed to wait for them. Memory must not be unmapped
// meanwhile.
func (s *Store) Unsure() bool { return s.unsure.Load() }

// Ready waits for copies that an earlier call could not wait for. While it fails the store cannot be used.
func (s *Store) Ready() error {
	if !s.unsure.Load() {
		return nil
	}
	if err := s.wait(); s.unsure.Load() {
		return s.health.Failed(err)
	}
	return nil
}

// Await waits for all copies. After an error they may be under way, which Unsure reports.
func (s *Store) Await() error { return s.health.Failed(s.wait()) }

// wait is Await without noting a broken context. If the driver refuses, it is asked again, and once more before memory is
// unmapped or page-locked memory is given back or serves another pause (Ready).
func (s *Store) wait() error {
	if s.copies == 0 {
		return nil
	}
	var first error
	for range 3 {
		s.timeline.CountWait()
		err := s.health.Driver.StreamSynchronize(s.health.ID, s.copies)
		if err == nil {
			s.unsure.Store(false)
			return first
		}
		first = cmp.Or(first, err)
	}
	s.unsure.Store(true)
	return first
}

// copyStream is the stream on which contents are copied. No other stream orders itself with it.
func (s *Store) copyStream() (cuda.Stream, error) {
	if s.copies == 0 {
		st, err := s.health.Driver.StreamCreate(s.health.ID, false)
		if err != nil {
			return 0, s.health.Failed(err)
		}
		s.copies = st
	}
	return s.copies, nil
}

// Close gives back what the store has. No contents are in it. After an error Close may be called again.
func (s *Store) Close() error {
	if err := s.Trim(0); err != nil {
		return err
	}
	if s.copies != 0 {
		if err := s.health.Driver.StreamDestroy(s.health.ID, s.copies); err != nil {
			return s.health.Failed(err)
		}
		s.copies = 0
	}
	return nil
}
