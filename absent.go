package cistern

import (
	"slices"
	"sort"

	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
	"github.com/cistern-gpu/cistern/resource"
)

// absence is a range of a space's addresses whose memory is paused, or on its way out or back: whole granules, or a
// segment. The blocks in it are in use (or wait for other streams), and between them lie zombies: addresses that nobody
// is given. A block may lie in several, and partly in memory that is there. Where no block lies any more the addresses
// become a hole; but not in pools of captured graphs, which use free memory as well, so that it comes back with the rest.
//
// reserved + paused = active + inactive holds at every moment, as paused is what blocks that are not free lack.
type absence struct {
	space      *space
	addr, size uint64
	pieces     []*piece // the contents, in address order; none where they were dropped
	// busy: somebody is pausing or resuming it, so it is not cut up, nor put back.
	busy bool
	// mapped: there is memory, still or again, and counted, though out of everybody's reach: that of blocks counts as
	// active, the rest among the spare bytes.
	mapped  bool
	bare    bool             // nothing is mapped there no longer, or not yet, though it counts so: it is on its way
	freed   bool             // a block was given back while it was mapped
	lost    bool             // its memory could not be had again
	live    int              // of a segment: blocks in it
	chunks  []vm.ChunkID     // while it is mapped: in address order
	backing resource.Backing // of a segment; nil: it is made of chunks
}

func (a *absence) end() uint64 { return a.addr + a.size }

// clip is the part of a range that lies in it.
func (a *absence) clip(addr, size uint64) (lo, n uint64) {
	lo, hi := max(addr, a.addr), min(addr+size, a.end())
	if lo >= hi {
		return lo, 0
	}
	return lo, hi - lo
}

// runs is its memory, piece by piece as it is made.
//
// +checklocks:a.space.dev.mu
func (a *absence) runs() (out []run) {
	if a.backing != nil {
		return []run{{a.addr, a.size}}
	}
	at := a.addr
	for _, id := range a.chunks {
		n := a.space.dev.chunks.At(id).Size
		out = append(out, run{at, n})
		at += n
	}
	return out
}

// absentFrom is the index of the first absence of the space that ends behind addr.
func (s *space) absentFrom(addr uint64) int {
	return sort.Search(len(s.absent), func(i int) bool { return s.absent[i].end() > addr })
}

// absentOver is the absence that addr lies in, nil where there is none.
func (s *space) absentOver(addr uint64) *absence {
	if i := s.absentFrom(addr); i < len(s.absent) && s.absent[i].addr <= addr {
		return s.absent[i]
	}
	return nil
}

func (s *space) addAbsent(a *absence) { s.absent = slices.Insert(s.absent, s.absentFrom(a.addr), a) }

// replaceAbsent puts parts of an absence into its place.
func (s *space) replaceAbsent(a *absence, parts ...*absence) {
	i := s.absentFrom(a.addr)
	s.absent = slices.Replace(s.absent, i, i+1, parts...)
}

// absentIn is the parts of the range that lie in absences. The caller must not change them meanwhile.
func (s *space) absentIn(addr, size uint64) []*absence {
	i := s.absentFrom(addr)
	k := i
	for k < len(s.absent) && s.absent[k].addr < addr+size {
		k++
	}
	return s.absent[i:k]
}

// missing is how many bytes of a block have no memory.
func (s *space) missing(b *heap.Block) (n uint64) {
	if len(s.absent) == 0 || b.State != heap.Used && b.State != heap.Pending {
		return 0
	}
	for _, a := range s.absentIn(b.Addr, b.Size) {
		if !a.mapped {
			_, k := a.clip(b.Addr, b.Size)
			n += k
		}
	}
	return n
}

// addPaused notes that blocks of a space lost memory, or got it back.
//
// +checklocks:d.mu
func (d *Device) addPaused(s *space, bytes int64) {
	s.pausedBytes += bytes
	d.quota.AddPaused(s.class, bytes)
}

// eachAbsent calls f for every part of a block that lies in an absence of the list, which is in address order, block by
// block of the space. f must not change the heap but for the block.
func (s *space) eachAbsent(list []*absence, f func(a *absence, id heap.ID, b *heap.Block, lo, n uint64)) {
	if len(list) == 0 {
		return
	}
	s.heap.Each(func(id heap.ID, b *heap.Block) bool {
		if b.State == heap.Hole {
			return true
		}
		i := sort.Search(len(list), func(i int) bool { return list[i].end() > b.Addr })
		for ; i < len(list) && list[i].addr < b.Addr+b.Size; i++ {
			lo, n := list[i].clip(b.Addr, b.Size)
			f(list[i], id, b, lo, n)
		}
		return true
	})
}

// survey is what lies in an absence.
type survey struct {
	first  heap.ID // the block in which it begins
	used   uint64  // bytes that blocks have of it
	blocks int     // that begin in it, or in no absence of the survey before it
	kinds  []granuleKind
}

// granuleKind is what lies in a granule of an absence, or in a segment.
type granuleKind uint8

const (
	granuleFree     granuleKind = iota // no block
	granuleLive                        // blocks
	granuleSelected                    // and one that is selected
)

// survey looks at every block of the space for what lies in absences, which are in address order; sel may be nil. The
// caller holds the space's lock.
func (s *space) survey(list []*absence, sel *Selection) map[*absence]*survey {
	out := map[*absence]*survey{}
	for _, a := range list {
		n := uint64(1)
		if a.backing == nil {
			n = a.size / s.dev.upstream.Granularity()
		}
		out[a] = &survey{kinds: make([]granuleKind, n)}
	}
	last := heap.ID(0)
	s.eachAbsent(list, func(a *absence, id heap.ID, b *heap.Block, lo, n uint64) {
		v := out[a]
		if v.first == 0 {
			v.first = id
		}
		if b.State == heap.Zombie {
			return
		}
		v.used += n
		if id != last {
			v.blocks++
		}
		last = id
		kind := granuleLive
		if sel != nil && sel.has(s, b) {
			kind = granuleSelected
		}
		g := a.size / uint64(len(v.kinds))
		for i := (lo - a.addr) / g; i <= (lo+n-1-a.addr)/g; i++ {
			v.kinds[i] = max(v.kinds[i], kind)
		}
	})
	return out
}

// vacate is what a free does where memory is paused: [addr, addr+size) of block id, which is free (or held) by now,
// becomes a zombie wherever it lies in an absence, and its contents there are forgotten. It returns the bytes that are no
// free memory. The caller holds Device.mu and the space's lock.
//
// +checklocks:d.mu
func (d *Device) vacate(s *space, id heap.ID, addr, size uint64, held bool) (gone uint64) {
	type hit struct {
		a      *absence
		zombie heap.ID
		lo, n  uint64
	}
	var hits []hit
	start := id
	for _, a := range s.absentIn(addr, size) {
		lo, n := a.clip(addr, size)
		for b := s.heap.At(id); b.Addr+b.Size <= lo; b = s.heap.At(id) {
			id = s.heap.Next(id)
		}
		id = s.heap.Unmap(id, lo, n)
		hits = append(hits, hit{a, id, lo, n})
		gone += n
		a.live--
		if a.mapped {
			d.quota.Spare += n
			a.freed = true
		} else {
			d.addPaused(s, -int64(n))
		}
		a.forget(lo, n)
	}
	if held { // what is left of it is apart from other free blocks
		for x := start; x != 0 && s.heap.At(x).Addr < addr+size; x = s.heap.Next(x) {
			if s.heap.At(x).State == heap.Held {
				d.heldBack = append(d.heldBack, heldFree{s, x})
			}
		}
	}
	for _, x := range hits {
		if !x.a.busy {
			d.punch(x.a, x.zombie, x.lo, x.n)
		}
	}
	return gone
}

// noteParked notes that a block was given back while other streams may use it.
func (s *space) noteParked(b *heap.Block) {
	if len(s.absent) > 0 {
		for _, a := range s.absentIn(b.Addr, b.Size) {
			a.freed = a.mapped
		}
	}
}

// punch makes a hole of the granules in which the zombie [lo, lo+n) lies and no block does any more.
//
// +checklocks:d.mu
func (d *Device) punch(a *absence, z heap.ID, lo, n uint64) {
	s := a.space
	if a.backing != nil || s.pool.pinned {
		return // releaseHollow looks after segments
	}
	h, g := s.heap, d.upstream.Granularity()
	from, to := lo/g*g, (lo+n+g-1)/g*g
	for id := h.Prev(z); id != 0; id = h.Prev(id) {
		b := h.At(id)
		if b.Addr+b.Size <= from {
			break
		}
		if b.State != heap.Zombie {
			from += g
			break
		}
	}
	for id := h.Next(z); id != 0; id = h.Next(id) {
		b := h.At(id)
		if b.Addr >= to {
			break
		}
		if b.State != heap.Zombie {
			to -= g
			break
		}
	}
	if from >= to {
		return
	}
	for h.At(z).Addr > from {
		z = h.Prev(z)
	}
	h.ReapPart(z, from, to-from)
	var parts []*absence
	if from > a.addr {
		parts = append(parts, a.part(a.addr, from))
	}
	if to < a.end() {
		parts = append(parts, a.part(to, a.end()))
	}
	s.replaceAbsent(a, parts...)
}

// part is a part of an absence that has no memory, as one of its own.
func (a *absence) part(from, to uint64) *absence {
	x := &absence{space: a.space, addr: from, size: to - from, backing: a.backing, live: a.live}
	i := sort.Search(len(a.pieces), func(i int) bool { return a.pieces[i].addr+a.pieces[i].size > from })
	for ; i < len(a.pieces) && a.pieces[i].addr < to; i++ {
		p := a.pieces[i]
		if lo, n := x.clip(p.addr, p.size); n < p.size {
			p = p.part(lo, n)
		}
		x.pieces = append(x.pieces, p)
	}
	return x
}

// cutUp replaces an absence that has no memory by parts, of granules of the same kind each, and returns them with their
// kinds. Granules that no block lies in become holes, except in pools of captured graphs. It is not for segments.
// +checklocks:d.mu
func (d *Device) cutUp(a *absence, v *survey) (parts []*absence, kinds []granuleKind) {
	s, g := a.space, a.size/uint64(len(v.kinds))
	first := v.first
	for i := 0; i < len(v.kinds); {
		k := i
		for k < len(v.kinds) && v.kinds[k] == v.kinds[i] {
			k++
		}
		from, to := a.addr+uint64(i)*g, a.addr+uint64(k)*g
		switch {
		case v.kinds[i] != granuleFree || s.pool.pinned:
			x := a
			if from > a.addr || to < a.end() {
				x = a.part(from, to)
			}
			parts, kinds = append(parts, x), append(kinds, v.kinds[i])
		default:
			for b := s.heap.At(first); b.Addr+b.Size <= from; b = s.heap.At(first) {
				first = s.heap.Next(first)
			}
			first = s.heap.ReapPart(first, from, to-from)
		}
		i = k
	}
	s.replaceAbsent(a, parts...)
	return parts, kinds
}

// blockOver finds the block that an address lies in, whatever it is. It looks at every block before it.
func (s *space) blockOver(addr uint64) (id heap.ID) {
	s.heap.Each(func(x heap.ID, b *heap.Block) bool {
		if addr-b.Addr < b.Size {
			id = x
			return false
		}
		return true
	})
	return id
}

// thin makes holes of the granules of absences, all of one space, that no block lies in. The caller holds Device.mu and
// the space's lock.
//
// +checklocks:d.mu
func (d *Device) thin(s *space, list []*absence) {
	all := s.survey(list, nil)
	for _, a := range list {
		if a.backing == nil && !a.busy {
			d.cutUp(a, all[a])
		}
	}
}

// refill makes memory that is out of reach ordinary memory again: what no block has of it is free, and the blocks are
// marked no more, unless they lack memory elsewhere. The caller holds Device.mu and no lane's lock.
//
// +checklocks:d.mu
func (d *Device) refill(list []*absence) {
	bySpace(list, func(s *space, list []*absence) { d.refillSpace(s, list) })
}

// bySpace calls f for each space's part of the list, with the space's lock.
func bySpace(list []*absence, f func(s *space, list []*absence)) {
	for len(list) > 0 {
		s := list[0].space
		n := 1
		for n < len(list) && list[n].space == s {
			n++
		}
		s.mu.Lock()
		f(s, list[:n])
		s.mu.Unlock()
		list = list[n:]
	}
}

// +checklocks:d.mu
func (d *Device) refillSpace(s *space, list []*absence) {
	done := map[*absence]bool{}
	for _, a := range list {
		done[a] = true
	}
	s.absent = slices.DeleteFunc(s.absent, func(a *absence) bool { return done[a] })
	type gap struct {
		zombie          heap.ID
		lo, size, stamp uint64
	}
	var gaps []gap
	s.eachAbsent(list, func(_ *absence, id heap.ID, b *heap.Block, lo, n uint64) {
		if b.State == heap.Zombie {
			gaps = append(gaps, gap{id, lo, n, b.Stamp})
		} else if len(s.absentIn(b.Addr, b.Size)) == 0 {
			b.Uses = d.dropUse(b.Uses, pauseMark)
		}
	})
	// Backwards: a zombie may reach into what stays away, and what is cut off at its end has a new name.
	for i := len(gaps) - 1; i >= 0; i-- {
		x := gaps[i]
		free := s.heap.Map(s.heap.ReapPart(x.zombie, x.lo, x.size), x.lo, x.size, x.stamp)
		if s.capture != 0 && !s.stream.timeline.IsOver(x.stamp) { // a pause that failed
			s.heap.Hold(free)
			d.heldBack = append(d.heldBack, heldFree{s, free})
		}
		s.gauges.SetFree(s.heap.FreeBlocks, int64(x.size))
		d.quota.Spare -= x.size
	}
	for _, a := range list {
		a.forget(a.addr, a.size)
	}
}

// thinAll makes holes of what is free of paused memory in pools that captured graphs used until now. The caller holds
// Device.mu and no lane's lock.
//
// +checklocks:d.mu
func (d *Device) thinAll(pools []*Pool) {
	for _, s := range d.spaces {
		if s != nil && slices.Contains(pools, s.pool) && len(s.absent) > 0 {
			s.mu.Lock()
			d.thin(s, slices.Clone(s.absent))
			s.mu.Unlock()
		}
	}
}

// releaseHollow gives back segments that have no memory and in which no block is left. The caller holds Device.mu and
// nothing else; it is let go while users' upstreams are called.
//
// +checklocks:d.mu
func (d *Device) releaseHollow() (first error) {
	if d.health.Broken() != nil || d.unsure.Load() {
		return nil
	}
	var list []*absence
	for _, s := range d.spaces {
		if s == nil || s.area != nil || s.pool.pinned {
			continue
		}
		for _, a := range s.absent { // changed by holders of Device.mu only
			if a.live == 0 && !a.busy {
				a.busy = true
				list = append(list, a)
			}
		}
	}
	for _, a := range list {
		s := a.space
		d.a.disown(a.addr, a.size)
		err := d.freeSegment(s, a.addr, a.size)
		if a.busy = false; err != nil {
			d.a.claim(a.addr, a.size, s) // which succeeded before
			if first == nil {
				first = err
			}
			continue
		}
		s.mu.Lock()
		s.heap.DropRange(s.heap.ReapPart(s.blockOver(a.addr), a.addr, a.size))
		s.replaceAbsent(a)
		s.mu.Unlock()
		d.recordSegment(s, a.addr, a.size, false, origin{})
		d.areas = slices.DeleteFunc(d.areas, func(r reservation) bool { return r.base == a.addr })
	}
	return first
}

// inTransit reports whether an address that nobody is given has memory that is on its way out or back.
func (s *space) inTransit(addr uint64) bool {
	a := s.absentOver(addr)
	return a != nil && a.mapped && !a.bare
}

// withAbsences corrects what is mapped in a space by what is paused, or on its way out or back. The caller holds
// Device.mu.
//
// +checklocks:s.dev.mu
func (s *space) withAbsences(runs []run) []run {
	if len(s.absent) == 0 {
		return runs
	}
	var out []run
	for _, r := range runs {
		for _, a := range s.absentIn(r.addr, r.size) {
			lo, n := a.clip(r.addr, r.size)
			if lo > r.addr {
				out = append(out, run{r.addr, lo - r.addr})
			}
			r = run{lo + n, r.addr + r.size - lo - n}
		}
		if r.size > 0 {
			out = append(out, r)
		}
	}
	for _, a := range s.absent {
		if a.mapped && !a.bare {
			out = append(out, run{a.addr, a.size})
		}
	}
	return out
}

// endPauses gives back what only pausing needs. No block is out.
func (d *Device) endPauses() error {
	d.pausing.Lock()
	defer d.pausing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.vault.drop(0); err != nil {
		return err
	}
	if d.copies != 0 {
		if err := d.drv.StreamDestroy(d.id, d.copies); err != nil {
			return d.health.Failed(err)
		}
		d.copies = 0
	}
	return nil
}
