package probe

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// contents checks that bytes are right where the engine relies on it: a chunk that is mapped at a second address while
// a kernel still writes through the first.
func (p *probe) contents() error {
	for _, c := range []struct {
		name string
		size uint64
		run  func(size uint64) (uint64, error)
	}{
		{"the check finds what is wrong", 2*mib + 5, p.control},
		{"second mapping behind a running kernel", 2 * mib, p.remap},
		{"second mapping behind a running kernel", 64 * mib, p.remap},
		{"second mapping behind a running kernel", gib, p.remap},
		{"a chunk moved 64 times on one stream", 20 * mib, p.wander},
		{"a chunk handed to another stream by an event", 20 * mib, p.hand},
	} {
		if c.size > p.largest {
			continue
		}
		p.untested = false
		k := key{section: "contents", call: c.name, size: c.size}
		var wrong uint64
		_, err := p.table.measure(k, func() (err error) { wrong, err = c.run(c.size); return err })
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", c.name, err)
		case wrong != 0:
			p.wrong++
			p.table.remark(k, fmt.Sprintf("WRONG: %d words", wrong))
		case p.untested:
			p.table.remark(k, "right, but the kernel was done before the second mapping was: nothing was shown")
		default:
			p.table.remark(k, "right")
		}
	}
	return nil
}

// control makes sure that Check can fail: it counts every word of a wrong seed, and one changed byte.
func (p *probe) control(size uint64) (uint64, error) {
	ptr, err := p.MemAlloc(p.dev, size)
	if err != nil {
		return 0, err
	}
	counter, err := p.NewCounter(p.dev)
	if err != nil {
		return 0, err
	}
	count := func() uint64 {
		n, cerr := p.Counter(p.dev, counter)
		err = errors.Join(err, cerr)
		return n
	}
	err = p.Fill(p.dev, p.work, ptr, size, 7)
	err = errors.Join(err, p.Check(p.dev, p.work, ptr, size, 7, counter))
	if n := count(); n != 0 {
		return n, err
	}
	err = errors.Join(err, p.Memset(p.dev, ptr+cuda.Ptr(size)-1, 0, 1, p.work), p.Memset(p.dev, ptr+4096, 0, 3, p.work),
		p.Check(p.dev, p.work, ptr, size, 7, counter))
	changed := count() // 2, or 1 or 0 where the pattern has zeros there: with seed 7 it has none
	err = errors.Join(err, p.Check(p.dev, p.work, ptr, size, 8, counter))
	other := count() - changed
	err = errors.Join(err, p.MemFree(p.dev, ptr), p.MemFree(p.dev, counter))
	// Of the 5 single bytes behind the last word, some may equal the other seed's by chance.
	if err == nil && (changed != 2 || other < size/8) {
		err = fmt.Errorf("the check counted %d of 2 changed places and %d of %d words of another seed", changed, other, size/8)
	}
	return 0, err
}

// moved is a chunk that is mapped at several places, with a counter of wrong words and an event.
type moved struct {
	*probe
	size    uint64
	places  uint64 // how many
	va      cuda.Ptr
	chunk   cuda.Handle
	counter cuda.Ptr
	event   cuda.Event
}

func (p *probe) newMoved(size, places uint64) (*moved, error) {
	m := &moved{probe: p, size: size, places: places}
	var err error
	if m.va, err = p.AddressReserve(places*size, p.info.Granularity, 0); err != nil {
		return nil, err
	}
	if m.chunk, err = p.MemCreate(size, p.prop); err != nil {
		return nil, err
	}
	if m.counter, err = p.NewCounter(p.dev); err != nil {
		return nil, err
	}
	m.event, err = p.EventCreate(p.dev)
	return m, err
}

func (m *moved) at(place uint64) cuda.Ptr { return m.va + cuda.Ptr(place*m.size) }

// mapAt maps the chunk and gives the device access.
func (m *moved) mapAt(place uint64) error {
	if err := m.MemMap(m.at(place), m.size, m.chunk); err != nil {
		return err
	}
	return m.MemSetAccess(m.at(place), m.size, []cuda.Device{m.dev})
}

func (m *moved) fill(s cuda.Stream, place, seed uint64) error {
	return m.Fill(m.dev, s, m.at(place), m.size, seed)
}

func (m *moved) check(s cuda.Stream, place, seed uint64) error {
	return m.Check(m.dev, s, m.at(place), m.size, seed, m.counter)
}

// end gives everything back, with the places from the first one on still mapped, and returns how many words were wrong.
func (m *moved) end(mapped uint64) (uint64, error) {
	wrong, err := m.Counter(m.dev, m.counter)
	return wrong, errors.Join(err, m.MemUnmap(m.at(mapped), (m.places-mapped)*m.size), m.MemRelease(m.chunk),
		m.AddressFree(m.va, m.places*m.size), m.EventDestroy(m.dev, m.event), m.MemFree(m.dev, m.counter))
}

// inTurn takes steps until one fails.
func inTurn(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// remap maps a chunk a second time while a kernel is running that later writes through the first mapping, reads through
// both, then unmaps the first once an event says that its work is done.
func (p *probe) remap(size uint64) (uint64, error) {
	m, err := p.newMoved(size, 2)
	if err != nil {
		return 0, err
	}
	if err := inTurn(
		func() error { return m.mapAt(0) },
		func() error { return p.Spin(p.dev, p.work, 100*time.Millisecond) },
		func() error { return m.fill(p.work, 0, 1) },
		func() error { return p.EventRecord(p.dev, m.event, p.work) },
		func() error { return m.mapAt(1) },
		func() error {
			done, err := p.EventQuery(p.dev, m.event)
			p.untested = done
			return err
		},
		func() error { return m.check(p.work, 1, 1) },
		func() error { return m.check(p.work, 0, 1) },
		func() error { return m.fill(p.work, 1, 2) },
		func() error { return m.check(p.work, 0, 2) },
		func() error { return p.EventRecord(p.dev, m.event, p.work) },
		func() error { return p.EventSynchronize(p.dev, m.event) },
		func() error { return p.MemUnmap(m.at(0), size) },
		func() error { return m.check(p.work, 1, 2) },
		func() error { return m.fill(p.work, 1, 3) },
		func() error { return m.check(p.work, 1, 3) },
	); err != nil {
		return 0, err
	}
	return m.end(1)
}

// wander maps one chunk at 64 addresses in turn, with work queued through each: stream order alone keeps the bytes
// right, while the old mappings stay until the end.
func (p *probe) wander(size uint64) (uint64, error) {
	const n = 64
	m, err := p.newMoved(size, n)
	if err != nil {
		return 0, err
	}
	if err := p.Spin(p.dev, p.work, 50*time.Millisecond); err != nil {
		return 0, err
	}
	for i := range uint64(n) {
		if err := m.mapAt(i); err != nil {
			return 0, err
		}
		if i > 0 {
			if err := m.check(p.work, i, i-1); err != nil {
				return 0, err
			}
		}
		if err := m.fill(p.work, i, i); err != nil {
			return 0, err
		}
	}
	if err := m.check(p.work, 0, n-1); err != nil {
		return 0, err
	}
	return m.end(0)
}

// hand writes a chunk through one mapping on one stream and reads it through another mapping on another stream that
// waits for an event.
func (p *probe) hand(size uint64) (uint64, error) {
	m, err := p.newMoved(size, 2)
	if err != nil {
		return 0, err
	}
	other, err := p.StreamCreate(p.dev, false)
	if err != nil {
		return 0, err
	}
	if err := inTurn(
		func() error { return m.mapAt(0) },
		func() error { return p.Spin(p.dev, p.work, 50*time.Millisecond) },
		func() error { return m.fill(p.work, 0, 11) },
		func() error { return p.EventRecord(p.dev, m.event, p.work) },
		func() error { return m.mapAt(1) },
		func() error { return p.StreamWaitEvent(p.dev, other, m.event) },
		func() error { return m.check(other, 1, 11) },
		func() error { return m.fill(other, 1, 12) },
		func() error { return m.check(other, 1, 12) },
	); err != nil {
		return 0, err
	}
	wrong, err := m.end(0)
	return wrong, errors.Join(err, p.StreamDestroy(p.dev, other))
}
