package open

import (
	"bytes"
	"errors"
	"math"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// The part of the conformance suite that is about memory of other kinds, about copies, and about streams that the caller
// made. What it takes for granted of a GPU was seen on an H200 with driver 580.

// at is host memory by its address. (Go 1.26's compiler fails where this is inlined into a copy of a constant.)
//
//go:noinline
func at(p cuda.Ptr, size uint64) []byte {
	a := uintptr(p)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))), size)
}

// escaped keeps what address was given last: a slice that Go put on the stack would move with it.
var escaped atomic.Pointer[byte]

func address(b []byte) cuda.Ptr {
	escaped.Store(unsafe.SliceData(b))
	return cuda.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// standsIn reports whether the driver stands in for the real one, and refuses what the real one's answer to is not known.
func standsIn(t *testing.T) bool { return !strings.Contains(t.Name(), "/real/") }

func fill(b []byte, seed int) {
	for i := range b {
		b[i] = byte((i*7 + i>>8 + seed) & 0xff)
	}
}

func stream(t *testing.T, d cuda.Driver, dev cuda.Device) cuda.Stream {
	t.Helper()
	s, err := d.StreamCreate(dev, false)
	must(t, err)
	t.Cleanup(func() { must(t, d.StreamDestroy(dev, s)) })
	return s
}

// moves copies and waits for it.
func moves(t *testing.T, d cuda.Driver, dev cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) {
	t.Helper()
	must(t, d.MemcpyAsync(dev, dst, src, size, s))
	must(t, d.StreamSynchronize(dev, s))
}

// chunkAt maps a new chunk at p.
func chunkAt(t *testing.T, d cuda.Driver, p cuda.Ptr, size uint64, prop cuda.MemProp, devs ...cuda.Device) cuda.Handle {
	t.Helper()
	h, err := d.MemCreate(size, prop)
	must(t, err)
	must(t, d.MemMap(p, size, h))
	must(t, d.MemSetAccess(p, size, devs))
	return h
}

func hostMemory(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	s := stream(t, d, dev)
	p, err := d.HostAlloc(dev, g+100)
	must(t, err)
	fill(at(p, g+100), 1)
	q, err := d.MemAlloc(dev, g+100)
	must(t, err)
	moves(t, d, dev, q, p, g+100, s)
	want := bytes.Clone(at(p, g+100))
	clear(at(p, g+100))
	moves(t, d, dev, p, q, g+100, s)
	if !bytes.Equal(at(p, g+100), want) {
		t.Error("what comes back is not what was sent")
	}
	if standsIn(t) {
		fails(t, "a free in the middle", d.HostFree(dev, p+4096))
		_, err = d.HostAlloc(dev, 0)
		fails(t, "no bytes", err)
	}
	must(t, d.HostFree(dev, p))

	page := uint64(os.Getpagesize())
	own := make([]byte, 9*page)
	first := (address(own) + cuda.Ptr(page) - 1) / cuda.Ptr(page) * cuda.Ptr(page)
	fill(at(first, 8*page), 2)
	must(t, d.HostRegister(dev, first, 4*page))
	wants(t, d.HostRegister(dev, first, 4*page), cuda.ErrHostAlreadyRegistered)
	must(t, d.HostRegister(dev, first+cuda.Ptr(4*page), 4*page))
	moves(t, d, dev, q, first, 4*page, s)
	moves(t, d, dev, q+cuda.Ptr(4*page), first+cuda.Ptr(4*page), 4*page, s)
	wants(t, d.MemcpyAsync(dev, q, first, 8*page, s), cuda.ErrInvalidValue) // over two registrations
	must(t, d.HostUnregister(dev, first+cuda.Ptr(4*page)))
	must(t, d.HostUnregister(dev, first))
	wants(t, d.HostUnregister(dev, first), cuda.ErrHostNotRegistered)
	got := make([]byte, 8*page)
	moves(t, d, dev, address(got), q, 8*page, s)
	if !bytes.Equal(got, at(first, 8*page)) {
		t.Error("registered memory did not arrive")
	}
	must(t, d.MemFree(dev, q))
	runtime.KeepAlive(own)
}

func managedMemory(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	if info, err := d.DeviceInfo(dev); err != nil || !info.Managed {
		t.Skip("the device has no managed memory that both sides use", err)
	}
	s := stream(t, d, dev)
	p, err := d.ManagedAlloc(dev, 4*g)
	must(t, err)
	q, err := d.MemAlloc(dev, g)
	must(t, err)
	must(t, d.MemPrefetch(dev, p, 4*g, cuda.LocationDevice, s))
	must(t, d.StreamSynchronize(dev, s))
	fill(at(p, g), 3)
	moves(t, d, dev, q, p, g, s)
	must(t, d.MemPrefetch(dev, p, 4*g, cuda.LocationDevice, s))
	moves(t, d, dev, p+cuda.Ptr(g), q, g, s)
	must(t, d.MemPrefetch(dev, p+cuda.Ptr(g), g, cuda.LocationHostNUMA, s))
	must(t, d.StreamSynchronize(dev, s))
	if !bytes.Equal(at(p, g), at(p+cuda.Ptr(g), g)) {
		t.Error("the two halves differ")
	}
	fails(t, "prefetching other memory", d.MemPrefetch(dev, q, g, cuda.LocationDevice, s))
	must(t, d.MemFree(dev, p))
	must(t, d.MemFree(dev, q))
	_, err = d.ManagedAlloc(dev, 0)
	wants(t, err, cuda.ErrInvalidValue)
	_, err = d.ManagedAlloc(dev, 1<<50)
	fails(t, "1 PiB", err)
}

func hostChunks(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	info, err := d.DeviceInfo(dev)
	must(t, err)
	if !info.HostVMM || info.HostNUMA < 0 {
		t.Skip("the driver maps no host memory")
	}
	s := stream(t, d, dev)
	prop := cuda.MemProp{Device: dev, Location: cuda.LocationHostNUMA, NUMANode: info.HostNUMA}
	size := 16 * g
	p, err := d.AddressReserve(2*size, g, 0)
	must(t, err)
	free, _, err := d.MemInfo(dev)
	must(t, err)
	h := chunkAt(t, d, p, size, prop, dev)
	if now, _, err := d.MemInfo(dev); err != nil || now+size/2 < free { // page tables are the device's
		t.Errorf("the device has %d free, and had %d (%v)", now, free, err)
	}
	must(t, d.MemSetHostAccess(p, size, info.HostNUMA))
	b := make([]byte, 2*g)
	fill(b, 4)
	moves(t, d, dev, p, address(b), 2*g, s)
	must(t, d.MemMap(p+cuda.Ptr(size), size, h)) // the same bytes
	must(t, d.MemSetAccess(p+cuda.Ptr(size), size, []cuda.Device{dev}))
	got := make([]byte, 2*g)
	moves(t, d, dev, address(got), p+cuda.Ptr(size), 2*g, s)
	if !bytes.Equal(b, got) {
		t.Error("the other mapping shows other bytes")
	}
	must(t, d.MemRelease(h))
	must(t, d.MemUnmap(p, 2*size))
	must(t, d.AddressFree(p, 2*size))
}

// copies is about bytes that stay with their chunk, wherever it is mapped.
func copies(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	s := stream(t, d, dev)
	p, err := d.AddressReserve(8*g, g, 0)
	must(t, err)
	prop := cuda.MemProp{Device: dev}
	a := chunkAt(t, d, p, g, prop, dev)
	b := chunkAt(t, d, p+cuda.Ptr(g), g, prop, dev)
	sent, got := make([]byte, 2*g), make([]byte, 2*g)
	fill(sent, 5)
	moves(t, d, dev, p, address(sent), 2*g, s) // over two mappings
	must(t, d.MemUnmap(p, 2*g))
	for i, h := range []cuda.Handle{a, b} { // the other way about, elsewhere
		to := p + cuda.Ptr(uint64(5-i)*g)
		must(t, d.MemMap(to, g, h))
		must(t, d.MemSetAccess(to, g, []cuda.Device{dev}))
		must(t, d.MemRelease(h))
	}
	moves(t, d, dev, address(got), p+cuda.Ptr(4*g), 2*g, s)
	if !bytes.Equal(got[:g], sent[g:]) || !bytes.Equal(got[g:], sent[:g]) {
		t.Error("the chunks did not keep their bytes")
	}
	q, err := d.MemAlloc(dev, 2*g)
	must(t, err)
	moves(t, d, dev, q+100, p+cuda.Ptr(4*g)+33, g, s)
	clear(got)
	moves(t, d, dev, address(got), q+100, g, s)
	if !bytes.Equal(got[:g-33], sent[g+33:]) || !bytes.Equal(got[g-33:g], sent[:33]) {
		t.Error("a copy within the device went wrong")
	}
	must(t, d.MemcpyAsync(dev, q, p+cuda.Ptr(4*g), 0, s))
	must(t, d.StreamSynchronize(dev, s))
	must(t, d.MemFree(dev, q))
	must(t, d.MemUnmap(p+cuda.Ptr(4*g), 2*g))
	must(t, d.AddressFree(p, 8*g))
}

func pools(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	info, err := d.DeviceInfo(dev)
	must(t, err)
	if !info.Pools {
		t.Skip("the device has no memory pools")
	}
	s := stream(t, d, dev)
	for _, handles := range []cuda.HandleType{cuda.HandleNone, cuda.HandlePosix, cuda.HandleFabric} {
		if handles&^info.PoolHandles == 0 {
			p, err := d.MemPoolCreate(cuda.MemPoolProps{Device: dev, Handles: handles, MaxSize: 64 * g})
			must(t, err)
			must(t, d.MemPoolDestroy(dev, p))
		}
	}
	_, err = d.MemPoolCreate(cuda.MemPoolProps{Device: 99})
	wants(t, err, cuda.ErrInvalidDevice)
	pool, err := d.MemPoolCreate(cuda.MemPoolProps{Device: dev})
	must(t, err)
	get := func(a cuda.MemPoolAttr) uint64 {
		t.Helper()
		v, err := d.MemPoolGet(dev, pool, a)
		must(t, err)
		return v
	}
	if n := get(cuda.MemPoolReleaseThreshold); n != 0 {
		t.Errorf("a new pool keeps %d bytes", n)
	}
	for a := cuda.MemPoolReuseFollowEventDependencies; a <= cuda.MemPoolReuseAllowInternal; a++ {
		for _, v := range []uint64{0, 1} {
			must(t, d.MemPoolSet(dev, pool, a, v))
			if get(a) != v {
				t.Errorf("attribute %d is %d after it was set to %d", a, get(a), v)
			}
		}
	}
	fails(t, "a figure that is read only", d.MemPoolSet(dev, pool, cuda.MemPoolReservedCurrent, 1))
	if standsIn(t) {
		must(t, d.MemPoolSetAccess(dev, pool, []cuda.Device{dev}))
	}

	size := 3*g + 100
	p, err := d.MemAllocAsync(dev, size, pool, s)
	must(t, err)
	if p == 0 || p%256 != 0 {
		t.Errorf("allocated %#x", uint64(p))
	}
	if used, held := get(cuda.MemPoolUsedCurrent), get(cuda.MemPoolReservedCurrent); used < size || held < used {
		t.Errorf("%d used of %d with %d allocated", used, held, size)
	}
	b, got := make([]byte, size), make([]byte, size)
	fill(b, 6)
	must(t, d.MemcpyAsync(dev, p, address(b), size, s))
	moves(t, d, dev, address(got), p, size, s)
	if !bytes.Equal(b, got) {
		t.Error("what was allocated does not keep its bytes")
	}
	q, err := d.MemAllocAsync(dev, 8, pool, s)
	must(t, err)
	r, err := d.MemAllocAsync(dev, 8, pool, s)
	must(t, err)
	if q == r || q >= p && q < p+cuda.Ptr(size) {
		t.Errorf("%#x and %#x are two blocks beside %#x", uint64(q), uint64(r), uint64(p))
	}
	must(t, d.MemFreeAsync(dev, p, s))
	must(t, d.MemFreeAsync(dev, q, s))
	if standsIn(t) {
		// cuMemFree frees it as well, but the real driver (580) counts it as used from then on.
		must(t, d.StreamSynchronize(dev, s))
		must(t, d.MemFree(dev, r))
	} else {
		must(t, d.MemFreeAsync(dev, r, s))
	}
	must(t, d.StreamSynchronize(dev, s))
	if used, held := get(cuda.MemPoolUsedCurrent), get(cuda.MemPoolReservedCurrent); used != 0 || held != 0 {
		t.Errorf("%d used of %d after all was freed", used, held)
	}
	if get(cuda.MemPoolUsedHigh) < size || get(cuda.MemPoolReservedHigh) < size {
		t.Errorf("at most %d were used of %d", get(cuda.MemPoolUsedHigh), get(cuda.MemPoolReservedHigh))
	}
	must(t, d.MemPoolSet(dev, pool, cuda.MemPoolUsedHigh, 0))
	if get(cuda.MemPoolUsedHigh) != 0 {
		t.Error("the highest use was not reset")
	}

	// A pool that may keep all of its memory does, until it is trimmed.
	must(t, d.MemPoolSet(dev, pool, cuda.MemPoolReleaseThreshold, math.MaxUint64))
	p, err = d.MemAllocAsync(dev, size, pool, s)
	must(t, err)
	must(t, d.MemFreeAsync(dev, p, s))
	must(t, d.StreamSynchronize(dev, s))
	held := get(cuda.MemPoolReservedCurrent)
	if held < size {
		t.Errorf("%d are held", held)
	}
	must(t, d.MemPoolTrim(dev, pool, held))
	if get(cuda.MemPoolReservedCurrent) != held {
		t.Errorf("%d of %d are held when none need go", get(cuda.MemPoolReservedCurrent), held)
	}
	must(t, d.MemPoolTrim(dev, pool, 0))
	if n := get(cuda.MemPoolReservedCurrent); n != 0 {
		t.Errorf("%d are held when all could go", n)
	}

	zero, err := d.MemAllocAsync(dev, 0, pool, s)
	if zero != 0 || err != nil {
		t.Errorf("no bytes at %#x, %v", uint64(zero), err)
	}
	_, err = d.MemAllocAsync(dev, 1<<50, pool, s)
	wants(t, err, cuda.ErrOutOfMemory)

	// Freed on another stream, and on one that is gone before its work is.
	p, err = d.MemAllocAsync(dev, g, pool, s)
	must(t, err)
	must(t, d.StreamSynchronize(dev, s))
	must(t, d.MemFreeAsync(dev, p, cuda.StreamNull))
	gone, err := d.StreamCreate(dev, false)
	must(t, err)
	p, err = d.MemAllocAsync(dev, g, pool, gone)
	must(t, err)
	must(t, d.MemFreeAsync(dev, p, gone))
	must(t, d.StreamDestroy(dev, gone))
	must(t, d.ContextSynchronize(dev))
	if used := get(cuda.MemPoolUsedCurrent); used != 0 {
		t.Errorf("%d are used", used)
	}

	// What is allocated outlives its pool. After that libcuda 580 dies at the end of a pool of another device: see
	// lab/native/pools2.c.
	p, err = d.MemAllocAsync(dev, g, pool, s)
	must(t, err)
	if n, _ := d.DeviceCount(); n == 1 || standsIn(t) {
		must(t, d.MemPoolDestroy(dev, pool))
	}
	moves(t, d, dev, p, address(b), g, s)
	runtime.KeepAlive(b)
	must(t, d.MemFreeAsync(dev, p, s))
	must(t, d.StreamSynchronize(dev, s))

	own, err := d.MemPoolDefault(dev)
	must(t, err)
	if again, err := d.MemPoolDefault(dev); again != own || own == 0 || err != nil {
		t.Errorf("the device's own pool is %#x, then %#x, %v", own, again, err)
	}
	p, err = d.MemAllocAsync(dev, g, own, cuda.StreamLegacy)
	must(t, err)
	must(t, d.MemFreeAsync(dev, p, cuda.StreamLegacy))
	must(t, d.StreamSynchronize(dev, cuda.StreamLegacy))
}

func ownStreams(t *testing.T, d cuda.Driver, dev cuda.Device) {
	seen := map[cuda.StreamID]bool{}
	for _, blocking := range []bool{true, false} {
		s, err := d.StreamCreate(dev, blocking)
		must(t, err)
		if is, err := d.StreamBlocking(dev, s); is != blocking || err != nil {
			t.Errorf("a stream made blocking %v says %v, %v", blocking, is, err)
		}
		id, err := d.StreamID(dev, s)
		must(t, err)
		if seen[id] {
			t.Errorf("%+v twice", id)
		}
		seen[id] = true
		e, err := d.EventCreate(dev)
		must(t, err)
		must(t, d.EventRecord(dev, e, s))
		must(t, d.StreamDestroy(dev, s))
		must(t, d.EventSynchronize(dev, e))
		must(t, d.EventDestroy(dev, e))
	}
	for _, s := range []cuda.Stream{cuda.StreamNull, cuda.StreamLegacy, cuda.StreamPerThread} {
		if is, err := d.StreamBlocking(dev, s); !is || err != nil {
			t.Errorf("stream %d: blocking %v, %v", s, is, err)
		}
	}
	_, err := d.StreamCreate(99, true)
	if !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("a stream of no device: %v", err)
	}
}

// peerCopies copies between two devices that can use each other's memory, and lets one use the other's pool.
func peerCopies(t *testing.T, d cuda.Driver, dev, peer cuda.Device, g uint64) {
	s := stream(t, d, dev)
	a, err := d.MemAlloc(dev, g)
	must(t, err)
	b, err := d.MemAlloc(peer, g)
	must(t, err)
	sent, got := make([]byte, g), make([]byte, g)
	fill(sent, 7)
	must(t, d.MemcpyAsync(dev, a, address(sent), g, s))
	must(t, d.MemcpyAsync(dev, b, a, g, s))
	moves(t, d, dev, address(got), b, g, s)
	if !bytes.Equal(sent, got) {
		t.Error("what came by way of the peer is not what was sent")
	}
	must(t, d.MemFree(dev, a))
	must(t, d.MemFree(peer, b))
	pool, err := d.MemPoolCreate(cuda.MemPoolProps{Device: peer})
	must(t, err)
	must(t, d.MemPoolSetAccess(peer, pool, []cuda.Device{dev}))
	ps := stream(t, d, peer)
	p, err := d.MemAllocAsync(peer, g, pool, ps)
	must(t, err)
	must(t, d.StreamSynchronize(peer, ps))
	moves(t, d, dev, p, address(sent), g, s)
	runtime.KeepAlive(sent)
	must(t, d.MemFreeAsync(peer, p, ps))
	must(t, d.StreamSynchronize(peer, ps))
	must(t, d.MemPoolDestroy(peer, pool))
}
