package offload

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// world is one simulated device with blocks whose contents are known.
type world struct {
	t      *testing.T
	drv    *sim.Driver
	time   *timeline.Device
	store  *Store
	turns  timeline.Turns
	blocks []*block
}

type block struct {
	addr, size uint64
	want       []byte
	kept       Contents
}

func newWorld(t *testing.T, register bool) *world {
	t.Helper()
	w := &world{t: t, drv: sim.New(sim.Options{Capacity: 256 * mib, Check: sim.CheckOrder})}
	testkit.Must(w.t, w.drv.RetainContext(0))
	h := health.New(w.drv, 0)
	w.time = timeline.New(h, timeline.NewGates(1), &w.turns)
	w.store = New(h, w.time, !register)
	return w
}

// add allocates blocks of the sizes and fills them.
func (w *world) add(sizes ...uint64) {
	w.t.Helper()
	for _, size := range sizes {
		p, err := w.drv.MemAlloc(0, size)
		testkit.Must(w.t, err)
		b := &block{addr: uint64(p), size: size, want: make([]byte, size)}
		for i := range b.want {
			b.want[i] = byte(i*7) ^ byte(i>>9) ^ byte(len(w.blocks)+1)
		}
		testkit.Must(w.t, w.drv.Write(0, cuda.StreamNull, p, b.want))
		w.blocks = append(w.blocks, b)
	}
	testkit.Must(w.t, w.drv.ContextSynchronize(0)) // as a pause does first
}

func (w *world) contents() (list []*Contents) {
	for _, b := range w.blocks {
		b.kept = Contents{}
		b.kept.Add(b.addr, b.size)
		list = append(list, &b.kept)
	}
	return list
}

// drop is what the owner does once contents are back, or the block was freed.
func (w *world) drop() {
	for _, b := range w.blocks {
		b.kept.Drop(b.addr, b.size)
	}
}

// wipe overwrites the blocks, and check compares them with what they had.
func (w *world) wipe() {
	w.t.Helper()
	for _, b := range w.blocks {
		testkit.Must(w.t, w.drv.Write(0, cuda.StreamNull, cuda.Ptr(b.addr), make([]byte, b.size)))
	}
	testkit.Must(w.t, w.drv.ContextSynchronize(0))
}

func (w *world) check() {
	w.t.Helper()
	for i, b := range w.blocks {
		got := make([]byte, b.size)
		testkit.Must(w.t, w.drv.ReadBack(0, cuda.StreamNull, cuda.Ptr(b.addr), got))
		if !bytes.Equal(got, b.want) {
			w.t.Fatalf("block %d of %d bytes has other contents", i, b.size)
		}
	}
	testkit.Must(w.t, w.drv.ContextSynchronize(0))
}

// save has contents copied to host memory, a batch for each, or to a file.
func (w *world) save(disk bool) error {
	list := w.contents()
	if !disk {
		w.store.PlaceInHost(list)
		var all []*Batch
		for _, c := range list {
			all = append(all, NewBatch([]*Contents{c}))
		}
		defer w.store.Release(all...)
		err := w.store.Save(all)
		for i := 0; err == nil && i < len(all); i++ {
			err = w.store.Saved(all[i])
		}
		return err
	}
	f, err := NewFile(w.t.TempDir())
	if err != nil {
		return err
	}
	f.Place(list)
	b := NewBatch(list)
	f.Close()
	defer w.store.Release(b)
	return w.store.SaveToFile(b)
}

func (w *world) load() error {
	var list []*Contents
	for _, b := range w.blocks {
		list = append(list, &b.kept)
	}
	b := NewBatch(list)
	defer w.store.Release(b)
	return w.store.Load(b)
}

// end gives everything back and finds what was forgotten.
func (w *world) end() {
	w.t.Helper()
	testkit.Must(w.t, w.store.Close())
	testkit.Must(w.t, w.time.DestroyEvents())
	for _, b := range w.blocks {
		testkit.Must(w.t, w.drv.MemFree(0, cuda.Ptr(b.addr)))
	}
	if l := w.drv.Leaks(); l != (sim.Live{}) {
		w.t.Errorf("left in the driver: %+v", l)
	}
	if err := w.drv.Fault(); err != nil {
		w.t.Error(err)
	}
}

func TestContentsComeBack(t *testing.T) {
	for _, register := range []bool{false, true} {
		for _, disk := range []bool{false, true} {
			t.Run(fmt.Sprintf("register %v, file %v", register, disk), func(t *testing.T) {
				before := testkit.Descriptors(t)
				w := newWorld(t, register)
				w.add(512, 40*kib+512, 3*mib, partSize+512, 512, partSize)
				for range 2 {
					testkit.Must(w.t, w.save(disk))
					slabs := w.store.staging.bytes()
					w.wipe()
					testkit.Must(w.t, w.load())
					w.check()
					w.drop()
					if n := w.store.staging.bytes(); n != slabs {
						t.Errorf("%d bytes of host memory became %d", slabs, n)
					}
				}
				w.end()
				if n := testkit.Descriptors(t); n != before {
					t.Errorf("%d descriptors were open, %d are", before, n)
				}
			})
		}
	}
}

// Contents that are dropped give their places back at once, to which later ones are copied; parts of contents are contents.
func TestDropAndPart(t *testing.T) {
	w := newWorld(t, false)
	w.add(3*mib, 1*mib, 2*mib)
	testkit.Must(w.t, w.save(false))
	first, had := w.blocks[0], w.store.staging.bytes()
	low, high := first.kept.Part(first.addr, first.addr+1*mib), first.kept.Part(first.addr+1*mib, first.addr+3*mib)
	if n := Bytes([]*Contents{&low, &high}); n != 3*mib {
		t.Errorf("parts of 3 MiB have %d bytes", n)
	}
	first.kept = Contents{}
	high.Drop(first.addr+1*mib, 2*mib)
	high.Drop(first.addr+1*mib, 2*mib) // once more
	w.wipe()
	b := NewBatch([]*Contents{&low, &high, &w.blocks[1].kept, &w.blocks[2].kept})
	if b.Bytes != 4*mib {
		t.Errorf("%d bytes are to be loaded", b.Bytes)
	}
	testkit.Must(w.t, w.store.Load(b))
	w.store.Release(b)
	copy(first.want[1*mib:], make([]byte, 2*mib)) // these are gone
	w.check()
	low.Drop(first.addr, 1*mib)
	w.drop()
	for _, s := range w.store.staging.slabs {
		if n := s.live.Load(); n != 0 {
			t.Errorf("%d bytes are in a slab after all contents were dropped", n)
		}
	}
	testkit.Must(w.t, w.save(false))
	if n := w.store.staging.bytes(); n != had {
		t.Errorf("%d bytes of host memory were enough, now %d are used", had, n)
	}
	w.drop()
	testkit.Must(w.t, w.store.Reserve(20*mib))
	if n := w.store.staging.bytes(); n < 20*mib || n != w.drv.HostBytes() {
		t.Errorf("%d bytes are ready, the driver says %d", n, w.drv.HostBytes())
	}
	testkit.Must(w.t, w.store.Reserve(0))
	if n := w.drv.HostBytes(); n != 0 {
		t.Errorf("%d bytes stay", n)
	}
	w.end()
}

// A block that is freed while its contents are in a batch does not close the file that the batch needs.
func TestFileStaysOpen(t *testing.T) {
	before := testkit.Descriptors(t)
	w := newWorld(t, false)
	w.add(1 * mib)
	testkit.Must(w.t, w.save(true))
	if n := testkit.Descriptors(t); n != before+1 {
		t.Errorf("%d descriptors are open for one file", n-before)
	}
	b := NewBatch([]*Contents{&w.blocks[0].kept})
	w.drop()
	w.wipe()
	testkit.Must(w.t, w.store.Load(b))
	w.check()
	w.store.Release(b)
	if n := testkit.Descriptors(t); n != before {
		t.Errorf("%d descriptors stay", n-before)
	}
	w.end()
}

// Whatever call of the driver fails, the error is its own, the contents that were saved stay, a later call succeeds, and
// nothing is left. With -short, as under the race detector, every seventh.
func TestFailEveryCall(t *testing.T) {
	step := uint64(1)
	if testing.Short() {
		step = 7
	}
	for _, register := range []bool{false, true} {
		for _, disk := range []bool{false, true} {
			for k := uint64(1); ; k += step {
				if !failCall(t, register, disk, k) {
					t.Logf("register %v, file %v: up to %d calls", register, disk, k-1)
					break
				}
			}
		}
	}
}

// failCall saves, loads and reserves while call k of the driver fails, and reports whether there was such a call.
func failCall(t *testing.T, register, disk bool, k uint64) (failed bool) {
	t.Helper()
	before := testkit.Descriptors(t)
	w := newWorld(t, register)
	w.add(40*kib, 3*mib)
	calls := uint64(0)
	what, code := "", []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrInvalidValue}[k%2]
	try := func(f func() error) {
		t.Helper()
		already := failed
		w.drv.FailCall(func(call string, _ uint64) cuda.Code {
			if calls++; calls != k {
				return cuda.Success
			}
			failed, what = true, fmt.Sprintf("register %v, file %v, call %d, %s", register, disk, k, call)
			return code
		})
		err := f()
		w.drv.FailCall(nil)
		switch {
		case err == nil:
		case already || !failed || !errors.Is(err, code):
			t.Fatalf("%s: %v", what, err)
		default:
			if err := f(); err != nil {
				t.Fatalf("%s: once more: %v", what, err)
			}
		}
	}
	for range 2 {
		try(func() error {
			err := w.save(disk)
			if err != nil {
				w.drop()
			}
			return err
		})
		w.wipe()
		try(w.load)
		w.check()
		w.drop()
	}
	try(func() error { return w.store.Reserve(16 * mib) })
	try(func() error { return w.store.Reserve(0) })
	try(w.store.Close)
	w.end()
	if n := testkit.Descriptors(t); n != before {
		t.Fatalf("%s: %d descriptors stay", what, n-before)
	}
	return failed
}

// A broken context ends every call, and is noted; nothing waits for ever.
func TestBrokenContext(t *testing.T) {
	for _, disk := range []bool{false, true} {
		w := newWorld(t, false)
		w.add(3 * mib)
		testkit.Must(w.t, w.save(disk))
		w.drv.FailCall(func(call string, _ uint64) cuda.Code {
			if call == "cuMemcpyAsync" {
				return cuda.ErrIllegalAddress
			}
			return cuda.Success
		})
		if err := w.load(); !errors.Is(err, cuda.ErrIllegalAddress) || w.store.health.Broken() == nil || !w.store.Unsure() {
			t.Errorf("file %v: %v; broken %v, unsure %v", disk, err, w.store.health.Broken(), w.store.Unsure())
		}
		w.drop()
		if err := w.store.Close(); !errors.Is(err, cuda.ErrIllegalAddress) {
			t.Errorf("file %v: %v", disk, err)
		}
	}
}

// While the driver refuses to wait for copies the store gives no host memory away; once it does not, all goes on.
func TestUnsure(t *testing.T) {
	for _, disk := range []bool{false, true} {
		w := newWorld(t, false)
		w.add(3 * mib)
		testkit.Must(w.t, w.save(disk))
		refuse := func(times int) {
			w.drv.FailCall(func(call string, _ uint64) cuda.Code {
				if call == "cuStreamSynchronize" && times > 0 {
					times--
					return cuda.ErrInvalidValue
				}
				return cuda.Success
			})
		}
		refuse(2)
		if err := w.load(); !errors.Is(err, cuda.ErrInvalidValue) || w.store.Unsure() {
			t.Errorf("file %v: two refusals: %v, unsure %v", disk, err, w.store.Unsure())
		}
		refuse(6)
		if err := w.load(); !errors.Is(err, cuda.ErrInvalidValue) || !w.store.Unsure() {
			t.Errorf("file %v: %v, unsure %v", disk, err, w.store.Unsure())
		}
		had := w.drv.HostBytes()
		if err := w.store.Trim(0); !errors.Is(err, cuda.ErrInvalidValue) || w.drv.HostBytes() != had {
			t.Errorf("file %v: %v, %d bytes of %d are left", disk, err, w.drv.HostBytes(), had)
		}
		testkit.Must(w.t, w.store.Ready())
		w.wipe()
		testkit.Must(w.t, w.load())
		w.check()
		w.drop()
		w.end()
	}
}

// Where the driver refuses to page-lock memory of the process, it allocates the memory.
func TestRegisteringRefused(t *testing.T) {
	w := newWorld(t, true)
	w.add(5 * mib)
	w.drv.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuMemHostRegister" {
			return cuda.ErrNotPermitted
		}
		return cuda.Success
	})
	testkit.Must(w.t, w.save(false))
	if l := w.drv.Leaks(); l.Registered != 0 || l.Hosts == 0 {
		t.Errorf("%+v", l)
	}
	w.wipe()
	testkit.Must(w.t, w.load())
	w.check()
	w.drop()
	w.end()
}
