// Package nopoll opens files without the poller of Go's runtime, which package os offers each file to, also those that it
// then refuses. With the first the runtime opens descriptors (epoll) that it needs from then on, and ends the process when
// they are gone; a library is a guest in programs that close all descriptors that they do not know, as many do that go into
// the background.
package nopoll

import (
	"io"
	"os"
)

// Open is os.Open.
func Open(name string) (*os.File, error) { return OpenFile(name, os.O_RDONLY, 0) }

// ReadFile is os.ReadFile.
func ReadFile(name string) ([]byte, error) {
	f, err := Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}
