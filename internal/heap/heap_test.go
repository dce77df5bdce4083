package heap

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cistern-gpu/cistern/internal/testkit"
)

// naive is the oracle: a byte map in units of Align, for ranges that begin at known addresses.
type naive struct {
	base   uint64
	state  []State
	starts map[uint64]uint64 // live blocks: address to size
}

func (o *naive) set(addr, size uint64, from, to State) error {
	for u := (addr - o.base) / Align; u < (addr-o.base+size)/Align; u++ {
		if u >= uint64(len(o.state)) {
			return fmt.Errorf("%#x lies outside of the range", addr)
		}
		if o.state[u] != from {
			return fmt.Errorf("unit at %#x is %d, want %d", o.base+u*Align, o.state[u], from)
		}
		o.state[u] = to
	}
	return nil
}

// verify checks everything that must hold of a heap at any time.
func (h *Heap) verify() error {
	var freeBytes, usedBytes uint64
	freeBlocks, usedBlocks, records, unmapped := 0, 0, 0, 0
	for _, first := range h.ranges {
		if h.slab.blocks[first].prev != 0 {
			return fmt.Errorf("the first block of a range has a left neighbour")
		}
		var prev ID
		for id := first; id != 0; id = h.slab.blocks[id].next {
			b := &h.slab.blocks[id]
			records++
			if b.prev != prev {
				return fmt.Errorf("block %d: prev is %d, want %d", id, b.prev, prev)
			}
			if b.Size == 0 || b.Size%Align != 0 || b.Addr%Align != 0 {
				return fmt.Errorf("block %d: %#x+%d", id, b.Addr, b.Size)
			}
			if prev != 0 {
				p := &h.slab.blocks[prev]
				if p.Addr+p.Size != b.Addr {
					return fmt.Errorf("blocks do not tile: %#x+%d, then %#x", p.Addr, p.Size, b.Addr)
				}
				if p.State == b.State && (b.State == Free || b.State == Unmapped) {
					return fmt.Errorf("two neighbours of state %d at %#x", b.State, b.Addr)
				}
			}
			got, _, found := h.Lookup(b.Addr)
			switch b.State {
			case Free:
				freeBytes += b.Size
				freeBlocks++
			case Unmapped:
				unmapped++
			case Used, Pending:
				usedBytes += b.Size
				usedBlocks++
				if !found || got != id {
					return fmt.Errorf("block %d at %#x is not in the table (%d, %v)", id, b.Addr, got, found)
				}
			case Stale:
			default:
				return fmt.Errorf("block %d has state %d", id, b.State)
			}
			if found && b.State != Used && b.State != Pending {
				return fmt.Errorf("block %d of state %d is in the table", id, b.State)
			}
			prev = id
		}
	}
	for id := h.slab.spare; id != 0; id = h.slab.blocks[id].binNext {
		if h.slab.blocks[id].State != unused {
			return fmt.Errorf("spare record %d has state %d", id, h.slab.blocks[id].State)
		}
		records++
	}
	switch {
	case records != len(h.slab.blocks)-1:
		return fmt.Errorf("%d records, %d of them are reached", len(h.slab.blocks)-1, records)
	case freeBytes != h.FreeBytes || usedBytes != h.UsedBytes || freeBlocks != h.FreeBlocks || usedBlocks != h.UsedBlocks:
		return fmt.Errorf("counts: free %d in %d, used %d in %d; the heap says %d in %d, %d in %d", freeBytes, freeBlocks,
			usedBytes, usedBlocks, h.FreeBytes, h.FreeBlocks, h.UsedBytes, h.UsedBlocks)
	}
	n := 0
	for _, e := range h.table.entries {
		if e != 0 {
			n++
		}
	}
	if n != usedBlocks || n != h.table.n {
		return fmt.Errorf("table: %d entries, says %d, %d used blocks", n, h.table.n, usedBlocks)
	}
	if err := h.FreeBins.verify(Free, freeBlocks); err != nil {
		return err
	}
	return h.UnmappedBins.verify(Unmapped, unmapped)
}

func (b *Bins) verify(state State, want int) error {
	n, blocks := 0, b.slab.blocks
	for i, head := range b.heads {
		l, s := i>>subBits, i&(subdivisions-1)
		if bit := b.second[l]>>s&1 == 1; bit != (head != 0) {
			return fmt.Errorf("bin %d: bit %v, head %d", i, bit, head)
		}
		if bit := b.first>>l&1 == 1; bit != (b.second[l] != 0) {
			return fmt.Errorf("level %d: bit %v, lists %#x", l, bit, b.second[l])
		}
		var prev ID
		for id := head; id != 0; id = blocks[id].binNext {
			x := &blocks[id]
			if x.State != state || x.binPrev != prev || int(x.bin) != i || binOf(x.Size) != uint16(i) {
				return fmt.Errorf("bin %d holds block %d: state %d, prev %d (want %d), its bin %d, bin of its size %d", i, id,
					x.State, x.binPrev, prev, x.bin, binOf(x.Size))
			}
			prev = id
			if n++; n > len(blocks) {
				return fmt.Errorf("bin %d is a circle", i)
			}
		}
	}
	if n != want {
		return fmt.Errorf("%d blocks of state %d in the bins, want %d", n, state, want)
	}
	return nil
}

// fits reports whether Take(n) would find a block, and its size.
func (h *Heap) fits(n uint64) (uint64, bool) {
	id := h.FreeBins.fit(h.slab.blocks, n)
	return h.slab.blocks[id].Size, id != 0
}

// machine drives a heap and the oracle with operations taken from numbers.
type machine struct {
	h       *Heap
	o       naive
	live    []uint64 // addresses, used or pending
	pending map[uint64]bool
	stale   []ID
	stacks  map[uint64]uint32 // of used and pending blocks; nil: none are kept
	next    func() uint64
}

const testRange = 1 << 20

func newMachine(next func() uint64) *machine {
	m := &machine{h: New(), pending: map[uint64]bool{}, next: next}
	m.o = naive{base: 1 << 32, state: make([]State, testRange/Align), starts: map[uint64]uint64{}}
	for i := range m.o.state {
		m.o.state[i] = Unmapped
	}
	m.h.AddRange(m.o.base, testRange)
	return m
}

func (m *machine) below(n int) int { return int(m.next() % uint64(n)) }

// step carries out one operation and says what it was.
func (m *machine) step() (what string, err error) {
	const chunk = 16 * Align
	switch k := m.below(16); {
	case k < 6: // take
		n := uint64(1+m.below(40)) * Align
		if m.below(8) == 0 {
			n *= 20
		}
		fits, ok := m.h.fits(n)
		id := m.h.Take(n, n-1)
		what = fmt.Sprintf("take %d: %d", n, id)
		smallest := m.smallestFree(n)
		if (id != 0) != (smallest != 0) || ok != (id != 0) {
			return what, fmt.Errorf("the smallest free range that fits is %d, fits says %d %v", smallest, fits, ok)
		}
		if id == 0 {
			return what, nil
		}
		// The bin is at most 1/32 wide above 32 units and exact below.
		if fits > smallest+smallest/32 || smallest <= 32*Align && fits != smallest {
			return what, fmt.Errorf("took from %d bytes where %d would do", fits, smallest)
		}
		b := m.h.At(id)
		if b.Size != n || b.Requested != n-1 || b.State != Used {
			return what, fmt.Errorf("block is %+v", *b)
		}
		m.live = append(m.live, b.Addr)
		m.o.starts[b.Addr] = n
		stack := uint32(n/Align) % 5
		m.h.Stacks.Set(id, stack)
		if m.stacks != nil {
			m.stacks[b.Addr] = stack
		}
		return what, m.o.set(b.Addr, n, Free, Used)
	case k < 10 && len(m.live) > 0: // free
		i := m.below(len(m.live))
		addr := m.live[i]
		size := m.o.starts[addr]
		m.live[i] = m.live[len(m.live)-1]
		m.live = m.live[:len(m.live)-1]
		delete(m.o.starts, addr)
		delete(m.stacks, addr)
		id, place, ok := m.h.Lookup(addr)
		what = fmt.Sprintf("free %#x+%d", addr, size)
		if !ok {
			return what, fmt.Errorf("not found")
		}
		stamp := m.next()%100 + 1
		var merged ID
		if m.below(2) == 0 {
			merged = m.h.Free(id, stamp)
		} else {
			merged = m.h.FreeAt(id, place, stamp)
		}
		if b := m.h.At(merged); b.Stamp < stamp || b.Addr > addr || b.Addr+b.Size < addr+size {
			return what, fmt.Errorf("merged into %+v", *b)
		}
		from := Used
		if m.pending[addr] {
			from = Pending
			delete(m.pending, addr)
		}
		return what, m.o.set(addr, size, from, Free)
	case k == 10 && len(m.live) > 0: // park
		addr := m.live[m.below(len(m.live))]
		what = fmt.Sprintf("park %#x", addr)
		if m.pending[addr] {
			return what, nil
		}
		id, _, _ := m.h.Lookup(addr)
		m.h.Park(id)
		m.pending[addr] = true
		return what, m.o.set(addr, m.o.starts[addr], Used, Pending)
	case k < 13: // map a piece of a unmapped
		var unmapped []ID
		m.h.UnmappedBins.Each(chunk, func(id ID, _ *Block) bool { unmapped = append(unmapped, id); return true })
		if len(unmapped) == 0 {
			return "map: no unmapped", nil
		}
		b := *m.h.At(unmapped[m.below(len(unmapped))])
		id, _ := m.blockAt(b.Addr)
		chunks := int(b.Size / chunk)
		size := uint64(1+m.below(chunks)) * chunk
		addr := b.Addr + uint64(m.below(int((b.Size-size)/chunk)+1))*chunk
		what = fmt.Sprintf("map %#x+%d", addr, size)
		merged := m.h.Map(id, addr, size, 7)
		if x := m.h.At(merged); x.State != Free || x.Addr > addr || x.Addr+x.Size < addr+size || x.Stamp < 7 {
			return what, fmt.Errorf("merged into %+v", *x)
		}
		return what, m.o.set(addr, size, Unmapped, Free)
	case k == 13: // unmap a piece of a free block
		var frees []ID
		m.h.FreeBins.Each(chunk, func(id ID, _ *Block) bool { frees = append(frees, id); return true })
		if len(frees) == 0 {
			return "unmap: nothing free", nil
		}
		id := frees[m.below(len(frees))]
		b := *m.h.At(id)
		lo := (b.Addr + chunk - 1) / chunk * chunk
		if lo+chunk > b.Addr+b.Size {
			return "unmap: no whole chunk", nil
		}
		addr := lo + uint64(m.below(int((b.Addr+b.Size-lo)/chunk)))*chunk
		what = fmt.Sprintf("unmap %#x of %#x+%d", addr, b.Addr, b.Size)
		z := m.h.Unmap(id, addr, chunk)
		if x := m.h.At(z); x.State != Stale || x.Addr != addr || x.Size != chunk {
			return what, fmt.Errorf("the stale mapping is %+v", *x)
		}
		m.stale = append(m.stale, z)
		return what, m.o.set(addr, chunk, Free, Stale)
	case len(m.stale) > 0:
		i := m.below(len(m.stale))
		z := m.stale[i]
		m.stale = append(m.stale[:i], m.stale[i+1:]...)
		b := *m.h.At(z)
		what = fmt.Sprintf("reap %#x", b.Addr)
		merged := m.h.Reap(z)
		if x := m.h.At(merged); x.State != Unmapped || x.Addr > b.Addr || x.Addr+x.Size < b.Addr+b.Size {
			return what, fmt.Errorf("merged into %+v", *x)
		}
		return what, m.o.set(b.Addr, b.Size, Stale, Unmapped)
	}
	if m.stacks != nil {
		m.stacks = nil
	} else {
		m.stacks = map[uint64]uint32{}
	}
	m.h.Stacks.Keep(m.stacks != nil)
	return "keep stacks, or not", nil
}

func (m *machine) blockAt(addr uint64) (found ID, b *Block) {
	m.h.Each(func(id ID, x *Block) bool {
		if x.Addr == addr {
			found, b = id, x
		}
		return found == 0
	})
	return
}

// smallestFree is the smallest run of free units of at least n bytes, 0 where there is none.
func (m *machine) smallestFree(n uint64) uint64 {
	best, run := uint64(0), uint64(0)
	for i := 0; i <= len(m.o.state); i++ {
		if i < len(m.o.state) && m.o.state[i] == Free {
			run += Align
			continue
		}
		if run >= n && (best == 0 || run < best) {
			best = run
		}
		run = 0
	}
	return best
}

// agree compares the heap's blocks with the byte map.
func (m *machine) agree() error {
	if err := m.h.verify(); err != nil {
		return err
	}
	at := m.o.base
	var bad error
	m.h.Each(func(id ID, b *Block) bool {
		if got := m.h.Stacks.Of(id); got != m.stacks[b.Addr] {
			bad = fmt.Errorf("block at %#x, of state %d, has stack %d, want %d", b.Addr, b.State, got, m.stacks[b.Addr])
		}
		if b.Addr != at {
			bad = fmt.Errorf("block at %#x, want one at %#x", b.Addr, at)
		}
		if err := m.o.set(b.Addr, b.Size, b.State, b.State); err != nil {
			bad = err
		}
		at += b.Size
		return bad == nil
	})
	if bad == nil && at != m.o.base+testRange {
		bad = fmt.Errorf("the blocks end at %#x", at)
	}
	return bad
}

func (m *machine) run(n int) error {
	for i := range n {
		what, err := m.step()
		if err == nil {
			err = m.agree()
		}
		if err != nil {
			return fmt.Errorf("operation %d, %s: %w", i, what, err)
		}
	}
	return nil
}

func TestRandom(t *testing.T) {
	seed := testkit.Seed(t)
	for i := range 30 {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		if err := newMachine(rng.Uint64).run(1000); err != nil {
			t.Fatalf("seed %d, %d: %v", seed, i, err)
		}
	}
}

func FuzzHeap(f *testing.F) {
	f.Add([]byte("a heap of blocks"))
	f.Add([]byte{11, 0, 0, 255, 1, 1, 6, 13, 15, 0, 3, 2})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) > 2000 {
			return
		}
		i := 0
		next := func() uint64 {
			if i >= len(ops) {
				return 0
			}
			i++
			return uint64(ops[i-1])
		}
		m := newMachine(next)
		for i < len(ops) {
			what, err := m.step()
			if err == nil {
				err = m.agree()
			}
			if err != nil {
				t.Fatalf("byte %d, %s: %v", i, what, err)
			}
		}
	})
}

// A free block that fits is found however many blocks of its bin do not fit.
func TestFitBehindTheScanLimit(t *testing.T) {
	h := New()
	const n = 64 * Align // 64 and 65 units share a bin
	size := uint64(10 * scanLimit * (n + Align))
	h.Map(h.AddRange(1<<32, size), 1<<32, size, 0)
	var blocks []ID
	want := h.Take(n+Align, n+Align) // put into its bin first, so the last that is looked at
	fence := h.Take(Align, Align)
	for range 3 * scanLimit {
		blocks = append(blocks, h.Take(n, n))
		h.Take(Align, Align)
	}
	rest, _ := h.fits(Align)
	h.Take(rest, rest)
	addr := h.At(want).Addr
	h.Free(want, 1)
	for _, id := range blocks {
		h.Free(id, 1)
	}
	id := h.Take(n+Align, n+Align)
	if id == 0 || h.At(id).Addr != addr {
		t.Fatalf("Take found block %d", id)
	}
	if err := h.verify(); err != nil {
		t.Fatal(err)
	}
	_ = fence
}

// A heap of whole blocks hands out blocks of the very size, however many others are in their bin, and splits none.
func TestWhole(t *testing.T) {
	h := New()
	h.Fit.KeepWhole()
	const unit = 2 << 20
	want := map[uint64]bool{}
	for i := range uint64(60) { // sizes that differ by less than a bin is wide
		addr, size := 1<<40+i<<32, 200*unit+i/2*unit/16
		h.Map(h.AddRange(addr, size), addr, size, 0)
		if size == 200*unit+20*unit/16 {
			want[addr] = true
		}
	}
	for range 2 {
		id := h.Take(200*unit+20*unit/16, 1)
		if id == 0 || !want[h.At(id).Addr] {
			t.Fatalf("got block %d", id)
		}
		delete(want, h.At(id).Addr)
	}
	for _, n := range []uint64{200*unit + 20*unit/16, 200*unit - Align, 201*unit + Align, Align} {
		if id := h.Take(n, 1); id != 0 {
			t.Errorf("%d bytes came from a block of %d", n, h.At(id).Size)
		}
	}
	if h.FreeBlocks != 58 || h.UsedBlocks != 2 {
		t.Errorf("%d free, %d used", h.FreeBlocks, h.UsedBlocks)
	}
}

// A held block counts as free, and yet nothing gets it or merges with it until it is regained.
func TestHold(t *testing.T) {
	h := New()
	h.Map(h.AddRange(1<<40, 10*Align), 1<<40, 10*Align, 0)
	var ids [5]ID
	for i := range ids {
		ids[i] = h.Take(2*Align, 1)
	}
	h.FreeHeld(ids[1], 7)
	id := h.Free(ids[3], 3)
	h.Hold(id)
	h.Free(ids[2], 1)
	h.Free(ids[0], 0)
	if h.FreeBytes != 8*Align || h.FreeBlocks != 4 || h.UsedBlocks != 1 || h.FreeBins.Largest() != 2*Align {
		t.Errorf("%d free bytes in %d blocks, %d used, largest %d", h.FreeBytes, h.FreeBlocks, h.UsedBlocks, h.FreeBins.Largest())
	}
	if h.At(ids[0]).Stamp != 0 || h.At(ids[2]).Stamp != 1 {
		t.Error("a block has the mark of one that is held")
	}
	for range 2 {
		if id := h.Take(2*Align, 1); id != ids[0] && id != ids[2] {
			t.Errorf("block %d was handed out", id)
		}
	}
	if id := h.Take(Align, 1); id != 0 {
		t.Errorf("block %d was handed out", id)
	}
	h.Free(ids[0], 0)
	h.Free(ids[2], 1)
	if id := h.Regain(ids[1]); h.At(id).Size != 6*Align || h.At(id).Stamp != 7 {
		t.Errorf("regained: %+v", h.At(id))
	}
	if id := h.Regain(ids[3]); h.At(id).Size != 8*Align || h.FreeBlocks != 1 {
		t.Errorf("regained: %+v", h.At(id))
	}
}

// TestReapPart: stale mappings become unmapped ranges in part, across their borders, and what is left of a held block stays held.
func TestReapPart(t *testing.T) {
	h := New()
	const base = 1 << 30
	free := h.Map(h.AddRange(base, 64*Align), base, 64*Align, 3)
	a := h.Unmap(free, base+8*Align, 8*Align)
	b := h.Unmap(h.Next(a), base+16*Align, 8*Align)
	if h.At(a).State != Stale || h.At(b).State != Stale || h.FreeBytes != 48*Align {
		t.Fatal("no stale")
	}
	gap := h.ReapPart(a, base+10*Align, 10*Align)
	if x := h.At(gap); x.State != Unmapped || x.Addr != base+10*Align || x.Size != 10*Align {
		t.Errorf("%+v", *x)
	}
	if err := h.verify(); err != nil {
		t.Fatal(err)
	}
	left, right := h.At(h.Prev(gap)), h.At(h.Next(gap))
	if left.State != Stale || left.Size != 2*Align || right.State != Stale || right.Size != 4*Align {
		t.Errorf("%+v, %+v", *left, *right)
	}
	held := h.Next(h.Next(gap))
	h.Hold(held)
	addr, size, bytes := h.At(held).Addr, h.At(held).Size, h.FreeBytes
	z := h.Unmap(held, addr+4*Align, 2*Align)
	if h.At(z).State != Stale || h.At(h.Prev(z)).State != Held || h.At(h.Next(z)).State != Held ||
		h.At(h.Prev(z)).Size+h.At(h.Next(z)).Size != size-2*Align || h.FreeBytes != bytes-2*Align {
		t.Error("what is left of a held block is not held")
	}
	h.Regain(h.Prev(z))
	h.Regain(h.Next(z))
	if err := h.verify(); err != nil {
		t.Error(err)
	}
}

func TestRanges(t *testing.T) {
	h := New()
	a := h.AddRange(1<<32, 1<<20)
	b := h.AddRange(1<<33, 1<<20)
	block := h.Map(b, 1<<33, 1<<20, 3)
	if h.DropRange(block) {
		t.Error("a range with memory was dropped")
	}
	id := h.Take(1<<20, 1<<20)
	if h.FreeBins.Largest() != 0 || h.UnmappedBins.Largest() != 1<<20 {
		t.Errorf("largest free %d, largest unmapped %d", h.FreeBins.Largest(), h.UnmappedBins.Largest())
	}
	block = h.Free(id, 4)
	z := h.Unmap(block, 1<<33, 1<<20)
	if h.DropRange(z) {
		t.Error("a range with an old mapping was dropped")
	}
	if !h.DropRange(h.Reap(z)) || !h.DropRange(a) || len(h.Ranges()) != 0 {
		t.Error("an empty range was not dropped")
	}
	if err := h.verify(); err != nil {
		t.Fatal(err)
	}
}

// Addresses 2 TiB apart have the same tag in the table.
func TestTableTags(t *testing.T) {
	h := New()
	bases := []uint64{1 << 41, 2 << 41, 3 << 41, 4 << 41}
	ids := map[uint64]ID{}
	for _, base := range bases {
		h.Map(h.AddRange(base, 100*Align), base, 100*Align, 0)
	}
	for range 400 {
		id := h.Take(Align, 1)
		ids[h.At(id).Addr] = id
	}
	for addr, id := range ids {
		if got, _, ok := h.Lookup(addr); !ok || got != id {
			t.Fatalf("Lookup(%#x) = %d %v, want %d", addr, got, ok, id)
		}
	}
	if _, _, ok := h.Lookup(5 << 41); ok {
		t.Error("an address of no range was found")
	}
	for addr, id := range ids {
		h.Free(id, 1)
		if _, _, ok := h.Lookup(addr); ok {
			t.Fatalf("%#x is found after it was freed", addr)
		}
	}
	if err := h.verify(); err != nil {
		t.Fatal(err)
	}
}

func TestBinOf(t *testing.T) {
	last := uint16(0)
	for u := uint64(1); u < 1<<22; u += 1 + u/64 {
		i := binOf(u * Align)
		if i < last {
			t.Fatalf("binOf(%d units) = %d after %d: bins must rise with the size", u, i, last)
		}
		if u < subdivisions && i != uint16(u) {
			t.Fatalf("binOf(%d units) = %d: small sizes have a bin each", u, i)
		}
		last = i
	}
	if i := binOf(1 << 47); int(i) >= levels*subdivisions {
		t.Fatalf("binOf(2^47) = %d", i)
	}
}

// Nothing is allocated once the slab and the table have their size.
func TestNoAllocation(t *testing.T) {
	h := New()
	h.Map(h.AddRange(1<<32, 1<<30), 1<<32, 1<<30, 0)
	var ids [1000]ID
	round := func() {
		for i := range ids {
			ids[i] = h.Take(uint64(1+i%37)*Align, 1)
		}
		for i := range ids {
			h.Free(ids[(i*7)%len(ids)], 1)
		}
	}
	round()
	if n := testing.AllocsPerRun(10, round); n != 0 {
		t.Errorf("%v Go allocations per round", n)
	}
}

func BenchmarkTakeFree(b *testing.B) {
	for _, live := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(live), func(b *testing.B) {
			h := New()
			h.Map(h.AddRange(1<<32, 1<<40), 1<<32, 1<<40, 0)
			rng := rand.New(rand.NewPCG(1, 1))
			ids := make([]ID, live)
			for i := range ids {
				ids[i] = h.Take(uint64(1+rng.IntN(64))*Align, 1)
			}
			b.ResetTimer()
			for i := range b.N {
				k := rng.IntN(live)
				h.Free(ids[k], uint64(i))
				ids[k] = h.Take(uint64(1+rng.IntN(64))*Align, 1)
			}
		})
	}
}
