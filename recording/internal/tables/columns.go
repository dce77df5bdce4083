// Package tables is what readers and writers of several formats keep runs in: events in columns, numbered values, names
// of native functions.
package tables

import (
	"encoding/binary"
	"math"
	"math/bits"
	"unsafe"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// Events in columns, as format.md describes them: about 8 bytes an event where the struct has 56. Cistern's files are
// made of them, and readers of every format keep what they have read so far in them.
const (
	tagSame   = 0x10 // address, size, stream, pool, stack as before
	tagPlace  = 0x20 // stream, pool, stack in the last column
	tagHandle = 0x40 // handle, flags in the last column
	tagLabel  = 0x80 // tag, library, thread in the last column
)

// BlockEvents is how many events one set of columns has at most.
const BlockEvents = 16 << 10

// Columns are tags, times, addresses, sizes, and the rest.
type Columns [5][]byte

// Label is the tag, library and thread of an event. Runs have few of them and go to and fro between these, so that events number those of
// their block.
type Label struct {
	Thread  uint32
	Tag     uint16
	Library uint8
}

// LabelOf is the label of an event.
func LabelOf(e *event.Event) Label { return Label{e.Thread, e.Tag, e.Library} }

// Labels numbers the labels of a block of events from 1, in the order in which they appear.
type Labels struct {
	numbers map[Label]uint64
}

// append writes a label that is not that of the event before: its number, or 0 and what it is.
func (l *Labels) append(b []byte, x Label) []byte {
	if n := l.numbers[x]; n != 0 {
		return binary.AppendUvarint(b, n)
	}
	if l.numbers == nil {
		l.numbers = map[Label]uint64{}
	}
	l.numbers[x] = uint64(len(l.numbers)) + 1
	b = append(b, 0)
	b = binary.AppendUvarint(b, uint64(x.Tag))
	b = append(b, x.Library)
	return binary.AppendUvarint(b, uint64(x.Thread))
}

// Encode replaces the columns by events.
func (c *Columns) Encode(events []event.Event, l *Labels) {
	for i := range c {
		c[i] = c[i][:0]
	}
	clear(l.numbers)
	var all uint64
	for k := range events {
		all |= events[k].Addr
	}
	shift := 0
	if all != 0 {
		shift = bits.TrailingZeros64(all)
	}
	c[2] = append(c[2], byte(shift))
	last := &event.Event{}
	for k := range events {
		e := &events[k]
		tag := byte(e.Kind)
		place := e.Stream != last.Stream || e.Pool != last.Pool || e.Stack != last.Stack
		if !place && e.Addr == last.Addr && e.Size == last.Size {
			tag |= tagSame
		} else {
			c[2] = binary.AppendVarint(c[2], int64(e.Addr>>shift-last.Addr>>shift))
			c[3] = binary.AppendUvarint(c[3], e.Size)
		}
		if place {
			tag |= tagPlace
			c[4] = binary.AppendUvarint(c[4], uint64(e.Stream))
			c[4] = binary.AppendUvarint(c[4], uint64(e.Pool))
			c[4] = binary.AppendUvarint(c[4], uint64(e.Stack))
		}
		if e.Handle != 0 || e.Flags != 0 {
			tag |= tagHandle
			c[4] = binary.AppendUvarint(c[4], e.Handle)
			c[4] = append(c[4], e.Flags)
		}
		if x := LabelOf(e); x != LabelOf(last) {
			tag |= tagLabel
			c[4] = l.append(c[4], x)
		}
		c[0] = append(c[0], tag)
		c[1] = binary.AppendVarint(c[1], e.TimeUS-last.TimeUS)
		last = e
	}
}

// size is how long append makes a slice, at most.
func (c *Columns) size() int {
	n := 0
	for i := range c {
		n += len(c[i]) + binary.MaxVarintLen32
	}
	return n
}

// Append appends the columns, each with its length.
func (c *Columns) Append(b []byte) []byte {
	for i := range c {
		b = append(binary.AppendUvarint(b, uint64(len(c[i]))), c[i]...)
	}
	return b
}

// DecodeEvents appends the n events in the columns at c. Where that fails, bad is the index of the event, or -1.
func DecodeEvents(dst []event.Event, c *Cursor, n int) (events []event.Event, bad int, ok bool) {
	tags := c.Bytes()
	times, addrs, sizes, rest := &Cursor{B: c.Bytes()}, &Cursor{B: c.Bytes()}, &Cursor{B: c.Bytes()}, &Cursor{B: c.Bytes()}
	shift := addrs.U8()
	if c.Bad || len(tags) != n || shift > 63 {
		return dst, -1, false
	}
	var e event.Event
	var known []Label
	for k, tag := range tags {
		e.Kind = event.Kind(tag & 0x0f)
		e.TimeUS += times.I()
		if tag&tagSame == 0 {
			e.Addr = (e.Addr>>shift + uint64(addrs.I())) << shift
			e.Size = sizes.U()
		}
		e.Handle, e.Flags = 0, 0
		if tag&(tagPlace|tagHandle) != 0 {
			if tag&tagPlace != 0 {
				e.Stream, e.Pool, e.Stack = rest.Ref(), rest.Ref(), rest.Ref()
			}
			if tag&tagHandle != 0 {
				e.Handle, e.Flags = rest.U(), rest.U8()
			}
		}
		if tag&tagLabel != 0 {
			x, ok := readLabel(rest, &known)
			if !ok {
				return dst, k, false
			}
			e.Tag, e.Library, e.Thread = x.Tag, x.Library, x.Thread
		}
		if times.Bad || addrs.Bad || sizes.Bad || rest.Bad {
			return dst, k, false
		}
		dst = append(dst, e)
	}
	return dst, -1, len(times.B) == 0 && len(addrs.B) == 0 && len(sizes.B) == 0 && len(rest.B) == 0
}

// readLabel is labels.append's inverse.
func readLabel(c *Cursor, known *[]Label) (x Label, ok bool) {
	if n := c.U(); n > 0 {
		if n > uint64(len(*known)) {
			return x, false
		}
		return (*known)[n-1], true
	}
	tag, library, thread := c.U(), c.U8(), c.Ref()
	x = Label{thread, uint16(tag), library}
	*known = append(*known, x)
	return x, tag <= math.MaxUint16
}

// EventList collects the events of one device in the order in which they come: the latest as they are, those before
// in columns. So the memory that reading needs is little more than that of the list it ends with.
type EventList struct {
	N      int
	latest []event.Event
	packed [][]byte // blockEvents events each
	cols   Columns
	labels Labels
}

// Add appends e, with the memory charged.
func (l *EventList) Add(b *input.Budget, e event.Event) error {
	if len(l.latest) == cap(l.latest) {
		if err := l.reserve(b); err != nil {
			return err
		}
	}
	l.latest = append(l.latest, e)
	l.N++
	return nil
}

func (l *EventList) reserve(b *input.Budget) error {
	if n := cap(l.latest); n < BlockEvents {
		n = max(64, 4*n)
		if err := b.Take(int64(n) * eventSize); err != nil {
			return err
		}
		b.Give(int64(cap(l.latest)) * eventSize)
		l.latest = append(make([]event.Event, 0, n), l.latest...)
		return nil
	}
	l.cols.Encode(l.latest, &l.labels)
	n := l.cols.size()
	if err := b.Take(int64(n) + 24); err != nil {
		return err
	}
	l.packed = append(l.packed, l.cols.Append(make([]byte, 0, n)))
	l.latest = l.latest[:0]
	return nil
}

// Join makes one list of all, and drops the pieces.
func (l *EventList) Join(b *input.Budget) ([]event.Event, error) {
	if err := b.Take(int64(l.N) * eventSize); err != nil {
		return nil, err
	}
	events := make([]event.Event, 0, l.N)
	for i, p := range l.packed {
		var ok bool
		if events, _, ok = DecodeEvents(events, &Cursor{B: p}, BlockEvents); !ok {
			panic("trace: columns that were encoded here cannot be decoded")
		}
		b.Give(int64(len(p)))
		l.packed[i] = nil
	}
	events = append(events, l.latest...)
	b.Give(int64(cap(l.latest)) * eventSize)
	*l = EventList{N: l.N}
	return events, nil
}

const eventSize = int64(unsafe.Sizeof(event.Event{}))
