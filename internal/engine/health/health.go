// Package health is the state of one device that every layer of the engine reads and reports to without a lock: whether its
// CUDA context works, whether the hot path may be used, and how many driver calls were made.
package health

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// State is the state of one device. Its methods may be called with any lock held.
type State struct {
	Driver *Driver
	ID     cuda.Device

	broken    atomic.Pointer[error] // the error that broke the context
	recording atomic.Bool

	mu    sync.Mutex      // held while flags.Quick is computed and stored; nothing else is locked meanwhile
	flags *magazine.Flags // allocated by itself, as C code reads it
}

// New is the state of a device whose context works.
func New(drv cuda.Driver, id cuda.Device) *State {
	s := &State{Driver: &Driver{Driver: drv}, ID: id, flags: &magazine.Flags{}}
	s.update()
	return s
}

// Failed records an error that breaks the context, and returns every error as it is.
func (s *State) Failed(err error) error {
	var code cuda.Code
	if errors.As(err, &code) && code.Poisons() && s.broken.CompareAndSwap(nil, &err) {
		s.update()
	}
	return err
}

// Broken is the first error that broke the context, nil while it works.
func (s *State) Broken() error {
	if p := s.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// SetRecording says whether requests are recorded, for which they have to take the slow path.
func (s *State) SetRecording(on bool) {
	s.recording.Store(on)
	s.update()
}

// Recording reports whether requests are recorded.
func (s *State) Recording() bool { return s.recording.Load() }

// Quick reports whether requests may take the hot path: nothing is recorded and the context works.
func (s *State) Quick() bool { return s.flags.Quick.Load() }

// SetWaiting says whether frees wait for other streams, so that some requests take the slow path to complete them.
func (s *State) SetWaiting(on bool) { s.flags.Waiting.Store(on) }

// Waiting reports whether frees wait for other streams.
func (s *State) Waiting() bool { return s.flags.Waiting.Load() }

// Flags are Quick and Waiting for C code.
func (s *State) Flags() *magazine.Flags { return s.flags }

// update stores Quick. Each caller has changed what it depends on before, so the last one sees all changes.
func (s *State) update() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flags.Quick.Store(s.broken.Load() == nil && !s.recording.Load())
}
