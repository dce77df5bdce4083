package engine_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// pair is two devices of one simulated machine, each with a stream.
type pair struct {
	drv *sim.Driver
	a   *engine.Allocator
	dev [2]*engine.Device
	st  [2]*engine.Stream
}

func newPair(t *testing.T, drv cuda.Driver, simulated *sim.Driver, opts config.Options) *pair {
	t.Helper()
	if simulated == nil {
		simulated = sim.New(sim.Options{Devices: 2, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }})
		drv = simulated
	}
	p := &pair{drv: simulated}
	var err error
	if p.a, err = engine.New(drv, opts); err != nil {
		t.Fatal(err)
	}
	for i := range p.dev {
		if p.dev[i], err = p.a.Device(cuda.Device(i)); err != nil {
			t.Fatal(err)
		}
		if p.st[i], err = p.dev[i].Stream(simulated.NewStreamNonBlocking(cuda.Device(i)), config.StreamDurable); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p *pair) alloc(t *testing.T, dev int, size uint64) cuda.Ptr {
	t.Helper()
	ptr, err := p.dev[dev].Alloc(size, p.st[dev])
	if err != nil {
		t.Fatal(err)
	}
	return ptr
}

// use has work on a device's stream use memory.
func (p *pair) use(dev int, ptr cuda.Ptr, size uint64) error {
	return p.drv.Use(cuda.Device(dev), p.st[dev].Handle(), ptr, size)
}

// After EnablePeer the peer uses all there is and all that comes, wherever it is mapped, and before it nothing.
func TestPeer(t *testing.T) {
	for _, opts := range []config.Options{{Backend: config.BackendVMM}, {Backend: config.BackendMalloc}, {SingleHandle: true}} {
		t.Run(opts.String(), func(t *testing.T) {
			drv := sim.New(sim.Options{Devices: 2, Capacity: 256 * mib, Check: sim.CheckOrder, Lag: 20 * time.Millisecond})
			p := newPair(t, drv, drv, opts)
			small, large := p.alloc(t, 0, 1000), p.alloc(t, 0, 70*mib)
			cached := p.alloc(t, 0, 30*mib)
			if err := p.a.Free(cached); err != nil {
				t.Fatal(err)
			}
			other := sim.New(sim.Options{Devices: 2, Check: sim.CheckOrder})
			o := newPair(t, other, other, opts)
			if x := o.alloc(t, 0, 1000); o.use(1, x, 1000) == nil {
				t.Fatal("without EnablePeer the simulator lets the peer use everything")
			}

			if err := p.dev[0].Peers.Enable(0); err != nil {
				t.Errorf("a device is no peer of its own: %v", err)
			}
			for range 2 {
				if err := p.dev[0].Peers.Enable(1); err != nil {
					t.Fatal(err)
				}
			}
			if got := p.dev[0].Peers.List(); len(got) != 1 || got[0] != 1 {
				t.Errorf("peers %v, want device 1", got)
			}
			again := p.alloc(t, 0, 30*mib) // from what was cached
			fresh := p.alloc(t, 0, 50*mib)
			for ptr, size := range map[cuda.Ptr]uint64{small: 1000, large: 70 * mib, again: 30 * mib, fresh: 50 * mib} {
				if err := p.use(1, ptr, size); err != nil {
					t.Errorf("the peer uses %d bytes: %v", size, err)
				}
				if err := p.a.RecordStream(ptr, p.st[1]); err != nil {
					t.Fatal(err)
				}
				if err := p.a.Free(ptr); err != nil {
					t.Fatal(err)
				}
			}
			// It only fits when most of that moves, or is given back, once the peer is done with it.
			most := p.alloc(t, 0, 200*mib)
			for _, dev := range []int{0, 1} {
				if err := p.use(dev, most, 200*mib); err != nil {
					t.Error(err)
				}
				if err := drv.StreamSynchronize(cuda.Device(dev), p.st[dev].Handle()); err != nil {
					t.Fatal(err)
				}
			}
			if x := p.alloc(t, 1, 1000); p.use(0, x, 1000) == nil {
				t.Error("peer access is one way, but device 0 uses memory of device 1")
			}
		})
	}
}

// Devices that cannot reach each other, and failures on the way, leave everything usable as it was.
func TestPeerFails(t *testing.T) {
	drv := sim.New(sim.Options{Devices: 2, Isolated: true, Check: sim.CheckOrder})
	p := newPair(t, drv, drv, config.Options{})
	if err := p.dev[0].Peers.Enable(1); !errors.Is(err, cuda.ErrPeerAccessUnsupported) {
		t.Errorf("%v; want unsupported", err)
	}
	if err := p.dev[0].Peers.Enable(7); !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("%v; want an invalid device", err)
	}
	if x := p.alloc(t, 0, 5*mib); p.use(0, x, 5*mib) != nil || len(p.dev[0].Peers.List()) != 0 {
		t.Error("a refusal changed the device")
	}
	for k := uint64(1); ; k++ {
		drv := sim.New(sim.Options{Devices: 2, Check: sim.CheckOrder})
		p := newPair(t, drv, drv, config.Options{})
		a, b := p.alloc(t, 0, 1000), p.alloc(t, 0, 70*mib)
		start, failed := drv.CallNumber(), false
		drv.FailCall(func(_ string, n uint64) cuda.Code {
			if n != start+k {
				return cuda.Success
			}
			failed = true
			return cuda.ErrOutOfMemory
		})
		err := p.dev[0].Peers.Enable(1)
		if (err != nil) != failed || failed && len(p.dev[0].Peers.List()) != 0 {
			t.Fatalf("call %d failed %v: %v, peers %v", k, failed, err, p.dev[0].Peers.List())
		}
		drv.FailCall(nil)
		if err := errors.Join(p.dev[0].Peers.Enable(1), p.use(1, a, 1000), p.use(1, b, 70*mib)); err != nil {
			t.Fatalf("call %d failed; then: %v", k, err)
		}
		if c := p.alloc(t, 0, 50*mib); p.use(1, c, 50*mib) != nil || p.use(0, c, 50*mib) == nil {
			t.Fatalf("call %d failed; then new memory is not the peer's, or unordered uses pass", k)
		}
		if !failed {
			if k < 5 {
				t.Errorf("EnablePeer makes %d driver calls only", k)
			}
			return
		}
	}
}

// peerless is a driver on which access for device 1 fails as if that device were broken.
type peerless struct {
	*sim.Driver
	mu     sync.Mutex
	broken bool // guarded by mu
}

func (d *peerless) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, x := range devs {
		if x == 1 && d.broken {
			return &cuda.Error{Op: "cuMemSetAccess", Device: 1, Size: size, Code: cuda.ErrIllegalAddress}
		}
	}
	return d.Driver.MemSetAccess(p, size, devs)
}

// A device whose context is broken fails alone: others go on, also those whose peer it is.
func TestBrokenDeviceFailsAlone(t *testing.T) {
	drv := &peerless{Driver: sim.New(sim.Options{Devices: 2})}
	p := newPair(t, drv, drv.Driver, config.Options{})
	for i := range p.dev {
		if err := p.dev[i].Peers.Enable(cuda.Device(1 - i)); err != nil {
			t.Fatal(err)
		}
	}
	before := p.alloc(t, 1, 3*mib)
	shared := p.alloc(t, 0, 3*mib)
	if err := p.a.RecordStream(shared, p.st[1]); err != nil {
		t.Fatal(err)
	}
	drv.Poison(1, cuda.ErrIllegalAddress)
	drv.mu.Lock()
	drv.broken = true
	drv.mu.Unlock()
	if _, err := p.dev[1].Alloc(100*mib, p.st[1]); err == nil {
		// Nothing in this request asks the context; what waits on its stream does.
		if err := p.dev[1].Trim(); err == nil {
			_, err = p.dev[1].Stream(p.st[1].Handle())
			if !errors.Is(err, cuda.ErrIllegalAddress) {
				t.Fatalf("the broken device: %v; want an illegal address", err)
			}
		}
	}
	if err := p.a.Free(before); err != nil {
		t.Errorf("a free on the broken device: %v", err)
	}
	p.a.Free(shared) // says that the peer's stream is broken, or not; the block is taken back either way
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			st, err := p.dev[0].Stream(drv.NewStreamNonBlocking(0), config.StreamDurable)
			if err != nil {
				t.Errorf("the healthy device: %v", err)
				return
			}
			for i := range 50 {
				size := uint64(1+i%7) * 5 * mib
				x, err := p.dev[0].Alloc(size, st)
				if err == nil {
					err = errors.Join(drv.Use(0, st.Handle(), x, size), p.a.Free(x))
				}
				if err != nil {
					t.Errorf("the healthy device: %v", err)
				}
				if _, err := p.dev[1].Alloc(size, p.st[1]); err == nil {
					t.Error("the broken device gives out memory")
				}
			}
		}()
	}
	wg.Wait()
	if err := p.dev[0].Trim(); err != nil {
		t.Errorf("trimming the healthy device: %v", err)
	}
	if s := p.dev[0].Views.Stats(); s.Active.All.Current != 0 || s.Reserved.All.Current != 0 {
		t.Errorf("the healthy device holds %d bytes and %d blocks after all is freed", s.Reserved.All.Current, s.Active.All.Current)
	}
}
