// Package views makes what users read of a device (package memory) from values that the engine collects under its locks: sums
// by tag, library, stack and pool, statistics, segments, and the words about the stages of a request that failed.
//
// It has no locks. The engine's locks guard the arguments of its functions, and are held while they run.
package views

import (
	"cmp"
	"maps"
	"slices"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Usage is what live blocks add up to, by the number of a tag, a library or a stack.
type Usage map[uint32]memory.Use

// Add adds a block of which so many bytes have no physical memory.
func (u Usage) Add(number uint32, b *heap.Block, paused uint64) {
	x := u[number]
	u[number] = memory.Use{Blocks: x.Blocks + 1, Requested: x.Requested + b.Requested, Allocated: x.Allocated + b.Size, Paused: x.Paused + paused}
}

// Tags are the sums of a usage by tag, the most bytes first.
func (u Usage) Tags() []memory.TagUse {
	return listed(u, func(n uint32, x memory.Use) memory.TagUse { return memory.TagUse{Tag: n, Use: x} })
}

// Libraries are those of a usage by library.
func (u Usage) Libraries() []memory.LibraryUse {
	return listed(u, func(n uint32, x memory.Use) memory.LibraryUse { return memory.LibraryUse{Library: uint8(n), Use: x} })
}

// Stacks are those of a usage by stack.
func (u Usage) Stacks() []memory.StackUse {
	return listed(u, func(n uint32, x memory.Use) memory.StackUse { return memory.StackUse{Stack: n, Use: x} })
}

func listed[T any](u Usage, make func(uint32, memory.Use) T) (out []T) {
	numbers := slices.SortedFunc(maps.Keys(u), func(a, b uint32) int {
		return cmp.Or(cmp.Compare(u[b].Allocated, u[a].Allocated), cmp.Compare(a, b))
	})
	for _, n := range numbers {
		out = append(out, make(n, u[n]))
	}
	return out
}

// Heap is the memory of a stream heap.
type Heap struct {
	Now     *quota.Gauges
	Free    uint64 // bytes
	Paused  uint64 // bytes of blocks, without physical memory
	Spilled bool   // it belongs to the spill of its pool
}

// AddTo adds the stream heap to its pool.
func (h Heap) AddTo(p *memory.PoolUse) {
	allocated := uint64(h.Now[quota.Allocated])
	if h.Spilled {
		p.Spilled += allocated
	}
	p.Allocated += allocated
	p.Pending += uint64(h.Now[quota.ActiveBytes]) - allocated
	p.Free += h.Free
	p.Paused += h.Paused
}

// AddToStats does the same for the pool's statistics.
func (h Heap) AddToStats(p *memory.PoolStats) {
	p.Blocks += h.Now[quota.Allocs]
	p.Requested += uint64(h.Now[quota.Requested])
	p.Allocated += uint64(h.Now[quota.Allocated])
	p.Cached += uint64(h.Now[quota.FreeBytes])
	p.Paused += h.Paused
	if h.Spilled {
		p.Spilled += uint64(h.Now[quota.Allocated])
	}
}

// SortPools has the pool with the most bytes first.
func SortPools(list []memory.PoolUse) {
	slices.SortStableFunc(list, func(a, b memory.PoolUse) int { return cmp.Compare(b.Bytes(), a.Bytes()) })
}
