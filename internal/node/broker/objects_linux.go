package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/policy"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// ObjectOptions configure the broker's named objects.
type ObjectOptions struct {
	// Open opens the driver when the first object is built; nil: the broker has no objects.
	Open func() (objects.Driver, error)
	// Most is the most generations; default 1024. A user who does not operate the broker may have a quarter of them.
	Most int
	// MostBytes is the most memory of objects of a device; default nine tenths of it.
	MostBytes uint64
	// Wait is how long the driver may take for an object; default 30 s.
	Wait time.Duration
	// Keep stores descriptors for the next broker; nil: none.
	Keep Keeper
}

const (
	// mostLayouts bounds the host memory of all layouts.
	mostLayouts = 256 << 20
	// mostBuilds bounds what one connection builds at once.
	mostBuilds = 16
	// mostJobs is how many objects may wait for the driver.
	mostJobs = 32
	// granule is the unit of an object's memory, in bytes; a device with another fails.
	granule = 2 << 20
)

// objectTable is the named objects of a broker. Its lock is a leaf; no driver call is made and no message is sent with it.
type objectTable struct {
	b    *Broker
	opt  ObjectOptions
	jobs chan struct{} // a place for each object that waits for the driver

	opening sync.Mutex   // held while the driver is opened
	passing sync.RWMutex // held for writing while a successor takes the objects over

	mu       sync.Mutex
	store    *objects.Store              // +checklocks:mu
	memory   map[uint64]*objects.Memory  // by generation; +checklocks:mu
	drv      objects.Driver              // nil before the first object; +checklocks:mu
	sessions map[objects.Session]*client // +checklocks:mu
	last     objects.Session             // +checklocks:mu
	kept     map[uint64]int              // chunks of the generations that are stored; +checklocks:mu
	devices  map[string]bool             // whose files are stored; +checklocks:mu
}

func newObjectTable(b *Broker, opt ObjectOptions) *objectTable {
	if opt.Most == 0 {
		opt.Most = 1024
	}
	if opt.Wait == 0 {
		opt.Wait = 30 * time.Second
	}
	user := max(opt.Most/4, 1)
	limits := objects.Limits{Objects: opt.Most, UserObjects: user, Layouts: mostLayouts, UserLayouts: mostLayouts / 4, Builds: mostBuilds}
	return &objectTable{b: b, opt: opt, jobs: make(chan struct{}, mostJobs), store: objects.NewStore(limits, uint64(time.Now().UnixMilli())),
		memory: map[uint64]*objects.Memory{}, sessions: map[objects.Session]*client{}, kept: map[uint64]int{}, devices: map[string]bool{}}
}

// aboutObjects reports whether a kind is one of a connection for objects.
func aboutObjects(k protocol.Kind) bool {
	switch k {
	case protocol.Build, protocol.Commit, protocol.Abandon, protocol.Get, protocol.Unpin, protocol.Remove, protocol.Objects:
		return true
	}
	return false
}

// enterObjects gives a connection its session.
func (t *objectTable) enter(c *client) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.session == 0 {
		t.last++
		c.session = t.last
		t.sessions[c.session] = c
	}
}

// leave ends what a connection builds and has pinned.
func (t *objectTable) leave(c *client) {
	if c.session == 0 {
		return
	}
	t.mu.Lock()
	delete(t.sessions, c.session)
	gone := t.take(t.store.Leave(c.session, time.Now()))
	t.mu.Unlock()
	t.release(gone)
}

// connected are the connections, for the broker's sweep.
func (t *objectTable) connected(all []*client) []*client {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.sessions {
		all = append(all, c)
	}
	return all
}

// freed is memory that is to be released.
type freed struct {
	generation uint64
	memory     *objects.Memory
}

// take takes the memory of generations. One whose memory is being made has none: its maker finds that it is not wanted.
//
// +checklocks:t.mu
func (t *objectTable) take(generations []uint64) (all []freed) {
	for _, g := range generations {
		if m := t.memory[g]; m != nil {
			delete(t.memory, g)
			all = append(all, freed{g, m})
		}
	}
	return all
}

// release releases memory. It waits for the driver, but not for long.
func (t *objectTable) release(all []freed) {
	if len(all) == 0 {
		return
	}
	t.mu.Lock()
	drv := t.drv
	t.mu.Unlock()
	over := make(chan struct{})
	go func() {
		defer close(over)
		for _, x := range all {
			if err := x.memory.Release(drv); err != nil {
				t.b.log.Error("memory of an object is lost until the broker ends", "generation", x.generation, "error", err)
			}
		}
	}()
	late := time.NewTimer(t.opt.Wait)
	defer late.Stop()
	select {
	case <-over:
	case <-late.C:
		t.b.log.Error("the driver does not release memory of objects", "waited", t.opt.Wait)
	}
}

// driver opens the driver once.
func (t *objectTable) driver() (objects.Driver, error) {
	t.opening.Lock()
	defer t.opening.Unlock()
	t.mu.Lock()
	drv := t.drv
	t.mu.Unlock()
	if drv != nil {
		return drv, nil
	}
	if t.opt.Open == nil {
		return nil, errors.New("this broker keeps no objects")
	}
	drv, err := t.opt.Open()
	if err != nil {
		return nil, fmt.Errorf("the broker has no driver for objects: %w", err)
	}
	t.mu.Lock()
	t.drv = drv
	t.mu.Unlock()
	return drv, nil
}

// device finds a device by its UUID.
func device(drv objects.Driver, uuid [16]byte) (cuda.Device, cuda.DeviceInfo, error) {
	n, err := drv.DeviceCount()
	if err != nil {
		return 0, cuda.DeviceInfo{}, err
	}
	for d := range cuda.Device(n) {
		info, err := drv.DeviceInfo(d)
		if err == nil && info.UUID == uuid {
			return d, info, nil
		}
	}
	return 0, cuda.DeviceInfo{}, fmt.Errorf("the broker does not see the device %s", UUID(uuid))
}

// object is one message about objects. An error ends the connection. fd is the descriptor that came with it, -1 for none.
func (c *client) object(m protocol.Message, fd int) error {
	t := c.b.objects
	if m.Kind != protocol.Build && fd >= 0 {
		unix.Close(fd)
	}
	t.passing.RLock()
	defer t.passing.RUnlock()
	if c.b.HandedOver() {
		if m.Kind == protocol.Build && fd >= 0 {
			unix.Close(fd)
		}
		return errHandedOver
	}
	t.enter(c)
	var err error
	switch m.Kind {
	case protocol.Build:
		return t.build(c, m, fd)
	case protocol.Get:
		return t.get(c, m)
	case protocol.Objects:
		var all []protocol.Object
		all, err = t.list(c, m)
		list(c, m.ID, all, err)
		return nil
	case protocol.Commit:
		err = t.commit(c, m)
	default:
		err = t.end(c, m)
	}
	c.end(m.ID, err)
	return nil
}

// end is the end of an answer.
func (c *client) end(id uint64, err error) bool {
	m := protocol.Message{Kind: protocol.End, ID: id}
	if err != nil {
		m.Text, m.Keep = err.Error(), code(err)
	}
	return c.send(m)
}

// code tells kinds of errors apart, in Keep of an End.
func code(err error) uint64 {
	switch {
	case errors.Is(err, objects.ErrNotFound):
		return protocol.CodeNotFound
	case errors.Is(err, objects.ErrDenied):
		return protocol.CodeDenied
	case errors.Is(err, objects.ErrLimit):
		return protocol.CodeLimit
	case errors.Is(err, cuda.ErrOutOfMemory):
		return protocol.CodeOutOfMemory
	}
	return protocol.CodeOther
}

// cred is who the client is. Groups are asked for when an object is read by its group.
func (c *client) cred() objects.Cred {
	who := objects.Cred{UID: c.uid, Operates: operates(c.uid)}
	if gid, groups, err := groupsOf(c); err == nil {
		who.Groups = append(groups, gid)
	}
	return who
}

// groupsOf asks the kernel for the groups of the process at the other end.
func groupsOf(c *client) (gid uint32, groups []uint32, err error) {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	bad := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			gid = cred.Gid
			groups = peerGroups(int(fd))
		}
	})
	return gid, groups, errors.Join(bad, err)
}

// objectName reads the text of a message that names an object.
func objectName(text string) (n protocol.ObjectName, err error) {
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return n, errors.New("expected the name of an object as JSON")
	}
	return n, objects.CheckName(n.Name)
}

// build begins a build, and sends its chunks. It takes over the descriptor.
func (t *objectTable) build(c *client, m protocol.Message, layout int) error {
	began := time.Now()
	o, err := t.specified(c, m, layout)
	if err != nil {
		if layout >= 0 {
			unix.Close(layout)
		}
		c.end(m.ID, err)
		return nil
	}
	made, err := t.make(c, o, layout)
	if err != nil {
		t.b.notes.say(slog.LevelInfo, c.uid, "an object was not made", "name", o.Name, "uid", o.UID, "pid", o.PID, "bytes", o.Bytes, "error", err)
		c.end(m.ID, err)
		return nil
	}
	t.b.log.Debug("an object is built", "name", o.Name, "uid", o.UID, "pid", o.PID, "generation", made.generation, "bytes", o.Bytes, "took", time.Since(began))
	if !c.send(protocol.Message{Kind: protocol.Built, ID: m.ID, Object: made.generation, Slot: uint64(o.Chunks())}) {
		return nil
	}
	made.send(c, m.ID)
	return nil
}

// send sends the chunks of a generation, of which the client has a build or a pin.
func (x freed) send(c *client, id uint64) {
	x.memory.Use(func() { // another connection may remove the build
		for i := range x.memory.Chunks {
			chunk := &x.memory.Chunks[i]
			if !c.send(protocol.Message{Kind: protocol.Chunk, ID: id, Object: x.generation, Slot: uint64(i), Bytes: chunk.Size}, chunk.FD) {
				return
			}
		}
	})
}

// specified is the object that a client wants to build.
func (t *objectTable) specified(c *client, m protocol.Message, layout int) (o objects.Object, err error) {
	var spec protocol.ObjectSpec
	if err := json.Unmarshal([]byte(m.Text), &spec); err != nil {
		return o, errors.New("expected a description of the object as JSON")
	}
	if layout < 0 {
		return o, errors.New("the object's layout did not come")
	}
	text, err := objects.ReadFile(layout, objects.MaxLayout)
	if err != nil {
		return o, fmt.Errorf("layout: %w", err)
	}
	if m.Bytes > objects.MaxChunks*objects.MaxChunk {
		return o, fmt.Errorf("an object of %d bytes: expected at most %d", m.Bytes, uint64(objects.MaxChunks*objects.MaxChunk))
	}
	if math.IsNaN(spec.TTL) || spec.TTL < 0 || spec.TTL > float64(math.MaxInt64/int64(time.Second)) {
		return o, fmt.Errorf("a time to live of %v s", spec.TTL)
	}
	gid, _, err := groupsOf(c)
	if err != nil {
		return o, err
	}
	return objects.Object{ObjectName: protocol.ObjectName{UID: c.uid, Name: spec.Name}, GID: gid, UUID: m.UUID, Bytes: m.Bytes,
		Reserved: (m.Bytes + granule - 1) &^ (granule - 1), Mode: spec.Mode, TTL: time.Duration(spec.TTL * float64(time.Second)), Labels: spec.Labels,
		LayoutSize: len(text), Layout: objects.Sum(text), PID: c.pid, Created: time.Now()}, nil
}

// make makes the memory of an object. The driver is called from another goroutine, which may outlast the wait for it. It takes over the
// layout.
func (t *objectTable) make(c *client, o objects.Object, layout int) (made freed, err error) {
	select {
	case t.jobs <- struct{}{}:
	default:
		unix.Close(layout)
		return made, fmt.Errorf("%d objects wait for the driver already", mostJobs)
	}
	type result struct {
		made freed
		err  error
	}
	over := make(chan result, 1)
	q, session, who := t.quota(c, o.UUID), c.session, c.cred()
	go func() {
		defer func() { <-t.jobs }()
		var r result
		r.made, r.err = t.create(session, who, o, q, layout)
		over <- r
	}()
	late := time.NewTimer(t.opt.Wait)
	defer late.Stop()
	select {
	case r := <-over:
		return r.made, r.err
	case <-late.C:
		c.hangUp() // what the driver may still make goes with the session
		return made, fmt.Errorf("the driver did not answer for %v", t.opt.Wait)
	}
}

// create makes the memory of an object, whose bytes count before the driver is asked.
func (t *objectTable) create(by objects.Session, who objects.Cred, o objects.Object, q objects.Quota, layout int) (made freed, err error) {
	drv, err := t.driver()
	if err != nil {
		unix.Close(layout)
		return made, err
	}
	dev, info, err := device(drv, o.UUID)
	switch {
	case err != nil:
	case !info.VMM || granule%max(info.Granularity, 1) != 0:
		err = fmt.Errorf("the device %s cannot share memory in units of %d bytes", UUID(o.UUID), granule)
	default:
		made.generation, err = t.begin(by, who, o, q, info.TotalBytes)
	}
	if err != nil {
		unix.Close(layout)
		return made, err
	}
	if made.memory, err = objects.Create(drv, dev, o.Reserved, layout); err != nil {
		err = fmt.Errorf("the object's memory: %w", err)
	}
	t.mu.Lock()
	_, wanted := t.store.Get(made.generation)
	if wanted && err == nil {
		t.memory[made.generation] = made.memory
	}
	if err != nil {
		_, _ = t.store.Abandon(by, made.generation)
	}
	t.mu.Unlock()
	if err == nil && !wanted {
		err = errors.Join(errors.New("the object was removed, or the connection has ended"), made.memory.Release(drv))
	}
	return made, err
}

// begin counts an object.
func (t *objectTable) begin(by objects.Session, who objects.Cred, o objects.Object, q objects.Quota, total uint64) (uint64, error) {
	most := t.opt.MostBytes
	if most == 0 {
		most = total / 10 * 9
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sessions[by] == nil {
		return 0, errors.New("the connection has ended")
	}
	return t.store.Begin(by, who, o, q, most)
}

// quota is what the policy says of the process, which may be a client too.
func (t *objectTable) quota(c *client, uuid [16]byte) (q objects.Quota) {
	b := t.b
	b.mu.Lock()
	slot, known := b.slots[uuid]
	b.mu.Unlock()
	if known {
		b.refresh(slot)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	label := c.label
	if known {
		for _, a := range b.ledger.Accounts(slot) {
			if x := b.clients[a.Client]; x != nil && x.pid == c.pid && x.pid != 0 {
				q.Reserved += a.Status.Reserved
				label = x.label
			}
		}
	}
	q.Max = b.rules.Of(policy.Client{UID: c.uid, Cgroup: c.cgroup, Label: label, Name: c.name, Device: UUID(uuid)}).Max
	return q
}

// commit makes a build visible.
func (t *objectTable) commit(c *client, m protocol.Message) error {
	if m.Text != "" && !isSum(m.Text) {
		return errors.New("expected the SHA-256 of the contents in hexadecimal, or none")
	}
	t.mu.Lock()
	o, ok := t.store.Get(m.Object)
	var memory *objects.Memory
	if ok {
		memory = t.memory[m.Object]
	}
	if ok && memory == nil {
		t.mu.Unlock()
		return errors.New("the object has no memory yet")
	}
	gone, err := t.store.Commit(c.session, m.Object, m.Text, time.Now())
	released := t.take(gone)
	var stored objects.Object
	if err == nil {
		stored = *o
	}
	t.mu.Unlock()
	if err != nil {
		return err
	}
	t.keep(&stored, memory)
	t.release(released)
	t.b.notes.say(slog.LevelInfo, c.uid, "an object is there", "name", stored.Name, "uid", stored.UID, "pid", stored.PID, "generation", m.Object, "bytes", stored.Bytes)
	return nil
}

func isSum(s string) bool {
	return len(s) == 64 && !slices.ContainsFunc([]byte(s), func(c byte) bool { return (c < '0' || c > '9') && (c < 'a' || c > 'f') })
}

// get pins a generation and sends it.
func (t *objectTable) get(c *client, m protocol.Message) error {
	n, err := objectName(m.Text)
	if err != nil {
		c.end(m.ID, err)
		return nil
	}
	who := c.cred()
	t.mu.Lock()
	o, err := t.store.Pin(c.session, who, n, m.Object)
	var x freed
	var text []byte
	if err == nil {
		x = freed{o.Generation, t.memory[o.Generation]}
		text, err = json.Marshal(o.Listed(UUID(o.UUID)))
	}
	t.mu.Unlock()
	if err != nil {
		c.end(m.ID, err)
		return nil
	}
	found := protocol.Message{Kind: protocol.Found, ID: m.ID, Object: x.generation, Slot: uint64(len(x.memory.Chunks)), UUID: o.UUID, Text: string(text)}
	if c.send(found, x.memory.Layout) {
		x.send(c, m.ID)
	}
	return nil
}

// end ends a build or a pin, or removes a name.
func (t *objectTable) end(c *client, m protocol.Message) error {
	var n protocol.ObjectName
	var err error
	if m.Kind == protocol.Remove {
		if n, err = objectName(m.Text); err != nil {
			return err
		}
	}
	var gone []uint64
	t.mu.Lock()
	switch m.Kind {
	case protocol.Abandon:
		gone, err = t.store.Abandon(c.session, m.Object)
	case protocol.Unpin:
		gone, err = t.store.Unpin(c.session, m.Object, time.Now())
	case protocol.Remove:
		gone, err = t.store.Remove(objects.Cred{UID: c.uid, Operates: operates(c.uid)}, n, m.Object)
	}
	released := t.take(gone)
	t.mu.Unlock()
	if m.Kind == protocol.Remove && err == nil {
		t.b.notes.say(slog.LevelInfo, c.uid, "an object was removed", "name", n.Name, "uid", n.UID, "generation", m.Object, "by_pid", c.pid, "by_uid", c.uid)
	}
	t.forget()
	t.release(released)
	return err
}

// list are the objects that a user may read.
func (t *objectTable) list(c *client, m protocol.Message) (all []protocol.Object, err error) {
	var only *protocol.ObjectName
	if m.Text != "" {
		n, err := objectName(m.Text)
		if err != nil {
			return nil, err
		}
		only = &n
	}
	who := c.cred()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range t.store.List(who, only) {
		all = append(all, o.Listed(UUID(o.UUID)))
	}
	return all, nil
}

// expire removes objects whose time is over.
func (t *objectTable) expire() {
	if !t.passing.TryRLock() {
		return // the successor does it
	}
	defer t.passing.RUnlock() // +checklocksignore: the tool does not know TryRLock
	t.mu.Lock()
	gone := t.take(t.store.Expire(time.Now()))
	t.mu.Unlock()
	for _, x := range gone {
		t.b.log.Debug("an object's time to live is over", "generation", x.generation)
	}
	t.forget()
	t.release(gone)
}

// close releases the objects of a broker that has ended. Descriptors that are stored keep the memory for the next one.
func (t *objectTable) close() {
	t.mu.Lock()
	var all []freed
	for g, m := range t.memory {
		all = append(all, freed{g, m})
	}
	clear(t.memory)
	t.mu.Unlock()
	t.release(all)
}

// reserved is the memory of objects of a device, and their number.
func (t *objectTable) reserved(uuid [16]byte) (uint64, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.store.Reserved(uuid)
}
