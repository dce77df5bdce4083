package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/socket"
)

const (
	// objectTime is how long the broker may take for an answer, objectDriver where it asks the driver for memory.
	objectTime   = 10 * time.Second
	objectDriver = 40 * time.Second
)

// Objects is a process's connection for named objects. It connects when it is asked for something, and again when the broker was
// another one. The methods may be called from any goroutine; they wait for each other.
type Objects struct {
	cfg ObjectsConfig

	mu   sync.Mutex
	link *link            // nil: none; +checklocks:mu
	last uint64           // number of a message; +checklocks:mu
	open map[uint64]*held // by generation; +checklocks:mu
	// joining: a broker that ends while open is pinned again is not connected to again at once.
	joining bool   // +checklocks:mu
	buf     []byte // +checklocks:mu
	oob     []byte // +checklocks:mu
}

// conn is the connection of parts.
type conn struct {
	guard socket.Guard
	link  *link
}

// held is a generation that this process has pinned.
type held struct {
	name  protocol.ObjectName
	times int
}

// NewObjects makes a connection, which is not connected yet.
func NewObjects(cfg ObjectsConfig) *Objects {
	if cfg.Guard == nil {
		cfg.Guard = noGuard{}
	}
	return &Objects{cfg: cfg, open: map[uint64]*held{}, buf: make([]byte, protocol.MaxMessage), oob: make([]byte, syscall.CmsgSpace(4))}
}

// Close ends the connection: builds end, and what is open is not pinned any more.
func (o *Objects) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop()
	clear(o.open)
}

// drop closes the link.
//
// +checklocks:o.mu
func (o *Objects) drop() {
	if o.link != nil {
		o.link.CloseBy(o.link.guard)
		o.link = nil
	}
}

// connect finds a broker, and pins again what is open here and was not removed.
//
// +checklocks:o.mu
func (o *Objects) connect() error {
	paths := []string{o.cfg.Socket}
	if o.cfg.Socket == "" {
		paths = Sockets()
	}
	var first error
	for _, path := range paths {
		l, err := dial(path, o.cfg.Guard)
		if err == nil {
			o.link, o.joining = l, true
			err = o.again()
			o.joining = false
			return err
		}
		if first == nil {
			first = gone(path, err)
		}
	}
	if first == nil {
		first = errors.New("there is none on this system")
	}
	return fmt.Errorf("%w: %w", ErrNoBroker, first)
}

// again pins what is open here.
//
// +checklocks:o.mu
func (o *Objects) again() error {
	for _, generation := range slices.Sorted(maps.Keys(o.open)) {
		h := o.open[generation]
		for range h.times {
			f, err := o.get(h.name, generation)
			var refused *ObjectError
			if errors.As(err, &refused) {
				break // it was removed; the mapping here keeps its memory
			}
			if err != nil {
				return err
			}
			f.Close()
		}
	}
	return nil
}

// send sends a question, to a new broker where the one before has ended.
//
// +checklocks:o.mu
func (o *Objects) send(m *protocol.Message, fds ...int) error {
	if o.link != nil {
		err := o.post(m, fds)
		if err == nil {
			return nil
		}
		o.drop()
	}
	if o.joining {
		return errEnded
	}
	if err := o.connect(); err != nil {
		o.drop()
		return err
	}
	err := o.post(m, fds)
	if err != nil {
		o.drop()
	}
	return err
}

// +checklocks:o.mu
func (o *Objects) post(m *protocol.Message, fds []int) error {
	o.last++
	m.ID = o.last
	return o.link.post(m.Append(nil), fds)
}

// next receives a message that belongs to the last question, and its descriptor, -1 for none. Where it fails the link is closed.
//
// +checklocks:o.mu
func (o *Objects) next(limit *deadline.Deadline) (m protocol.Message, fd int, err error) {
	for {
		left := limit.Left(time.Now())
		if left <= 0 {
			o.drop()
			return m, -1, fmt.Errorf("the node's broker did not answer for %v", limit.Limit)
		}
		m, fd, ok, err := o.link.read(left, o.buf, o.oob)
		switch {
		case err != nil:
			o.drop()
			return m, -1, fmt.Errorf("the node's broker: %w", err)
		case !ok:
		case m.Kind == protocol.Refused:
			o.drop()
			return m, -1, fmt.Errorf("the node's broker refused: %s", m.Text)
		case m.ID == o.last:
			return m, fd, nil
		case fd >= 0:
			o.link.close(fd)
		}
	}
}

// ended is the error of an End.
func endOf(m *protocol.Message) error {
	if m.Kind != protocol.End {
		return fmt.Errorf("the node's broker answers with a message %q", m.Kind)
	}
	if m.Text == "" {
		return nil
	}
	return &ObjectError{m.Keep, m.Text}
}

// ask sends a question that is answered by End alone.
//
// +checklocks:o.mu
func (o *Objects) ask(m protocol.Message) error {
	limit := deadline.Deadline{Limit: objectTime}
	if err := o.send(&m); err != nil {
		return err
	}
	answer, fd, err := o.next(&limit)
	if err != nil {
		return err
	}
	if fd >= 0 {
		o.link.close(fd)
	}
	return endOf(&answer)
}

// Build begins an object of so many bytes. The caller closes the parts, and ends the build with Commit or Abandon.
func (o *Objects) Build(uuid [16]byte, bytes uint64, spec protocol.ObjectSpec, layout []byte) (*Parts, error) {
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if len(text) > protocol.MaxText {
		return nil, fmt.Errorf("the description of the object has %d bytes: expected at most %d", len(text), protocol.MaxText)
	}
	file, err := objects.NewFile("cistern-layout", layout)
	if err != nil {
		return nil, err
	}
	o.cfg.Guard.Opened(file)
	defer func() {
		o.cfg.Guard.Closing(file)
		syscall.Close(file)
	}()
	o.mu.Lock()
	defer o.mu.Unlock()
	limit := deadline.Deadline{Limit: objectDriver}
	if err := o.send(&protocol.Message{Kind: protocol.Build, UUID: uuid, Bytes: bytes, Text: string(text)}, file); err != nil {
		return nil, err
	}
	m, fd, err := o.next(&limit)
	if err != nil {
		return nil, err
	}
	if fd >= 0 {
		o.link.close(fd)
	}
	if m.Kind != protocol.Built {
		return nil, cmpError(endOf(&m))
	}
	p, err := o.parts(&m, bytes, &limit)
	if err != nil && o.link != nil {
		_ = o.ask(protocol.Message{Kind: protocol.Abandon, Object: m.Object})
	}
	return p, err
}

// cmpError is an error where an answer came that says nothing.
func cmpError(err error) error {
	if err == nil {
		return errors.New("the node's broker answers without memory")
	}
	return err
}

// parts receives the chunks of a generation, all of them also where one has no descriptor.
//
// +checklocks:o.mu
func (o *Objects) parts(m *protocol.Message, bytes uint64, limit *deadline.Deadline) (*Parts, error) {
	p := &Parts{Generation: m.Object, conn: conn{o.cfg.Guard, o.link}}
	if m.Slot == 0 || m.Slot > objects.MaxChunks {
		o.drop()
		return nil, fmt.Errorf("the node's broker names %d chunks: expected 1 to %d", m.Slot, objects.MaxChunks)
	}
	var sum uint64
	missing := false
	for i := range m.Slot {
		c, fd, err := o.next(limit)
		if err == nil && (c.Kind != protocol.Chunk || c.Slot != i || c.Object != m.Object || c.Bytes > 1<<50) {
			err = fmt.Errorf("the node's broker answers with a message %q in place of a chunk", c.Kind)
			if fd >= 0 {
				o.link.close(fd)
			}
			o.drop()
		}
		if err != nil {
			p.Close()
			return nil, err
		}
		if fd < 0 {
			missing = true
			continue
		}
		sum += c.Bytes
		p.Chunks = append(p.Chunks, ObjectChunk{FD: fd, Size: c.Bytes})
	}
	switch {
	case missing:
		p.Close()
		return nil, errors.New("the descriptor of a chunk did not come: this process has none left")
	case sum < bytes:
		p.Close()
		return nil, fmt.Errorf("the node's broker sent %d bytes of an object of %d", sum, bytes)
	}
	return p, nil
}

// Close closes the descriptors. What was mapped of them stays.
func (p *Parts) Close() {
	for _, c := range p.Chunks {
		p.guard.Closing(c.FD)
		syscall.Close(c.FD)
	}
	p.Chunks = nil
}

// Commit makes a build visible. contents is the SHA-256 of the contents in hexadecimal, or "".
func (o *Objects) Commit(p *Parts, contents string) error {
	return o.ends(p, protocol.Message{Kind: protocol.Commit, Object: p.Generation, Text: contents})
}

// Abandon ends a build.
func (o *Objects) Abandon(p *Parts) error {
	return o.ends(p, protocol.Message{Kind: protocol.Abandon, Object: p.Generation})
}

func (o *Objects) ends(p *Parts, m protocol.Message) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.link == nil || o.link != p.link {
		return errors.New("the node's broker has ended, and the build with it")
	}
	l := o.link
	limit := deadline.Deadline{Limit: objectDriver} // a generation before may be released
	if err := o.post(&m, nil); err != nil {
		o.drop()
		return fmt.Errorf("the node's broker: %w", err)
	}
	answer, fd, err := o.next(&limit)
	if err != nil {
		return err
	}
	if fd >= 0 {
		l.close(fd)
	}
	return endOf(&answer)
}

// Get pins a generation, 0 for the latest, and returns its memory. The caller closes the parts, and undoes it with Unpin.
func (o *Objects) Get(name protocol.ObjectName, generation uint64) (*Found, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f, err := o.get(name, generation)
	if err != nil {
		return nil, err
	}
	h := o.open[f.Generation]
	if h == nil {
		h = &held{name: name}
		o.open[f.Generation] = h
	}
	h.times++
	return f, nil
}

// +checklocks:o.mu
func (o *Objects) get(name protocol.ObjectName, generation uint64) (*Found, error) {
	text, err := json.Marshal(name)
	if err != nil {
		return nil, err
	}
	limit := deadline.Deadline{Limit: objectTime}
	if err := o.send(&protocol.Message{Kind: protocol.Get, Text: string(text), Object: generation}); err != nil {
		return nil, err
	}
	m, fd, err := o.next(&limit)
	if err != nil {
		return nil, err
	}
	defer func() {
		if fd >= 0 {
			o.cfg.Guard.Closing(fd)
			syscall.Close(fd)
		}
	}()
	if m.Kind != protocol.Found {
		return nil, cmpError(endOf(&m))
	}
	f := &Found{UUID: m.UUID}
	if err := json.Unmarshal([]byte(m.Text), &f.Object); err != nil {
		o.drop()
		return nil, fmt.Errorf("the node's broker describes an object as %q: %w", m.Text, err)
	}
	p, err := o.parts(&m, f.Object.Bytes, &limit)
	if err == nil {
		f.Parts = *p
		if fd < 0 {
			err = errors.New("the descriptor of the layout did not come: this process has none left")
		} else if f.Layout, err = objects.ReadFile(fd, objects.MaxLayout); err != nil {
			err = fmt.Errorf("the object's layout: %w", err)
		} else if got := objects.Sum(f.Layout); got != f.Object.Layout {
			err = fmt.Errorf("the object's layout has the checksum %s: expected %s", got, f.Object.Layout)
		}
	}
	if err != nil {
		f.Close()
		if o.link != nil {
			_ = o.ask(protocol.Message{Kind: protocol.Unpin, Object: m.Object})
		}
		return nil, err
	}
	return f, nil
}

// Unpin undoes one Get. A broker that does not know the pin is a later one than that of Get.
func (o *Objects) Unpin(generation uint64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.open[generation]
	if h == nil {
		return nil
	}
	if o.link == nil { // a pin goes with its connection
		if h.times--; h.times == 0 {
			delete(o.open, generation)
		}
		return nil
	}
	err := o.ask(protocol.Message{Kind: protocol.Unpin, Object: generation})
	if h.times--; h.times == 0 {
		delete(o.open, generation)
	}
	var refused *ObjectError
	if errors.As(err, &refused) && refused.Code == protocol.CodeNotFound || o.link == nil {
		return nil
	}
	return err
}

// Remove takes the name from an object, or ends one generation.
func (o *Objects) Remove(name protocol.ObjectName, generation uint64) error {
	text, err := json.Marshal(name)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.ask(protocol.Message{Kind: protocol.Remove, Text: string(text), Object: generation})
}

// List are the objects that the user may read; with a name, the generations of that name.
func (o *Objects) List(name *protocol.ObjectName) (all []protocol.Object, err error) {
	m := protocol.Message{Kind: protocol.Objects}
	if name != nil {
		text, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		m.Text = string(text)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	limit := deadline.Deadline{Limit: objectTime}
	if err := o.send(&m); err != nil {
		return nil, err
	}
	for {
		answer, fd, err := o.next(&limit)
		if err != nil {
			return nil, err
		}
		if fd >= 0 {
			o.link.close(fd)
		}
		if answer.Kind != protocol.Item {
			return all, endOf(&answer)
		}
		var x protocol.Object
		if err := json.Unmarshal([]byte(answer.Text), &x); err != nil {
			o.drop()
			return nil, fmt.Errorf("the node's broker describes an object as %q: %w", answer.Text, err)
		}
		all = append(all, x)
	}
}
