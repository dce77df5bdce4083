package recording

import (
	"fmt"
)

// Error says in one line what is wrong with a file: where, and what was expected there.
type Error struct {
	Path   string // "-" is standard input
	Offset int64  // byte of the decompressed file; -1 where an event or the whole file is meant
	Line   int    // line of a text file, from 1; 0 elsewhere
	Device int    // device of Event
	Event  int    // index of the event on Device; -1 where none is meant
	Msg    string
	Err    error // the cause, where there is one
}

// Error is the line.
func (e *Error) Error() string {
	path := e.Path
	if path == "" || path == "-" {
		path = "standard input"
	}
	switch {
	case e.Line > 0:
		return fmt.Sprintf("%s: line %d: %s", path, e.Line, e.Msg)
	case e.Event >= 0 && e.Offset >= 0:
		return fmt.Sprintf("%s: byte %d, event %d of device %d: %s", path, e.Offset, e.Event, e.Device, e.Msg)
	case e.Event >= 0:
		return fmt.Sprintf("%s: event %d of device %d: %s", path, e.Event, e.Device, e.Msg)
	case e.Offset >= 0:
		return fmt.Sprintf("%s: byte %d: %s", path, e.Offset, e.Msg)
	}
	return fmt.Sprintf("%s: %s", path, e.Msg)
}

// Unwrap is the cause.
func (e *Error) Unwrap() error { return e.Err }
