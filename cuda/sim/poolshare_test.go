package sim

import (
	"bytes"
	"os"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// sharedPool is a pool of one driver that another has imported, with memory, and an event of each that the other has open.
type sharedPool struct {
	t              *testing.T
	a, b           *Driver
	at, bt         cuda.Stream
	pool, imported cuda.MemPool
	p, q           cuda.Ptr
	ae, af, be, bf cuda.Event // ae and be are a's own and b's own; af and bf the same, opened by the other
}

const sharedSize = 3*mib + 1000

func newSharedPool(t *testing.T, check CheckLevel) *sharedPool {
	t.Helper()
	if Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	x := &sharedPool{t: t, a: New(Options{Devices: 2, Handles: Exportable, Check: check}), b: New(Options{Devices: 2, Check: check, Lag: ms})}
	t.Cleanup(func() { ok(t, x.a.Close()); ok(t, x.b.Close()) })
	x.at, x.bt = x.a.NewStreamNonBlocking(0), x.b.NewStreamNonBlocking(0)
	x.pool = must[cuda.MemPool](t)(x.a.MemPoolCreate(cuda.MemPoolProps{Handles: cuda.HandlePosix}))
	fd := must[int](t)(x.a.MemPoolExport(0, x.pool))
	x.imported = must[cuda.MemPool](t)(x.b.MemPoolImport(0, fd))
	ok(t, os.NewFile(uintptr(fd), "pool").Close())
	x.ae = must[cuda.Event](t)(x.a.EventCreateShared(0))
	x.be = must[cuda.Event](t)(x.b.EventCreateShared(0))
	x.af = must[cuda.Event](t)(x.b.EventOpen(0, must[cuda.EventHandle](t)(x.a.EventExport(0, x.ae))))
	x.bf = must[cuda.Event](t)(x.a.EventOpen(0, must[cuda.EventHandle](t)(x.b.EventExport(0, x.be))))
	x.p = must[cuda.Ptr](t)(x.a.MemAllocAsync(0, sharedSize, x.pool, x.at))
	return x
}

func (x *sharedPool) open() {
	x.t.Helper()
	h := must[cuda.PoolPtr](x.t)(x.a.MemPoolExportPtr(0, x.p))
	if again := must[cuda.PoolPtr](x.t)(x.a.MemPoolExportPtr(0, x.p)); again != h {
		x.t.Errorf("its name is %x, then %x", h, again)
	}
	x.q = must[cuda.Ptr](x.t)(x.b.MemPoolImportPtr(0, x.imported, h))
}

// toB makes what b queues next come after what a has queued; toA the reverse.
func (x *sharedPool) toB() {
	x.t.Helper()
	ok(x.t, x.a.EventRecord(0, x.ae, x.at))
	ok(x.t, x.b.StreamWaitEvent(0, x.bt, x.af))
}

func (x *sharedPool) toA() {
	x.t.Helper()
	ok(x.t, x.b.EventRecord(0, x.be, x.bt))
	ok(x.t, x.a.StreamWaitEvent(0, x.at, x.bf))
}

// end gives everything back; the memory was freed.
func (x *sharedPool) end() {
	x.t.Helper()
	ok(x.t, x.a.EventDestroy(0, x.bf))
	ok(x.t, x.b.EventDestroy(0, x.af))
	ok(x.t, x.a.EventDestroy(0, x.ae))
	ok(x.t, x.b.EventDestroy(0, x.be))
	ok(x.t, x.b.StreamSynchronize(0, x.bt))
	ok(x.t, x.a.StreamSynchronize(0, x.at))
	ok(x.t, x.b.MemPoolDestroy(0, x.imported))
	ok(x.t, x.a.MemPoolDestroy(0, x.pool))
	for _, d := range []*Driver{x.a, x.b} {
		if l := d.Leaks(); l != (Live{Streams: 1}) || d.ReservedBytes(0) != 0 {
			x.t.Errorf("left %+v, %d bytes", l, d.ReservedBytes(0))
		}
	}
}

// Memory passes between two drivers in stream order, with its contents.
func TestSharedPool(t *testing.T) {
	x := newSharedPool(t, CheckOrder)
	a, b := x.a, x.b
	before, after := []byte("written before the export"), []byte("written after it")
	ok(t, a.Write(0, x.at, x.p+contentPage-5, before))
	x.open()
	for _, m := range []cuda.MemPoolAttr{cuda.MemPoolReservedCurrent, cuda.MemPoolUsedCurrent} {
		if n := must[uint64](t)(b.MemPoolGet(0, x.imported, m)); m == cuda.MemPoolUsedCurrent != (n >= sharedSize) {
			t.Errorf("attribute %d of the imported pool is %d", m, n)
		}
	}
	x.toB()
	got := make([]byte, len(before)+1)
	ok(t, b.ReadBack(0, x.bt, x.q+contentPage-5, got))
	if !bytes.Equal(got, append(before, Poison)) {
		t.Errorf("the importer reads %q", got)
	}
	ok(t, b.Write(0, x.bt, x.q+2*mib, after))
	x.toA()
	got = make([]byte, len(after))
	ok(t, a.ReadBack(0, x.at, x.p+2*mib, got))
	if !bytes.Equal(got, after) {
		t.Errorf("the exporter reads %q", got)
	}
	// Reads need no order among themselves, and bytes of their own no order at all.
	ok(t, a.Read(0, x.at, x.p, 100))
	ok(t, b.Read(0, x.bt, x.q, 100))
	x.toA()
	ok(t, a.Use(0, x.at, x.p, 100))
	ok(t, b.Use(0, x.bt, x.q+200, 100))
	x.toB()
	ok(t, b.MemFreeAsync(0, x.q, x.bt))
	wantFault(t, b.Use(0, x.bt, x.q, 1), FaultUnmapped)
	x.toA()
	ok(t, a.MemFreeAsync(0, x.p, x.at))
	if next := must[cuda.Ptr](t)(a.MemAllocAsync(0, sharedSize, x.pool, x.at)); next != x.p {
		t.Errorf("the memory at %#x is used no more: the next is at %#x", uint64(x.p), uint64(next))
	}
	ok(t, a.ReadBack(0, x.at, x.p+2*mib, got))
	if got[0] != Poison {
		t.Errorf("new memory has old contents: %q", got)
	}
	ok(t, a.MemFreeAsync(0, x.p, x.at))
	x.end()
}

// What the rules forbid is found, and what a host has seen is order too.
func TestSharedPoolFaults(t *testing.T) {
	t.Run("allocating", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		_, err := x.b.MemAllocAsync(0, 100, x.imported, x.bt)
		wantCode(t, err, cuda.ErrInvalidValue)
		_, err = x.b.MemPoolExport(0, x.imported)
		wantCode(t, err, cuda.ErrInvalidValue)
	})
	t.Run("access", func(t *testing.T) {
		x := newSharedPool(t, CheckUse)
		ok(t, x.a.MemPoolSetAccess(0, x.pool, []cuda.Device{1})) // which is the exporter's alone
		x.open()
		x.b.NewStream(1)
		wantFault(t, x.b.Use(1, cuda.StreamLegacy, x.q, 1), FaultNoAccess)
		ok(t, x.b.MemPoolSetAccess(0, x.imported, []cuda.Device{1}))
		ok(t, x.b.Use(1, cuda.StreamLegacy, x.q, 1))
	})
	t.Run("the allocation", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		wantFault(t, x.b.Use(0, x.bt, x.q, 1), FaultRace)
	})
	t.Run("use", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		x.toB()
		ok(t, x.b.Use(0, x.bt, x.q, 100))
		wantFault(t, x.a.Read(0, x.at, x.p+99, 1), FaultRace)
	})
	t.Run("the host", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		ok(t, x.a.StreamSynchronize(0, x.at))
		ok(t, x.b.Use(0, x.bt, x.q, 100))
		ok(t, x.b.EventRecord(0, x.be, x.bt))
		if done := must[bool](t)(x.a.EventQuery(0, x.bf)); done {
			t.Error("work of the other driver takes no time")
		}
		ok(t, x.a.EventSynchronize(0, x.bf))
		ok(t, x.a.Use(0, x.at, x.p, 100))
	})
	t.Run("freed before the importer's free", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		wantFault(t, x.a.MemFreeAsync(0, x.p, x.at), FaultShared)
		ok(t, x.a.StreamSynchronize(0, x.at))
		wantFault(t, x.a.MemFree(0, x.p), FaultShared)
		ok(t, x.b.MemFreeAsync(0, x.q, x.bt))
		ok(t, x.b.StreamSynchronize(0, x.bt))
		ok(t, x.a.MemFree(0, x.p))
		x.end()
	})
	t.Run("freed without order after the importer's free", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		x.toB()
		ok(t, x.b.MemFreeAsync(0, x.q, x.bt))
		wantFault(t, x.a.MemFreeAsync(0, x.p, x.at), FaultRace)
	})
	t.Run("freed by a host that has not seen the importer's free", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		x.toB()
		ok(t, x.a.StreamSynchronize(0, x.at))
		ok(t, x.b.MemFreeAsync(0, x.q, x.bt))
		wantFault(t, x.a.MemFree(0, x.p), FaultInUse)
		ok(t, x.b.StreamSynchronize(0, x.bt))
		ok(t, x.a.MemFree(0, x.p))
	})
	t.Run("freed by the importer on a stream without order", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		x.open()
		x.toB()
		ok(t, x.b.Use(0, x.bt, x.q, 1))
		wantFault(t, x.b.MemFreeAsync(0, x.q, x.b.NewStreamNonBlocking(0)), FaultRace)
		wantFault(t, x.b.MemFree(0, x.q), FaultInUse)
		ok(t, x.b.StreamSynchronize(0, x.bt))
		ok(t, x.b.MemFree(0, x.q))
	})
	t.Run("imported after the free", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		h := must[cuda.PoolPtr](t)(x.a.MemPoolExportPtr(0, x.p))
		ok(t, x.a.MemFreeAsync(0, x.p, x.at))
		_, err := x.b.MemPoolImportPtr(0, x.imported, h)
		wantCode(t, err, cuda.ErrInvalidValue)
	})
	t.Run("names", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		h := must[cuda.PoolPtr](t)(x.a.MemPoolExportPtr(0, x.p))
		own := must[cuda.MemPool](t)(x.b.MemPoolCreate(cuda.MemPoolProps{}))
		_, err := x.b.MemPoolImportPtr(0, own, h)
		wantCode(t, err, cuda.ErrInvalidValue)
		other := must[cuda.MemPool](t)(x.a.MemPoolCreate(cuda.MemPoolProps{Handles: cuda.HandlePosix}))
		p := must[cuda.Ptr](t)(x.a.MemAllocAsync(0, 100, other, x.at))
		_, err = x.b.MemPoolImportPtr(0, x.imported, must[cuda.PoolPtr](t)(x.a.MemPoolExportPtr(0, p)))
		wantCode(t, err, cuda.ErrInvalidValue)
		_, err = x.a.MemPoolExportPtr(0, p+512)
		wantCode(t, err, cuda.ErrInvalidValue)
		q := must[cuda.Ptr](t)(x.b.MemAllocAsync(0, 100, own, x.bt))
		_, err = x.b.MemPoolExportPtr(0, q)
		wantCode(t, err, cuda.ErrInvalidValue)
		_, err = x.b.MemPoolExport(0, own)
		wantCode(t, err, cuda.ErrInvalidValue)
		_, err = x.b.MemPoolImportPtr(0, x.imported, cuda.PoolPtr{})
		wantCode(t, err, cuda.ErrInvalidValue)
	})
	t.Run("events", func(t *testing.T) {
		x := newSharedPool(t, CheckOrder)
		ok(t, x.b.StreamWaitEvent(0, x.bt, x.af)) // nothing was recorded
		e := must[cuda.Event](t)(x.a.EventCreate(0))
		_, err := x.a.EventExport(0, e)
		wantCode(t, err, cuda.ErrInvalidHandle)
		_, err = x.a.EventOpen(0, must[cuda.EventHandle](t)(x.a.EventExport(0, x.ae)))
		wantCode(t, err, cuda.ErrInvalidContext)
		_, err = x.b.EventOpen(0, cuda.EventHandle{})
		wantCode(t, err, cuda.ErrInvalidValue)
		_, err = x.b.EventExport(0, x.af)
		wantCode(t, err, cuda.ErrInvalidHandle)
		h := must[cuda.EventHandle](t)(x.a.EventExport(0, x.ae))
		ok(t, x.a.EventDestroy(0, x.ae))
		wantFault(t, x.b.StreamWaitEvent(0, x.bt, x.af), FaultShared)
		wantFault(t, x.b.EventRecord(0, x.af, x.bt), FaultShared)
		_, err = x.b.EventOpen(0, h)
		wantCode(t, err, cuda.ErrInvalidHandle)
	})
}

// A state that another process wrote is read without a crash, and what is accepted is written the same.
func FuzzBlockState(f *testing.F) {
	d := New(Options{Check: CheckOrder})
	s := &blockState{uses: ranges{hi: 1000}, openers: []opener{{1, 2, 3, 1}}, hosts: []fileName{{driver: 1, serial: 2, pid: 3, fd: 4}}}
	f.Add(d.encodeBlock(s))
	var e encoder
	for _, v := range []uint64{1, 0, 0, 1, 0, 1000, 7, 0, 9, 1, 8, 1, 4} {
		e.number(v)
	}
	f.Add([]byte(e))
	f.Fuzz(func(t *testing.T, b []byte) {
		d := New(Options{Check: CheckOrder})
		s, err := d.decodeBlock(b, 1000)
		if err != nil {
			return
		}
		again, err := d.decodeBlock(d.encodeBlock(s), 1000)
		ok(t, err)
		if !bytes.Equal(d.encodeBlock(again), d.encodeBlock(s)) {
			t.Errorf("%x becomes %x, then %x", b, d.encodeBlock(s), d.encodeBlock(again))
		}
	})
}
