package probe

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

const (
	mib = 1 << 20
	gib = 1 << 30
	tib = 1 << 40
)

var sizes = []uint64{2 * mib, 20 * mib, 32 * mib, 64 * mib, 256 * mib, 1 * gib, 8 * gib}

// repeats is how often a cycle over a chunk of this size is measured.
func (p *probe) repeats(size uint64) int {
	if size >= 8*gib {
		return max(p.reps/4, 1)
	}
	return p.reps
}

// fits reports whether size bytes are wanted and available with some to spare.
func (p *probe) fits(section string, size uint64) bool {
	if size > p.largest {
		return false
	}
	free, _, err := p.MemInfo(p.dev)
	if err != nil || free < size+gib {
		p.table.remark(key{section: section, size: size}, fmt.Sprintf("left out: %s free, %v", units.FormatBytes(free), err))
		return false
	}
	return true
}

// withoutContext tries which calls work before the device has a primary context, and that none of them makes one.
func (p *probe) withoutContext() {
	const section = "no context"
	size := p.info.Granularity
	active := func(call string) {
		if on, err := p.ContextActive(p.dev); on || err != nil {
			p.table.remark(key{section: section, call: call}, fmt.Sprintf("a context is active afterwards: %v %v", on, err))
		}
	}
	try := func(call string, f func() error) error {
		_, err := p.table.measure(key{section: section, call: call}, f)
		active(call)
		return err
	}
	active("before")
	try("cuMemGetInfo", func() error {
		_, _, err := p.MemInfo(p.dev)
		return err
	})
	var va cuda.Ptr
	var h cuda.Handle
	if try("cuMemAddressReserve", func() (err error) { va, err = p.AddressReserve(size, size, 0); return err }) != nil {
		return
	}
	if try("cuMemCreate", func() (err error) { h, err = p.MemCreate(size, p.prop); return err }) == nil {
		if try("cuMemMap", func() error { return p.MemMap(va, size, h) }) == nil {
			try("cuMemSetAccess", func() error { return p.MemSetAccess(va, size, []cuda.Device{p.dev}) })
			try("cuMemUnmap", func() error { return p.MemUnmap(va, size) })
		}
		try("cuMemRelease", func() error { return p.MemRelease(h) })
	}
	try("cuMemAddressFree", func() error { return p.AddressFree(va, size) })
}

// handles tries a chunk with every kind of export handle, whatever the attributes promise.
func (p *probe) handles() error {
	for _, kind := range []struct {
		name    string
		handles cuda.HandleType
	}{{"none", cuda.HandleNone}, {"POSIX", cuda.HandlePosix}, {"FABRIC", cuda.HandleFabric}, {"FABRIC|POSIX", cuda.HandleFabric | cuda.HandlePosix}} {
		prop := p.prop
		prop.Handles = kind.handles
		k := key{section: "handles", call: "cuMemCreate with " + kind.name, size: p.info.Granularity}
		for range p.reps {
			var h cuda.Handle
			if _, err := p.table.measure(k, func() (err error) { h, err = p.MemCreate(p.info.Granularity, prop); return err }); err != nil {
				break // its line says so
			}
			if err := p.MemRelease(h); err != nil {
				return err
			}
		}
	}
	return nil
}

// chunks measures the life of one chunk for every size and load: made, mapped, mapped a second time, unmapped, released.
func (p *probe) chunks() error {
	for _, l := range p.loads {
		for _, size := range sizes {
			section := "chunk"
			if p.late(section) {
				return p.await(l)
			}
			if !p.fits(section, size) {
				continue
			}
			va, err := p.AddressReserve(2*size, p.info.Granularity, 0)
			if err != nil {
				return err
			}
			waits := 0
			for i := 0; i < p.repeats(size) && waits < 2 && !p.late(section); i++ {
				d, err := p.cycle(l, size, va)
				if err != nil {
					return err
				}
				if d > waited && !l.idle {
					waits++
				}
			}
			if err := p.await(l); err != nil {
				return err
			}
			if err := p.AddressFree(va, 2*size); err != nil {
				return err
			}
		}
	}
	return nil
}

// cycle is one life of a chunk; it returns the longest call.
func (p *probe) cycle(l *load, size uint64, va cuda.Ptr) (longest time.Duration, err error) {
	devs := []cuda.Device{p.dev}
	second := va + cuda.Ptr(size)
	var h cuda.Handle
	for _, step := range []struct {
		name string
		call func() error
	}{
		{"cuMemCreate", func() (err error) { h, err = p.MemCreate(size, p.prop); return err }},
		{"cuMemMap", func() error { return p.MemMap(va, size, h) }},
		{"cuMemSetAccess", func() error { return p.MemSetAccess(va, size, devs) }},
		{"cuMemMap second", func() error { return p.MemMap(second, size, h) }},
		{"cuMemSetAccess second", func() error { return p.MemSetAccess(second, size, devs) }},
		{"cuMemUnmap first", func() error { return p.MemUnmap(va, size) }},
		{"cuMemUnmap last", func() error { return p.MemUnmap(second, size) }},
		{"cuMemRelease", func() error { return p.MemRelease(h) }},
	} {
		if err := p.keep(l); err != nil {
			return 0, err
		}
		d, err := p.table.measure(key{"chunk", step.name, size, l.name}, step.call)
		if err != nil {
			return 0, err
		}
		longest = max(longest, d)
	}
	return longest, nil
}

// batches measures one access call and one unmap call over ranges made of many handles.
func (p *probe) batches() error {
	uniform := func(n int, size uint64) []uint64 {
		s := make([]uint64, n)
		for i := range s {
			s[i] = size
		}
		return s
	}
	mixed := func(n int) []uint64 {
		s := make([]uint64, n)
		for i := range s {
			s[i] = []uint64{2 * mib, 20 * mib, 2 * mib, 64 * mib, 2 * mib, 32 * mib}[i%6]
		}
		return s
	}
	for _, b := range []struct {
		name  string
		sizes []uint64
	}{
		{"8 x 2 MiB", uniform(8, 2*mib)}, {"64 x 2 MiB", uniform(64, 2*mib)}, {"512 x 2 MiB", uniform(512, 2*mib)},
		{"8 x 20 MiB", uniform(8, 20*mib)}, {"64 x 20 MiB", uniform(64, 20*mib)},
		{"8 x 64 MiB", uniform(8, 64*mib)}, {"64 x 64 MiB", uniform(64, 64*mib)},
		{"12 mixed", mixed(12)}, {"96 mixed", mixed(96)}, {"384 mixed", mixed(384)},
	} {
		if p.late("batch") {
			return nil
		}
		if err := p.batch(b.name, b.sizes); err != nil {
			return err
		}
	}
	return nil
}

func (p *probe) batch(name string, sizes []uint64) error {
	var total uint64
	for _, s := range sizes {
		total += s
	}
	if !p.fits("batch", total) {
		return nil
	}
	devs := []cuda.Device{p.dev}
	va, err := p.AddressReserve(total, p.info.Granularity, 0)
	if err != nil {
		return err
	}
	handles := make([]cuda.Handle, len(sizes))
	each := func(f func(i int, at cuda.Ptr) error) error {
		at := va
		for i, s := range sizes {
			if err := f(i, at); err != nil {
				return err
			}
			at += cuda.Ptr(s)
		}
		return nil
	}
	for range max(p.reps/4, 1) {
		for _, step := range []struct {
			name string
			call func() error
		}{
			{"cuMemCreate, each", func() error {
				return each(func(i int, _ cuda.Ptr) (err error) { handles[i], err = p.MemCreate(sizes[i], p.prop); return err })
			}},
			{"cuMemMap, each", func() error {
				return each(func(i int, at cuda.Ptr) error { return p.MemMap(at, sizes[i], handles[i]) })
			}},
			{"cuMemSetAccess, one call", func() error { return p.MemSetAccess(va, total, devs) }},
			{"cuMemUnmap, one call", func() error { return p.MemUnmap(va, total) }},
			{"cuMemMap, each, again", func() error {
				return each(func(i int, at cuda.Ptr) error { return p.MemMap(at, sizes[i], handles[i]) })
			}},
			{"cuMemSetAccess, each", func() error {
				return each(func(i int, at cuda.Ptr) error { return p.MemSetAccess(at, sizes[i], devs) })
			}},
			{"cuMemSetAccess, one call, set already", func() error { return p.MemSetAccess(va, total, devs) }},
			{"cuMemUnmap, each", func() error {
				return each(func(i int, at cuda.Ptr) error { return p.MemUnmap(at, sizes[i]) })
			}},
			{"cuMemRelease, each", func() error {
				return each(func(i int, _ cuda.Ptr) error { return p.MemRelease(handles[i]) })
			}},
		} {
			if _, err := p.table.measure(key{"batch " + name, step.name, total, "idle"}, step.call); err != nil {
				return err
			}
		}
	}
	return p.AddressFree(va, total)
}

// malloc measures cuMemAlloc and cuMemFree.
func (p *probe) malloc() error {
	for _, l := range p.loads {
		for _, size := range append([]uint64{512, 64 << 10}, sizes...) {
			if p.late("malloc") {
				return p.await(l)
			}
			if !p.fits("malloc", size) {
				continue
			}
			waits := 0
			for i := 0; i < p.repeats(size) && waits < 2; i++ {
				var ptr cuda.Ptr
				if err := p.keep(l); err != nil {
					return err
				}
				d1, err := p.table.measure(key{"malloc", "cuMemAlloc", size, l.name}, func() (err error) {
					ptr, err = p.MemAlloc(p.dev, size)
					return err
				})
				if err != nil {
					return err
				}
				if err := p.keep(l); err != nil {
					return err
				}
				d2, err := p.table.measure(key{"malloc", "cuMemFree", size, l.name}, func() error { return p.MemFree(p.dev, ptr) })
				if err != nil {
					return err
				}
				if d2 > waited {
					l.until = time.Time{}
				}
				if max(d1, d2) > waited && !l.idle {
					waits++
				}
			}
			if err := p.await(l); err != nil {
				return err
			}
		}
	}
	return nil
}

// addresses tries how large and how many address ranges may be, and whether a hint is followed.
func (p *probe) addresses() error {
	const section = "addresses"
	for _, size := range []uint64{2 * mib, 64 * mib, gib, 16 * gib, 160 * gib, tib, 4 * tib, 16 * tib, 32 * tib, 64 * tib, 128 * tib} {
		for range p.reps {
			var va cuda.Ptr
			_, err := p.table.measure(key{section, "cuMemAddressReserve", size, "idle"}, func() (err error) {
				va, err = p.AddressReserve(size, p.info.Granularity, 0)
				return err
			})
			if err != nil {
				break // its line says so
			}
			if _, err := p.table.measure(key{section, "cuMemAddressFree", size, "idle"}, func() error {
				return p.AddressFree(va, size)
			}); err != nil {
				break
			}
		}
	}
	var held []cuda.Ptr
	var full error
	for len(held) < 256 && full == nil {
		va, err := p.AddressReserve(tib, p.info.Granularity, 0)
		if full = err; err == nil {
			held = append(held, va)
		}
	}
	p.table.remark(key{section: section, call: "ranges at once", size: tib}, fmt.Sprintf("%d, then %v", len(held), full))
	for _, va := range held {
		if err := p.AddressFree(va, tib); err != nil {
			return err
		}
	}
	first, err := p.AddressReserve(gib, p.info.Granularity, 0)
	if err != nil {
		return err
	}
	second, err := p.AddressReserve(gib, p.info.Granularity, first+4*gib)
	if err != nil {
		return err
	}
	p.table.remark(key{section: section, call: "hint", size: gib},
		fmt.Sprintf("asked for %#x, got %#x (first was %#x)", uint64(first+4*gib), uint64(second), uint64(first)))
	return errors.Join(p.AddressFree(first, gib), p.AddressFree(second, gib))
}
