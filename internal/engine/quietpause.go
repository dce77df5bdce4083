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

// PauseQuietly is Pause for a thread of the library's own: it calls no function of the program, and fails where it would have to
// (OnUnmap, OnMap).
func (d *Device) PauseQuietly(sel Selection, o config.PauseOptions) (memory.PauseReport, error) {
	return d.pause(&pause{d: d, sel: sel, o: o, quiet: true})
}

// ResumeQuietly is Resume likewise: where the driver has too little, what is cached here and the node's broker help, and neither
// callbacks nor users' resources.
func (d *Device) ResumeQuietly(sel Selection) (memory.PauseReport, error) { return d.resume(sel, true) }

// observed is the error of a quiet pause or resume while there are observers.
//
// +checklocks:ob.gpu.mu
func (ob *observers) observed(what string) error {
	if ob.onUnmap != nil || ob.onMap != nil {
		return fmt.Errorf("%s: %w", what, ErrObserved)
	}
	return nil
}
