package trace

import (
	"encoding/binary"
	"math/bits"

	"github.com/cistern-gpu/cistern/event"
)

// Events in columns, as format.md describes them: about 8 bytes an event where the struct has 48. Cistern's files are
// made of them, and readers of every format keep what they have read so far in them.
const (
	tagSame   = 0x10 // address, size, stream, pool, stack as before
	tagPlace  = 0x20 // stream, pool, stack in the last column
	tagHandle = 0x40 // handle, flags in the last column
)

// columns are tags, times, addresses, sizes, and the rest.
type columns [5][]byte

// encode replaces the columns by events.
func (c *columns) encode(events []event.Event) {
	for i := range c {
		c[i] = c[i][:0]
	}
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
		if tag&0x80 != 0 || times.bad || addrs.bad || sizes.bad || rest.bad {
			return dst, k, false
		}
		dst = append(dst, e)
	}
	return dst, -1, len(times.b) == 0 && len(addrs.b) == 0 && len(sizes.b) == 0 && len(rest.b) == 0
}

// eventList collects the events of one device in the order in which they come: the latest as they are, those before
// in columns. So the memory that reading needs is little more than that of the list it ends with.
type eventList struct {
	n      int
	latest []event.Event
	packed [][]byte // blockEvents events each
	cols   columns
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
	l.cols.encode(l.latest)
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
