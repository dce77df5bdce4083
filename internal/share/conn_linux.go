package share

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
)

// conn is one end of a connection. Package net could do this too, but is larger than all that a program brings with
// Cistern.
type conn struct {
	file     *os.File
	raw      syscall.RawConn
	fd       int
	guard    Guard
	patience time.Duration
	over     atomic.Bool // nothing is waited for any more
}

// newConn takes a connected, non-blocking socket. Waiting for it takes no thread: the runtime polls it.
func newConn(fd int, guard Guard, patience time.Duration) (*conn, error) {
	guard.Opened(fd)
	f := os.NewFile(uintptr(fd), "share")
	raw, err := f.SyscallConn()
	if err != nil {
		guard.Closing(fd)
		f.Close()
		return nil, err
	}
	return &conn{file: f, raw: raw, fd: fd, guard: guard, patience: patience}, nil
}

func (c *conn) close() {
	c.guard.Closing(c.fd)
	c.file.Close()
}

// user is who is at the other end: the one that connected, or the one that began to listen.
func (c *conn) user() (uint32, error) {
	var cred *syscall.Ucred
	var err error
	if e := c.raw.Control(func(fd uintptr) {
		cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); e != nil {
		return 0, e
	}
	if err != nil {
		return 0, os.NewSyscallError("getsockopt", err)
	}
	return cred.Uid, nil
}

// begin is the time from which on the other side has so long.
func (c *conn) begin() {
	c.file.SetDeadline(time.Now().Add(c.patience))
	if c.over.Load() {
		c.file.SetDeadline(time.Now())
	}
}

// hurry ends what is waited for, now and from now on.
func (c *conn) hurry() {
	c.over.Store(true)
	c.file.SetDeadline(time.Now())
}

// try makes a call whenever wait, of c.raw, says that it may go through, until it does. Whoever waits may have been stopped for
// longer than it wanted to wait: so at the end of that time it is tried once more.
func (c *conn) try(wait func(func(uintptr) bool) error, call func(fd uintptr) bool) error {
	err := wait(call)
	if !errors.Is(err, os.ErrDeadlineExceeded) || c.over.Load() {
		return err
	}
	through := false
	if e := c.raw.Control(func(fd uintptr) { through = call(fd) }); e == nil && through {
		return nil
	}
	return err
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
		e := c.try(c.raw.Write, func(fd uintptr) bool {
			for {
				n, err = syscall.SendmsgN(int(fd), b, oob, nil, syscall.MSG_NOSIGNAL)
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
		e := c.try(c.raw.Read, func(fd uintptr) bool {
			for {
				n, oobn, _, _, err = syscall.Recvmsg(int(fd), b, oob, syscall.MSG_CMSG_CLOEXEC)
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
