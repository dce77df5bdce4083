package trace

import (
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/cistern-gpu/cistern/event"
)

// Events in columns, as format.md describes them: about 8 bytes an event where the struct has 56. Cistern's files are
// made of them, and readers of every format keep what they have read so far in them.
const (
	tagSame   = 0x10 // address, size, stream, pool, stack as before
	tagPlace  = 0x20 // stream, pool, stack in the last column
	tagHandle = 0x40 // handle, flags in the last column
	tagLabel  = 0x80 // tag, library, thread in the last column
)

// columns are tags, times, addresses, sizes, and the rest.
type columns [5][]byte

// label is who an event is for. Runs have few of them and go to and fro between these, so that events number those of
// their block.
type label struct {
	thread  uint32
	tag     uint16
	library uint8
}

func labelOf(e *event.Event) label { return label{e.Thread, e.Tag, e.Library} }

// labels numbers the labels of a block of events from 1, in the order in which they appear.
type labels struct {
	numbers map[label]uint64
}

// append writes a label that is not that of the event before: its number, or 0 and what it is.
func (l *labels) append(b []byte, x label) []byte {
	if n := l.numbers[x]; n != 0 {
		return binary.AppendUvarint(b, n)
	}
	if l.numbers == nil {
		l.numbers = map[label]uint64{}
	}
	l.numbers[x] = uint64(len(l.numbers)) + 1
	b = append(b, 0)
	b = binary.AppendUvarint(b, uint64(x.tag))
	b = append(b, x.library)
	return binary.AppendUvarint(b, uint64(x.thread))
}

// encode replaces the columns by events.
func (c *columns) encode(events []event.Event, l *labels) {
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
		if x := labelOf(e); x != labelOf(last) {
			tag |= tagLabel
			c[4] = l.append(c[4], x)
		}
		c[0] = append(c[0], tag)
		c[1] = binary.AppendVarint(c[1], e.TimeUS-last.TimeUS)
		last = e
	}
}

// size is how long append makes a slice, at most.
func (c *columns) size() int {
	n := 0
	for i := range c {
		n += len(c[i]) + binary.MaxVarintLen32
	}
	return n
}

// append appends the columns, each with its length.
func (c *columns) append(b []byte) []byte {
	for i := range c {
		b = append(binary.AppendUvarint(b, uint64(len(c[i]))), c[i]...)
	}
	return b
}

// decodeEvents appends the n events in the columns at c. Where that fails, bad is the index of the event, or -1.
func decodeEvents(dst []event.Event, c *cursor, n int) (events []event.Event, bad int, ok bool) {
	tags := c.bytes()
	times, addrs, sizes, rest := &cursor{b: c.bytes()}, &cursor{b: c.bytes()}, &cursor{b: c.bytes()}, &cursor{b: c.bytes()}
	shift := addrs.u8()
	if c.bad || len(tags) != n || shift > 63 {
		return dst, -1, false
	}
	var e event.Event
	var known []label
	for k, tag := range tags {
		e.Kind = event.Kind(tag & 0x0f)
		e.TimeUS += times.i()
		if tag&tagSame == 0 {
			e.Addr = (e.Addr>>shift + uint64(addrs.i())) << shift
			e.Size = sizes.u()
		}
		e.Handle, e.Flags = 0, 0
		if tag&(tagPlace|tagHandle) != 0 {
			if tag&tagPlace != 0 {
				e.Stream, e.Pool, e.Stack = rest.ref(), rest.ref(), rest.ref()
			}
			if tag&tagHandle != 0 {
				e.Handle, e.Flags = rest.u(), rest.u8()
			}
		}
		if tag&tagLabel != 0 {
			x, ok := readLabel(rest, &known)
			if !ok {
				return dst, k, false
			}
			e.Tag, e.Library, e.Thread = x.tag, x.library, x.thread
		}
		if times.bad || addrs.bad || sizes.bad || rest.bad {
			return dst, k, false
		}
		dst = append(dst, e)
	}
	return dst, -1, len(times.b) == 0 && len(addrs.b) == 0 && len(sizes.b) == 0 && len(rest.b) == 0
}

// readLabel is labels.append's inverse.
func readLabel(c *cursor, known *[]label) (x label, ok bool) {
	if n := c.u(); n > 0 {
		if n > uint64(len(*known)) {
			return x, false
		}
		return (*known)[n-1], true
	}
	tag, library, thread := c.u(), c.u8(), c.ref()
	x = label{thread, uint16(tag), library}
	*known = append(*known, x)
	return x, tag <= math.MaxUint16
}

// eventList collects the events of one device in the order in which they come: the latest as they are, those before
// in columns. So the memory that reading needs is little more than that of the list it ends with.
type eventList struct {
	n      int
	latest []event.Event
	packed [][]byte // blockEvents events each
	cols   columns
	labels labels
}

// add appends e, with the memory charged.
func (l *eventList) add(b *budget, e event.Event) error {
	if len(l.latest) == cap(l.latest) {
		if err := l.room(b); err != nil {
			return err
		}
	}
	l.latest = append(l.latest, e)
	l.n++
	return nil
}

func (l *eventList) room(b *budget) error {
	if n := cap(l.latest); n < blockEvents {
		n = max(64, 4*n)
		if err := b.take(int64(n) * eventSize); err != nil {
			return err
		}
		b.give(int64(cap(l.latest)) * eventSize)
		l.latest = append(make([]event.Event, 0, n), l.latest...)
		return nil
	}
	l.cols.encode(l.latest, &l.labels)
	n := l.cols.size()
	if err := b.take(int64(n) + 24); err != nil {
		return err
	}
	l.packed = append(l.packed, l.cols.append(make([]byte, 0, n)))
	l.latest = l.latest[:0]
	return nil
}

// join makes one list of all, and drops the pieces.
func (l *eventList) join(b *budget) ([]event.Event, error) {
	if err := b.take(int64(l.n) * eventSize); err != nil {
		return nil, err
	}
	events := make([]event.Event, 0, l.n)
	for i, p := range l.packed {
		var ok bool
		if events, _, ok = decodeEvents(events, &cursor{b: p}, blockEvents); !ok {
			panic("trace: columns that were encoded here cannot be decoded")
		}
		b.give(int64(len(p)))
		l.packed[i] = nil
	}
	events = append(events, l.latest...)
	b.give(int64(cap(l.latest)) * eventSize)
	*l = eventList{n: l.n}
	return events, nil
}
