package sim

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

const gib = 1 << 30

// ok stops the test on an error.
var ok = testkit.Must

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		ok(t, err)
		return v
	}
}

func wantCode(t testing.TB, err error, code cuda.Code) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Fatalf("got %v, want %v", err, code)
	}
}

// chunkAt makes a chunk of size bytes and maps it at p with access for device 0.
func chunkAt(t testing.TB, d *Driver, p cuda.Ptr, size uint64) cuda.Handle {
	t.Helper()
	h := must[cuda.Handle](t)(d.MemCreate(size, cuda.MemProp{}))
	ok(t, d.MemMap(p, size, h))
	ok(t, d.MemSetAccess(p, size, []cuda.Device{0}))
	return h
}

func TestWorkUnderLag(t *testing.T) {
	d := New(Options{Lag: 20 * time.Millisecond, Check: CheckOrder})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	h := chunkAt(t, d, p, 2*mib)
	ok(t, d.Use(0, s, p, 4096))
	e := must[cuda.Event](t)(d.EventCreate(0))
	ok(t, d.EventRecord(0, e, s))
	if done, err := d.EventQuery(0, e); done || err != nil {
		t.Fatal(done, err)
	}
	d.Advance(20 * time.Millisecond)
	var f *Fault
	if err := d.MemUnmap(p, 2*mib); !errors.As(err, &f) || f.Kind != FaultInUse {
		t.Fatalf("unmap that the host did not wait for: %v", err)
	}
	if done, err := d.EventQuery(0, e); !done || err != nil {
		t.Fatal(done, err)
	}
	ok(t, d.MemUnmap(p, 2*mib))
	ok(t, d.MemRelease(h))
	ok(t, d.AddressFree(p, 64*mib))
	ok(t, d.EventDestroy(0, e))
	ok(t, d.DestroyStream(0, s))
	if l := d.Leaks(); l != (Live{}) {
		t.Fatalf("%+v", l)
	}
	if d.ReservedBytes(0) != 0 || d.PeakBytes(0) != 2*mib {
		t.Fatal(d.ReservedBytes(0), d.PeakBytes(0))
	}
	if d.Fault() == nil {
		t.Fatal("the fault was not kept")
	}
}
