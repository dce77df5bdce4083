package engine_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/memory"
)

// TestNestedSegmentGoes: the first segment of a pool over another begins where that one's does. When it is given back the
// addresses of the other's still count.
func TestNestedSegmentGoes(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{SingleHandle: true}, 2)
	inner, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{Upstream: e.dev.DefaultPool().Resource()})
	must(t, err)
	var ptrs [2]cuda.Ptr
	for i := range ptrs {
		ptrs[i], err = inner.Alloc(100*kib, e.streams[i])
		must(t, err)
	}
	before := e.dev.Views.Stats().AddressBytes
	base, size, err := e.a.SegmentBase(ptrs[1])
	must(t, err)
	if base != ptrs[0] || before != size+4*mib {
		t.Fatalf("the segments are not nested as the test wants: %#x in [%#x, +%d), %d bytes of addresses", ptrs, base, size, before)
	}
	e.free(t, ptrs[0])
	must(t, inner.Trim())
	if after := e.dev.Views.Stats().AddressBytes; after != before-2*mib {
		t.Errorf("%d bytes of addresses were reserved, and %d are, after a segment of 2 MiB went", before, after)
	}
}
