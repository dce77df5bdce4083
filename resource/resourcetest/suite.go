// Package resourcetest holds resources to what package resource promises, and to what RMM documents of its own: a suite
// that runs over any resource, on the simulated device, whose checker demands that work is ordered, and on a GPU, where
// kernels fill memory with patterns and compare it.
//
//	resourcetest.Run(t, machine, resourcetest.Case{New: func(m resourcetest.Machine) (resource.Resource, func() error, error) { … }})
//
// Files: suite.go the suite; contents.go its parts that put work on memory; failures.go a failure at every driver call,
// over the simulated device; machine.go the devices.
package resourcetest

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/resource"
)

// Case is a resource to be tested.
type Case struct {
	// New makes the resource, afresh each time, on device 0 of the machine. done, which may be nil, is called when the
	// resource was trimmed and closed: it closes what lies under it.
	New func(m Machine) (r resource.Resource, done func() error, err error)
	// Alike: two that New makes are equal, so that memory of one may be given back to the other.
	Alike bool
	// Silent: MemInfo is not known.
	Silent bool
	// Remote: the host cannot read it at its address though it is HostAccessible, as over the simulated device.
	Remote bool
	// Limit, where it is not 0, is how many bytes can be out before the resource is out of memory, at the most.
	Limit uint64
}

// dev is the device that everything is tested on.
const dev = cuda.Device(0)

// bench is a resource under test.
type bench struct {
	*testing.T
	m Machine
	r resource.Resource
	c Case
	t resource.Traits
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bench) alloc(size, align uint64, s cuda.Stream) cuda.Ptr {
	b.Helper()
	p, err := b.r.Alloc(size, align, s)
	if err != nil {
		b.Fatalf("%d bytes aligned to %d: %v", size, align, err)
	}
	return p
}

// free gives memory back once work on the stream is done with it, as the resource demands.
func (b *bench) free(p cuda.Ptr, size, align uint64, s cuda.Stream) {
	b.Helper()
	if err := b.release(p, size, align, s); err != nil {
		b.Fatalf("freeing %d bytes at %#x: %v", size, uint64(p), err)
	}
}

func (b *bench) release(p cuda.Ptr, size, align uint64, s cuda.Stream) error {
	if !b.t.StreamOrdered {
		if err := b.m.StreamSynchronize(dev, s); err != nil {
			return err
		}
	}
	return b.r.Free(p, size, align, s)
}

func (b *bench) stream() cuda.Stream {
	b.Helper()
	s, err := b.m.StreamCreate(dev, false)
	b.must(err)
	b.Cleanup(func() { b.must(b.m.StreamDestroy(dev, s)) })
	return s
}

func (b *bench) wrong() {
	b.Helper()
	if err := b.m.Wrong(); err != nil {
		b.Error(err)
	}
}

// parts of the suite, each with a resource of its own.
var parts = []struct {
	name string
	test func(b *bench)
}{
	{"traits", traits}, {"no bytes", nothing}, {"too much", tooMuch}, {"alignment", alignment},
	{"two blocks of 8 bytes", distinct}, {"memory info", memInfo}, {"equality", equality},
	{"contents", contents}, {"random", random}, {"producers and consumers", handover},
	{"a stream destroyed after a free", destroyed}, {"threads", threads}, {"the host", hostAccess}, {"peers", peers},
	{"pages that go and come", backing}, {"out of memory", exhausted},
}

// Run tests a resource on a machine. Nothing may be left when the resource is closed: exactly that over the simulated
// device, and on a GPU no more than what the driver may keep for itself.
func Run(t *testing.T, m Machine, c Case) {
	if err := m.RetainContext(dev); err != nil {
		t.Fatal(err)
	}
	const slack = 128 << 20
	before, _, err := m.MemInfo(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if after, _, err := m.MemInfo(dev); err != nil || after+slack < before {
			t.Errorf("%d bytes of the device were free before, %d are now, %v", before, after, err)
		}
	}()
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			b := begin(t, m, c)
			part.test(b)
			b.wrong()
		})
	}
}

// begin makes the resource; when the test ends, it is closed.
func begin(t *testing.T, m Machine, c Case) *bench {
	t.Helper()
	before := held(m)
	r, done, err := c.New(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			return // memory may still be out
		}
		if err := end(m, r, done); err != nil {
			t.Error(err)
		}
		if after := held(m); after != before {
			t.Errorf("the resource left %+v; before, there was %+v", after, before)
		}
		if err := m.Wrong(); err != nil {
			t.Error(err)
		}
	})
	return &bench{T: t, m: m, r: r, c: c, t: r.Traits()}
}

// end has the resource give back all it keeps, and closes it.
func end(m Machine, r resource.Resource, done func() error) error {
	if err := m.ContextSynchronize(dev); err != nil { // what was freed in a stream's order is back
		return err
	}
	if trimmer, ok := resource.As[resource.Trimmer](r); ok {
		if err := trimmer.Trim(); err != nil {
			return err
		}
	}
	if err := resource.Close(r); err != nil || done == nil {
		return err
	}
	return done()
}

// inventory is what exists in a simulated machine.
type inventory struct {
	sim.Live
	device, host uint64
}

// held is what exists now; nothing where it is not known, on a real GPU.
func held(m Machine) inventory {
	s, ok := m.(*Sim)
	if !ok {
		return inventory{}
	}
	return inventory{s.Leaks(), s.ReservedBytes(dev), s.HostBytes()}
}

func traits(b *bench) {
	if b.t.Name == "" || b.t.Align < 256 || b.t.Align&(b.t.Align-1) != 0 || b.t.Device != dev {
		b.Errorf("%+v", b.t)
	}
	if !b.t.DeviceAccessible && !b.t.HostAccessible {
		b.Errorf("no device can use it: %+v", b.t)
	}
}

// No bytes are a request that is met.
func nothing(b *bench) {
	for range 3 {
		if p, err := b.r.Alloc(0, 0, cuda.StreamLegacy); p != 0 || err != nil {
			b.Errorf("0 bytes are %#x, %v", uint64(p), err)
		}
	}
	b.must(b.r.Free(0, 0, 0, cuda.StreamLegacy))
	b.must(b.r.Free(0, 100, 0, cuda.StreamLegacy))
}

// What can never be met is out of memory, and harms nothing.
func tooMuch(b *bench) {
	s := b.stream()
	p := b.alloc(1000, 0, s)
	b.must(b.m.Fill(dev, s, p, 1000, 1))
	for _, size := range []uint64{1 << 50, 1<<63 + 1, math.MaxUint64 - 100, math.MaxUint64} {
		if p, err := b.r.Alloc(size, 0, s); p != 0 || !errors.Is(err, cuda.ErrOutOfMemory) {
			b.Errorf("%d bytes are %#x, %v", size, uint64(p), err)
		} else if strings.Contains(err.Error(), "\n") {
			b.Errorf("not one line: %v", err)
		}
	}
	b.must(b.m.Check(dev, s, p, 1000, 1))
	b.free(p, 1000, 0, s)
	b.free(b.alloc(1000, 0, s), 1000, 0, s)
}

// Every alignment up to the resource's own is kept, for every size; larger ones are kept or refused.
func alignment(b *bench) {
	s := b.stream()
	for _, size := range []uint64{1, 10, 1000, 4096, 100_001} {
		for align := uint64(1); align <= b.t.Align; align *= 2 {
			p := b.alloc(size, align, s)
			if uint64(p)%align != 0 || uint64(p)%256 != 0 {
				b.Errorf("%d bytes aligned to %d are at %#x", size, align, uint64(p))
			}
			b.must(b.m.Fill(dev, s, p, size, align))
			b.must(b.m.Check(dev, s, p, size, align))
			b.free(p, size, align, s)
		}
		p := b.alloc(size, 0, s)
		if uint64(p)%b.t.Align != 0 {
			b.Errorf("%d bytes are at %#x, aligned to %d by themselves", size, uint64(p), b.t.Align)
		}
		b.free(p, size, 0, s)
		for _, align := range []uint64{3, 12, 511, 1<<20 + 1} {
			if p, err := b.r.Alloc(size, align, s); err == nil {
				b.Errorf("aligned to %d: %#x", align, uint64(p))
			} else if !errors.Is(err, resource.ErrAlign) {
				b.Errorf("aligned to %d: %v", align, err)
			}
		}
		for _, align := range []uint64{2 * b.t.Align, 8 << 20} {
			p, err := b.r.Alloc(size, align, s)
			switch {
			case err == nil && uint64(p)%align != 0:
				b.Errorf("aligned to %d: %#x", align, uint64(p))
				fallthrough
			case err == nil:
				b.must(b.m.Fill(dev, s, p, size, 1))
				b.free(p, size, align, s)
			case !errors.Is(err, resource.ErrAlign):
				b.Errorf("aligned to %d: %v", align, err)
			}
		}
	}
}

// RMM: two blocks of 8 bytes that are live have different addresses.
func distinct(b *bench) {
	s := b.stream()
	p, q := b.alloc(8, 0, s), b.alloc(8, 0, s)
	if p == q || p == 0 || q == 0 {
		b.Errorf("%#x and %#x", uint64(p), uint64(q))
	}
	b.must(b.m.Fill(dev, s, p, 8, 1))
	b.must(b.m.Fill(dev, s, q, 8, 2))
	b.must(b.m.Check(dev, s, p, 8, 1))
	b.must(b.m.Check(dev, s, q, 8, 2))
	b.free(p, 8, 0, s)
	b.free(q, 8, 0, s)
}

func memInfo(b *bench) {
	free, total, err := b.r.MemInfo()
	if b.c.Silent {
		if err == nil {
			b.Errorf("memory info: %d of %d, though neither is known", free, total)
		}
		return
	}
	b.must(err)
	if total == 0 || free > total {
		b.Errorf("%d free of %d", free, total)
	}
}

func equality(b *bench) {
	if !b.r.Equal(b.r) {
		b.Error("not equal to itself")
	}
	other, done, err := b.c.New(b.m)
	b.must(err)
	if b.r.Equal(other) != b.c.Alike || other.Equal(b.r) != b.c.Alike {
		b.Errorf("equal to another of its kind: %v, %v; want %v", b.r.Equal(other), other.Equal(b.r), b.c.Alike)
	}
	for _, stranger := range []resource.Resource{resource.Statistics(b.r), stranger{b.r}} {
		if b.r.Equal(stranger) {
			b.Errorf("equal to %T", stranger)
		}
	}
	if b.c.Alike { // then memory may cross
		s := b.stream()
		p := b.alloc(100, 0, s)
		b.must(b.m.Fill(dev, s, p, 100, 1))
		b.must(b.m.StreamSynchronize(dev, s))
		b.must(other.Free(p, 100, 0, s))
	}
	b.must(end(b.m, other, done))
}

// stranger is a resource of an unknown kind.
type stranger struct{ resource.Resource }

// Out of memory leaves everything as it was, and what fits succeeds afterwards.
func exhausted(b *bench) {
	limit := b.c.Limit
	if _, simulated := b.m.(*Sim); limit == 0 && !(simulated && b.t.OnDevice) {
		b.Log("not tried: the memory of a whole machine is not used up in a test")
		return
	}
	s := b.stream()
	const size = 6 << 20
	for round := range 3 {
		var blocks []cuda.Ptr
		var err error
		for {
			var p cuda.Ptr
			if p, err = b.r.Alloc(size, 0, s); err != nil {
				break
			}
			b.must(b.m.Fill(dev, s, p, size, uint64(len(blocks))))
			blocks = append(blocks, p)
			if limit != 0 && uint64(len(blocks)) > limit/size {
				b.Fatalf("%d blocks of %d bytes, limited to %d", len(blocks), size, limit)
			}
		}
		if !errors.Is(err, cuda.ErrOutOfMemory) || len(blocks) == 0 {
			b.Fatalf("round %d: after %d blocks: %v", round, len(blocks), err)
		}
		for i, p := range blocks {
			b.must(b.m.Check(dev, s, p, size, uint64(i)))
		}
		// Goroutines that wait for a block get it.
		b.free(blocks[0], size, 0, s)
		b.must(b.m.StreamSynchronize(dev, s))
		blocks[0] = b.alloc(size, 0, s)
		for _, p := range blocks {
			b.free(p, size, 0, s)
		}
		b.must(b.m.StreamSynchronize(dev, s))
	}
}
