package share

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/internal/socket"
)

// conn is one end of a connection. Package net could do this too, but is larger than all that a program brings with
// Cistern.
type conn struct {
	socket.Socket
	guard   Guard
	timeout time.Duration
	until   time.Time   // for what is waited for
	over    atomic.Bool // nothing is waited for any more
	poller  *poller     // that waits; nil: the calling thread does
}

// newConn takes a connected, non-blocking socket.
func newConn(fd int, guard Guard, timeout time.Duration) (*conn, error) {
	s, err := socket.Of(fd)
	if err != nil {
		syscall.Close(fd)
		return nil, err
	}
	guard.Opened(fd)
	return &conn{Socket: s, guard: guard, timeout: timeout}, nil
}

func (c *conn) close() { c.CloseBy(c.guard) }

// user is the user at the other end: the one that connected, or the one that began to listen.
func (c *conn) user() (uint32, error) {
	cred, err := syscall.GetsockoptUcred(c.FD, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	if err != nil {
		return 0, os.NewSyscallError("getsockopt", err)
	}
	return cred.Uid, nil
}

// begin is the time from which on the other side has so long.
func (c *conn) begin() { c.until = time.Now().Add(c.timeout) }

// hurry ends what is waited for, now and from now on.
func (c *conn) hurry() {
	c.over.Store(true)
	if c.poller != nil {
		c.poller.release(c.FD)
	}
}

// try makes a call until it goes through, and waits in between. The thread may have been stopped for longer than it wanted to
// wait: so at the end of that time it is tried once more.
func (c *conn) try(events int16, call func() bool) error {
	for !c.over.Load() {
		if !c.Ours() {
			return socket.ErrClosed
		}
		if call() {
			return nil
		}
		left := time.Until(c.until)
		if left <= 0 {
			break
		}
		if c.poller != nil {
			if !c.poller.await(c.FD, events, c.until) {
				break
			}
		} else if err := socket.Poll([]socket.PollFD{{FD: int32(c.FD), Events: events}}, left); err != nil {
			return err
		}
	}
	return os.ErrDeadlineExceeded
}

// send writes a whole message; the descriptors go with its first byte.
func (c *conn) send(b []byte, fds ...int) error {
	c.begin()
	var oob []byte
	if len(fds) > 0 {
		oob = syscall.UnixRights(fds...)
	}
	for len(b) > 0 {
		var n int
		var err error
		e := c.try(socket.Out, func() bool {
			for {
				n, err = syscall.SendmsgN(c.FD, b, oob, nil, syscall.MSG_NOSIGNAL)
				if err != syscall.EINTR {
					return err != syscall.EAGAIN
				}
			}
		})
		if err = cause(e, err, "sendmsg"); err != nil {
			return err
		}
		b, oob = b[n:], nil
	}
	return nil
}

// receive fills b, and appends the descriptors that come with it to *fds; with nil none are accepted.
func (c *conn) receive(b []byte, fds *[]int) error {
	c.begin()
	var oob []byte
	if fds != nil {
		oob = make([]byte, syscall.CmsgSpace(4*maxBatch))
	}
	for len(b) > 0 {
		var n, oobn int
		var err error
		e := c.try(socket.In, func() bool {
			for {
				n, oobn, _, _, err = syscall.Recvmsg(c.FD, b, oob, syscall.MSG_CMSG_CLOEXEC)
				if err != syscall.EINTR {
					return err != syscall.EAGAIN
				}
			}
		})
		if err = cause(e, err, "recvmsg"); err != nil {
			return err
		}
		if oobn > 0 {
			if err := c.unpack(oob[:oobn], fds); err != nil {
				return err
			}
		}
		if n == 0 {
			return errEnded
		}
		b = b[n:]
	}
	return nil
}

func (c *conn) unpack(oob []byte, fds *[]int) error {
	all, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return os.NewSyscallError("recvmsg", err)
	}
	for i := range all {
		got, err := syscall.ParseUnixRights(&all[i])
		if err != nil {
			return os.NewSyscallError("recvmsg", err)
		}
		for _, fd := range got {
			c.guard.Opened(fd)
		}
		*fds = append(*fds, got...)
	}
	return nil
}

// cause is the one of the two errors that says why nothing came or went.
func cause(wait, call error, what string) error {
	switch {
	case errors.Is(wait, os.ErrDeadlineExceeded):
		return wait
	case call == syscall.EPIPE || call == syscall.ECONNRESET:
		return errEnded
	case call != nil:
		return os.NewSyscallError(what, call)
	}
	return wait
}

// next receives a message of one of the kinds.
func (c *conn) next(fds *[]int, kinds ...kind) (kind, []byte, error) {
	var h [headerSize]byte
	if err := c.receive(h[:], fds); err != nil {
		return 0, nil, err
	}
	k, n, err := parseHeader(h)
	if err != nil {
		return 0, nil, err
	}
	if !slices.Contains(kinds, k) {
		return 0, nil, fmt.Errorf("a message of kind %d where none was due", k)
	}
	b := make([]byte, n)
	return k, b, c.receive(b, nil)
}
