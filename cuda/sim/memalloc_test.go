package sim

import (
	"math/rand/v2"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// What 64 blocks of each size took on an H200 with driver 580.
func TestSmallAllocationsArePacked(t *testing.T) {
	for _, c := range []struct{ size, bytes uint64 }{
		{512, 2 * mib}, {65536, 4 * mib}, {mib, 64 * mib}, {mib + 512, 128 * mib}, {1536 << 10, 128 * mib},
		{2*mib - 512, 128 * mib}, {2 * mib, 128 * mib}, {2*mib + 512, 256 * mib}, {3 * mib, 256 * mib},
	} {
		d := New(Options{})
		ok(t, d.RetainContext(0))
		var ps []cuda.Ptr
		for range 64 {
			p := must[cuda.Ptr](t)(d.MemAlloc(0, c.size))
			if p%512 != 0 {
				t.Errorf("%#x is not aligned", p)
			}
			ps = append(ps, p)
		}
		if got := d.ReservedBytes(0); got != c.bytes {
			t.Errorf("64 blocks of %d bytes take %d, measured %d", c.size, got, c.bytes)
		}
		for _, p := range ps {
			ok(t, d.MemFree(0, p))
		}
		if d.ReservedBytes(0) != 0 || d.Leaks() != (Live{}) || len(d.space.gaps) != 1 {
			t.Errorf("after freeing all: %d bytes, %+v", d.ReservedBytes(0), d.Leaks())
		}
	}
}

func TestFreeRules(t *testing.T) {
	d := New(Options{Check: CheckUse, Devices: 2})
	s := d.NewStream(0)
	ok(t, d.RetainContext(1))
	a := must[cuda.Ptr](t)(d.MemAlloc(0, 1000))
	b := must[cuda.Ptr](t)(d.MemAlloc(0, 3*mib))
	_, err := d.MemAlloc(0, 0)
	wantCode(t, err, cuda.ErrInvalidValue)
	for _, bad := range []cuda.Ptr{0, a + 512, a + 4096, b + 512, b + 2*mib, 1 << 62} {
		wantCode(t, d.MemFree(0, bad), cuda.ErrInvalidValue)
	}
	wantCode(t, d.MemFree(1, a), cuda.ErrInvalidValue) // another device's
	r := must[cuda.Ptr](t)(d.AddressReserve(2*mib, 0, 0))
	chunkAt(t, d, r, 2*mib)
	wantCode(t, d.MemFree(0, r), cuda.ErrInvalidValue)      // mapped, not allocated
	wantCode(t, d.MemUnmap(b, 4*mib), cuda.ErrInvalidValue) // allocated, not mapped
	if d.Calls().DeviceSyncs != 0 {
		t.Error("calls that failed have synchronised")
	}
	ok(t, d.Use(0, s, a, 1000))
	wantFault(t, d.Use(0, s, a, 1025), FaultUnmapped) // 1000 is rounded to 1024
	ok(t, d.Use(0, s, b, 3*mib))
	wantFault(t, d.Use(0, s, b, 3*mib+1), FaultUnmapped)
	ok(t, d.MemFree(0, a))
	wantCode(t, d.MemFree(0, a), cuda.ErrInvalidValue)
	wantFault(t, d.Use(0, s, a, 1), FaultUnmapped)
	ok(t, d.MemFree(0, b))
	wantFault(t, d.Use(0, s, b, 1), FaultUnmapped)
}

// Live blocks never overlap and freed room is used again, over random sizes.
func TestAllocationsNeverOverlap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	d := New(Options{Capacity: 256 * mib})
	ok(t, d.RetainContext(0))
	live := map[cuda.Ptr]uint64{}
	var order []cuda.Ptr
	for range 5000 {
		if len(order) > 0 && (rng.IntN(2) == 0 || len(order) > 200) {
			i := rng.IntN(len(order))
			p := order[i]
			order[i] = order[len(order)-1]
			order = order[:len(order)-1]
			delete(live, p)
			ok(t, d.MemFree(0, p))
			continue
		}
		size := uint64(1) << rng.IntN(22)
		size += rng.Uint64N(size)
		p, err := d.MemAlloc(0, size)
		if err != nil {
			wantCode(t, err, cuda.ErrOutOfMemory)
			continue
		}
		for q, n := range live {
			if uint64(p) < uint64(q)+n && uint64(q) < uint64(p)+size {
				t.Fatalf("%#x+%d overlaps %#x+%d", p, size, q, n)
			}
		}
		live[p] = size
		order = append(order, p)
		if d.ReservedBytes(0) > 256*mib {
			t.Fatal("beyond the capacity")
		}
	}
	for _, p := range order {
		ok(t, d.MemFree(0, p))
	}
	if d.ReservedBytes(0) != 0 || len(d.space.gaps) != 1 {
		t.Errorf("%d bytes and %d gaps are left", d.ReservedBytes(0), len(d.space.gaps))
	}
}
