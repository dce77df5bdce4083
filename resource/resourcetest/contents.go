package resourcetest

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/resource"
)

// Memory of every size, all of it live at once, holds what was written.
func contents(b *bench) {
	s := b.stream()
	sizes := []uint64{1, 7, 8, 9, 255, 256, 257, 511, 512, 513, 4096, 65_537, 1 << 20, 2<<20 - 1, 2 << 20, 2<<20 + 1, 24 << 20}
	at := map[uint64]cuda.Ptr{}
	for i, size := range sizes {
		at[size] = b.alloc(size, 0, s)
		b.must(b.m.Fill(dev, s, at[size], size, uint64(i)))
	}
	for i, size := range sizes {
		b.must(b.m.Check(dev, s, at[size], size, uint64(i)))
		b.free(at[size], size, 0, s)
	}
}

// mixed is a size as programs ask for them: many small ones, few large ones.
func mixed(rng *rand.Rand) uint64 {
	n := uint64(8) << rng.Uint64N(18)
	return n + rng.Uint64N(n)
}

type piece struct {
	p          cuda.Ptr
	size, seed uint64
	align      uint64
}

// churn allocates and frees at random on one stream, and compares every block's contents before it goes.
func churn(b *bench, s cuda.Stream, rng *rand.Rand, steps int) error {
	var out []piece
	drop := func(i int) error {
		x := out[i]
		out[i] = out[len(out)-1]
		out = out[:len(out)-1]
		if err := b.m.Check(dev, s, x.p, x.size, x.seed); err != nil {
			return err
		}
		return b.release(x.p, x.size, x.align, s)
	}
	for range steps {
		if len(out) > 0 && (len(out) >= 24 || rng.Uint64N(5) < 2) {
			if err := drop(rng.IntN(len(out))); err != nil {
				return err
			}
			continue
		}
		x := piece{size: mixed(rng), seed: rng.Uint64(), align: []uint64{0, 0, 8, 256}[rng.IntN(4)]}
		var err error
		if x.p, err = b.r.Alloc(x.size, x.align, s); err != nil {
			return err
		}
		if err := b.m.Fill(dev, s, x.p, x.size, x.seed); err != nil {
			return err
		}
		out = append(out, x)
	}
	for len(out) > 0 {
		if err := drop(0); err != nil {
			return err
		}
	}
	return nil
}

func random(b *bench) {
	b.must(churn(b, b.stream(), rand.New(rand.NewPCG(1, 2)), 400))
}

// Several threads, each on a stream of its own.
func threads(b *bench) {
	var group sync.WaitGroup
	failed := make([]error, 4)
	for i := range failed {
		s := b.stream()
		group.Go(func() { failed[i] = churn(b, s, rand.New(rand.NewPCG(3, uint64(i))), 120) })
	}
	group.Wait()
	for _, err := range failed {
		b.must(err)
	}
}

// RMM: memory is allocated on one stream by one thread, and used and freed on another stream by another thread, which
// waits for the first one's event.
func handover(b *bench) {
	type item struct {
		piece
		ready cuda.Event
	}
	const items = 100
	made := make(chan item, 8)
	producer, consumer := b.stream(), b.stream()
	var failed error
	runtime.LockOSThread() // the two are on different threads
	defer runtime.UnlockOSThread()
	go func() {
		defer close(made)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		rng := rand.New(rand.NewPCG(5, 6))
		for i := range uint64(items) {
			x := item{piece: piece{size: mixed(rng), seed: i}}
			if x.p, failed = b.r.Alloc(x.size, 0, producer); failed != nil {
				return
			}
			if failed = b.m.Fill(dev, producer, x.p, x.size, x.seed); failed != nil {
				return
			}
			if x.ready, failed = b.m.EventCreate(dev); failed != nil {
				return
			}
			if failed = b.m.EventRecord(dev, x.ready, producer); failed != nil {
				return
			}
			made <- x
		}
	}()
	n := 0
	var first error
	for x := range made { // to the end, or the producer would never end
		if first != nil {
			continue
		}
		first = func() error {
			if err := b.m.StreamWaitEvent(dev, consumer, x.ready); err != nil {
				return err
			}
			if err := b.m.Check(dev, consumer, x.p, x.size, x.seed); err != nil {
				return err
			}
			if err := b.release(x.p, x.size, 0, consumer); err != nil {
				return err
			}
			n++
			return b.m.EventDestroy(dev, x.ready)
		}()
	}
	b.must(failed)
	b.must(first)
	if n != items {
		b.Errorf("%d of %d blocks came over", n, items)
	}
}

// RMM: a stream may be destroyed once what was allocated on it was freed on it, with its work still queued.
func destroyed(b *bench) {
	const size = 3 << 20
	var last cuda.Ptr
	for i := range uint64(8) {
		s, err := b.m.StreamCreate(dev, i%2 == 0)
		b.must(err)
		p := b.alloc(size, 0, s)
		b.must(b.m.Fill(dev, s, p, size, i))
		b.must(b.m.Check(dev, s, p, size, i))
		b.free(p, size, 0, s)
		b.must(b.m.StreamDestroy(dev, s))
		last = p
	}
	s := b.stream()
	p := b.alloc(size, 0, s)
	b.must(b.m.Fill(dev, s, p, size, 99))
	b.must(b.m.Check(dev, s, p, size, 99))
	b.free(p, size, 0, s)
	if last == 0 {
		b.Error("no memory")
	}
}

// bytesAt is memory that the host may use.
func bytesAt(p cuda.Ptr, size uint64) []byte {
	a := uintptr(p)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))), size)
}

// What is the host's is read and written by it, at the same address as by the device.
func hostAccess(b *bench) {
	if !b.t.HostAccessible || b.c.Remote {
		b.Log("not tried: it is the device's alone")
		return
	}
	const size = 100_000
	s := b.stream()
	p := b.alloc(size, 0, s)
	b.must(b.m.Fill(dev, s, p, size, 7))
	b.must(b.m.StreamSynchronize(dev, s))
	host := bytesAt(p, size)
	for _, i := range []uint64{0, 1, edge/8 - 1, size/8 - 1} { // over the simulated device, its ends have contents
		if got, want := binary.LittleEndian.Uint64(host[8*i:]), gpu.Word(7, i); got != want {
			b.Errorf("word %d is %#x for the host; the device wrote %#x", i, got, want)
		}
	}
	gpu.Pattern(host, 8)
	b.must(b.m.Check(dev, s, p, size, 8))
	b.free(p, size, 0, s)
}

// Memory got before and after access is enabled is another device's to use.
func peers(b *bench) {
	r, ok := resource.As[resource.Peers](b.r)
	if !ok {
		b.Log("not tried: it cannot be opened to other devices")
		return
	}
	n, err := b.m.DeviceCount()
	b.must(err)
	const peer, size = dev + 1, 3 << 20
	if n < 2 {
		b.Log("not tried: there is one device")
		return
	}
	b.must(b.m.RetainContext(peer))
	can, err := b.m.CanAccessPeer(peer, dev)
	b.must(err)
	if !can {
		b.Log("not tried: the devices cannot use each other's memory")
		return
	}
	s := b.stream()
	there, err := b.m.StreamCreate(peer, false)
	b.must(err)
	defer func() { b.must(b.m.StreamDestroy(peer, there)) }()
	before := b.alloc(size, 0, s)
	b.must(b.m.StreamSynchronize(dev, s))
	b.must(r.EnablePeer(peer))
	b.must(r.EnablePeer(peer)) // again
	b.must(r.EnablePeer(dev))  // itself
	after := b.alloc(size, 0, s)
	b.must(b.m.StreamSynchronize(dev, s))
	for i, p := range []cuda.Ptr{before, after} {
		b.must(b.m.Fill(peer, there, p, size, uint64(i)))
		b.must(b.m.StreamSynchronize(peer, there))
		b.must(b.m.Check(dev, s, p, size, uint64(i)))
		b.free(p, size, 0, s)
	}
}

// Memory goes and comes while its addresses stay.
func backing(b *bench) {
	r, ok := resource.As[resource.Backing](b.r)
	if !ok {
		b.Log("not tried: its pages stay")
		return
	}
	s := b.stream()
	const size, small = 32 << 20, 100
	use := func(p cuda.Ptr, size, seed uint64) {
		b.Helper()
		b.must(b.m.Fill(dev, s, p, size, seed))
		b.must(b.m.Check(dev, s, p, size, seed))
		b.must(b.m.StreamSynchronize(dev, s))
	}
	p, q := b.alloc(size, 0, s), b.alloc(small, 0, s)
	use(p, size, 1)
	use(q, small, 2)
	free, _, err := b.m.MemInfo(dev)
	b.must(err)
	for i := range uint64(3) {
		b.must(r.Unback(p, size))
		b.must(r.Unback(p, size)) // again
		if now, _, err := b.m.MemInfo(dev); b.t.OnDevice && (err != nil || now < free+size) {
			b.Errorf("%d bytes were free, %d without the %d, %v", free, now, size, err)
		}
		b.must(b.m.Check(dev, s, q, small, 2)) // the other one stays
		b.must(r.Back(p, size))
		b.must(r.Back(p, size))
		use(p, size, 10+i)
	}
	b.must(r.Unback(q, small))
	b.free(q, small, 0, s) // without memory
	b.must(r.Unback(p, size))
	b.must(r.Back(p, size))
	use(p, size, 3)
	b.free(p, size, 0, s)
}
