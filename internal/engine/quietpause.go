package engine

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/memory"
)

// Pausing and resuming on behalf of another process: a thread of the library does it, which calls no function of the program.

// ErrObserved is why memory is not paused or resumed quietly: a function of the program would have to be called.
var ErrObserved = errors.New("the program registered a function for memory that is mapped or unmapped")

// Quiet pauses and resumes memory of a device for a thread of the library's own.
type Quiet struct{ dev *Device }

// Quietly is that for a device.
func Quietly(d *Device) Quiet { return Quiet{d} }

// Pause is Device.Pause, which calls no function of the program: it fails where it would have to (OnUnmap, OnMap).
func (q Quiet) Pause(sel Selection, o config.PauseOptions) (memory.PauseReport, error) {
	return pauseSelected(&pause{d: q.dev, sel: sel, o: o, quiet: true})
}

// Pausable is how many bytes of physical memory Pause would return at least; 0 where it would fail.
func (q Quiet) Pausable(sel Selection, o config.PauseOptions) uint64 {
	return pausable(&pause{d: q.dev, sel: sel, o: o, quiet: true})
}

// Resume is Device.Resume likewise: where the driver has too little, what is cached here and the node's broker help, and neither
// callbacks nor users' resources.
func (q Quiet) Resume(sel Selection) (memory.PauseReport, error) {
	return resumeSelected(q.dev, sel, true)
}

// observed is the error of a quiet pause or resume while there are observers.
//
// +checklocks:ob.gpu.mu
func (ob *observers) observed(what string) error {
	if ob.onUnmap != nil || ob.onMap != nil {
		return fmt.Errorf("%s: %w", what, ErrObserved)
	}
	return nil
}
