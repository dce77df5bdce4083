//go:build !linux

package live

import (
	"context"
	"errors"
)

var errNotLinux = errors.New("the memory of processes is published and read on Linux only")

// Page is one that a process publishes, which is done on Linux.
type Page struct{}

// Publish fails: there is no /proc to be found through.
func Publish(Process, func([]Device) []Device, func() []Details) (*Page, error) {
	return nil, errNotLinux
}

// PublishUnlisted fails.
func PublishUnlisted(Process, func([]Device) []Device) (*Page, error) { return nil, errNotLinux }

// Descriptor fails.
func (*Page) Descriptor() (int, error) { return -1, errNotLinux }

// SetEager does nothing.
func (*Page) SetEager(bool) {}

// SetDropped does nothing.
func (*Page) SetDropped(uint64) {}

// Close does nothing.
func (*Page) Close() {}

// Reader reads a page, which is done on Linux.
type Reader struct{}

// List fails.
func List(context.Context, ...*Reader) ([]*Reader, []error) { return nil, []error{errNotLinux} }

// Read fails.
func (*Reader) Read(bool) (Process, error) { return Process{}, errNotLinux }

// ReadOnce fails.
func (*Reader) ReadOnce(bool) (Process, error) { return Process{}, errNotLinux }

// Close does nothing.
func (*Reader) Close() {}

// Ended does not know.
func Ended(int, uint64) bool { return false }

// Of fails.
func Of(int) (Process, error) { return Process{}, errNotLinux }
