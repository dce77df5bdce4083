package input

import (
	"fmt"
)

// Memory is bounded by what was read: a reader may hold memoryBase bytes, and memoryFactor bytes for each byte of the
// decompressed file that it has consumed, and of these no more than storedFactor for each byte of the file as it is
// stored. Everything whose size a file controls is charged before it is allocated, so counts and lengths that a file merely
// claims cost nothing. Real snapshots need about 1.1: a dict of 71 bytes becomes an event of 56, after it was kept in 8
// while the file was read. Real files of Cistern's format need 70 for each stored byte.
const (
	MemoryBase   = 24 << 20
	memoryFactor = 2
	storedFactor = 256
)

// A file that decompresses to more than ratioFree bytes must not exceed ratioMax times its compressed size. Real
// snapshots reach 16; the limit is what bounds the time that a bomb can take, and the memory, since that follows the
// decompressed size.
const (
	RatioFree = 16 << 20
	RatioMax  = 200
)

// Budget counts the bytes a reader holds against the bytes it has read. Nil is no bound.
type Budget struct {
	used   int64
	limit  int64
	Factor int64
	read   func() int64 // bytes of the decompressed file consumed so far
	stored func() int64 // bytes of the file as it is stored, at least those consumed
}

// NewBudget bounds a reader by how much it has read of the file, unpacked and as it is stored.
func NewBudget(read, stored func() int64) *Budget {
	return &Budget{limit: MemoryBase, Factor: memoryFactor, read: read, stored: stored}
}

// Take charges n bytes, or reports that the file asks for more than a file of its size may.
func (b *Budget) Take(n int64) error {
	if b == nil {
		return nil
	}
	b.used += n
	if b.used <= b.limit {
		return nil
	}
	unpacked, stored := b.Factor*b.read(), storedFactor*b.stored()
	b.limit = MemoryBase + min(unpacked, stored)
	switch {
	case b.used <= b.limit:
		return nil
	case unpacked <= stored:
		return fmt.Errorf("the file needs more memory than %d MiB + %d times its size; no valid recording does",
			MemoryBase>>20, b.Factor)
	}
	return fmt.Errorf("the file needs more memory than %d MiB + %d times its compressed size; no valid recording does",
		MemoryBase>>20, storedFactor)
}

// Give returns n bytes that were charged.
func (b *Budget) Give(n int64) { b.used -= n }

// Grow is append's growth with the memory charged: it returns s with room for one more.
func Grow[T any](b *Budget, s []T, size int64) ([]T, error) {
	if len(s) < cap(s) {
		return s, nil
	}
	n := max(16, cap(s)+cap(s)/2)
	if err := b.Take(int64(n) * size); err != nil {
		return s, err
	}
	t := make([]T, len(s), n)
	copy(t, s)
	b.Give(int64(cap(s)) * size)
	return t, nil
}
