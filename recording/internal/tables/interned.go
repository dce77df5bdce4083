package tables

import (
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// Interned numbers values in the order in which they are first seen. The last one asked for is found at once: runs of
// the same stream are the rule.
type Interned struct {
	Vals []uint64
	ids  map[uint64]uint32
	last uint32
}

// ID is the number of v.
func (t *Interned) ID(v uint64) uint32 {
	if int(t.last) < len(t.Vals) && t.Vals[t.last] == v {
		return t.last
	}
	if id, ok := t.ids[v]; ok {
		t.last = id
		return id
	}
	if t.ids == nil {
		t.ids = map[uint64]uint32{}
	}
	t.last = uint32(len(t.Vals))
	t.Vals = append(t.Vals, v)
	t.ids[v] = t.last
	return t.last
}

// Charged is ID with the memory of a new value charged.
func (t *Interned) Charged(b *input.Budget, v uint64) (uint32, error) {
	n := len(t.Vals)
	id := t.ID(v)
	if len(t.Vals) > n {
		return id, b.Take(64)
	}
	return id, nil
}
