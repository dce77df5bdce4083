package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

const everything = ^uint64(0)

// givesBack is GiveBack, which must release what it says, and leave keep.
func (e *fixture) givesBack(t *testing.T, need, keep uint64) uint64 {
	t.Helper()
	before := e.drv.ReservedBytes(0)
	n, err := e.dev.GiveBack(need, keep)
	must(t, err)
	after := e.drv.ReservedBytes(0)
	if before-after != n || n > 0 && after < keep {
		t.Errorf("GiveBack(%d, %d) = %d: reserved went from %d to %d", need, keep, n, before, after)
	}
	if s := e.dev.Views.Stats(); uint64(s.Reserved.All.Current) != after || s.Reserved.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
		t.Errorf("%d bytes are reserved, the statistics say %+v", after, s)
	}
	return n
}

// handles are the sizes of the device's chunks.
func (e *fixture) handles() (sizes []uint64) {
	for _, h := range e.drv.Handles(0) {
		sizes = append(sizes, h.Size)
	}
	slices.Sort(sizes)
	return sizes
}

// The largest chunks go first, no more than are needed, and what is to stay stays.
func TestGiveBack(t *testing.T) {
	e := checked(t, config.Options{}, 80*gib, 1)
	st := e.streams[0]
	var blocks []cuda.Ptr
	for _, size := range []uint64{64 * mib, 4 * gib, 512 * kib, 100 * mib} {
		blocks = append(blocks, e.alloc(t, size, st))
	}
	if n := e.givesBack(t, everything, 0); n != 0 {
		t.Errorf("%d bytes of live blocks went", n)
	}
	for _, p := range blocks {
		e.free(t, p)
	}
	e.drv.Advance(time.Second)
	sizes := e.handles()
	largest := sizes[len(sizes)-1]
	if sizes[0] == largest {
		t.Fatalf("all chunks have %d bytes: nothing is tested", largest)
	}
	if n := e.givesBack(t, 3*largest, 0); n != 3*largest || len(e.handles()) != len(sizes)-3 {
		t.Errorf("%d bytes went as %d chunks, not as 3 of %d", n, len(sizes)-len(e.handles()), largest)
	}
	if n := e.givesBack(t, 3*largest-mib, 0); n != 3*largest {
		t.Errorf("%d bytes went of %d that were needed, not one chunk more", n, 3*largest-mib)
	}
	held := e.drv.ReservedBytes(0)
	if n := e.givesBack(t, everything, held-5*mib); n != 4*mib {
		t.Errorf("%d bytes went, not all that may in chunks of 2 MiB", n)
	}
	if n := e.givesBack(t, everything, held); n != 0 {
		t.Errorf("%d bytes went of those that are to stay", n)
	}
	e.givesBack(t, everything, 0)
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes stay", n)
	}
}

// What the GPU is known to be done with goes without a wait. What it may use is waited for when that does not suffice, and so
// is what other streams use.
func TestGiveBackWaits(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		t.Run(fmt.Sprint(backend), func(t *testing.T) {
			e := checked(t, config.Options{Backend: backend}, gib, 3)
			idle, more := e.alloc(t, 32*mib, e.streams[0]), e.alloc(t, 32*mib, e.streams[0])
			busy, shared := e.alloc(t, 32*mib, e.streams[1]), e.alloc(t, 32*mib, e.streams[1])
			e.use(t, e.streams[0], idle, 32*mib)
			e.free(t, idle)
			e.free(t, more)
			if e.givesBack(t, 2*mib, 0); e.dev.Views.Stats().StreamSyncs == 0 {
				t.Error("the stream was not waited for")
			}
			e.use(t, e.streams[1], busy, 32*mib)
			must(t, e.a.RecordStream(shared, e.streams[2]))
			e.use(t, e.streams[2], shared, 32*mib)
			e.free(t, busy)
			e.free(t, shared)
			waits := e.dev.Views.Stats().StreamSyncs
			if n := e.givesBack(t, 16*mib, 0); n < 16*mib || n > 32*mib || e.dev.Views.Stats().StreamSyncs != waits {
				t.Errorf("%d bytes went with %d waits", n, e.dev.Views.Stats().StreamSyncs-waits)
			}
			e.givesBack(t, everything, 0)
			// cuMemFree waits for all streams by itself.
			if n := e.drv.ReservedBytes(0); n != 0 || backend == config.BackendVMM && e.dev.Views.Stats().StreamSyncs == waits {
				t.Errorf("%d bytes stay after %d waits", n, e.dev.Views.Stats().StreamSyncs-waits)
			}
		})
	}
}

// Memory of captured graphs, of streams that are being captured and under observers stays; users' resources are not called.
func TestGiveBackLeaves(t *testing.T) {
	e := checked(t, config.Options{}, gib, 2)
	st := e.streams[0]
	graph := e.pool(t, 1, config.PoolOptions{})
	e.capture(t, st, graph, func() { e.free(t, fromPool(t, graph, 32*mib, st)) })
	if n := e.givesBack(t, everything, 0); n != 0 {
		t.Errorf("%d bytes of a captured graph went", n)
	}
	e.free(t, e.alloc(t, 32*mib, st))
	other := e.pool(t, 2, config.PoolOptions{})
	must(t, e.dev.Captures.Begin(st, other))
	must(t, e.drv.BeginCapture(0, st.Handle()))
	if n := e.givesBack(t, everything, 0); n != 0 {
		t.Errorf("%d bytes of a stream that is being captured went", n)
	}
	_, err := e.drv.EndCapture(0, st.Handle())
	must(t, err)
	must(t, e.dev.Captures.End(st))
	e.dev.OnUnmap(func(cuda.Ptr, uint64) { t.Error("an observer was called") })
	if n := e.givesBack(t, everything, 0); n != 0 {
		t.Errorf("%d bytes that are observed went", n)
	}
	e.dev.OnUnmap(nil)
	if n := e.givesBack(t, everything, 0); n != 32*mib {
		t.Errorf("%d bytes went of 32 MiB", n)
	}

	calls := 0
	pool := e.pool(t, 3, config.PoolOptions{Upstream: &upstream{Resource: resource.Device(e.drv, 0), observe: func(string, uint64) { calls++ }}})
	e.free(t, fromPool(t, pool, 32*mib, st))
	before := calls
	if n := e.givesBack(t, everything, 0); n != 0 || calls != before {
		t.Errorf("%d bytes of a user's resource went by %d calls", n, calls-before)
	}
	must(t, pool.Release())
}

// Segments of the engine's own go one by one, up to what is to stay.
func TestGiveBackSegments(t *testing.T) {
	for _, o := range []config.Options{{Backend: config.BackendMalloc}, {SingleHandle: true}} {
		t.Run(fmt.Sprint(o), func(t *testing.T) {
			e := checked(t, o, gib, 1)
			var blocks []cuda.Ptr
			for range 4 {
				blocks = append(blocks, e.alloc(t, 32*mib, e.streams[0]))
			}
			for _, p := range blocks {
				e.free(t, p)
			}
			if n := e.givesBack(t, 40*mib, 0); n != 64*mib {
				t.Errorf("%d bytes went of segments of 32 MiB", n)
			}
			if n := e.givesBack(t, everything, 33*mib); n != 0 {
				t.Errorf("%d bytes went, and one segment is too little", n)
			}
			if n := e.givesBack(t, everything, 32*mib); n != 32*mib {
				t.Errorf("%d bytes went of one segment", n)
			}
		})
	}
}

// Spare chunks and those of released pools go as well, and a driver call that fails loses nothing.
func TestGiveBackFails(t *testing.T) {
	e := checked(t, config.Options{}, gib, 1)
	pool := e.pool(t, 1, config.PoolOptions{})
	p := fromPool(t, pool, 32*mib, e.streams[0])
	must(t, pool.Release())
	e.free(t, p)
	q := e.alloc(t, 32*mib, e.streams[0])
	e.free(t, q)
	for _, call := range []string{"cuMemUnmap", "cuMemRelease"} {
		e.drv.FailCall(func(name string, _ uint64) cuda.Code {
			if name == call {
				return cuda.ErrInvalidValue
			}
			return cuda.Success
		})
		n, err := e.dev.GiveBack(everything, 0)
		e.drv.FailCall(nil)
		if n != 0 || call == "cuMemRelease" && err == nil {
			t.Errorf("%s failed: %d bytes went, %v", call, n, err)
		}
	}
	e.givesBack(t, everything, 0)
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes stay", n)
	}
	e.drv.Poison(0, cuda.ErrIllegalAddress)
	_, _ = e.dev.Alloc(mib, e.streams[0])
	if n, err := e.dev.GiveBack(everything, 0); n != 0 || err == nil {
		t.Errorf("a broken device gave %d bytes: %v", n, err)
	}
}
