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

// mapped maps a chunk and gives the device access.
func (p *probe) mapped(va cuda.Ptr, size uint64, h cuda.Handle) error {
	if err := p.MemMap(va, size, h); err != nil {
		return err
	}
	return p.MemSetAccess(va, size, []cuda.Device{p.dev})
}

// remap maps a chunk a second time while a kernel is running that later writes through the first mapping, reads through
// both, then unmaps the first once an event says that its work is done.
func (p *probe) remap(size uint64) (uint64, error) {
	va, err := p.AddressReserve(2*size, p.info.Granularity, 0)
	if err != nil {
		return 0, err
	}
	first, second := va, va+cuda.Ptr(size)
	h, err := p.MemCreate(size, p.prop)
	if err != nil {
		return 0, err
	}
	counter, err := p.NewCounter(p.dev)
	if err != nil {
		return 0, err
	}
	e, err := p.EventCreate(p.dev)
	if err != nil {
		return 0, err
	}
	for _, step := range []func() error{
		func() error { return p.mapped(first, size, h) },
		func() error { return p.Spin(p.dev, p.work, 100*time.Millisecond) },
		func() error { return p.Fill(p.dev, p.work, first, size, 1) },
		func() error { return p.EventRecord(p.dev, e, p.work) },
		func() error { return p.mapped(second, size, h) },
		func() error {
			if done, err := p.EventQuery(p.dev, e); done || err != nil {
				p.untested = true
				return err
			}
			return nil
		},
		func() error { return p.Check(p.dev, p.work, second, size, 1, counter) },
		func() error { return p.Check(p.dev, p.work, first, size, 1, counter) },
		func() error { return p.Fill(p.dev, p.work, second, size, 2) },
		func() error { return p.Check(p.dev, p.work, first, size, 2, counter) },
		func() error { return p.EventRecord(p.dev, e, p.work) },
		func() error { return p.EventSynchronize(p.dev, e) },
		func() error { return p.MemUnmap(first, size) },
		func() error { return p.Check(p.dev, p.work, second, size, 2, counter) },
		func() error { return p.Fill(p.dev, p.work, second, size, 3) },
		func() error { return p.Check(p.dev, p.work, second, size, 3, counter) },
	} {
		if err := step(); err != nil {
			return 0, err
		}
	}
	wrong, err := p.Counter(p.dev, counter)
	return wrong, errors.Join(err, p.MemUnmap(second, size), p.MemRelease(h), p.AddressFree(va, 2*size),
		p.EventDestroy(p.dev, e), p.MemFree(p.dev, counter))
}

// wander maps one chunk at 64 addresses in turn, with work queued through each: stream order alone keeps the bytes
// right, while the old mappings stay until the end.
func (p *probe) wander(size uint64) (uint64, error) {
	const n = 64
	va, err := p.AddressReserve(n*size, p.info.Granularity, 0)
	if err != nil {
		return 0, err
	}
	h, err := p.MemCreate(size, p.prop)
	if err != nil {
		return 0, err
	}
	counter, err := p.NewCounter(p.dev)
	if err != nil {
		return 0, err
	}
	if err := p.Spin(p.dev, p.work, 50*time.Millisecond); err != nil {
		return 0, err
	}
	at := func(i int) cuda.Ptr { return va + cuda.Ptr(uint64(i)*size) }
	for i := range n {
		if err := p.mapped(at(i), size, h); err != nil {
			return 0, err
		}
		if i > 0 {
			if err := p.Check(p.dev, p.work, at(i), size, uint64(i-1), counter); err != nil {
				return 0, err
			}
		}
		if err := p.Fill(p.dev, p.work, at(i), size, uint64(i)); err != nil {
			return 0, err
		}
	}
	if err := p.Check(p.dev, p.work, at(0), size, n-1, counter); err != nil {
		return 0, err
	}
	wrong, err := p.Counter(p.dev, counter)
	return wrong, errors.Join(err, p.MemUnmap(va, n*size), p.MemRelease(h), p.AddressFree(va, n*size), p.MemFree(p.dev, counter))
}

// hand writes a chunk through one mapping on one stream and reads it through another mapping on another stream that
// waits for an event.
func (p *probe) hand(size uint64) (uint64, error) {
	va, err := p.AddressReserve(2*size, p.info.Granularity, 0)
	if err != nil {
		return 0, err
	}
	other, err := p.StreamCreate(p.dev, false)
	if err != nil {
		return 0, err
	}
	h, err := p.MemCreate(size, p.prop)
	if err != nil {
		return 0, err
	}
	counter, err := p.NewCounter(p.dev)
	if err != nil {
		return 0, err
	}
	e, err := p.EventCreate(p.dev)
	if err != nil {
		return 0, err
	}
	second := va + cuda.Ptr(size)
	for _, step := range []func() error{
		func() error { return p.mapped(va, size, h) },
		func() error { return p.Spin(p.dev, p.work, 50*time.Millisecond) },
		func() error { return p.Fill(p.dev, p.work, va, size, 11) },
		func() error { return p.EventRecord(p.dev, e, p.work) },
		func() error { return p.mapped(second, size, h) },
		func() error { return p.StreamWaitEvent(p.dev, other, e) },
		func() error { return p.Check(p.dev, other, second, size, 11, counter) },
		func() error { return p.Fill(p.dev, other, second, size, 12) },
		func() error { return p.Check(p.dev, other, second, size, 12, counter) },
	} {
		if err := step(); err != nil {
			return 0, err
		}
	}
	wrong, err := p.Counter(p.dev, counter)
	return wrong, errors.Join(err, p.MemUnmap(va, 2*size), p.MemRelease(h), p.AddressFree(va, 2*size),
		p.EventDestroy(p.dev, e), p.StreamDestroy(p.dev, other), p.MemFree(p.dev, counter))
}
