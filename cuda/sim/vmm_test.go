package sim

import (
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

func TestMapRules(t *testing.T) {
	d := New(Options{Check: CheckUse})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	h := must[cuda.Handle](t)(d.MemCreate(4*mib, cuda.MemProp{}))
	k := must[cuda.Handle](t)(d.MemCreate(2*mib, cuda.MemProp{}))
	dev := []cuda.Device{0}

	wantCode(t, d.MemMap(p, 2*mib, h), cuda.ErrNotSupported)        // a part of a chunk
	wantCode(t, d.MemMap(p, 8*mib, h), cuda.ErrInvalidValue)        // more than the chunk
	wantCode(t, d.MemMap(p+4096, 4*mib, h), cuda.ErrInvalidValue)   // not a multiple of the granularity
	wantCode(t, d.MemMap(p+62*mib, 4*mib, h), cuda.ErrInvalidValue) // beyond the reservation
	wantCode(t, d.MemMap(p-4*mib, 4*mib, h), cuda.ErrInvalidValue)  // not reserved
	wantCode(t, d.MemMap(p, 4*mib, 12345), cuda.ErrInvalidValue)    // no such handle
	ok(t, d.MemMap(p, 4*mib, h))
	wantCode(t, d.MemMap(p, 4*mib, h), cuda.ErrInvalidValue)       // mapped already
	wantCode(t, d.MemMap(p+2*mib, 2*mib, k), cuda.ErrInvalidValue) // half of it
	wantFault(t, d.Use(0, s, p, 1), FaultNoAccess)
	wantCode(t, d.MemSetAccess(p, 2*mib, dev), cuda.ErrInvalidValue)
	wantCode(t, d.MemSetAccess(p, 8*mib, dev), cuda.ErrInvalidValue)
	wantCode(t, d.MemSetAccess(p, 4*mib, nil), cuda.ErrInvalidValue)
	wantCode(t, d.MemSetAccess(p, 4*mib, []cuda.Device{1}), cuda.ErrInvalidDevice)
	ok(t, d.MemSetAccess(p, 4*mib, dev))
	ok(t, d.Use(0, s, p, 4*mib))
	ok(t, d.MemMap(p+4*mib, 2*mib, k))
	wantFault(t, d.Use(0, s, p, 4*mib+1), FaultNoAccess)

	wantCode(t, d.MemUnmap(p, 2*mib), cuda.ErrInvalidValue)
	wantCode(t, d.MemUnmap(p+2*mib, 4*mib), cuda.ErrInvalidValue)
	wantCode(t, d.MemUnmap(p, 8*mib), cuda.ErrInvalidValue) // a hole at the end
	wantCode(t, d.MemUnmap(p, 0), cuda.ErrInvalidValue)
	wantCode(t, d.AddressFree(p, 64*mib), cuda.ErrInvalidValue) // something is mapped
	if l := d.Leaks(); l.Mappings != 2 {
		t.Errorf("failed calls had effects: %+v", l)
	}
	ok(t, d.MemUnmap(p, 6*mib)) // two mappings in one call
	wantFault(t, d.Use(0, s, p, 1), FaultUnmapped)
	wantCode(t, d.AddressFree(p, 32*mib), cuda.ErrInvalidValue)
	wantCode(t, d.AddressFree(p+2*mib, 62*mib), cuda.ErrInvalidValue)
	ok(t, d.AddressFree(p, 64*mib))
	wantCode(t, d.AddressFree(p, 64*mib), cuda.ErrInvalidValue)
	ok(t, d.MemRelease(h))
	wantCode(t, d.MemRelease(h), cuda.ErrInvalidValue)
	ok(t, d.MemRelease(k))
	ok(t, d.DestroyStream(0, s))
	if l := d.Leaks(); l != (Live{}) {
		t.Errorf("%+v", l)
	}
}

// A chunk lives until its handle is released and its last mapping is gone, and counts once.
func TestChunkLivesWithHandleAndMappings(t *testing.T) {
	d := New(Options{})
	p := must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	h := chunkAt(t, d, p, 2*mib)
	ok(t, d.MemMap(p+8*mib, 2*mib, h))
	if m := d.Mappings(0); len(m) != 2 || m[0].Chunk != m[1].Chunk || m[0].Addr != p || m[1].Addr != p+8*mib ||
		len(m[0].Access) != 1 || len(m[1].Access) != 0 {
		t.Errorf("%+v", m)
	}
	if hs := d.Handles(0); len(hs) != 1 || hs[0].Handle != h || hs[0].Mappings != 2 || hs[0].Size != 2*mib {
		t.Errorf("%+v", hs)
	}
	steps := []func() error{
		func() error { return d.MemUnmap(p, 2*mib) },
		func() error { return d.MemRelease(h) },
		func() error { return d.MemUnmap(p+8*mib, 2*mib) },
	}
	for i, step := range steps {
		if d.ReservedBytes(0) != 2*mib {
			t.Errorf("before step %d: %d bytes", i, d.ReservedBytes(0))
		}
		ok(t, step())
	}
	if d.ReservedBytes(0) != 0 || d.Leaks().Chunks != 0 {
		t.Errorf("%d bytes, %+v", d.ReservedBytes(0), d.Leaks())
	}
	wantCode(t, d.MemMap(p, 2*mib, h), cuda.ErrInvalidValue)
}

func TestCapacity(t *testing.T) {
	d := New(Options{Capacity: 10 * mib, Devices: 2, HostCapacity: 4 * mib})
	ok(t, d.RetainContext(0))
	a := must[cuda.Handle](t)(d.MemCreate(6*mib, cuda.MemProp{}))
	must[cuda.Handle](t)(d.MemCreate(6*mib, cuda.MemProp{Device: 1}))
	_, err := d.MemCreate(6*mib, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	p := must[cuda.Ptr](t)(d.MemAlloc(0, 3*mib)) // takes 4
	_, err = d.MemAlloc(0, 1)
	wantCode(t, err, cuda.ErrOutOfMemory)
	if free, total, err := d.MemInfo(0); free != 0 || total != 10*mib || err != nil {
		t.Error(free, total, err)
	}
	ok(t, d.MemFree(0, p))
	d.SetOutside(0, 3*mib)
	_, err = d.MemCreate(2*mib, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	if free, _, _ := d.MemInfo(0); free != mib {
		t.Error(free)
	}
	ok(t, d.MemRelease(a))
	must[cuda.Handle](t)(d.MemCreate(6*mib, cuda.MemProp{}))
	if d.PeakBytes(0) != 10*mib {
		t.Error(d.PeakBytes(0))
	}
	d.ResetPeak(0)
	if d.PeakBytes(0) != 6*mib {
		t.Error(d.PeakBytes(0))
	}
	_, err = d.MemCreate(1<<62, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)

	host := cuda.MemProp{Location: cuda.LocationHostNUMA}
	hh := must[cuda.Handle](t)(d.MemCreate(4*mib, host))
	_, err = d.MemCreate(2*mib, host)
	wantCode(t, err, cuda.ErrOutOfMemory)
	if d.HostBytes() != 4*mib || d.ReservedBytes(0) != 6*mib {
		t.Error("host memory counts apart")
	}
	ok(t, d.MemRelease(hh))
}

func TestReservations(t *testing.T) {
	d := New(Options{AddressSpace: 64 * mib})
	take := func(size, align uint64, hint cuda.Ptr) cuda.Ptr {
		t.Helper()
		return must[cuda.Ptr](t)(d.AddressReserve(size, align, hint))
	}
	a := take(4*mib, 0, 0)
	b := take(4*mib, 0, 0)
	if b != a+4*mib {
		t.Errorf("first fit: %#x after %#x", b, a)
	}
	c := take(2*mib, 16*mib, 0)
	if c%(16*mib) != 0 || c == a {
		t.Errorf("aligned to 16 MiB: %#x", c)
	}
	if e := take(2*mib, 0, a+32*mib); e != a+32*mib {
		t.Errorf("a free hint was not taken: %#x", e)
	}
	if e := take(2*mib, 16*mib, a+34*mib); e%(16*mib) != 0 {
		t.Errorf("a hint against the alignment was taken: %#x", e)
	}
	if e := take(2*mib, 0, a); e == a || e != b+4*mib {
		t.Errorf("a taken hint: %#x", e)
	}
	ok(t, d.AddressFree(a, 4*mib))
	if e := take(2*mib, 0, 0); e != a {
		t.Errorf("the lowest gap was not taken: %#x", e)
	}
	for _, bad := range []struct {
		size, align uint64
		hint        cuda.Ptr
	}{{0, 0, 0}, {mib, 0, 0}, {2 * mib, 3 * mib, 0}, {2 * mib, 0, 12345}} {
		_, err := d.AddressReserve(bad.size, bad.align, bad.hint)
		wantCode(t, err, cuda.ErrInvalidValue)
	}
	_, err := d.AddressReserve(64*mib, 0, 0)
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = d.AddressReserve(1<<63, 0, a)
	wantCode(t, err, cuda.ErrOutOfMemory)
}

// A million remaps leave the driver where it was.
func TestRemapsLeaveNothing(t *testing.T) {
	d := New(Options{})
	p := must[cuda.Ptr](t)(d.AddressReserve(gib, 0, 0))
	h := must[cuda.Handle](t)(d.MemCreate(2*mib, cuda.MemProp{}))
	before := d.Leaks()
	for i := range 200_000 {
		at := p + cuda.Ptr(i%512)*2*mib
		ok(t, d.MemMap(at, 2*mib, h))
		ok(t, d.MemSetAccess(at, 2*mib, []cuda.Device{0}))
		ok(t, d.MemUnmap(at, 2*mib))
	}
	if d.Leaks() != before || len(d.space.gaps) != 1 || d.space.resv[0].mapped != 0 {
		t.Errorf("%+v, was %+v", d.Leaks(), before)
	}
	for i := range 1000 {
		_ = i
		ok(t, d.MemRelease(must[cuda.Handle](t)(d.MemCreate(2*mib, cuda.MemProp{}))))
	}
	if len(d.chunks) > 2 {
		t.Errorf("%d slots for chunks", len(d.chunks))
	}
}

func TestPeerAccess(t *testing.T) {
	d := New(Options{Devices: 2, Check: CheckUse})
	s0, s1 := d.NewStream(0), d.NewStream(1)
	p := must[cuda.Ptr](t)(d.AddressReserve(2*mib, 0, 0))
	chunkAt(t, d, p, 2*mib)
	ok(t, d.Use(0, s0, p, 512))
	wantFault(t, d.Use(1, s1, p, 512), FaultNoAccess)
	ok(t, d.MemSetAccess(p, 2*mib, []cuda.Device{0, 1}))
	ok(t, d.Use(1, s1, p, 512))
	a := must[cuda.Ptr](t)(d.MemAlloc(0, 512))
	wantFault(t, d.Use(1, s1, a, 512), FaultNoAccess)
}
