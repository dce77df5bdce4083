package heap

import "math/bits"

// table finds a block by its address: open addressing, linear probing, deletion by shifting back (Knuth, The Art of
// Computer Programming vol. 3, 6.4, algorithm R), at most half full. An entry is the low 32 bits of the address in
// units, and the block: the tag decides nearly always without touching the block, and the block's own address
// decides the rest.
type table struct {
	entries []uint64 // tag<<32 | id; 0 is empty
	shift   uint     // 64 - log2(len(entries))
	n       int
}

const minTable = 64

func (t *table) init() { t.grow(minTable) }

func (t *table) grow(size int) {
	old := t.entries
	t.entries = make([]uint64, size)
	t.shift = 64 - uint(bits.TrailingZeros(uint(size)))
	for _, e := range old {
		if e != 0 {
			t.insert(e)
		}
	}
}

// home is where an entry wants to be: Fibonacci hashing of the tag.
func (t *table) home(tag uint64) uint64 { return tag * 0x9E3779B97F4A7C15 >> t.shift }

func (t *table) insert(e uint64) {
	mask := uint64(len(t.entries) - 1)
	i := t.home(e>>32) & mask
	for t.entries[i] != 0 {
		i = (i + 1) & mask
	}
	t.entries[i] = e
}

func tagOf(addr uint64) uint64 { return addr >> unitBits & 0xFFFFFFFF }

func (t *table) put(addr uint64, id ID) {
	if 2*(t.n+1) > len(t.entries) {
		t.grow(2 * len(t.entries))
	}
	t.n++
	t.insert(tagOf(addr)<<32 | uint64(id))
}

// find is the block at addr and the index of its entry.
func (t *table) find(addr uint64, blocks []Block) (ID, uint64, bool) {
	tag := tagOf(addr)
	mask := uint64(len(t.entries) - 1)
	for i := t.home(tag) & mask; ; i = (i + 1) & mask {
		e := t.entries[i]
		if e == 0 {
			return 0, 0, false
		}
		if e>>32 == tag && blocks[uint32(e)].Addr == addr {
			return ID(uint32(e)), i, true
		}
	}
}

// del empties entry i.
func (t *table) del(at uint64) {
	t.n--
	mask := uint64(len(t.entries) - 1)
	for i := (at + 1) & mask; t.entries[i] != 0; i = (i + 1) & mask {
		// The entry at i may move into the unmapped range unless its home lies cyclically in (unmapped range, i].
		if home := t.home(t.entries[i]>>32) & mask; (i-home)&mask >= (i-at)&mask {
			t.entries[at] = t.entries[i]
			at = i
		}
	}
	t.entries[at] = 0
}
