package cistern_test

import (
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// A hole between blocks that is narrower than every chunk that is free is no reason to fail: there is room for those
// elsewhere.
func TestNarrowHole(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 16 * gib}, cistern.Options{}, 3)
	coarse := e.alloc(t, 14*gib, e.streams[0])
	x := e.alloc(t, 2*mib, e.streams[1])
	hole := e.alloc(t, 2*mib, e.streams[1])
	y := e.alloc(t, 2*mib, e.streams[1])
	z := e.alloc(t, 2*gib-6*mib, e.streams[2])
	e.free(t, hole)
	w := e.alloc(t, 2*mib, e.streams[2]) // takes the chunk from between the blocks
	e.free(t, coarse)
	v := e.alloc(t, 2*mib, e.streams[1])
	for _, p := range []cuda.Ptr{x, y, z, w, v} {
		e.free(t, p)
	}
}
