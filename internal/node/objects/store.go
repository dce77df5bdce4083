package objects

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Session is a connection.
type Session uint64

// Cred is the process that asks, as the kernel identifies it.
type Cred struct {
	UID      uint32
	Groups   []uint32
	Operates bool // root, and the broker's own user
}

// Object is one generation of an object.
type Object struct {
	protocol.ObjectName
	Generation uint64
	GID        uint32
	UUID       [16]byte // of the device
	Bytes      uint64   // of the contents
	Reserved   uint64   // bytes of physical memory
	Mode       uint32
	TTL        time.Duration // 0 is without end
	Labels     map[string]string
	LayoutSize int
	Layout     string // SHA-256 in hexadecimal
	Contents   string // likewise, "" where the writer did not say
	PID        int    // of the writer
	Created    time.Time

	state  string
	writer Session // while it is built
	pins   map[Session]int
	used   time.Time // when the last pin went, or it was committed
}

// Limits bound what processes may have of objects. The zero value of one is no limit.
type Limits struct {
	Objects     int    // generations in all
	UserObjects int    // of one user who does not operate the broker
	Layouts     uint64 // bytes of all layouts
	UserLayouts uint64 // likewise, of one user who does not operate the broker
	Builds      int    // of one connection, at once
}

// Store is the bookkeeping. Make one with NewStore.
type Store struct {
	limits Limits
	last   uint64
	all    map[uint64]*Object              // by generation
	named  map[protocol.ObjectName]*Object // the latest that was committed
}

// NewStore makes a store whose generations have numbers above last.
func NewStore(limits Limits, last uint64) *Store {
	return &Store{limits: limits, last: last, all: map[uint64]*Object{}, named: map[protocol.ObjectName]*Object{}}
}

// Errors that callers tell apart.
var (
	ErrNotFound = errors.New("no such object")
	ErrDenied   = errors.New("permission denied")
	ErrLimit    = errors.New("limit reached")
)

const (
	// MaxName is the most bytes of a name.
	MaxName = 255
	// MaxLabels is the most labels of an object, MaxLabel the most bytes of a key or a value.
	MaxLabels = 8
	MaxLabel  = 63
)

// CheckName is what is wrong with a name.
func CheckName(name string) error {
	if name == "" || len(name) > MaxName {
		return fmt.Errorf("a name of %d bytes: expected 1 to %d", len(name), MaxName)
	}
	for i, c := range []byte(name) {
		if !plain(c) || c == '/' && (i == 0 || i == len(name)-1 || name[i-1] == '/') {
			return fmt.Errorf("name %q: expected letters, digits and - _ . : @ + = with single slashes in between", protocol.Clean(name, MaxName))
		}
	}
	return nil
}

// plain reports whether names and labels may have the character.
func plain(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	switch c {
	case '-', '_', '.', ':', '@', '+', '=', '/':
		return true
	}
	return false
}

// check is what is wrong with an object that a process wants to build.
func (o *Object) check() error {
	if err := CheckName(o.Name); err != nil {
		return err
	}
	switch {
	case o.Bytes == 0:
		return errors.New("an object of 0 bytes: expected 1 or more")
	case o.Mode&^0o044 != 0o600:
		return fmt.Errorf("mode %#o: expected 0600, 0640, 0604 or 0644", o.Mode)
	case o.TTL < 0:
		return errors.New("a negative time to live")
	case len(o.Labels) > MaxLabels:
		return fmt.Errorf("%d labels: expected at most %d", len(o.Labels), MaxLabels)
	}
	for k, v := range o.Labels {
		for _, s := range [...]string{k, v} {
			if len(s) > MaxLabel || slices.ContainsFunc([]byte(s), func(c byte) bool { return !plain(c) }) || k == "" {
				return fmt.Errorf("label %q: expected a key and a value of letters, digits and - _ . : @ + = /, at most %d bytes each",
					protocol.Clean(k, MaxLabel), MaxLabel)
			}
		}
	}
	return nil
}

// Quota is what the policy says of the process that builds an object: its max, and the bytes that it has reserved of the device.
type Quota struct{ Max, Reserved uint64 }

// Begin begins a build and returns its generation. Its memory counts from now on. most is what objects may reserve of the device, 0
// without limit.
func (s *Store) Begin(by Session, who Cred, o Object, q Quota, most uint64) (uint64, error) {
	if err := o.check(); err != nil {
		return 0, err
	}
	var device, user, layouts, userLayouts uint64
	count, builds := 0, 0
	for _, x := range s.all {
		layouts += uint64(x.LayoutSize)
		if x.UUID == o.UUID {
			device += x.Reserved
		}
		if x.UID == o.UID {
			count++
			userLayouts += uint64(x.LayoutSize)
			if x.UUID == o.UUID {
				user += x.Reserved
			}
		}
		if x.state == protocol.ObjectBuilding && x.writer == by {
			builds++
		}
	}
	l := &s.limits
	above := func(has, more, limit uint64) bool { return limit != 0 && (more > limit || has > limit-more) }
	switch {
	case l.Builds != 0 && builds >= l.Builds:
		return 0, fmt.Errorf("%w: this connection builds %d objects already", ErrLimit, builds)
	case l.Objects != 0 && len(s.all) >= l.Objects:
		return 0, fmt.Errorf("%w: there are %d objects already", ErrLimit, len(s.all))
	case !who.Operates && l.UserObjects != 0 && count >= l.UserObjects:
		return 0, fmt.Errorf("%w: user %d has %d objects already", ErrLimit, o.UID, count)
	case above(layouts, uint64(o.LayoutSize), l.Layouts), !who.Operates && above(userLayouts, uint64(o.LayoutSize), l.UserLayouts):
		return 0, fmt.Errorf("%w: the layouts of objects have %s already", ErrLimit, units.FormatBytes(layouts))
	case above(device, o.Reserved, most):
		return 0, fmt.Errorf("%w: objects have %s of the device's memory already, and may have %s", ErrLimit, units.FormatBytes(device), units.FormatBytes(most))
	case q.Max != 0 && above(user+min(q.Reserved, 1<<62), o.Reserved, q.Max):
		return 0, fmt.Errorf("%w: the policy's max is %s: this process has reserved %s, and objects of user %d have %s", ErrLimit,
			units.FormatBytes(q.Max), units.FormatBytes(q.Reserved), o.UID, units.FormatBytes(user))
	}
	s.last++
	o.Generation, o.state, o.writer, o.pins = s.last, protocol.ObjectBuilding, by, nil
	s.all[o.Generation] = &o
	return o.Generation, nil
}

// built is a build of a session.
func (s *Store) built(by Session, generation uint64) (*Object, error) {
	o := s.all[generation]
	if o == nil || o.state != protocol.ObjectBuilding || o.writer != by {
		return nil, fmt.Errorf("%w: this connection does not build generation %d, or it was removed", ErrNotFound, generation)
	}
	return o, nil
}

// Commit makes a build the latest generation of its name. It returns what is to be released.
func (s *Store) Commit(by Session, generation uint64, contents string, now time.Time) (freed []uint64, err error) {
	o, err := s.built(by, generation)
	if err != nil {
		return nil, err
	}
	o.state, o.writer, o.used, o.Contents = protocol.ObjectCommitted, 0, now, contents
	if before := s.named[o.ObjectName]; before != nil {
		freed = s.unlink(before)
	}
	s.named[o.ObjectName] = o
	return freed, nil
}

// Abandon ends a build.
func (s *Store) Abandon(by Session, generation uint64) (freed []uint64, err error) {
	if _, err := s.built(by, generation); err != nil {
		return nil, err
	}
	delete(s.all, generation)
	return []uint64{generation}, nil
}

// unlink takes the name from a generation.
func (s *Store) unlink(o *Object) (freed []uint64) {
	if s.named[o.ObjectName] == o {
		delete(s.named, o.ObjectName)
	}
	o.state = protocol.ObjectRemoved
	return s.unused(o)
}

// unused drops a generation that has no name and no pins.
func (s *Store) unused(o *Object) (freed []uint64) {
	if o.state != protocol.ObjectRemoved || len(o.pins) != 0 {
		return nil
	}
	delete(s.all, o.Generation)
	return []uint64{o.Generation}
}

// reads reports whether somebody may read an object.
func (o *Object) reads(who Cred) bool {
	return who.Operates || who.UID == o.UID || o.Mode&0o004 != 0 || o.Mode&0o040 != 0 && slices.Contains(who.Groups, o.GID)
}

// find is a generation that somebody may read; 0 is the latest of the name. What may not be read is not there.
func (s *Store) find(who Cred, name protocol.ObjectName, generation uint64) (*Object, error) {
	o := s.named[name]
	if generation != 0 {
		if o = s.all[generation]; o != nil && (o.ObjectName != name || o.state == protocol.ObjectBuilding) {
			o = nil
		}
	}
	switch {
	case o == nil && generation != 0:
		return nil, fmt.Errorf("%w: %q of user %d has no generation %d", ErrNotFound, name.Name, name.UID, generation)
	case o == nil:
		return nil, fmt.Errorf("%w: %q of user %d", ErrNotFound, name.Name, name.UID)
	case !o.reads(who):
		return nil, fmt.Errorf("%w: %q of user %d has mode %04o", ErrDenied, name.Name, name.UID, o.Mode)
	}
	return o, nil
}

// Pin keeps a generation for a session, until Unpin or Leave, as often as it was pinned.
func (s *Store) Pin(by Session, who Cred, name protocol.ObjectName, generation uint64) (*Object, error) {
	o, err := s.find(who, name, generation)
	if err != nil {
		return nil, err
	}
	if o.pins == nil {
		o.pins = map[Session]int{}
	}
	o.pins[by]++
	return o, nil
}

// Unpin undoes one Pin.
func (s *Store) Unpin(by Session, generation uint64, now time.Time) (freed []uint64, err error) {
	o := s.all[generation]
	if o == nil || o.pins[by] == 0 {
		return nil, fmt.Errorf("%w: this connection has not opened generation %d", ErrNotFound, generation)
	}
	if o.pins[by]--; o.pins[by] == 0 {
		delete(o.pins, by)
		o.used = now
	}
	return s.unused(o), nil
}

// Remove takes the name from the latest generation, with generation 0, or from a given one, which may be a build: it ends.
func (s *Store) Remove(who Cred, name protocol.ObjectName, generation uint64) (freed []uint64, err error) {
	var of []*Object
	for _, o := range s.all {
		if o.ObjectName == name && (o.Generation == generation && o.state != protocol.ObjectRemoved || generation == 0 && o == s.named[name]) {
			of = append(of, o)
		}
	}
	if !who.Operates && who.UID != name.UID {
		return nil, fmt.Errorf("%w: only user %d, root and the broker's user remove objects of user %d", ErrDenied, name.UID, name.UID)
	}
	if len(of) == 0 {
		return nil, fmt.Errorf("%w: %q of user %d", ErrNotFound, name.Name, name.UID)
	}
	for _, o := range of {
		freed = append(freed, s.unlink(o)...)
	}
	return freed, nil
}

// Leave ends a session: its builds and its pins.
func (s *Store) Leave(by Session, now time.Time) (freed []uint64) {
	for _, o := range s.all {
		switch {
		case o.state == protocol.ObjectBuilding && o.writer == by:
			delete(s.all, o.Generation)
			freed = append(freed, o.Generation)
		case o.pins[by] != 0:
			delete(o.pins, by)
			o.used = now
			freed = append(freed, s.unused(o)...)
		}
	}
	return freed
}

// Expire removes what has not been used for its time to live.
func (s *Store) Expire(now time.Time) (freed []uint64) {
	for _, o := range s.named {
		if o.TTL != 0 && len(o.pins) == 0 && now.Sub(o.used) >= o.TTL {
			freed = append(freed, s.unlink(o)...)
		}
	}
	return freed
}

// Restore adds what an earlier broker kept, as committed and last used now.
func (s *Store) Restore(o Object, now time.Time) error {
	if err := o.check(); err != nil {
		return err
	}
	if s.all[o.Generation] != nil || o.Generation == 0 {
		return fmt.Errorf("generation %d is there twice", o.Generation)
	}
	o.state, o.pins, o.used, o.writer = protocol.ObjectCommitted, nil, now, 0
	if before := s.named[o.ObjectName]; before != nil {
		return fmt.Errorf("%q of user %d is there twice", o.Name, o.UID)
	}
	s.all[o.Generation], s.named[o.ObjectName] = &o, &o
	s.last = max(s.last, o.Generation)
	return nil
}

// Named reports whether a generation is the latest of a name.
func (s *Store) Named(generation uint64) bool {
	o := s.all[generation]
	return o != nil && o.state == protocol.ObjectCommitted
}

// Get is a generation.
func (s *Store) Get(generation uint64) (*Object, bool) {
	o, ok := s.all[generation]
	return o, ok
}

// Listed is how the object is listed.
func (o *Object) Listed(device string) protocol.Object {
	return protocol.Object{Name: o.Name, UID: o.UID, GID: o.GID, Generation: o.Generation, State: o.state, Device: device, Bytes: o.Bytes,
		Reserved: o.Reserved, Mode: o.Mode, TTL: o.TTL.Seconds(), Labels: o.Labels, Layout: o.Layout, Contents: o.Contents, Readers: len(o.pins),
		PID: o.PID, Created: o.Created.Unix()}
}

// List are the generations that somebody may read or owns, by user, name and number; with a name, those of the name.
func (s *Store) List(who Cred, name *protocol.ObjectName) (all []*Object) {
	for _, o := range s.all {
		if o.reads(who) && (name == nil || *name == o.ObjectName) {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(x, y *Object) int {
		return cmp.Or(cmp.Compare(x.UID, y.UID), cmp.Compare(x.Name, y.Name), cmp.Compare(x.Generation, y.Generation))
	})
	return all
}

// Reserved is the memory of all objects of a device, and their number.
func (s *Store) Reserved(uuid [16]byte) (bytes uint64, count int) {
	for _, o := range s.all {
		if o.UUID == uuid {
			bytes += o.Reserved
			count++
		}
	}
	return bytes, count
}
