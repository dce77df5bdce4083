package input

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/recording"
)

// Whole is an error about the file as such.
func Whole(format string, args ...any) *recording.Error {
	return &recording.Error{Offset: -1, Event: -1, Msg: fmt.Sprintf(format, args...)}
}

// AtByte is an error at a byte of the decompressed file.
func AtByte(off int64, format string, args ...any) *recording.Error {
	return &recording.Error{Offset: off, Event: -1, Msg: fmt.Sprintf(format, args...)}
}

// Named gives err the file's name; an error that is not ours yet becomes one.
func Named(err error, path string) error {
	var e *recording.Error
	if !errors.As(err, &e) {
		e = Whole("%s", err)
		e.Err = err
	}
	e.Path = path
	return e
}

// Clip shortens s for a message.
func Clip(s []byte) string {
	if len(s) > 40 {
		return string(s[:40]) + "…"
	}
	return string(s)
}
