package initial

import (
	"math/bits"
	"math/rand/v2"
)

// addrMap maps addresses to 32-bit numbers: open addressing, no pointers. The zero value is empty. The hash is seeded,
// so that no file can be made whose addresses all fall into one place.
type addrMap struct {
	seed uint64
	keys []uint64
	vals []uint32 // value+1, 0 is empty
	n    int
}

func (t *addrMap) slot(addr uint64) int {
	h := (addr ^ t.seed) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32) * (t.seed | 1)
	return int(h >> (64 - uint(bits.Len(uint(len(t.keys)-1)))))
}

// get is the number of addr.
func (t *addrMap) get(addr uint64) (uint32, bool) {
	if t.n == 0 {
		return 0, false
	}
	for i := t.slot(addr); t.vals[i] != 0; i = (i + 1) & (len(t.keys) - 1) {
		if t.keys[i] == addr {
			return t.vals[i] - 1, true
		}
	}
	return 0, false
}

// set stores v under addr.
func (t *addrMap) set(addr uint64, v uint32) {
	if 2*(t.n+1) > len(t.keys) {
		if t.seed == 0 {
			t.seed = rand.Uint64() | 1<<63
		}
		old := *t
		t.keys, t.vals, t.n = make([]uint64, max(64, 2*len(old.keys))), make([]uint32, max(64, 2*len(old.keys))), 0
		for i, w := range old.vals {
			if w != 0 {
				t.set(old.keys[i], w-1)
			}
		}
	}
	i := t.slot(addr)
	for t.vals[i] != 0 && t.keys[i] != addr {
		i = (i + 1) & (len(t.keys) - 1)
	}
	if t.vals[i] == 0 {
		t.n++
	}
	t.keys[i], t.vals[i] = addr, v+1
}

// del removes addr and moves back what its slot had pushed on.
func (t *addrMap) del(addr uint64) {
	if t.n == 0 {
		return
	}
	mask := len(t.keys) - 1
	i := t.slot(addr)
	for t.keys[i] != addr || t.vals[i] == 0 {
		if t.vals[i] == 0 {
			return
		}
		i = (i + 1) & mask
	}
	t.n--
	for j := (i + 1) & mask; t.vals[j] != 0; j = (j + 1) & mask {
		// What is at j may move to i unless its own slot lies between them.
		if h := t.slot(t.keys[j]); (j-h)&mask >= (j-i)&mask {
			t.keys[i], t.vals[i] = t.keys[j], t.vals[j]
			i = j
		}
	}
	t.vals[i] = 0
}
