package phys

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// Map maps chunks one behind another from addr on and makes them accessible. After an error none is mapped but those in left,
// the first ones, where undoing failed as well: the caller keeps their addresses out of use and puts their unmap off.
func (m *Memory) Map(addr uint64, ids []ChunkID) (left []ChunkID, err error) {
	n, at := 0, addr
	for ; n < len(ids) && err == nil; n++ {
		k := m.Chunk(ids[n])
		if err = m.health.Driver.MemMap(cuda.Ptr(at), k.Size, k.Handle); err != nil {
			break
		}
		k.Mappings++
		at += k.Size
	}
	if err == nil {
		err = m.Access.Set(cuda.Ptr(addr), at-addr)
	}
	if err == nil {
		return nil, nil
	}
	m.health.Failed(err)
	if n > 0 && m.Unmap(addr, ids[:n]) != nil {
		return ids[:n], err
	}
	return nil, err
}

// Unmap undoes the mappings of chunks that lie one behind another from addr on: all or none.
func (m *Memory) Unmap(addr uint64, ids []ChunkID) error {
	size := uint64(0)
	for _, id := range ids {
		size += m.Chunk(id).Size
	}
	if err := m.health.Driver.MemUnmap(cuda.Ptr(addr), size); err != nil {
		return m.health.Failed(err)
	}
	for _, id := range ids {
		m.Chunk(id).Mappings--
	}
	return nil
}

// Defer has the mappings of chunks that lie one behind another from addr on undone by Reap. No block covers their addresses,
// and the GPU is done with them.
func (m *Memory) Defer(addr uint64, ids []ChunkID) {
	for _, id := range ids {
		m.Stale.Push(StaleMapping{Addr: addr, Chunk: id, Owner: -1, Stream: -1, Published: Published, Recorded: true})
		addr += m.Chunk(id).Size
	}
}

// Reap unmaps the stale mappings that are over, the oldest first, and returns them: their addresses may be used again. The
// result is valid until the next call. Those whose unmap fails stay.
func (m *Memory) Reap(over func(StaleMapping) bool) []StaleMapping {
	m.reaped = m.reaped[:0]
	m.Stale.list = slices.DeleteFunc(m.Stale.list, func(z StaleMapping) bool {
		if !over(z) || m.Unmap(z.Addr, []ChunkID{z.Chunk}) != nil {
			return false
		}
		m.reaped = append(m.reaped, z)
		return true
	})
	return m.reaped
}

// StaleMapping is an old mapping of a chunk. It may be unmapped once the host knows that Epoch of Stream is over.
type StaleMapping struct {
	Addr  uint64
	Chunk ChunkID
	Block int32 // the owner's block for these addresses
	Owner int32 // index of the owning stream heap; -1: no block covers these addresses
	// Stream and Epoch say whose work must be done, as the engine counts them; Stream -1: it is done.
	Stream    int32
	Epoch     uint64
	Published Publication
	// Recorded says that the history has the end of this mapping already, or never had its beginning.
	Recorded bool
}

// Publication is how far observers were notified of a stale mapping before it is unmapped.
type Publication uint8

const (
	Unpublished    Publication = iota
	BeingPublished             // it must not be unmapped yet
	Published                  // or no observer ever knew of it
)

// StaleMappings are old mappings in the order in which they were made.
type StaleMappings struct {
	list []StaleMapping
}

// Push adds a stale mapping.
func (z *StaleMappings) Push(x StaleMapping) { z.list = append(z.list, x) }

// Len is the number of stale mappings.
func (z *StaleMappings) Len() int { return len(z.list) }

// All are the stale mappings, the oldest first; the caller may change their Published.
func (z *StaleMappings) All() []StaleMapping { return z.list }
