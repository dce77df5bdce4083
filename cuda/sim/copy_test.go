package sim

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

func filled(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)*5 + byte(i>>8) + seed
	}
	return b
}

// shows reads [p, p+len(want)) and compares.
func shows(t *testing.T, d *Driver, s cuda.Stream, p cuda.Ptr, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	ok(t, d.ReadBack(0, s, p, got))
	if !bytes.Equal(got, want) {
		t.Fatalf("%#x shows % x…, want % x…", uint64(p), got[:min(8, len(got))], want[:min(8, len(want))])
	}
}

var poison = bytes.Repeat([]byte{Poison}, 4096)

// Bytes belong to the chunk: they are seen through every mapping, stay while it has none, and go with it.
func TestContentsBelongToTheChunk(t *testing.T) {
	d := New(Options{Check: CheckOrder})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(64*mib, 0, 0))
	h := chunkAt(t, d, p, 2*mib)
	shows(t, d, s, p+mib, poison)
	want := filled(100_000, 1)
	ok(t, d.Write(0, s, p+12345, want))
	ok(t, d.MemMap(p+32*mib, 2*mib, h))
	ok(t, d.MemSetAccess(p+32*mib, 2*mib, []cuda.Device{0}))
	shows(t, d, s, p+32*mib+12345, want)
	shows(t, d, s, p+32*mib+12345-4096, poison)
	ok(t, d.Write(0, s, p+32*mib+12345, []byte{9}))
	want[0] = 9
	ok(t, d.StreamSynchronize(0, s))
	ok(t, d.MemUnmap(p, 2*mib))
	ok(t, d.MemUnmap(p+32*mib, 2*mib))
	wantFault(t, d.ReadBack(0, s, p, make([]byte, 1)), FaultUnmapped)
	wantFault(t, d.Write(0, s, p, make([]byte, 1)), FaultUnmapped)
	ok(t, d.MemMap(p+8*mib, 2*mib, h))
	ok(t, d.MemSetAccess(p+8*mib, 2*mib, []cuda.Device{0}))
	shows(t, d, s, p+8*mib+12345, want)
	ok(t, d.StreamSynchronize(0, s))
	ok(t, d.MemUnmap(p+8*mib, 2*mib))
	ok(t, d.MemRelease(h))
	chunkAt(t, d, p+8*mib, 2*mib)
	shows(t, d, s, p+8*mib+12345, poison)
}

// What is freed is undefined in its next block too.
func TestContentsGoWithTheBlock(t *testing.T) {
	d := New(Options{Check: CheckOrder})
	s := d.NewStream(0)
	pool := must[cuda.MemPool](t)(d.MemPoolDefault(0))
	keep := must[cuda.Ptr](t)(d.MemAlloc(0, 512)) // the slab stays
	for name, c := range map[string]struct {
		alloc func() (cuda.Ptr, error)
		free  func(p cuda.Ptr) error
	}{
		"small":  {func() (cuda.Ptr, error) { return d.MemAlloc(0, 4096) }, func(p cuda.Ptr) error { return d.MemFree(0, p) }},
		"large":  {func() (cuda.Ptr, error) { return d.MemAlloc(0, 3*mib) }, func(p cuda.Ptr) error { return d.MemFree(0, p) }},
		"pooled": {func() (cuda.Ptr, error) { return d.MemAllocAsync(0, 4096, pool, s) }, func(p cuda.Ptr) error { return d.MemFreeAsync(0, p, s) }},
	} {
		p := must[cuda.Ptr](t)(c.alloc())
		ok(t, d.Write(0, s, p, filled(4096, 2)))
		shows(t, d, s, p, filled(4096, 2))
		ok(t, d.StreamSynchronize(0, s))
		ok(t, c.free(p))
		again := must[cuda.Ptr](t)(c.alloc())
		if again != p {
			t.Fatalf("%s: %#x, then %#x", name, p, again)
		}
		shows(t, d, s, again, poison)
		ok(t, d.StreamSynchronize(0, s))
		ok(t, c.free(again))
	}
	ok(t, d.MemFree(0, keep))
}

// Memory that was never written takes none of the test's, nor does copying it about.
func TestContentsAreSparse(t *testing.T) {
	d := New(Options{})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(2*gib, 0, 0))
	chunkAt(t, d, p, gib)
	chunkAt(t, d, p+gib, gib)
	pages := func(p cuda.Ptr) int {
		if c := d.space.find(uint64(p)).chunk; c.data != nil {
			return len(c.data.pages)
		}
		return 0
	}
	ok(t, d.MemcpyAsync(0, p+gib, p, gib, s))
	if pages(p) != 0 || pages(p+gib) != 0 {
		t.Errorf("%d and %d pages of nothing", pages(p), pages(p+gib))
	}
	ok(t, d.Write(0, s, p+100*mib, []byte{1}))
	ok(t, d.MemcpyAsync(0, p+gib, p, gib, s))
	if pages(p) != 1 || pages(p+gib) != 1 {
		t.Errorf("%d and %d pages for a byte", pages(p), pages(p+gib))
	}
	shows(t, d, s, p+gib+100*mib-1, []byte{Poison, 1, Poison})
	buf := make([]byte, mib)
	ok(t, d.MemcpyAsync(0, addressOf(buf), p, mib, s))
	if buf[0] != Poison || buf[mib-1] != Poison {
		t.Error("unwritten memory reads as something")
	}
	ok(t, d.MemcpyAsync(0, p+mib, addressOf(buf), mib, s))
	if pages(p) != 1 {
		t.Errorf("%d pages for a byte and poison", pages(p))
	}
}

// Random copies between mappings, blocks and host memory against plain slices.
func TestCopiesAgainstBytes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	d := New(Options{Check: CheckOrder, Devices: 2})
	s := d.NewStream(0)
	ok(t, d.RetainContext(1))
	const size = 6 * mib
	p := must[cuda.Ptr](t)(d.AddressReserve(size, 0, 0))
	for i := range cuda.Ptr(3) {
		chunkAt(t, d, p+i*2*mib, 2*mib)
	}
	pool := must[cuda.MemPool](t)(d.MemPoolDefault(0))
	own := make([]byte, size)
	places := []cuda.Ptr{p, must[cuda.Ptr](t)(d.MemAlloc(0, size)), must[cuda.Ptr](t)(d.MemAlloc(1, size)),
		must[cuda.Ptr](t)(d.MemAllocAsync(0, size, pool, s)), must[cuda.Ptr](t)(d.HostAlloc(0, size)),
		must[cuda.Ptr](t)(d.ManagedAlloc(0, size)), addressOf(own)}
	model := make([][]byte, len(places))
	for i, q := range places {
		model[i] = filled(size, byte(i))
		b := filled(size, byte(i))
		ok(t, d.MemcpyAsync(0, q, addressOf(b), size, s))
		b[0]++ // it was there until here
	}
	for step := range 400 {
		i, j := rng.IntN(len(places)), rng.IntN(len(places))
		n := 1 + rng.IntN(1<<rng.IntN(22))
		from, to := rng.IntN(size-n+1), rng.IntN(size-n+1)
		if i == j {
			continue // overlap is undefined
		}
		ok(t, d.MemcpyAsync(0, places[j]+cuda.Ptr(to), places[i]+cuda.Ptr(from), uint64(n), s))
		copy(model[j][to:to+n], model[i][from:from+n])
		if step%50 == 0 {
			for k, q := range places {
				got := make([]byte, size)
				ok(t, d.MemcpyAsync(0, addressOf(got), q, size, s))
				if !bytes.Equal(got, model[k]) {
					t.Fatalf("seed %d, step %d: place %d is wrong", seed, step, k)
				}
			}
		}
	}
	own[0]++
}

// A copy takes the link's time on its stream, and none of the host's.
func TestCopiesTakeTime(t *testing.T) {
	d := New(Options{Devices: 2})
	s := d.NewStream(0)
	ok(t, d.RetainContext(1))
	a := must[cuda.Ptr](t)(d.MemAlloc(0, gib))
	b := must[cuda.Ptr](t)(d.MemAlloc(0, gib))
	c := must[cuda.Ptr](t)(d.MemAlloc(1, gib))
	pinned := must[cuda.Ptr](t)(d.HostAlloc(0, 16*mib))
	pageable := make([]byte, 16*mib)
	for name, m := range map[string]struct {
		dst, src cuda.Ptr
		size     uint64
		rate     float64
	}{
		"to pinned": {pinned, a, 16 * mib, 55.3e9}, "from pinned": {a, pinned, 16 * mib, 55.4e9},
		"to pageable": {addressOf(pageable), a, 16 * mib, 17e9}, "from pageable": {a, addressOf(pageable), 16 * mib, 9e9},
		"within": {a, b, gib, 2400e9}, "peer": {c, a, gib, 450e9},
	} {
		began := d.Now()
		ok(t, d.MemcpyAsync(0, m.dst, m.src, m.size, s))
		if d.Now() != began {
			t.Errorf("%s: the host waited", name)
		}
		ok(t, d.StreamSynchronize(0, s))
		if got, want := (d.Now() - began).Seconds(), float64(m.size)/m.rate; got < want*0.99 || got > want*1.01 {
			t.Errorf("%s: %v, want %v", name, time.Duration(got*1e9), time.Duration(want*1e9))
		}
	}
}

// Memory under a copy stays, and other uses of it come before or after.
func TestCopiesAreInOrder(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder})
	host := must[cuda.Ptr](t)(r.HostAlloc(0, 4*mib))
	ok(t, r.MemcpyAsync(0, host, r.p, 4*mib, r.n))
	wantFault(t, r.MemUnmap(r.p, 4*mib), FaultInUse)
	wantFault(t, r.HostFree(0, host), FaultInUse)
	ok(t, r.Read(0, r.m, r.p, 4*mib)) // it reads, too
	wantFault(t, r.Use(0, r.m, r.p+mib, 1), FaultRace)
	f := wantFault(t, r.MemcpyAsync(0, r.p, host, mib, r.m), FaultRace)
	if f.Op != "cuMemcpyAsync" {
		t.Error(f)
	}
	ok(t, r.ContextSynchronize(0))
	ok(t, r.MemUnmap(r.p, 4*mib))
	ok(t, r.HostFree(0, host))
	// By the clock alone.
	u := newRig(t, Options{Check: CheckUse})
	q := must[cuda.Ptr](t)(u.MemAlloc(0, 4*mib))
	ok(t, u.MemcpyAsync(0, q, u.p, 4*mib, u.n))
	wantFault(t, u.MemUnmap(u.p+2*mib, 2*mib), FaultInUse)
	u.Advance(ms)
	ok(t, u.MemUnmap(u.p+2*mib, 2*mib))
}

// Whatever is wrong with a copy is an error of the call: the program goes on.
func TestBadCopies(t *testing.T) {
	r := newRig(t, Options{Check: CheckOrder, Devices: 2})
	b := make([]byte, 8192)
	copied := func(dst, src cuda.Ptr, n uint64) error { return r.MemcpyAsync(0, dst, src, n, r.a) }
	for name, err := range map[string]error{
		"null":                  copied(0, r.p, 10),
		"from null":             copied(r.p, 0, 10),
		"past the end":          copied(r.p, ^cuda.Ptr(0)-5, 10),
		"not mapped":            copied(addressOf(b), r.p+4*mib, 10),
		"partly mapped":         copied(addressOf(b), r.p+4*mib-10, 20),
		"an address of nothing": copied(r.p, 8192, 10),
		"to one":                copied(8192, r.p, 10),
		"a wild one":            copied(1<<62, r.p, 10),
	} {
		wantCode(t, err, cuda.ErrInvalidValue)
		if err == nil {
			t.Error(name)
		}
	}
	ok(t, copied(r.p, r.p+mib, 0))
	wantFault(t, r.MemcpyAsync(0, r.p, r.p+mib, 10, 0x999999), FaultStream)
	h := must[cuda.Handle](t)(r.MemCreate(2*mib, cuda.MemProp{}))
	ok(t, r.MemMap(r.p+8*mib, 2*mib, h)) // without access
	wantFault(t, copied(r.p, r.p+8*mib, 10), FaultNoAccess)
	ok(t, r.BeginCapture(0, r.n))
	wantFault(t, r.MemcpyAsync(0, r.p, addressOf(b), 10, r.n), FaultCapture)
	if r.status(t, r.n) != cuda.CaptureActive {
		t.Error("the capture is spoilt")
	}
	b[0] = 1
}

// Two devices: memory that the calling device cannot use is copied by its own.
func TestPeerCopies(t *testing.T) {
	for _, noPeers := range []bool{false, true} {
		d := New(Options{Devices: 2, Isolated: noPeers, Check: CheckOrder})
		s := d.NewStream(0)
		ok(t, d.RetainContext(1))
		a := must[cuda.Ptr](t)(d.MemAlloc(0, mib))
		b := must[cuda.Ptr](t)(d.MemAlloc(1, mib))
		ok(t, d.Write(0, s, a, filled(mib, 3)))
		wantFault(t, d.Use(0, s, b, 1), FaultNoAccess)
		ok(t, d.MemcpyAsync(0, b, a, mib, s))
		got := make([]byte, mib)
		ok(t, d.MemcpyAsync(1, addressOf(got), b, mib, s))
		if !bytes.Equal(got, filled(mib, 3)) {
			t.Error("the peer has other bytes")
		}
	}
}
