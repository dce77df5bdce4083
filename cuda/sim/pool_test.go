package sim

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// pooled is a rig with a pool.
type pooled struct {
	rig
	t    *testing.T
	pool cuda.MemPool
}

func newPooled(t *testing.T, o Options) pooled {
	t.Helper()
	r := newRig(t, o)
	return pooled{r, t, must[cuda.MemPool](t)(r.MemPoolCreate(cuda.MemPoolProps{}))}
}

func (p pooled) get(a cuda.MemPoolAttr) uint64 {
	p.t.Helper()
	return must[uint64](p.t)(p.MemPoolGet(0, p.pool, a))
}

func (p pooled) alloc(size uint64, s cuda.Stream) cuda.Ptr {
	p.t.Helper()
	return must[cuda.Ptr](p.t)(p.MemAllocAsync(0, size, p.pool, s))
}

// What a pool holds, as seen on an H200 with driver 580.
func TestPoolHolds(t *testing.T) {
	p := newPooled(t, Options{})
	base := p.ReservedBytes(0)
	a := p.alloc(64*mib+100, p.n)
	if held, used := p.get(cuda.MemPoolReservedCurrent), p.get(cuda.MemPoolUsedCurrent); held != 96*mib || used != 64*mib+100 {
		t.Errorf("%d used of %d", used, held)
	}
	if p.ReservedBytes(0) != base+96*mib {
		t.Errorf("the device gave %d", p.ReservedBytes(0)-base)
	}
	b := p.alloc(100, p.n) // from what is there
	if b%512 != 0 || p.get(cuda.MemPoolReservedCurrent) != 96*mib || p.Leaks().Asyncs != 2 {
		t.Errorf("%#x of %d, %+v", b, p.get(cuda.MemPoolReservedCurrent), p.Leaks())
	}
	ok(t, p.MemFreeAsync(0, a, p.n))
	ok(t, p.MemFreeAsync(0, b, p.n))
	if p.get(cuda.MemPoolUsedCurrent) != 0 || p.get(cuda.MemPoolReservedCurrent) != 96*mib {
		t.Error("memory went before the host waited")
	}
	ok(t, p.StreamSynchronize(0, p.n))
	if p.get(cuda.MemPoolReservedCurrent) != 0 || p.ReservedBytes(0) != base || p.get(cuda.MemPoolUsedHigh) != 64*mib+200 ||
		p.get(cuda.MemPoolReservedHigh) != 96*mib {
		t.Errorf("%d held, at most %d used of %d", p.get(cuda.MemPoolReservedCurrent), p.get(cuda.MemPoolUsedHigh), p.get(cuda.MemPoolReservedHigh))
	}
	ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolUsedHigh, 0))
	if p.get(cuda.MemPoolUsedHigh) != 0 {
		t.Error("not reset")
	}
}

// Each way of waiting makes a pool give back what is above its threshold, and nothing else does.
func TestPoolThreshold(t *testing.T) {
	for name, wait := range map[string]func(p pooled) error{
		"stream":  func(p pooled) error { return p.StreamSynchronize(0, p.m) },
		"event":   func(p pooled) error { return p.EventSynchronize(0, eventOn(p.t, p.Driver, p.m)) },
		"context": func(p pooled) error { return p.ContextSynchronize(0) },
	} {
		for _, c := range []struct{ threshold, left uint64 }{{0, 0}, {64 * mib, 64 * mib}, {math.MaxUint64, 96 * mib}} {
			p := newPooled(t, Options{})
			ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolReleaseThreshold, c.threshold))
			var blocks []cuda.Ptr
			for range 3 {
				blocks = append(blocks, p.alloc(32*mib, p.n))
			}
			for _, b := range blocks {
				ok(t, p.MemFreeAsync(0, b, p.n))
			}
			_ = must[bool](t)(p.EventQuery(0, eventOn(t, p.Driver, p.n)))
			if p.get(cuda.MemPoolReservedCurrent) != 96*mib {
				t.Errorf("%s: memory went without a wait", name)
			}
			ok(t, wait(p))
			if got := p.get(cuda.MemPoolReservedCurrent); got != c.left {
				t.Errorf("%s with a threshold of %d: %d left, want %d", name, c.threshold, got, c.left)
			}
			ok(t, p.MemPoolTrim(0, p.pool, 40*mib))
			if got := p.get(cuda.MemPoolReservedCurrent); got != min(c.left, 64*mib) {
				t.Errorf("%d left of %d after trimming to 40 MiB", got, c.left)
			}
			ok(t, p.MemPoolTrim(0, p.pool, 0))
			if got := p.get(cuda.MemPoolReservedCurrent); got != 0 {
				t.Errorf("%d left after trimming", got)
			}
		}
	}
}

// Memory whose free is not complete stays.
func TestPoolKeepsWhatIsPending(t *testing.T) {
	p := newPooled(t, Options{Lag: 20 * ms, Check: CheckOrder})
	a := p.alloc(32*mib, p.n)
	ok(t, p.Use(0, p.n, a, 32*mib))
	ok(t, p.MemFreeAsync(0, a, p.n))
	ok(t, p.StreamSynchronize(0, p.m)) // not that one
	ok(t, p.MemPoolTrim(0, p.pool, 0))
	if p.get(cuda.MemPoolReservedCurrent) != 32*mib {
		t.Error("memory went that work uses")
	}
	ok(t, p.StreamSynchronize(0, p.n))
	if p.get(cuda.MemPoolReservedCurrent) != 0 {
		t.Error("memory stays")
	}
}

// Which streams may use freed memory again, and when.
func TestPoolReuse(t *testing.T) {
	const (
		none          = 0
		follow        = 1 << cuda.MemPoolReuseFollowEventDependencies
		opportunistic = 1 << cuda.MemPoolReuseAllowOpportunistic
		internal      = 1 << cuda.MemPoolReuseAllowInternal
	)
	for _, c := range []struct {
		name  string
		flags int
		with  func(p pooled) cuda.Stream // between the free and the allocation, on the stream that it returns
		reuse bool
	}{
		{"the same stream", none, func(p pooled) cuda.Stream { return p.n }, true},
		{"another", none, func(p pooled) cuda.Stream { return p.m }, false},
		{"another, all allowed", follow | opportunistic, func(p pooled) cuda.Stream { return p.m }, false},
		{"another that waits, not followed", none, func(p pooled) cuda.Stream {
			ok(p.t, p.StreamWaitEvent(0, p.m, eventOn(p.t, p.Driver, p.n)))
			return p.m
		}, false},
		{"another that waits", follow, func(p pooled) cuda.Stream {
			ok(p.t, p.StreamWaitEvent(0, p.m, eventOn(p.t, p.Driver, p.n)))
			return p.m
		}, true},
		{"another, later", opportunistic, func(p pooled) cuda.Stream { p.Advance(50 * ms); return p.m }, true},
		{"another, later, not allowed", follow, func(p pooled) cuda.Stream { p.Advance(50 * ms); return p.m }, false},
		{"another after the host waited", none, func(p pooled) cuda.Stream {
			ok(p.t, p.StreamSynchronize(0, p.n))
			return p.m
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPooled(t, Options{Lag: 20 * ms, Check: CheckOrder})
			for a := cuda.MemPoolReuseFollowEventDependencies; a <= cuda.MemPoolReuseAllowInternal; a++ {
				ok(t, p.MemPoolSet(0, p.pool, a, uint64(c.flags>>a&1)))
			}
			ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolReleaseThreshold, math.MaxUint64))
			a := p.alloc(32*mib, p.n)
			ok(t, p.Use(0, p.n, a, 32*mib))
			ok(t, p.MemFreeAsync(0, a, p.n))
			s := c.with(p)
			b := p.alloc(32*mib, s)
			if (a == b) != c.reuse {
				t.Errorf("reused: %v", a == b)
			}
			ok(t, p.Use(0, s, b, 32*mib)) // which is no race, either way
		})
	}
	// When there is no more, the stream waits for the other, if it may.
	p := newPooled(t, Options{Lag: 20 * ms, Check: CheckOrder, Capacity: 40 * mib})
	a := p.alloc(32*mib, p.n)
	ok(t, p.Use(0, p.n, a, 32*mib))
	ok(t, p.MemFreeAsync(0, a, p.n))
	ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolReuseAllowInternal, 0))
	_, err := p.MemAllocAsync(0, 32*mib, p.pool, p.m)
	wantCode(t, err, cuda.ErrOutOfMemory)
	ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolReuseAllowInternal, 1))
	if b := p.alloc(32*mib, p.m); b != a {
		t.Errorf("%#x, then %#x", a, b)
	}
	if got := doneAt(t, p.Driver, eventOn(t, p.Driver, p.m)); got != 20*ms {
		t.Errorf("the stream went on at %v", got)
	}
	ok(t, p.Use(0, p.m, a, 32*mib))
}

// The order of allocations, uses and frees.
func TestPoolOrder(t *testing.T) {
	p := newPooled(t, Options{Lag: 20 * ms, Check: CheckOrder})
	a := p.alloc(4096, p.n)
	wantFault(t, p.Use(0, p.m, a, 100), FaultRace) // before it is allocated, for all that stream knows
	b := p.alloc(4096, p.n)
	ok(t, p.StreamWaitEvent(0, p.m, eventOn(t, p.Driver, p.n)))
	ok(t, p.Use(0, p.m, b, 4096))
	f := wantFault(t, p.MemFreeAsync(0, b, p.n), FaultRace)
	if !strings.Contains(f.Detail, "freed without order") || f.Op != "cuMemFreeAsync" {
		t.Error(f)
	}
	ok(t, p.StreamWaitEvent(0, p.n, eventOn(t, p.Driver, p.m)))
	ok(t, p.MemFreeAsync(0, b, p.n))
	wantFault(t, p.Use(0, p.n, b, 1), FaultUnmapped)
	wantFault(t, p.Use(0, p.m, b, 1), FaultUnmapped)
	wantCode(t, p.MemFreeAsync(0, b, p.n), cuda.ErrInvalidValue)
	wantFault(t, p.Use(0, p.n, a, 4097), FaultUnmapped)

	u := newPooled(t, Options{Lag: 20 * ms, Check: CheckUse})
	c := u.alloc(4096, u.n)
	ok(t, u.Use(0, u.m, c, 4096))
	wantFault(t, u.MemFreeAsync(0, c, u.n), FaultInUse)
	ok(t, u.MemFreeAsync(0, c, u.m))
}

// cuMemFree frees pooled memory too, once the host has seen it done.
func TestPoolMemFree(t *testing.T) {
	p := newPooled(t, Options{Lag: 20 * ms, Check: CheckOrder})
	a := p.alloc(4096, p.n)
	ok(t, p.Use(0, p.n, a, 4096))
	wantFault(t, p.MemFree(0, a), FaultInUse)
	ok(t, p.StreamSynchronize(0, p.n))
	wantCode(t, p.MemFree(0, a+512), cuda.ErrInvalidValue)
	ok(t, p.MemFree(0, a))
	wantCode(t, p.MemFree(0, a), cuda.ErrInvalidValue)
	if b := p.alloc(4096, p.m); b != a { // it is free for all
		t.Errorf("%#x, then %#x", a, b)
	}
}

func TestPoolRules(t *testing.T) {
	p := newPooled(t, Options{Check: CheckUse, Devices: 2, Handles: cuda.HandlePosix, Capacity: 256 * mib})
	if q, err := p.MemAllocAsync(0, 0, p.pool, p.n); q != 0 || err != nil {
		t.Errorf("no bytes: %#x, %v", q, err)
	}
	_, err := p.MemAllocAsync(0, 1<<50, p.pool, p.n)
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = p.MemAllocAsync(0, ^uint64(0), p.pool, p.n)
	wantCode(t, err, cuda.ErrOutOfMemory)
	for name, unknown := range map[string]cuda.Ptr{
		"allocated": must[cuda.Ptr](t)(p.MemAlloc(0, 100)), "mapped": p.p, "null": 0, "nothing": 12345,
		"host":   must[cuda.Ptr](t)(p.HostAlloc(0, 100)),
		"within": p.alloc(4096, p.n) + 512,
	} {
		if err := p.MemFreeAsync(0, unknown, p.n); err == nil {
			t.Error(name)
		} else {
			wantCode(t, err, cuda.ErrInvalidValue)
		}
	}
	if p.Fault() != nil {
		t.Error(p.Fault())
	}
	for _, c := range []struct {
		attr  cuda.MemPoolAttr
		value uint64
	}{{0, 0}, {9, 0}, {cuda.MemPoolReuseAllowInternal, 2}, {cuda.MemPoolUsedCurrent, 0}, {cuda.MemPoolReservedCurrent, 0}, {cuda.MemPoolUsedHigh, 1}} {
		wantCode(t, p.MemPoolSet(0, p.pool, c.attr, c.value), cuda.ErrInvalidValue)
	}
	_, err = p.MemPoolGet(0, p.pool, 0)
	wantCode(t, err, cuda.ErrInvalidValue)
	_, err = p.MemPoolCreate(cuda.MemPoolProps{Handles: cuda.HandleFabric})
	wantCode(t, err, cuda.ErrNotSupported)
	_, err = p.MemPoolCreate(cuda.MemPoolProps{Handles: cuda.HandleFabric | cuda.HandlePosix})
	wantCode(t, err, cuda.ErrInvalidValue)
	_, err = p.MemPoolCreate(cuda.MemPoolProps{Device: 1})
	wantCode(t, err, cuda.ErrInvalidContext)
	own := must[cuda.MemPool](t)(p.MemPoolDefault(0))
	wantCode(t, p.MemPoolDestroy(0, own), cuda.ErrInvalidValue)

	small := must[cuda.MemPool](t)(p.MemPoolCreate(cuda.MemPoolProps{MaxSize: 40 * mib, Handles: cuda.HandlePosix}))
	a := must[cuda.Ptr](t)(p.MemAllocAsync(0, 40*mib, small, p.n))
	_, err = p.MemAllocAsync(0, 30*mib, small, p.n)
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = p.IpcExport(0, a)
	wantCode(t, err, cuda.ErrInvalidValue)
	ok(t, p.MemPoolDestroy(0, small)) // with memory that is out
	wantFault(t, p.MemPoolDestroy(0, small), FaultPool)
	_, err = p.MemAllocAsync(0, 1, small, p.n)
	wantFault(t, err, FaultPool)
	ok(t, p.Use(0, p.n, a, 40*mib))
	before := p.ReservedBytes(0)
	ok(t, p.MemFreeAsync(0, a, p.n))
	if p.ReservedBytes(0) != before-64*mib {
		t.Errorf("the destroyed pool holds %d", p.ReservedBytes(0)-before+64*mib)
	}
	ok(t, p.BeginCapture(0, p.n))
	_, err = p.MemAllocAsync(0, 1, own, p.n)
	wantFault(t, err, FaultCapture)
	if p.status(t, p.n) != cuda.CaptureActive {
		t.Error("the capture is spoilt")
	}
}

// A pool takes the device's memory and gives none back; with nothing left it uses what it has itself.
func TestPoolCapacity(t *testing.T) {
	p := newPooled(t, Options{Capacity: 100 * mib, Check: CheckOrder})
	ok(t, p.MemPoolSet(0, p.pool, cuda.MemPoolReleaseThreshold, math.MaxUint64))
	a := p.alloc(32*mib, p.n)
	b := p.alloc(32*mib, p.n)
	_, err := p.MemAllocAsync(0, 33*mib, p.pool, p.n)
	wantCode(t, err, cuda.ErrOutOfMemory)
	ok(t, p.MemFreeAsync(0, a, p.n))
	ok(t, p.MemFreeAsync(0, b, p.n))
	ok(t, p.StreamSynchronize(0, p.n))
	_, err = p.MemCreate(64*mib, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	c := p.alloc(60*mib, p.n) // neither half was large enough
	if p.get(cuda.MemPoolReservedCurrent) != 64*mib {
		t.Errorf("%d held", p.get(cuda.MemPoolReservedCurrent))
	}
	ok(t, p.MemFreeAsync(0, c, p.n))
}

// Other devices use what a pool has and will have once it is open to them, and not because of peer access.
func TestPoolAccess(t *testing.T) {
	p := newPooled(t, Options{Devices: 2, Check: CheckOrder})
	s := p.NewStreamNonBlocking(1)
	ok(t, p.EnablePeerAccess(1, 0))
	a := p.alloc(100, p.n)
	ok(t, p.StreamSynchronize(0, p.n))
	wantFault(t, p.Use(1, s, a, 100), FaultNoAccess)
	wantCode(t, p.MemPoolSetAccess(0, p.pool, nil), cuda.ErrInvalidValue)
	wantCode(t, p.MemPoolSetAccess(0, p.pool, []cuda.Device{2}), cuda.ErrInvalidDevice)
	ok(t, p.MemPoolSetAccess(0, p.pool, []cuda.Device{1}))
	ok(t, p.Use(1, s, a, 100))
	b := p.alloc(64*mib, p.n)
	ok(t, p.StreamSynchronize(0, p.n))
	ok(t, p.Use(1, s, b, 64*mib))
	ok(t, p.StreamSynchronize(1, s))
	ok(t, p.Use(0, p.n, a, 100))
}

// Random allocations and frees on several streams, each block used by its stream: nothing overlaps, nothing races, and
// all comes back.
func TestPoolsNeverOverlap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 4))
	p := newPooled(t, Options{Check: CheckOrder, Lag: 3, Capacity: 300 * mib})
	before := p.ReservedBytes(0)
	type out struct {
		ptr  cuda.Ptr
		size uint64
		s    cuda.Stream
	}
	streams := []cuda.Stream{p.a, p.b, p.n, p.m, cuda.StreamNull}
	var live []out
	var used uint64
	failed := 0
	for step := range 4000 {
		for a := cuda.MemPoolReuseFollowEventDependencies; step%100 == 0 && a <= cuda.MemPoolReuseAllowInternal; a++ {
			ok(t, p.MemPoolSet(0, p.pool, a, rng.Uint64N(2)))
		}
		s := streams[rng.IntN(len(streams))]
		switch op := rng.IntN(20); {
		case op < 10:
			size := 1 + rng.Uint64N(1<<rng.IntN(26))
			q, err := p.MemAllocAsync(0, size, p.pool, s)
			if err != nil {
				wantCode(t, err, cuda.ErrOutOfMemory)
				failed++
				continue
			}
			for _, o := range live {
				if q < o.ptr+cuda.Ptr(o.size) && o.ptr < q+cuda.Ptr(size) {
					t.Fatalf("seed %d, step %d: %#x+%d overlaps %#x+%d", seed, step, q, size, o.ptr, o.size)
				}
			}
			ok(t, p.Use(0, s, q, size))
			live = append(live, out{q, size, s})
			used += size
		case op < 18 && len(live) > 0:
			i := rng.IntN(len(live))
			o := live[i]
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
			ok(t, p.Use(0, o.s, o.ptr, o.size))
			ok(t, p.MemFreeAsync(0, o.ptr, o.s))
			used -= o.size
		case op == 18:
			ok(t, p.StreamSynchronize(0, s))
		default:
			p.Advance(2)
		}
		if got := p.get(cuda.MemPoolUsedCurrent); got != used {
			t.Fatalf("seed %d, step %d: %d used, want %d", seed, step, got, used)
		}
	}
	for _, o := range live {
		ok(t, p.MemFreeAsync(0, o.ptr, o.s))
	}
	ok(t, p.ContextSynchronize(0))
	if p.get(cuda.MemPoolReservedCurrent) != 0 || p.ReservedBytes(0) != before || p.Leaks().Asyncs != 0 || failed == 0 {
		t.Errorf("%d held, %+v, %d allocations failed", p.get(cuda.MemPoolReservedCurrent), p.Leaks(), failed)
	}
}
