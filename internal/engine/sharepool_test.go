package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// pooled is a pool over a stream-ordered pool of the driver's, whose memory other processes can be given.
func (p *party) pooled(o resource.AsyncOptions) (*engine.Pool, *resource.AsyncPool) {
	p.t.Helper()
	async, err := resource.Async(p.drv, 0, o)
	if err != nil {
		p.t.Fatal(err)
	}
	pool, err := p.dev.NewPool(memory.PoolID{8, uint64(async.Pool())}, config.PoolOptions{Upstream: resource.Statistics(async)})
	if err != nil {
		p.t.Fatal(err)
	}
	return pool, async
}

// Stream-ordered memory is shared by its pool's descriptor, and the blocks of a segment are opened as one.
func TestSharePooled(t *testing.T) {
	from, to := newParty(t, config.Options{}, sim.Options{}), newParty(t, config.Options{}, sim.Options{Devices: 2})
	pool, async := from.pooled(resource.AsyncOptions{Handles: cuda.HandlePosix})
	var ptrs, open [2]cuda.Ptr
	for i := range ptrs {
		var err error
		if ptrs[i], err = pool.Alloc(mib, from.st); err != nil {
			t.Fatal(err)
		}
	}
	before := to.drv.Leaks()
	for i, ptr := range ptrs {
		open[i] = to.mustOpen(from.export(ptr))
		to.used(open[i], mib)
	}
	if open[1]-open[0] != ptrs[1]-ptrs[0] || to.drv.Leaks().Asyncs != before.Asyncs+1 {
		t.Errorf("%#x are open at %#x: %+v", ptrs, open, to.drv.Leaks())
	}
	// What is open is opened to peers too, and so is what is opened later.
	if err := to.dev.Peers.Enable(1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := errors.Join(to.drv.Use(1, cuda.StreamLegacy, open[0], mib), to.drv.StreamSynchronize(1, cuda.StreamLegacy)); err != nil {
			t.Error(err)
		}
		to.close(open[0])
		to.close(open[1])
		for i, ptr := range ptrs {
			open[i] = to.mustOpen(from.export(ptr))
		}
	}
	to.close(open[0])
	to.close(open[1])
	if after := to.drv.Leaks(); after.Asyncs != before.Asyncs || after.Pools != before.Pools {
		t.Errorf("left %+v where %+v was", after, before)
	}
	for _, ptr := range ptrs {
		if err := from.a.Free(ptr); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(pool.Release(), async.Close()); err != nil {
		t.Error(err)
	}
	if l := from.drv.Leaks(); l.Asyncs != 0 || l.Pools != 0 {
		t.Errorf("the exporter has %+v", l)
	}
}

// Whichever driver call fails of the exporter or of the importer, nothing is left of it, and the next try succeeds.
func TestSharePooledFails(t *testing.T) {
	from, to := newParty(t, config.Options{}, sim.Options{}), newParty(t, config.Options{}, sim.Options{Devices: 2})
	if err := to.dev.Peers.Enable(1); err != nil { // so that opening sets access
		t.Fatal(err)
	}
	pool, _ := from.pooled(resource.AsyncOptions{Handles: cuda.HandlePosix})
	for _, p := range []*party{from, to} {
		failures := map[string]bool{}
		for k := uint64(1); ; k++ {
			ptr, err := pool.Alloc(30*mib, from.st) // a segment of its own
			if err != nil {
				t.Fatal(err)
			}
			n, failed, before, fds := uint64(0), "", to.drv.Leaks(), testkit.Descriptors(t)
			p.drv.FailCall(func(call string, _ uint64) cuda.Code {
				if n++; n == k {
					failed = call
					return cuda.ErrNotPermitted
				}
				return cuda.Success
			})
			e, err := from.a.Sharing.Export(ptr)
			var q cuda.Ptr
			if err == nil {
				q, err = to.open(e)
			}
			p.drv.FailCall(nil)
			if failed != "" {
				failures[failed] = true
				if !errors.Is(err, cuda.ErrNotPermitted) {
					t.Fatalf("%s failed: %v", failed, err)
				}
				if after := to.drv.Leaks(); after != before || p == to && testkit.Descriptors(t) > fds+1 { // the exporter's file
					t.Fatalf("%s failed: left %+v where %+v was", failed, after, before)
				}
				q, err = to.open(from.export(ptr))
			}
			if err != nil {
				t.Fatal(err)
			}
			to.used(q, 30*mib)
			to.close(q)
			if err := from.a.Free(ptr); err != nil {
				t.Error(err)
			}
			if failed == "" {
				break
			}
		}
		for _, call := range map[*party][]string{from: {"cuMemPoolExportPointer", "cuMemPoolExportToShareableHandle"},
			to: {"cuMemPoolImportFromShareableHandle", "cuMemPoolImportPointer", "cuMemPoolSetAccess"}}[p] {
			if !failures[call] {
				t.Errorf("%s was not made to fail: %v", call, failures)
			}
		}
	}
}

// A pool without handles says so.
func TestSharePooledWithoutHandles(t *testing.T) {
	from := newParty(t, config.Options{}, sim.Options{})
	pool, _ := from.pooled(resource.AsyncOptions{})
	ptr, err := pool.Alloc(mib, from.st)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := from.a.Sharing.Export(ptr); !errors.Is(err, cuda.ErrNotSupported) || !strings.Contains(err.Error(), "handles=posix") {
		t.Error(err)
	}
}
