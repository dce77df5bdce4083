// Package socket has sockets and waits for them that need no poller of Go's runtime, which ends the process where it gets no
// descriptor, and where the program closes the descriptors that it has (see internal/nopoll). Linux has all of it.
package socket

import "errors"

// Guard records the descriptors that a child of fork must close. Its methods are called from any goroutine.
type Guard interface {
	Opened(fd int)  // the descriptor is open
	Closing(fd int) // and will be closed next
}

// ErrClosed is that the program closed a socket of Cistern's.
var ErrClosed = errors.New("the program closed the socket's descriptor")
