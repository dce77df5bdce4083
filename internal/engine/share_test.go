package engine_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// party is a process that shares memory or opens it: an allocator over a simulated driver of its own.
type party struct {
	t   *testing.T
	drv *sim.Driver
	a   *engine.Allocator
	dev *engine.Device
	st  *engine.Stream
}

func newParty(t *testing.T, opts config.Options, machine sim.Options) *party {
	t.Helper()
	if sim.Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	p := &party{t: t}
	machine.Handles, machine.Check = sim.Exportable, sim.CheckOrder
	machine.OnFault = func(err error) { t.Error(err) }
	p.drv = sim.New(machine)
	var err error
	if p.a, err = engine.New(p.drv, opts); err != nil {
		t.Fatal(err)
	}
	if p.dev, err = p.a.Device(0); err != nil {
		t.Fatal(err)
	}
	if p.st, err = p.dev.Stream(cuda.StreamLegacy); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *party) alloc(size uint64) cuda.Ptr {
	p.t.Helper()
	ptr, err := p.dev.Alloc(size, p.st)
	if err != nil {
		p.t.Fatal(err)
	}
	return ptr
}

func (p *party) export(ptr cuda.Ptr) *engine.Export {
	p.t.Helper()
	e, err := p.a.Sharing.Export(ptr)
	if err != nil {
		p.t.Fatal(err)
	}
	return e
}

// open opens an export of another party's, the way that descriptors go from hand to hand.
func (p *party) open(e *engine.Export) (cuda.Ptr, error) {
	var file *os.File
	defer func() { file.Close() }()
	return p.a.Sharing.Open(0, "the other", e.Shared, func(i int) (int, error) {
		file.Close()
		fd, err := e.Descriptor(i)
		if err != nil {
			return -1, err
		}
		file = os.NewFile(uintptr(fd), "chunk")
		return fd, nil
	})
}

func (p *party) mustOpen(e *engine.Export) cuda.Ptr {
	p.t.Helper()
	ptr, err := p.open(e)
	if err != nil {
		p.t.Fatal(err)
	}
	return ptr
}

// used has the GPU use the memory, which faults unless all of it is mapped and accessible.
func (p *party) used(ptr cuda.Ptr, size uint64) {
	p.t.Helper()
	if err := p.drv.Use(0, cuda.StreamLegacy, ptr, size); err != nil {
		p.t.Error(err)
	}
	if err := p.drv.StreamSynchronize(0, cuda.StreamLegacy); err != nil {
		p.t.Error(err)
	}
}

func (p *party) close(ptr cuda.Ptr) {
	p.t.Helper()
	if err := p.a.Sharing.Close(ptr); err != nil {
		p.t.Error(err)
	}
}

var shareConfs = map[string]config.Options{
	"chunks":       {},
	"small chunks": {ChunkMax: 2 * mib},
	"segments":     {Backend: config.BackendMalloc},
	"one handle":   {SingleHandle: true},
}

func TestShare(t *testing.T) {
	for name, opts := range shareConfs {
		t.Run(name, func(t *testing.T) {
			from, to := newParty(t, opts, sim.Options{}), newParty(t, opts, sim.Options{})
			fds, before := testkit.Descriptors(t), to.drv.Leaks()
			for _, size := range []uint64{1, 100 * kib, 300 * kib, 3*mib + 5, 200 * mib} {
				from.alloc(size) // so that what is shared does not begin where a chunk does
				ptr := from.alloc(size)
				e := from.export(ptr)
				if again := from.export(ptr); again != e {
					t.Errorf("%d bytes: exported as %d, then as %d", size, e.ID, again.ID)
				}
				if found, err := from.a.Sharing.Exported(e.ID); found != e || err != nil {
					t.Errorf("%d bytes: export %d is %v, %v", size, e.ID, found, err)
				}
				p := to.mustOpen(e)
				to.used(p, e.Shared.Size)
				if b, err := from.a.Base(ptr); err != nil || b.Size != e.Shared.Size {
					t.Errorf("%d bytes: a block of %d was exported as one of %d, %v", size, b.Size, e.Shared.Size, err)
				}
				if _, err := to.a.Base(p); !errors.Is(err, memory.ErrUnknownPointer) {
					t.Errorf("what is open passes for an allocation: %v", err)
				}
				if err := to.a.Free(p); !errors.Is(err, memory.ErrUnknownPointer) {
					t.Errorf("what is open was freed: %v", err)
				}
				if now := to.dev.Views.Stats(); now.Reserved.All.Current != 0 {
					t.Errorf("what is open counts: %+v", now.Reserved.All)
				}
				to.close(p)
				if err := to.a.Sharing.Close(p); !errors.Is(err, memory.ErrUnknownPointer) {
					t.Errorf("closed once more: %v", err)
				}
				if after := to.drv.Leaks(); after != before {
					t.Errorf("%d bytes: left %+v where %+v was", size, after, before)
				}
			}
			if now := testkit.Descriptors(t); now != fds {
				t.Errorf("%d descriptors are open, %d were", now, fds)
			}
		})
	}
}

func TestExportEndsWithTheBlock(t *testing.T) {
	for name, opts := range shareConfs {
		t.Run(name, func(t *testing.T) {
			p := newParty(t, opts, sim.Options{})
			ptr := p.alloc(5 * mib)
			e := p.export(ptr)
			if err := p.a.Free(ptr); err != nil {
				t.Fatal(err)
			}
			gone := func(what string, err error) {
				t.Helper()
				if !errors.Is(err, memory.ErrNotExported) || !strings.Contains(err.Error(), "was freed") {
					t.Errorf("%s: %v", what, err)
				}
			}
			_, err := p.a.Sharing.Exported(e.ID)
			gone("the export", err)
			gone("whether it is live", e.Live())
			_, err = e.Descriptor(0)
			gone("a descriptor", err)
			_, err = p.a.Sharing.OpenOwn(e)
			gone("the process itself", err)
			if _, err := p.a.Sharing.Exported(e.ID + 1); !errors.Is(err, memory.ErrNotExported) || strings.Contains(err.Error(), "freed") {
				t.Errorf("a number that was never given: %v", err)
			}
			if _, err := p.a.Sharing.Export(ptr); !errors.Is(err, memory.ErrUnknownPointer) {
				t.Errorf("free memory was exported: %v", err)
			}
			if again := p.alloc(5 * mib); again != ptr {
				t.Fatalf("the block is at %#x, expected it where it was, at %#x", uint64(again), uint64(ptr))
			}
			gone("when somebody else has the memory", e.Live())
			if f := p.export(ptr); f.ID == e.ID {
				t.Error("another block was exported under the same number")
			}
			gone("when somebody else shares the memory", e.Live())
			// A free that goes the fast way does not know of the export; after it, nothing may be left of the mark.
			if err := p.a.Free(ptr); err != nil {
				t.Fatal(err)
			}
			calls := p.drv.Calls().Count
			for range 10 {
				if err := p.a.Free(p.alloc(5 * mib)); err != nil {
					t.Fatal(err)
				}
			}
			if now := p.drv.Calls().Count; now != calls {
				t.Errorf("%d driver calls after the export had ended", now-calls)
			}
		})
	}
}

// Memory that is exported can also be used on other streams.
func TestExportOfRecordedBlock(t *testing.T) {
	p := newParty(t, config.Options{}, sim.Options{Lag: 1000})
	other, err := p.dev.Stream(p.drv.NewStream(0))
	if err != nil {
		t.Fatal(err)
	}
	ptr := p.alloc(3 * mib)
	e := p.export(ptr)
	if err := p.a.RecordStream(ptr, other); err != nil {
		t.Fatal(err)
	}
	if err := p.drv.Use(0, other.Handle(), ptr, 3*mib); err != nil {
		t.Fatal(err)
	}
	if err := p.a.Free(ptr); err != nil {
		t.Fatal(err)
	}
	if got := p.dev.Views.Stats().ActiveBytes.All.Current; got != 3*mib {
		t.Errorf("%d bytes are active, expected the block to wait for the other stream", got)
	}
	if err := e.Live(); !errors.Is(err, memory.ErrNotExported) {
		t.Errorf("a block that waits is still exported: %v", err)
	}
}

func TestOpenMapsOnce(t *testing.T) {
	for name, opts := range shareConfs {
		t.Run(name, func(t *testing.T) {
			from, to := newParty(t, opts, sim.Options{}), newParty(t, config.Options{}, sim.Options{})
			a, b := from.export(from.alloc(100*kib)), from.export(from.alloc(100*kib))
			p := to.mustOpen(a)
			one := to.drv.Leaks()
			if again := to.mustOpen(a); again != p {
				t.Errorf("the block is open at %#x and at %#x", uint64(p), uint64(again))
			}
			q := to.mustOpen(b) // in the same chunk
			if int64(q-p) != int64(b.Ptr-a.Ptr) {
				t.Errorf("the blocks at %#x and %#x are open at %#x and %#x", uint64(a.Ptr), uint64(b.Ptr), uint64(p), uint64(q))
			}
			if now := to.drv.Leaks(); now != one {
				t.Errorf("%+v exists, %+v did with one block open", now, one)
			}
			want := a.Shared.Size // the least that is known of memory without descriptors
			if len(a.Shared.Chunks) > 0 {
				want = 0
			}
			for _, c := range a.Shared.Chunks {
				want += c.Size
			}
			if s := to.dev.Views.Stats(); s.ImportedBytes != want || s.Reserved.All.Current != 0 {
				t.Errorf("%d bytes are imported and %d reserved, expected %d and 0", s.ImportedBytes, s.Reserved.All.Current, want)
			}
			for _, x := range []cuda.Ptr{p, q, p} {
				to.used(p, 100*kib)
				to.close(x)
			}
			if s := to.dev.Views.Stats(); s.ImportedBytes != 0 {
				t.Errorf("all is closed, and %d bytes are imported", s.ImportedBytes)
			}
			if now := to.drv.Leaks(); now.Mappings != 0 || now.Reservations != 0 || now.Allocs != 0 {
				t.Errorf("all is closed and there is %+v", now)
			}
		})
	}
}

func TestOpenAtOnce(t *testing.T) {
	from, to := newParty(t, config.Options{ChunkMax: 2 * mib}, sim.Options{}), newParty(t, config.Options{}, sim.Options{})
	exports := []*engine.Export{from.export(from.alloc(20 * mib)), from.export(from.alloc(100 * kib)), from.export(from.alloc(100 * kib))}
	before := to.drv.Leaks()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := range 50 {
				e := exports[(i+k)%len(exports)]
				p, err := to.open(e)
				if err != nil {
					t.Error(err)
					return
				}
				if err := to.a.Sharing.Close(p); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if after := to.drv.Leaks(); after != before {
		t.Errorf("left %+v where %+v was", after, before)
	}
}

// Whichever driver call of an Open fails, nothing is left of it, and the next succeeds.
func TestOpenFails(t *testing.T) {
	for name, opts := range shareConfs {
		t.Run(name, func(t *testing.T) {
			from, to := newParty(t, opts, sim.Options{}), newParty(t, config.Options{}, sim.Options{})
			e := from.export(from.alloc(70 * mib))
			before, fds := to.drv.Leaks(), testkit.Descriptors(t)
			for k := uint64(1); ; k++ {
				n, failed := uint64(0), ""
				to.drv.FailCall(func(call string, _ uint64) cuda.Code {
					if n++; n == k {
						failed = call
						return cuda.ErrNotPermitted
					}
					return cuda.Success
				})
				p, err := to.open(e)
				to.drv.FailCall(nil)
				if failed == "" {
					if err != nil || k < 2 {
						t.Fatalf("%d driver calls, %v", k-1, err)
					}
					to.close(p)
					break
				}
				if !errors.Is(err, cuda.ErrNotPermitted) {
					t.Fatalf("%s failed: %v", failed, err)
				}
				if after := to.drv.Leaks(); after != before || testkit.Descriptors(t) != fds {
					t.Fatalf("%s failed: left %+v where %+v was", failed, after, before)
				}
			}
		})
	}
}

func TestOpenImpossible(t *testing.T) {
	p := newParty(t, config.Options{}, sim.Options{})
	none := func(int) (int, error) { t.Error("a descriptor was asked for"); return -1, errors.New("none") }
	chunk := []memory.SharedChunk{{Size: 2 * mib, Serial: 1}}
	for what, m := range map[string]memory.Shared{
		"nothing":                {},
		"an empty block":         {Chunks: chunk},
		"a block past the end":   {Size: 512, Offset: 2 * mib, Chunks: chunk},
		"an offset that wraps":   {Size: 512, Offset: ^uint64(0) - 100, Chunks: chunk},
		"a size that wraps":      {Size: ^uint64(0) - 100, Offset: 512, Chunks: chunk},
		"an empty chunk":         {Size: 512, Chunks: []memory.SharedChunk{{}}},
		"half a granule":         {Size: 512, Chunks: []memory.SharedChunk{{Size: mib}}},
		"more than there can be": {Size: 512, Chunks: []memory.SharedChunk{{Size: 1 << 46}, {Size: 1 << 46}, {Size: 1 << 46}}},
		"no IPC handle":          {Size: 512},
	} {
		before := p.drv.Leaks()
		if _, err := p.a.Sharing.Open(0, "the other", m, none); err == nil || p.drv.Leaks() != before {
			t.Errorf("%s: %v, left %+v", what, err, p.drv.Leaks())
		}
	}
	if _, err := p.a.Sharing.Open(1, "the other", memory.Shared{}, none); !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("a device that does not exist: %v", err)
	}
}

// Memory on another GPU than the one that is to use it.
func TestOpenOnAnotherDevice(t *testing.T) {
	from, to := newParty(t, config.Options{}, sim.Options{}), newParty(t, config.Options{}, sim.Options{Devices: 2})
	e := from.export(from.alloc(3 * mib))
	open := func() (cuda.Ptr, error) {
		fd := -1
		return to.a.Sharing.Open(1, "the other", e.Shared, func(i int) (_ int, err error) {
			fd, err = e.Descriptor(i)
			t.Cleanup(func() { os.NewFile(uintptr(fd), "chunk").Close() })
			return fd, err
		})
	}
	p, err := open()
	if err != nil {
		t.Fatal(err)
	}
	if err := to.drv.Use(1, cuda.StreamLegacy, p, 3*mib); err != nil {
		t.Error(err)
	}
	if err := to.drv.StreamSynchronize(1, cuda.StreamLegacy); err != nil {
		t.Error(err)
	}
	to.close(p)
	to.drv.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuMemSetAccess" {
			return cuda.ErrInvalidDevice
		}
		return cuda.Success
	})
	if _, err := open(); err == nil || !strings.Contains(err.Error(), "cannot be used from there") || strings.Contains(err.Error(), "\n") {
		t.Errorf("a GPU out of reach: %v", err)
	}
}

func TestOpenOwn(t *testing.T) {
	p := newParty(t, config.Options{}, sim.Options{})
	ptr := p.alloc(mib)
	e := p.export(ptr)
	before := p.drv.Leaks()
	for range 2 {
		if got, err := p.a.Sharing.OpenOwn(e); got != ptr || err != nil {
			t.Errorf("opened at %#x, %v; the block is at %#x", uint64(got), err, uint64(ptr))
		}
	}
	for range 2 {
		p.close(ptr)
	}
	if err := p.a.Sharing.Close(ptr); !errors.Is(err, memory.ErrUnknownPointer) {
		t.Errorf("closed once too often: %v", err)
	}
	if p.drv.Leaks() != before {
		t.Errorf("%+v exists, %+v did", p.drv.Leaks(), before)
	}
	if err := p.a.Free(ptr); err != nil {
		t.Error(err)
	}
}

func TestThousandOpens(t *testing.T) {
	from, to := newParty(t, config.Options{ChunkMax: 2 * mib}, sim.Options{}), newParty(t, config.Options{}, sim.Options{})
	e := from.export(from.alloc(64 * mib))
	p := to.mustOpen(e)
	to.close(p)
	before, fds := to.drv.Leaks(), testkit.Descriptors(t)
	for range 1000 {
		if q := to.mustOpen(e); q != p {
			t.Fatalf("opened at %#x, before at %#x: addresses run out", uint64(q), uint64(p))
		}
		to.close(p)
	}
	if after := to.drv.Leaks(); after != before || testkit.Descriptors(t) != fds {
		t.Errorf("left %+v and %d descriptors where %+v and %d were", after, testkit.Descriptors(t), before, fds)
	}
}

// Where a device makes no chunks for other processes, sharing says so; memory from cuMemAlloc can be shared all the same.
func TestShareWithoutHandles(t *testing.T) {
	for name, opts := range shareConfs {
		a, err := engine.New(sim.New(sim.Options{}), opts)
		if err != nil {
			t.Fatal(err)
		}
		dev, err := a.Device(0)
		if err != nil {
			t.Fatal(err)
		}
		st, err := dev.Stream(cuda.StreamLegacy)
		if err != nil {
			t.Fatal(err)
		}
		ptr, err := dev.Alloc(mib, st)
		if err != nil {
			t.Fatal(err)
		}
		_, err = a.Sharing.Export(ptr)
		if name == "segments" && err != nil || name != "segments" && !errors.Is(err, cuda.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
		if err := a.Free(ptr); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Pools have memory of their own kinds, which is shared by its own means.
func TestSharePools(t *testing.T) {
	from, to := newParty(t, config.Options{}, sim.Options{}), newParty(t, config.Options{}, sim.Options{})
	handles, err := resource.Segments(from.drv, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range []config.PoolOptions{{Kind: config.PoolMalloc}, {Kind: config.PoolSingleHandle}, {SegmentPerBlock: true}, {},
		{Upstream: resource.Statistics(handles)}, {Upstream: resource.Device(from.drv, 0)}} {
		pool, err := from.dev.NewPool(memory.PoolID{7, uint64(i)}, o)
		if err != nil {
			t.Fatal(err)
		}
		ptr, err := pool.Alloc(45*mib, from.st)
		if err != nil {
			t.Fatal(err)
		}
		e := from.export(ptr)
		if n := len(e.Shared.Chunks); (o.Kind == config.PoolMalloc || i == 5) && n != 0 || (o.Kind == config.PoolSingleHandle || o.SegmentPerBlock || i == 4) && n != 1 {
			t.Errorf("%+v: %d chunks", o, n)
		}
		p := to.mustOpen(e)
		to.used(p, 45*mib)
		to.close(p)
		if err := from.a.Free(ptr); err != nil {
			t.Error(err)
		}
	}
}

// What a device's peers may use includes what is open on it.
func TestOpenForPeers(t *testing.T) {
	from, to := newParty(t, config.Options{}, sim.Options{}), newParty(t, config.Options{}, sim.Options{Devices: 2})
	before := to.mustOpen(from.export(from.alloc(40 * mib)))
	if err := to.dev.Peers.Enable(1); err != nil {
		t.Fatal(err)
	}
	after := to.mustOpen(from.export(from.alloc(3 * mib)))
	for _, p := range []cuda.Ptr{before, after} {
		if err := to.drv.Use(1, cuda.StreamLegacy, p, 3*mib); err != nil {
			t.Error(err)
		}
		if err := to.drv.StreamSynchronize(1, cuda.StreamLegacy); err != nil {
			t.Error(err)
		}
		to.close(p)
	}
}

// While an exported block is live, what it lies on stays where it is and what it is, however scarce memory is.
func TestExportedMemoryStays(t *testing.T) {
	p := newParty(t, config.Options{ChunkMax: 2 * mib}, sim.Options{Capacity: 96 * mib})
	rng := rand.New(rand.NewPCG(1, 2))
	streams := []*engine.Stream{p.st}
	for range 3 {
		st, err := p.dev.Stream(p.drv.NewStream(0), config.StreamDurable)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, st)
	}
	under := func(e *engine.Export) (list []sim.MappingInfo) {
		for _, m := range p.drv.Mappings(0) {
			if m.Addr < e.Ptr+cuda.Ptr(e.Shared.Size) && e.Ptr < m.Addr+cuda.Ptr(m.Size) {
				list = append(list, m)
			}
		}
		return list
	}
	type live struct {
		e     *engine.Export
		under []sim.MappingInfo
	}
	var blocks []cuda.Ptr
	exported := map[cuda.Ptr]live{}
	ended, refused := 0, 0
	for step := range 4000 {
		switch n := len(blocks); {
		case n > 20 && rng.IntN(2) == 0:
			i := rng.IntN(n)
			ptr := blocks[i]
			blocks[i] = blocks[n-1]
			blocks = blocks[:n-1]
			if err := p.a.Free(ptr); err != nil {
				t.Fatal(err)
			}
			if x, ok := exported[ptr]; ok {
				ended++
				if err := x.e.Live(); !errors.Is(err, memory.ErrNotExported) {
					t.Fatalf("step %d: the export of a freed block: %v", step, err)
				}
				delete(exported, ptr)
			}
		default:
			size := uint64(1) << rng.IntN(25)
			ptr, err := p.dev.Alloc(size, streams[rng.IntN(len(streams))])
			if errors.Is(err, cuda.ErrOutOfMemory) {
				refused++
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			blocks = append(blocks, ptr)
			if rng.IntN(3) == 0 {
				e := p.export(ptr)
				x := live{e, under(e)}
				var sum, chunks uint64
				for i, m := range x.under {
					sum += m.Size
					if i < len(e.Shared.Chunks) {
						chunks += e.Shared.Chunks[i].Size
					}
				}
				if len(x.under) != len(e.Shared.Chunks) || sum != chunks || e.Ptr != x.under[0].Addr+cuda.Ptr(e.Shared.Offset) {
					t.Fatalf("step %d: %+v is mapped as %+v", step, e.Shared, x.under)
				}
				exported[ptr] = x
			}
		}
		if step%50 == 0 {
			if rng.IntN(4) == 0 {
				if err := p.a.Trim(); err != nil {
					t.Fatal(err)
				}
			}
			for _, x := range exported {
				if err := x.e.Live(); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
				if now := under(x.e); !slices.EqualFunc(now, x.under, func(a, b sim.MappingInfo) bool {
					return a.Addr == b.Addr && a.Size == b.Size && a.Chunk == b.Chunk && a.Handle == b.Handle
				}) {
					t.Fatalf("step %d: under %#x there was %+v, now %+v", step, uint64(x.e.Ptr), x.under, now)
				}
			}
		}
	}
	if s := p.dev.Views.Stats(); ended < 100 || refused < 10 || s.Remaps < 100 {
		t.Errorf("too little happened: %d exports ended, %d requests were refused, %d remaps", ended, refused, s.Remaps)
	}
}
