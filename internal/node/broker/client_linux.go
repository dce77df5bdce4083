package broker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/policy"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// mostAsks bounds the questions of one client that are open at once.
const mostAsks = 64

// client is one connection.
type client struct {
	process
	b       *Broker
	conn    *net.UnixConn
	id      ledger.ClientID
	label   string
	version string
	reading sync.Mutex // held while the segment is read; set and closed while no other goroutine has the client
	segment *live.Segment
	slots   []ledger.Slot             // guarded by Broker.mu
	heard   map[ledger.Slot]time.Time // when it last said itself what it has; guarded by Broker.mu

	pausings pausings
	session  objects.Session // of named objects; 0: none

	mu   sync.Mutex
	asks map[uint64]*asking // by the client's number for the question; +checklocks:mu
}

// serve is the whole conversation with one connection.
func (b *Broker) serve(ctx context.Context, conn *net.UnixConn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &client{b: b, conn: conn, asks: map[uint64]*asking{}, heard: map[ledger.Slot]time.Time{}, process: process{pidfd: -1}}
	p, err := identify(conn)
	if err != nil {
		c.close()
		b.notes.say(slog.LevelWarn, uint32(os.Geteuid()), "a connection was refused", "error", err)
		return
	}
	c.process = p
	if err := b.admit(c); err != nil {
		b.counts.Refused.Add(1)
		b.notes.say(slog.LevelWarn, c.uid, "a connection was refused", "pid", c.pid, "uid", c.uid, "error", err)
		c.send(protocol.Message{Kind: protocol.Refused, Text: err.Error()})
		c.close()
		return
	}
	defer b.release(c)
	defer c.close() // before it counts no more: closing may wait for the client
	if err := c.converse(ctx); err != nil {
		b.notes.say(slog.LevelWarn, c.uid, "a connection was ended", "pid", c.pid, "uid", c.uid, "name", c.name, "error", err)
		c.send(protocol.Message{Kind: protocol.Refused, Text: err.Error()})
	}
}

// admit counts a connection.
func (b *Broker) admit(c *client) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closing:
		return errors.New("the broker is ending")
	case len(b.stops) >= b.opt.MaxClients && !(operates(c.uid) && len(b.stops) < b.opt.MaxClients+operators):
		return fmt.Errorf("%d connections are open already", len(b.stops))
	case b.users[c.uid] >= b.opt.PerUser && !operates(c.uid):
		return fmt.Errorf("user %d has %d connections already", c.uid, b.opt.PerUser)
	case c.pid != 0 && b.conns[c.pid] >= b.opt.PerProcess: // those without a number are many
		return fmt.Errorf("process %d has %d connections already", c.pid, b.opt.PerProcess)
	}
	b.conns[c.pid]++
	b.users[c.uid]++
	b.stops[c] = struct{}{}
	return nil
}

func (b *Broker) release(c *client) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conns[c.pid]--; b.conns[c.pid] == 0 {
		delete(b.conns, c.pid)
	}
	if b.users[c.uid]--; b.users[c.uid] == 0 {
		delete(b.users, c.uid)
	}
	delete(b.stops, c)
}

// hangUp has the connection's goroutine end it, which alone closes it: descriptors that the client sent are closed with it, and that
// may wait for whatever the client likes.
func (c *client) hangUp() {
	_ = c.conn.CloseWrite()
	_ = c.conn.CloseRead()
}

func (c *client) close() {
	c.conn.Close()
	if c.pidfd >= 0 {
		unix.Close(c.pidfd)
	}
	if c.segment != nil {
		c.segment.Close()
	}
}

// converse reads messages until the client hangs up (nil) or sends what it must not.
func (c *client) converse(ctx context.Context) error {
	_ = c.conn.SetReadDeadline(time.Now().Add(greetTime))
	buf, oob := make([]byte, protocol.MaxMessage), make([]byte, unix.CmsgSpace(4))
	m, fd, err := c.read(buf, oob)
	if err != nil {
		return ended0(err)
	}
	_ = c.conn.SetReadDeadline(time.Time{})
	if m.Kind != protocol.Hello {
		return c.control(m, fd, buf, oob)
	}
	c.label, c.version = m.Label, m.Version
	if fd < 0 {
		return errors.New("the client sent no status segment")
	}
	if c.segment, err = live.NewSegment(fd); err != nil {
		return err
	}
	c.b.enter(c)
	defer c.b.leave(c)
	defer c.pausings.end()
	if err := c.welcome(); err != nil {
		return err
	}
	var asked sync.WaitGroup
	defer asked.Wait()
	defer c.cancelAll()
	buf = make([]byte, 2<<10) // what clients send from now on is small
	for {
		m, fd, err := c.read(buf, oob)
		if err != nil {
			return ended0(err)
		}
		if fd >= 0 {
			unix.Close(fd)
		}
		if err := c.handle(ctx, m, &asked); err != nil {
			return err
		}
	}
}

// ended0 is nil for the end of a connection.
func ended0(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("no message came for %v", greetTime)
	}
	return err
}

// read reads a message, and a descriptor if one comes with it (else -1).
func (c *client) read(buf, oob []byte) (m protocol.Message, fd int, err error) {
	n, oobn, flags, _, err := c.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return m, -1, err
	}
	fd = descriptor(oob[:oobn])
	if n == 0 {
		err = io.EOF
	} else if flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("a message of more than %d bytes", len(buf))
	} else {
		m, err = protocol.Parse(buf[:n])
	}
	if err != nil && fd >= 0 {
		unix.Close(fd)
		fd = -1
	}
	c.b.counts.Messages.Add(1)
	return m, fd, err
}

// descriptor is the one that came, -1 for none. The buffer has room for one, and the kernel closes others.
func descriptor(oob []byte) int {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(all) == 0 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&all[0])
	if err != nil || len(fds) == 0 {
		return -1
	}
	for _, fd := range fds[1:] {
		unix.Close(fd)
	}
	return fds[0]
}

// send sends a message, with a descriptor if one is named. A client that does not accept it is hung up.
func (c *client) send(m protocol.Message, fds ...int) bool {
	return c.sendBy(time.Now().Add(sendTime), m, fds...)
}

// sendBy sends a message by a time, which it waits for only where the client's socket is full.
func (c *client) sendBy(until time.Time, m protocol.Message, fds ...int) bool {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	text := m.Append(nil)
	err := c.sendNow(text, oob)
	if errors.Is(err, unix.EAGAIN) {
		_ = c.conn.SetWriteDeadline(until)
		_, _, err = c.conn.WriteMsgUnix(text, oob, nil)
	}
	if err != nil {
		if !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.EPIPE) {
			c.b.notes.say(slog.LevelWarn, c.uid, "a client does not accept messages", "client", c.id, "pid", c.pid, "error", err)
		}
		c.hangUp()
		return false
	}
	return true
}

// sendNow sends a message without waiting, at any time.
func (c *client) sendNow(text, oob []byte) error {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			if _, failed = unix.SendmsgN(int(fd), text, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); failed != unix.EINTR {
				return
			}
		}
	})
	return cmp.Or(err, failed)
}

func (c *client) welcome() error {
	if !c.send(protocol.Message{Kind: protocol.Welcome, ID: uint64(c.id)}, c.b.segment.Descriptor()) {
		return errors.New("it did not accept the answer to its first message")
	}
	return nil
}

// enter makes the connection a client, leave ends that.
func (b *Broker) enter(c *client) {
	b.mu.Lock()
	b.last++
	c.id = ledger.ClientID(b.last)
	b.clients[c.id] = c
	b.mu.Unlock()
	b.log.Debug("a client has come", "client", c.id, "pid", c.pid, "name", c.name, "uid", c.uid, "cgroup", c.cgroup, "label", c.label, "version", c.version)
}

func (b *Broker) leave(c *client) {
	defer b.log.Debug("a client has gone", "client", c.id, "pid", c.pid)
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.clients, c.id)
	for id, q := range b.open {
		if q.part.Client == c.id {
			b.ledger.Missed(q.part)
			delete(b.open, id)
			q.answer <- answer{left: true}
		}
	}
	b.ledger.Leave(c.id)
	for _, slot := range c.slots {
		b.show(slot)
	}
}

// handle is one message of a client. An error ends the connection.
func (c *client) handle(ctx context.Context, m protocol.Message, asked *sync.WaitGroup) error {
	if c.b.heard(c) {
		c.b.notes.say(slog.LevelInfo, c.uid, "a client answers again", "client", c.id, "pid", c.pid)
	}
	switch m.Kind {
	case protocol.Join:
		return c.join(m)
	case protocol.Ask:
		return c.ask(ctx, m, asked)
	case protocol.Done:
		c.done(m.ID)
	case protocol.Gave:
		c.b.gave(c, m)
	case protocol.Paused:
		c.b.paused(c, m)
	case protocol.Pausable:
		return c.pausable(m)
	case protocol.Query:
		slot, err := c.slot(m)
		if err != nil {
			return err
		}
		c.b.refresh(slot)
		c.b.mu.Lock()
		a, _ := c.b.ledger.Account(c.id, slot)
		n := c.b.ledger.Available(c.b.now(), c.id, slot)
		c.b.mu.Unlock()
		c.send(protocol.Message{Kind: protocol.Answer, ID: m.ID, Slot: m.Slot, Bytes: n, Limit: a.Policy.Max})
	case protocol.List, protocol.Set, protocol.Hello:
		return fmt.Errorf("a message %q of a client", m.Kind)
	}
	return nil // others are of later versions
}

// heard has a client asked again that did not answer once, and reports whether it is one.
func (b *Broker) heard(c *client) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	mute := b.ledger.Mute(c.id)
	b.ledger.Heard(c.id)
	return mute
}

// slot is that of a message, which the client has joined.
func (c *client) slot(m protocol.Message) (ledger.Slot, error) {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	for _, s := range c.slots {
		if uint64(s) == m.Slot {
			return s, nil
		}
	}
	return 0, fmt.Errorf("a message %q about device %d, which the client did not name", m.Kind, m.Slot)
}

// join notes that the client uses a device.
func (c *client) join(m protocol.Message) error {
	b := c.b
	b.mu.Lock()
	slot, known := b.slots[m.UUID]
	if !known {
		if err := b.mayName(c.uid); err != nil {
			b.mu.Unlock()
			return err
		}
		slot = b.newSlot(m.UUID)
	}
	if _, has := b.ledger.Account(c.id, slot); !has {
		c.slots = append(c.slots, slot)
	}
	p := b.policyOf(c, slot)
	b.ledger.Join(b.now(), c.id, slot, m.Total, p)
	b.mu.Unlock()
	c.send(protocol.Message{Kind: protocol.Joined, ID: m.ID, Slot: uint64(slot), Limit: p.Max})
	if now := c.max(slot); now != p.Max { // rules have changed before the client knew its slot
		c.limit(slot, now)
	}
	return nil
}

// mayName is why a user's clients may not name one more device that no client uses yet. A user that invents devices leaves others as
// many slots as it has itself.
//
// +checklocks:b.mu
func (b *Broker) mayName(uid uint32) error {
	var used, mine [grants.Slots]bool
	for _, c := range b.clients {
		for _, slot := range c.slots {
			used[slot] = true
			mine[slot] = mine[slot] || c.uid == uid
		}
	}
	n, own := 0, 0
	for slot := range used {
		if used[slot] {
			n++
		}
		if mine[slot] {
			own++
		}
	}
	switch {
	case n == grants.Slots:
		return fmt.Errorf("there are %d devices already", grants.Slots)
	case own >= grants.Slots-n && !operates(uid):
		return fmt.Errorf("user %d uses %d devices already, and %d places are left", uid, own, grants.Slots-n)
	}
	return nil
}

// newSlot is a slot for a device, where none is left that of one which no client uses any more. mayName has found that there is one.
//
// +checklocks:b.mu
func (b *Broker) newSlot(uuid [16]byte) (slot ledger.Slot) {
	if slot = ledger.Slot(len(b.slots)); slot == grants.Slots {
		for slot = 0; !b.ledger.Forget(slot); {
			slot++
		}
		delete(b.slots, b.uuids[slot])
		b.counts.loads[slot].forget()
		b.fresh[slot] = 0
	}
	b.slots[uuid], b.uuids[slot] = slot, uuid
	return slot
}

// control answers the commands of operators, and messages about objects. fd is the descriptor that came with m, -1 for none.
func (c *client) control(m protocol.Message, fd int, buf, oob []byte) error {
	defer c.b.objects.leave(c)
	for {
		if !aboutObjects(m.Kind) && fd >= 0 {
			unix.Close(fd)
		}
		switch m.Kind {
		case protocol.List:
			list(c, m.ID, c.b.entries(c), nil)
		case protocol.Devices:
			list(c, m.ID, c.b.Devices(), nil)
		case protocol.Pause, protocol.Resume:
			results, err := c.b.pause(c, m)
			list(c, m.ID, results, err)
		case protocol.Set:
			answer := protocol.Message{Kind: protocol.End, ID: m.ID}
			if err := c.b.set(c, m.Text); err != nil {
				answer.Text = err.Error()
			}
			c.send(answer)
		case protocol.Build, protocol.Commit, protocol.Abandon, protocol.Get, protocol.Unpin, protocol.Remove, protocol.Objects:
			if err := c.object(m, fd); err != nil {
				return err
			}
		case protocol.Handover:
			if err := c.handOver(m, buf, oob); err != nil {
				return err
			}
		default:
			return fmt.Errorf("a conversation begins with a message %q: expected %q", m.Kind, protocol.Hello)
		}
		var err error
		if m, fd, err = c.read(buf, oob); err != nil {
			return ended0(err)
		}
	}
}

// mostListed bounds a text of an item: JSON may write a byte in six, and an item that is cut is no JSON.
const mostListed = 1 << 10

// list sends items and the end of their list.
func list[T any](c *client, id uint64, items []T, err error) {
	for _, x := range items {
		text, bad := json.Marshal(x)
		if bad != nil {
			err = bad
			break
		}
		if !c.send(protocol.Message{Kind: protocol.Item, ID: id, Text: string(text)}) {
			return // it is hung up
		}
	}
	end := protocol.Message{Kind: protocol.End, ID: id}
	if err != nil {
		end.Text = err.Error()
	}
	c.send(end)
}

// operates reports whether a user may see and change everything: root, and the broker's own.
func operates(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

// mostSet bounds the rules that commands add.
const mostSet = 1000

// set adds a rule until the broker ends. It takes the place of one with the same conditions and keys.
func (b *Broker) set(c *client, text string) error {
	if !operates(c.uid) {
		return errors.New("only root and the broker's user change the policy")
	}
	r, err := policy.ParseRule(text)
	if err != nil {
		return err
	}
	b.setRules(func() *policy.Policy {
		b.extra = slices.DeleteFunc(b.extra, func(o policy.Rule) bool { return r.Replaces(&o) })
		if len(b.extra) == mostSet {
			err = fmt.Errorf("commands have set %d rules, the most: write rules into the policy's file (cistern serve --policy FILE)", mostSet)
			return b.rules
		}
		b.extra = append(b.extra, r)
		return b.file.With(b.extra)
	})
	if err != nil {
		return err
	}
	b.log.Info("policy set", "uid", c.uid, "pid", c.pid, "rule", r.String())
	return nil
}

// entries are the clients that a user may see, by device.
func (b *Broker) entries(by *client) (all []protocol.Entry) {
	b.mu.Lock()
	n := len(b.slots)
	b.mu.Unlock()
	for slot := range ledger.Slot(n) {
		b.refresh(slot)
		b.mu.Lock()
		for _, a := range b.ledger.Accounts(slot) {
			c := b.clients[a.Client]
			if c == nil || !operates(by.uid) && c.uid != by.uid {
				continue
			}
			all = append(all, protocol.Entry{Client: uint64(a.Client), PID: c.pid, UID: c.uid, Name: c.name, Label: c.label, Cgroup: protocol.Clean(c.cgroup, mostListed), Version: c.version,
				Device: UUID(b.uuids[slot]), Total: b.ledger.Total(slot), Reserved: a.Status.Reserved, Active: a.Status.Active, Cached: a.Status.Cached,
				Pinned: a.Status.Pinned, Paused: a.Status.Paused, Pausable: a.Pausable, Pauses: a.Pauses, Floor: max(a.Policy.Min, a.Status.Floor(a.Hold)), Granted: a.Granted, Gave: a.Gave, Got: a.Got,
				Refaults: a.Refaults, Missed: a.Missed, Skipped: b.ledger.Mute(a.Client), Min: a.Policy.Min, High: a.Policy.High, Max: a.Policy.Max,
				Weight: a.Policy.Weight, Priority: a.Policy.Priority, Decay: a.Policy.Decay.Seconds()})
		}
		b.mu.Unlock()
	}
	return all
}
