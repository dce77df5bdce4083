package client

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/socket"
)

// link is one connection to a broker.
type link struct {
	socket.Socket
	guard socket.Guard
	view  atomic.Pointer[grants.View]
}

// dial connects to a broker of root's or of this user's.
func dial(path string, g socket.Guard) (*link, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		syscall.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	s, err := socket.Of(fd)
	if err == nil {
		var cred *syscall.Ucred
		if cred, err = syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil && cred.Uid != 0 && cred.Uid != uint32(os.Geteuid()) {
			err = fmt.Errorf("it belongs to user %d: expected root or user %d", cred.Uid, os.Geteuid())
		}
	}
	if err != nil {
		syscall.Close(fd)
		return nil, err
	}
	g.Opened(fd)
	return &link{Socket: s, guard: g}, nil
}

// shut ends the conversation; the goroutine that reads closes the socket.
func (l *link) shut() {
	if l.Ours() {
		_ = syscall.Shutdown(l.FD, syscall.SHUT_RDWR)
	}
}

// post sends a message whole, or fails at once.
func (l *link) post(b []byte, fds []int) error {
	if !l.Ours() {
		return socket.ErrClosed
	}
	var oob []byte
	if len(fds) > 0 {
		oob = syscall.UnixRights(fds...)
	}
	for {
		_, err := syscall.SendmsgN(l.FD, b, oob, nil, syscall.MSG_NOSIGNAL|syscall.MSG_DONTWAIT)
		switch err {
		case syscall.EINTR:
			continue
		case syscall.EPIPE, syscall.ECONNRESET:
			return errEnded
		}
		return os.NewSyscallError("sendmsg", err)
	}
}

// errEnded is that the broker hung up.
var errEnded = errors.New("the broker has ended")

// read waits for a message for so long at most; ok is false where none came. fd is -1 unless a descriptor came with it.
func (l *link) read(d time.Duration, b, oob []byte) (m protocol.Message, fd int, ok bool, err error) {
	if err := socket.Poll([]socket.PollFD{{FD: int32(l.FD), Events: socket.In}}, d); err != nil {
		return m, -1, false, err
	}
	if !l.Ours() {
		return m, -1, false, socket.ErrClosed
	}
	n, oobn, flags, _, err := syscall.Recvmsg(l.FD, b, oob, syscall.MSG_CMSG_CLOEXEC|syscall.MSG_DONTWAIT)
	switch {
	case err == syscall.EAGAIN || err == syscall.EINTR:
		return m, -1, false, nil
	case err != nil:
		return m, -1, false, os.NewSyscallError("recvmsg", err)
	}
	fd = l.descriptor(oob[:oobn])
	switch {
	case n == 0:
		err = errEnded
	case flags&syscall.MSG_TRUNC != 0:
		err = fmt.Errorf("a message of more than %d bytes", len(b))
	default:
		m, err = protocol.Parse(b[:n])
	}
	if err != nil && fd >= 0 {
		l.close(fd)
	}
	return m, fd, err == nil, err
}

// descriptor is the one that came, -1 for none.
func (l *link) descriptor(oob []byte) int {
	all, err := syscall.ParseSocketControlMessage(oob)
	if err != nil || len(all) == 0 {
		return -1
	}
	fds, err := syscall.ParseUnixRights(&all[0])
	if err != nil || len(fds) == 0 {
		return -1
	}
	for _, fd := range fds {
		l.guard.Opened(fd)
	}
	for _, fd := range fds[1:] {
		l.close(fd)
	}
	return fds[0]
}

func (l *link) close(fd int) {
	l.guard.Closing(fd)
	syscall.Close(fd)
}

// run connects, reads, and connects again, until Close.
func (c *Client) run() {
	defer c.panicked()
	defer close(c.gives)
	defer c.first.Set()
	for pause := leastPause; !c.ended.IsSet(); {
		l, err := c.connect()
		if l != nil {
			began := time.Now()
			c.tried.Store(l)
			err = c.converse(l)
			c.tried.Store(nil)
			l.CloseBy(l.guard)
			c.retire(l)
			if time.Since(began) > mostPause {
				pause = leastPause
			}
		}
		c.lose(err.Error())
		c.first.Set()
		var r refused
		wait := pause
		switch {
		case errors.As(err, &r):
			wait = mostPause
		case l == nil:
			wait = searchPause
		default:
			pause = min(2*pause, mostPause)
		}
		c.ended.Wait(wait)
	}
}

// retire unmaps the view of a link that is lost, and those of earlier ones that threads read then.
func (c *Client) retire(l *link) {
	if v := l.view.Load(); v != nil {
		c.retired = append(c.retired, v)
	}
	c.retired = slices.DeleteFunc(c.retired, (*grants.View).Close)
}

// connect finds a broker and greets it.
func (c *Client) connect() (*link, error) {
	paths := []string{c.cfg.Socket}
	if c.cfg.Socket == "" {
		paths = Sockets()
	}
	var first error
	for _, path := range paths {
		l, err := dial(path, c.cfg.Guard)
		if err == nil {
			if err = c.greet(l); err == nil {
				return l, nil
			}
			l.CloseBy(l.guard)
		}
		if first == nil || !errors.Is(err, os.ErrNotExist) {
			first = gone(path, err)
		}
	}
	return nil, first
}

func (c *Client) greet(l *link) error {
	page, err := c.cfg.Page()
	if err != nil {
		return err
	}
	fd, err := page.Descriptor()
	if err != nil {
		return err
	}
	c.page.Store(page)
	c.cfg.Guard.Opened(fd)
	defer l.close(fd)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.post(l, &protocol.Message{Kind: protocol.Hello, Version: c.cfg.Version, Label: c.cfg.Label}, fd)
}

// converse reads what the broker sends until the link is lost. It returns why.
func (c *Client) converse(l *link) error {
	b, oob := make([]byte, protocol.MaxMessage), make([]byte, syscall.CmsgSpace(4))
	limit := deadline.Deadline{Limit: greetTime}
	limit.Left(time.Now())
	for !c.ended.IsSet() {
		wait := look
		if l.view.Load() == nil {
			if wait = limit.Left(time.Now()); wait <= 0 {
				return fmt.Errorf("the broker did not answer for %v", greetTime)
			}
		}
		m, fd, ok, err := l.read(wait, b, oob)
		if err != nil {
			return err
		}
		if !ok {
			if !l.Ours() {
				return socket.ErrClosed
			}
			continue
		}
		if m.Kind == protocol.Welcome {
			err = c.welcomed(l, fd)
		} else {
			err = c.handle(l, &m)
		}
		if fd >= 0 {
			l.close(fd)
		}
		if err != nil {
			return err
		}
	}
	return errors.New("the client has ended")
}

// welcomed begins to use a link.
func (c *Client) welcomed(l *link, fd int) error {
	if l.view.Load() != nil {
		return errors.New("the broker sent its first answer twice")
	}
	if fd < 0 {
		return errors.New("the broker's grants did not come: is there a descriptor left?")
	}
	view, err := grants.Open(fd)
	if err != nil {
		return err
	}
	l.view.Store(view)
	c.page.Load().SetEager(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link.Store(l)
	c.why = ""
	c.silent = time.Time{}
	for id, d := range c.devices {
		if err := c.post(l, &protocol.Message{Kind: protocol.Join, ID: uint64(id), UUID: d.uuid, Total: d.total}); err != nil {
			return err
		}
	}
	c.first.Set()
	return nil
}

// handle is one message of the broker.
func (c *Client) handle(l *link, m *protocol.Message) error {
	switch m.Kind {
	case protocol.Joined, protocol.Limit:
		return c.joined(m)
	case protocol.Granted, protocol.Answer:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.silent = time.Time{}
		if p := c.asks[m.ID]; p != nil {
			p.bytes, p.limit, p.words = m.Bytes, m.Limit, m.Text
			p.over.Set()
			delete(c.asks, m.ID)
		} else if m.Kind == protocol.Granted && m.Bytes > 0 { // no request waits any more
			_ = c.post(l, &protocol.Message{Kind: protocol.Done, ID: m.ID, Slot: m.Slot})
		}
	case protocol.GiveBack:
		select {
		case c.gives <- *m:
		default: // the broker asks faster than memory can be given
			c.send(l, &protocol.Message{Kind: protocol.Gave, ID: m.ID, Slot: m.Slot, Text: "too many requests wait already"})
		}
	case protocol.Pausing:
		c.pausing(l, *m)
	case protocol.Refused:
		return refused(m.Text)
	}
	return nil
}

// joined takes the slot and the limit of a device.
func (c *Client) joined(m *protocol.Message) error {
	if m.Slot >= grants.Slots {
		return fmt.Errorf("the broker names slot %d of %d", m.Slot, grants.Slots)
	}
	c.mu.Lock()
	var d *device
	for id, x := range c.devices {
		if m.Kind == protocol.Joined && uint64(id) == m.ID || m.Kind == protocol.Limit && x.slot.Load() == int64(m.Slot) {
			d = x
		}
	}
	if d != nil && m.Kind == protocol.Joined {
		d.slot.Store(int64(m.Slot))
	}
	c.mu.Unlock()
	if d != nil {
		c.cfg.Host.SetMax(d.id, m.Limit)
		d.joined.Set()
	}
	if d != nil && m.Kind == protocol.Joined {
		select {
		case c.gives <- *m: // what the broker may pause is said from there, which may wait for the engine's locks
		default: // and again when the broker asks what there is
		}
	}
	return nil
}

// lose forgets the broker. From here on the process works as if there had never been one.
func (c *Client) lose(why string) {
	c.mu.Lock()
	l := c.link.Swap(nil)
	c.why = why
	for id, p := range c.asks {
		p.words, p.lost = why, true
		p.over.Set()
		delete(c.asks, id)
	}
	var joined []*device
	for _, d := range c.devices {
		if d.slot.Swap(-1) >= 0 {
			joined = append(joined, d)
		}
	}
	c.mu.Unlock()
	if l == nil {
		return
	}
	c.page.Load().SetEager(false)
	for _, d := range joined {
		c.cfg.Host.SetMax(d.id, 0)
	}
}
