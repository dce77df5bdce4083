package pytorch

import (
	"hash/maphash"
	"math/bits"

	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// strtab interns strings: equal strings have equal ids. Text lies in large pieces without pointers, so that a file of
// a million distinct strings costs little more than the strings.
type strtab struct {
	b     *input.Budget
	seed  maphash.Seed
	text  [][]byte // pieces; the last has room
	ents  []strent
	slots []uint32 // open addressing, id+1; a power of two, at most half full
	mask  uint32
}

type strent struct {
	piece, off, n, hash uint32
}

const strPiece = 64 << 10

func newStrtab(b *input.Budget) *strtab {
	t := &strtab{b: b, seed: maphash.MakeSeed(), slots: make([]uint32, 1024), mask: 1023}
	return t
}

// get is the text of id, valid until the table is dropped.
func (t *strtab) get(id uint64) []byte {
	e := t.ents[id]
	return t.text[e.piece][e.off : e.off+e.n : e.off+e.n]
}

// id interns s.
func (t *strtab) id(s []byte) (uint32, error) {
	h := uint32(maphash.Bytes(t.seed, s))
	i := h & t.mask
	for ; t.slots[i] != 0; i = (i + 1) & t.mask {
		e := &t.ents[t.slots[i]-1]
		if e.hash == h && int(e.n) == len(s) && string(t.get(uint64(t.slots[i]-1))) == string(s) {
			return t.slots[i] - 1, nil
		}
	}
	var err error
	if t.ents, err = input.Grow(t.b, t.ents, 16); err != nil {
		return 0, err
	}
	last := len(t.text) - 1
	if last < 0 || cap(t.text[last])-len(t.text[last]) < len(s) {
		n := max(strPiece, len(s))
		if err := t.b.Take(int64(n) + 24); err != nil {
			return 0, err
		}
		t.text = append(t.text, make([]byte, 0, n))
		last++
	}
	off := len(t.text[last])
	t.text[last] = append(t.text[last], s...)
	t.ents = append(t.ents, strent{uint32(last), uint32(off), uint32(len(s)), h})
	id := uint32(len(t.ents) - 1)
	t.slots[i] = id + 1
	if len(t.ents)*2 > len(t.slots) {
		return id, t.rehash()
	}
	return id, nil
}

func (t *strtab) rehash() error {
	n := 1 << bits.Len(uint(len(t.ents)*2))
	if err := t.b.Take(int64(n) * 4); err != nil {
		return err
	}
	t.b.Give(int64(len(t.slots)) * 4)
	t.slots, t.mask = make([]uint32, n), uint32(n-1)
	for id := range t.ents {
		i := t.ents[id].hash & t.mask
		for t.slots[i] != 0 {
			i = (i + 1) & t.mask
		}
		t.slots[i] = uint32(id) + 1
	}
	return nil
}
