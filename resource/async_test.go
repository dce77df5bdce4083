package resource_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/resource"
)

// counted notes at which number of allocations pools are destroyed.
type counted struct {
	cuda.Driver
	out       int
	destroyed []int
}

func (c *counted) MemAllocAsync(d cuda.Device, size uint64, pool cuda.MemPool, s cuda.Stream) (cuda.Ptr, error) {
	p, err := c.Driver.MemAllocAsync(d, size, pool, s)
	if err == nil {
		c.out++
	}
	return p, err
}

func (c *counted) MemFreeAsync(d cuda.Device, p cuda.Ptr, s cuda.Stream) error {
	err := c.Driver.MemFreeAsync(d, p, s)
	if err == nil {
		c.out--
	}
	return err
}

func (c *counted) MemPoolDestroy(d cuda.Device, pool cuda.MemPool) error {
	c.destroyed = append(c.destroyed, c.out)
	return c.Driver.MemPoolDestroy(d, pool)
}

// A pool that is closed while memory of it is out is destroyed by the free of the last of it, and once.
func TestAsyncPoolOutlived(t *testing.T) {
	must := testkit.Must
	d := &counted{Driver: sim.New(sim.Options{Capacity: 1 << 30})}
	pool, err := resource.Async(d, 0, resource.AsyncOptions{})
	must(t, err)
	var blocks [3]cuda.Ptr
	for i := range blocks {
		blocks[i], err = pool.Alloc(1<<20, 0, cuda.StreamLegacy)
		must(t, err)
	}
	must(t, pool.Free(blocks[0], 1<<20, 0, cuda.StreamLegacy))
	must(t, pool.Close())
	must(t, pool.Close())
	must(t, pool.Free(blocks[1], 1<<20, 0, cuda.StreamLegacy))
	if len(d.destroyed) != 0 {
		t.Fatalf("destroyed with %v blocks out", d.destroyed)
	}
	must(t, pool.Free(blocks[2], 1<<20, 0, cuda.StreamLegacy))
	if len(d.destroyed) != 1 || d.destroyed[0] != 0 {
		t.Errorf("destroyed with %v blocks out, want once with none", d.destroyed)
	}
	must(t, pool.Close())
	if len(d.destroyed) != 1 {
		t.Errorf("destroyed %d times", len(d.destroyed))
	}
}
