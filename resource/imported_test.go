package resource_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/resource"
)

// A pool of one process is used by another, in stream order; it is opened to the importer's other device by the importer.
func TestImportedPool(t *testing.T) {
	if sim.Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	machine := sim.Options{Devices: 2, Capacity: 1 << 30, Handles: sim.Exportable, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }}
	a, b := sim.New(machine), sim.New(machine)
	t.Cleanup(func() { a.Close(); b.Close() })
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	plain, err := resource.Async(a, 0, resource.AsyncOptions{})
	ok(err)
	if _, err := plain.Export(); !errors.Is(err, cuda.ErrNotSupported) || !strings.Contains(err.Error(), "handles") {
		t.Errorf("a pool without handles: %v", err)
	}
	if _, err := plain.ExportPtr(1); !errors.Is(err, cuda.ErrNotSupported) {
		t.Errorf("memory of a pool without handles: %v", err)
	}
	pool, err := resource.Async(a, 0, resource.AsyncOptions{Handles: cuda.HandlePosix, Threshold: resource.Unlimited})
	ok(err)
	fd, err := pool.Export()
	ok(err)
	imported, err := resource.ImportAsync(b, 0, fd)
	ok(err)
	ok(os.NewFile(uintptr(fd), "pool").Close())
	if _, err := resource.ImportAsync(b, 0, 0); err == nil {
		t.Error("a descriptor of something else was imported")
	}
	s, r := a.NewStreamNonBlocking(0), b.NewStreamNonBlocking(0)
	b.NewStream(1)
	p, err := pool.Alloc(1<<20, 0, s)
	ok(err)
	name, err := pool.ExportPtr(p)
	ok(err)
	q, err := imported.ImportPtr(name)
	ok(err)
	ok(imported.EnablePeer(1))
	ok(a.StreamSynchronize(0, s))
	ok(b.Use(1, cuda.StreamLegacy, q, 1<<20))
	ok(b.StreamSynchronize(1, cuda.StreamLegacy))
	ok(imported.Free(q, r))
	ok(imported.Free(0, r))
	ok(b.StreamSynchronize(0, r))
	ok(pool.Free(p, 1<<20, 0, s))
	ok(a.StreamSynchronize(0, s))
	ok(imported.Close())
	ok(imported.Close())
	ok(pool.Close())
	ok(plain.Close())
	if l, m := a.Leaks(), b.Leaks(); l != (sim.Live{Streams: 1}) || m != (sim.Live{Streams: 2}) {
		t.Errorf("left %+v and %+v", l, m)
	}
}
