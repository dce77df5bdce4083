package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// A broker hands over to its successor: the listening socket, the lock, and the descriptors of its objects, by the names of keptNames. It
// ends when the successor confirms that it has them. Until then it goes on serving, but for messages about objects, which wait; where
// the successor fails, nothing has changed.

const (
	// passTime is how long a successor may take to accept a descriptor, takeTime to say that it has all.
	passTime = 10 * time.Second
	takeTime = time.Minute
)

// Names of descriptors that are not of objects.
const (
	passedSocket = "socket"
	passedLock   = "lock"
	passedAlive  = "alive" // a pipe that hangs up when the broker has ended
)

// passes is what a broker passes to its successor beside objects.
type passes struct {
	listener *net.UnixListener
	end      func()
	lock     *os.File // nil: a successor is refused
}

var errHandedOver = errors.New("another broker has taken over")

// HandsOver lets a successor take over. lock is the file that makes this the only broker at its path.
func (b *Broker) HandsOver(lock *os.File) {
	b.mu.Lock()
	b.passes.lock = lock
	b.mu.Unlock()
}

// HandedOver reports whether a successor has taken over: the path and the lock are its own.
func (b *Broker) HandedOver() bool { return b.handed.Load() }

// passing is one handing over. It is a Keeper, which has the successor keep.
type passing struct {
	c  *client
	id uint64
}

func (p passing) Store(name string, fd int) error {
	if !p.c.sendBy(time.Now().Add(passTime), protocol.Message{Kind: protocol.Kept, ID: p.id, Text: name}, fd) {
		return errors.New("the successor does not accept descriptors")
	}
	return nil
}

func (passing) Forget(string) {}

// handOver is the message of a successor. An error ends the connection.
func (c *client) handOver(m protocol.Message, buf, oob []byte) error {
	b := c.b
	b.mu.Lock()
	with := b.passes
	b.mu.Unlock()
	switch {
	case !operates(c.uid):
		c.end(m.ID, errors.New("only root and the broker's user take over"))
		return nil
	case with.lock == nil || with.listener == nil || b.objects.opt.Keep != nil:
		c.end(m.ID, errors.New("the broker runs under systemd, which keeps objects: restart it there"))
		return nil
	}
	t := b.objects
	t.passing.Lock()
	defer t.passing.Unlock()
	if b.HandedOver() {
		return errHandedOver
	}
	alive, err := passing{c, m.ID}.all(t, with)
	if err != nil {
		c.end(m.ID, err)
		return nil
	}
	c.end(m.ID, nil)
	_ = c.conn.SetReadDeadline(time.Now().Add(takeTime))
	answer, fd, err := c.read(buf, oob)
	_ = c.conn.SetReadDeadline(time.Time{})
	if fd >= 0 {
		unix.Close(fd)
	}
	if err != nil || answer.Kind != protocol.TakenOver || answer.ID != m.ID {
		unix.Close(alive)
		b.notes.say(slog.LevelWarn, c.uid, "a successor did not take over; this broker goes on", "pid", c.pid, "error", err)
		return ended0(err)
	}
	b.log.Info("another broker has taken over", "pid", c.pid, "uid", c.uid)
	b.handed.Store(true) // alive stays open until the process ends
	with.listener.SetUnlinkOnClose(false)
	with.end()
	return nil
}

// all sends everything, and returns the end of the pipe that this process has to keep open while it lives.
func (p passing) all(t *objectTable, with passes) (alive int, err error) {
	for g, o := range t.named() {
		var bad error
		o.memory.Use(func() { bad = keepParts(p, &o.object, o.memory) })
		if bad != nil {
			return -1, fmt.Errorf("generation %d: %w", g, bad)
		}
	}
	raw, err := with.listener.SyscallConn() // File would have the listener block
	if err != nil {
		return -1, err
	}
	bad := raw.Control(func(fd uintptr) { err = p.Store(passedSocket, int(fd)) })
	if err = errors.Join(bad, err); err != nil {
		return -1, err
	}
	if raw, err = with.lock.SyscallConn(); err != nil {
		return -1, err
	}
	bad = raw.Control(func(fd uintptr) { err = p.Store(passedLock, int(fd)) })
	if err = errors.Join(bad, err); err != nil {
		return -1, err
	}
	var ends [2]int
	if err = unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return -1, os.NewSyscallError("pipe2", err)
	}
	err = p.Store(passedAlive, ends[0])
	unix.Close(ends[0])
	if err != nil {
		unix.Close(ends[1])
		return -1, err
	}
	return ends[1], nil
}

// namedObject is an object with its memory.
type namedObject struct {
	object objects.Object
	memory *objects.Memory
}

// named are the generations that outlive the broker.
func (t *objectTable) named() map[uint64]namedObject {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[uint64]namedObject{}
	for g, m := range t.memory {
		if o, ok := t.store.Get(g); ok && t.store.Named(g) {
			all[g] = namedObject{*o, m}
		}
	}
	return all
}

// Handover is what a broker got of the one before it.
type Handover struct {
	Listener *net.UnixListener
	Lock     *os.File
	objects  map[string]int
	alive    *os.File
	conn     *net.UnixConn
}

// TakeOver asks the broker at a path for what it has. It goes on until Confirm. errors.Is finds unix.ENOENT or unix.ECONNREFUSED where
// none serves there.
func TakeOver(path string) (h *Handover, err error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	h = &Handover{conn: conn, objects: map[string]int{}}
	if err = h.receive(); err == nil {
		err = h.open()
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("the broker at %s does not hand over: %w", path, err)
	}
	return h, nil
}

// receive receives all descriptors by name.
func (h *Handover) receive() error {
	raw, err := h.conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	bad := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(bad, err); err != nil {
		return err
	}
	if !operates(cred.Uid) {
		return fmt.Errorf("it is of user %d", cred.Uid)
	}
	if _, err := h.conn.Write((&protocol.Message{Kind: protocol.Handover, ID: 1}).Append(nil)); err != nil {
		return err
	}
	buf, oob := make([]byte, protocol.MaxMessage), make([]byte, unix.CmsgSpace(4))
	for {
		_ = h.conn.SetReadDeadline(time.Now().Add(takeTime))
		n, oobn, _, _, err := h.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return err
		}
		fd := descriptor(oob[:oobn])
		m, err := protocol.Parse(buf[:n])
		_, twice := h.objects[m.Text]
		switch {
		case err != nil || m.Kind == protocol.Refused || m.Kind == protocol.End && m.Text != "":
			if fd >= 0 {
				unix.Close(fd)
			}
			if err == nil {
				err = errors.New(protocol.Clean(m.Text, mostSaid))
			}
			return err
		case m.Kind == protocol.Kept && fd >= 0 && !twice:
			h.objects[m.Text] = fd
		case fd >= 0:
			unix.Close(fd)
		}
		if m.Kind == protocol.End {
			return nil
		}
	}
}

// open makes what it is of the descriptors that are not of objects.
func (h *Handover) open() error {
	take := func(name string) *os.File {
		fd, ok := h.objects[name]
		if !ok {
			return nil
		}
		delete(h.objects, name)
		return os.NewFile(uintptr(fd), name)
	}
	socket := take(passedSocket)
	h.Lock, h.alive = take(passedLock), take(passedAlive)
	if socket == nil || h.Lock == nil || h.alive == nil {
		socket.Close()
		return errors.New("not all of its descriptors came")
	}
	defer socket.Close()
	l, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return errors.New("it listens at no Unix socket")
	}
	h.Listener = u
	return nil
}

// TakeOver makes the objects of a handover this broker's. It waits until the driver has them charged to this process: without persistence
// mode it drops memory when the last process that has the device open ends. Where the driver does not answer the descriptors still keep them.
func (b *Broker) TakeOver(h *Handover) (count int) {
	fds := h.objects
	h.objects = nil
	if count = b.restore(fds); count == 0 {
		return 0
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		b.objects.charge()
	}()
	select {
	case <-over:
	case <-time.After(b.objects.opt.Wait):
		b.log.Warn("the driver does not answer", "waited", b.objects.opt.Wait)
	}
	return count
}

// Confirm ends the broker before, and waits for its end, for so long at most. An error is that it goes on.
func (h *Handover) Confirm(wait time.Duration) (ended bool, err error) {
	if _, err := h.conn.Write((&protocol.Message{Kind: protocol.TakenOver, ID: 1}).Append(nil)); err != nil {
		return false, err
	}
	h.Listener.SetUnlinkOnClose(true)
	poll := []unix.PollFd{{Fd: int32(h.alive.Fd()), Events: unix.POLLIN}}
	for end := time.Now().Add(wait); ; {
		n, err := unix.Poll(poll, int(max(time.Until(end).Milliseconds(), 0)))
		if err != unix.EINTR {
			return n > 0, nil
		}
	}
}

// Close closes what is not in use.
func (h *Handover) Close() {
	h.conn.Close()
	h.alive.Close()
	for _, fd := range h.objects {
		unix.Close(fd)
	}
}
