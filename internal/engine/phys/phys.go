// Package phys keeps the physical memory of a device: the addresses reserved for it, the chunks that are mapped there, the
// unmaps that are put off, and the table of the owners of addresses. It does not know blocks or the work of streams: its owner,
// package engine, says what may be done, and changes blocks and records events from the results.
//
// # Chunks and mappings
//
// A chunk is one physical handle. It is owned (mapped in the area of one owner, at one address as far as that owner is
// concerned), or spare, or in the hands of the engine between the two. When a chunk moves, it is mapped at its new address
// first, and the old mapping becomes a stale mapping: the driver allows both at once, and stream order makes the new one usable
// immediately. A stale mapping is unmapped once the host knows that the work queued before the move is done. Until then
// kernels may still read and write through it, so its addresses are not mapped anew; nothing relies on an unmap waiting
// for the GPU.
//
// Memory of other processes is mapped apart from all this, and not counted (Imports).
//
// # Counting
//
// A chunk counts as reserved once, however often it is mapped: from its creation until its handle is released, which happens
// only when no mapping of it is left in this process. A chunk that moves counts in the size class of its new owner at once; a
// spare chunk counts as large.
//
// # Failures
//
// Each driver call may fail. Those that can fail come before the first change of state, and those before the failing one are
// undone: a method that returns an error has changed nothing. Undoing is an unmap and may fail itself; the mappings that stay
// are returned, or kept as stale mappings, still counted, and tried again with those (Memory.Reap). A chunk that cannot be
// released stays spare. Errors that break the context are reported to package health.
//
// # Locks
//
// It has none. The device's lock guards a Memory with all that it points to; an owner's lock its Area. A Table is read
// without a lock; its writers take turns by a lock of the engine's.
package phys

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

// Upstream is where chunks come from.
type Upstream interface {
	Create(size uint64) (cuda.Handle, error)
	Release(h cuda.Handle) error
}

// Memory is the physical memory of one device.
type Memory struct {
	Stale  StaleMappings
	Ranges Ranges
	Access Access

	health   *health.State
	quota    *quota.Device
	upstream Upstream // nil where the device has no chunks
	chunks   chunks
	spares   []ChunkID
	reaped   []StaleMapping // the result of Reap, reused
}

// New is a device without memory. Chunks come from u, and are counted in q.
func New(h *health.State, q *quota.Device, u Upstream) *Memory {
	return &Memory{health: h, quota: q, upstream: u, Access: Access{drv: h.Driver, devices: []cuda.Device{h.ID}}}
}

// Chunk is the record of a chunk; the pointer is valid until the next Create.
func (m *Memory) Chunk(id ChunkID) *Chunk { return &m.chunks.slab[id] }

// NewSerial numbers a piece of memory, whatever it is made of.
func (m *Memory) NewSerial() uint64 { return m.chunks.newSerial() }

// Create gets a chunk of the device. It is the caller's, to be assigned, made spare or given back.
func (m *Memory) Create(size uint64) (ChunkID, error) {
	h, err := m.upstream.Create(size)
	if err != nil {
		return 0, m.health.Failed(err)
	}
	m.quota.Got(size, true)
	return m.chunks.add(h, size), nil
}

// Release gives the handle of a chunk back that is mapped nowhere. The chunk stays, and counts, until it is renewed or given
// back.
func (m *Memory) Release(id ChunkID) error {
	k := m.Chunk(id)
	if err := m.upstream.Release(k.Handle); err != nil {
		return m.health.Failed(err)
	}
	k.Released = true
	return nil
}

// Renew gets a new handle for a chunk whose own was released.
func (m *Memory) Renew(id ChunkID) error {
	k := m.Chunk(id)
	h, err := m.upstream.Create(k.Size)
	if err != nil {
		return m.health.Failed(err)
	}
	k.Handle, k.Serial, k.Released = h, m.NewSerial(), false
	return nil
}

// Assign makes chunks, spare or the caller's, an owner's: those mapped one behind another from addr on.
func (m *Memory) Assign(addr uint64, owner int32, class int, ids ...ChunkID) {
	spares := false
	for _, id := range ids {
		k := m.Chunk(id)
		if k.spare {
			spares, k.spare = true, false
			m.quota.TakeSpare(k.Size)
		}
		k.Addr, k.Owner, k.Stamp, k.Stream, k.group = addr, owner, 0, -1, uint8(quota.GroupOf(class))
		m.quota.Physical[k.group].Join(k.Size)
		addr += k.Size
	}
	if spares {
		m.spares = slices.DeleteFunc(m.spares, func(id ChunkID) bool { return !m.Chunk(id).spare })
	}
}

// Leave takes a chunk from its owner; it is the caller's then. Its mapping becomes a stale mapping, to be unmapped behind the
// epoch of the stream, where the owner's block is in its place.
func (m *Memory) Leave(id ChunkID, block, stream int32, epoch uint64, recorded bool) {
	k := m.Chunk(id)
	m.Stale.Push(StaleMapping{Addr: k.Addr, Chunk: id, Block: block, Owner: k.Owner, Stream: stream, Epoch: epoch, Recorded: recorded})
	m.quota.Physical[k.group].Leave(k.Size)
	k.Owner = -1
}

// GiveBack ends an owner's chunk whose mappings were undone: it is released, unless it is already. It reports false where it
// could not be, or is still mapped elsewhere; then it is spare.
func (m *Memory) GiveBack(id ChunkID) bool {
	k := m.Chunk(id)
	if k.Mappings == 0 && (k.Released || m.Release(id) == nil) {
		m.quota.Physical[k.group].Remove(k.Size)
		m.quota.GaveBack(k.Size, true)
		m.chunks.drop(id)
		return true
	}
	m.quota.Physical[k.group].Leave(k.Size)
	m.AddSpare(id, -1, 0)
	return false
}

// AddSpare makes a chunk of the caller's spare, whose bytes are free behind the epoch of the stream; -1 is no stream.
func (m *Memory) AddSpare(id ChunkID, stream int32, epoch uint64) {
	k := m.Chunk(id)
	k.Addr, k.Owner, k.Stream, k.Stamp, k.spare = 0, -1, stream, epoch, true
	m.spares = append(m.spares, id)
	m.quota.AddSpare(k.Size)
}

// Spares are the spare chunks, those that have been spare for longest first.
func (m *Memory) Spares() []ChunkID { return m.spares }

// ReleaseSpares gives the spare chunks that are mapped nowhere back to the driver, of those that are chosen. It returns how many
// went, and the first error.
func (m *Memory) ReleaseSpares(chosen func(ChunkID) bool) (n int64, first error) {
	m.spares = slices.DeleteFunc(m.spares, func(id ChunkID) bool {
		k := m.Chunk(id)
		if k.Mappings > 0 || !chosen(id) {
			return false
		}
		if err := m.Release(id); err != nil {
			if first == nil {
				first = err
			}
			return false
		}
		m.quota.Spare -= k.Size
		m.quota.Physical[quota.GroupLarge].Remove(k.Size)
		m.quota.GaveBack(k.Size, true)
		m.chunks.drop(id)
		n++
		return true
	})
	return n, first
}
