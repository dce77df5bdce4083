package open

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// conforms tests what package cuda promises of every driver, on device 0, as far as one host thread and an idle GPU can
// tell. What the simulated driver forbids, the real one must forbid too, or an engine that passes here fails there.
func conforms(t *testing.T, d cuda.Driver) {
	const dev = cuda.Device(0)
	info, err := d.DeviceInfo(dev)
	must(t, err)
	g := info.Granularity
	if !info.VMM || g == 0 || g&(g-1) != 0 || info.TotalBytes < 64*g {
		t.Fatalf("device 0 is %+v", info)
	}
	prop := cuda.MemProp{Device: dev}
	reserve := func(t *testing.T, size uint64) cuda.Ptr {
		t.Helper()
		p, err := d.AddressReserve(size, g, 0)
		must(t, err)
		t.Cleanup(func() {
			if err := d.AddressFree(p, size); err != nil {
				t.Errorf("giving the range back: %v", err)
			}
		})
		return p
	}
	create := func(t *testing.T, size uint64) cuda.Handle {
		t.Helper()
		h, err := d.MemCreate(size, prop)
		must(t, err)
		return h
	}

	// Driver 580 on an H200 lets unmapping of what is not mapped pass, and a mapping run past its reservation. Nothing
	// documents either, so the drivers that stand in for it refuse both.
	strict := !strings.HasSuffix(t.Name(), "/real")

	t.Run("no context is made to look", func(t *testing.T) {
		if active, err := d.ContextActive(dev); active || err != nil {
			t.Skipf("the context exists already: %v, %v", active, err)
		}
		if _, _, err := d.MemInfo(dev); !errors.Is(err, cuda.ErrInvalidContext) {
			t.Errorf("memory info: %v; want invalid context", err)
		}
		if _, err := d.ProbeHandles(dev); err != nil {
			t.Error(err)
		}
		h := create(t, g)
		p := reserve(t, g)
		must(t, d.MemMap(p, g, h))
		must(t, d.MemSetAccess(p, g, []cuda.Device{dev}))
		must(t, d.MemUnmap(p, g))
		must(t, d.MemRelease(h))
		if active, err := d.ContextActive(dev); active || err != nil {
			t.Errorf("a context exists: %v, %v", active, err)
		}
	})
	must(t, d.RetainContext(dev))
	must(t, d.RetainContext(dev))
	if active, err := d.ContextActive(dev); !active || err != nil {
		t.Errorf("context active: %v, %v", active, err)
	}

	t.Run("devices", func(t *testing.T) {
		n, err := d.DeviceCount()
		must(t, err)
		for _, bad := range []cuda.Device{-1, cuda.Device(n)} {
			_, err := d.DeviceInfo(bad)
			wants(t, err, cuda.ErrInvalidDevice)
			wants(t, d.RetainContext(bad), cuda.ErrInvalidDevice)
			_, err = d.MemCreate(g, cuda.MemProp{Device: bad})
			wants(t, err, cuda.ErrInvalidDevice)
		}
	})
	t.Run("a chunk mapped twice", func(t *testing.T) {
		p := reserve(t, 4*g)
		h := create(t, 2*g)
		must(t, d.MemMap(p, 2*g, h))
		must(t, d.MemMap(p+cuda.Ptr(2*g), 2*g, h))
		must(t, d.MemRelease(h)) // it goes with its last mapping
		must(t, d.MemSetAccess(p, 4*g, []cuda.Device{dev}))
		must(t, d.MemSetAccess(p, 2*g, []cuda.Device{dev})) // again
		must(t, d.MemSetReadOnly(p, 2*g, []cuda.Device{dev}))
		must(t, d.MemUnmap(p, 4*g))
	})
	t.Run("only whole mappings are unmapped", func(t *testing.T) {
		p := reserve(t, 4*g)
		h := create(t, 2*g)
		must(t, d.MemMap(p, 2*g, h))
		fails(t, "half a mapping", d.MemUnmap(p, g))
		fails(t, "the other half", d.MemUnmap(p+cuda.Ptr(g), g))
		if strict {
			fails(t, "nothing", d.MemUnmap(p+cuda.Ptr(2*g), 2*g))
		}
		must(t, d.MemSetAccess(p, 2*g, []cuda.Device{dev})) // it is still there
		must(t, d.MemUnmap(p, 2*g))
		if strict {
			fails(t, "twice", d.MemUnmap(p, 2*g))
		}
		must(t, d.MemRelease(h))
	})
	t.Run("mapping", func(t *testing.T) {
		p := reserve(t, 4*g)
		a, b := create(t, 2*g), create(t, 2*g)
		must(t, d.MemMap(p, 2*g, a))
		fails(t, "over another", d.MemMap(p, 2*g, b))
		fails(t, "over half of another", d.MemMap(p+cuda.Ptr(g), 2*g, b))
		if strict {
			fails(t, "past the range", d.MemMap(p+cuda.Ptr(3*g), 2*g, b))
		}
		fails(t, "access to what is not mapped", d.MemSetAccess(p, 4*g, []cuda.Device{dev}))
		fails(t, "reading what is not mapped", d.MemSetReadOnly(p, 4*g, []cuda.Device{dev}))
		fails(t, "access for no device", d.MemSetAccess(p, 2*g, []cuda.Device{99}))
		must(t, d.MemMap(p+cuda.Ptr(2*g), 2*g, b))
		must(t, d.MemSetAccess(p, 4*g, []cuda.Device{dev}))
		fails(t, "a range in use given back", d.AddressFree(p, 4*g))
		must(t, d.MemUnmap(p, 4*g))
		fails(t, "half a range given back", d.AddressFree(p, 2*g))
		must(t, d.MemRelease(a))
		must(t, d.MemRelease(b))
	})
	t.Run("addresses", func(t *testing.T) {
		p, err := d.AddressReserve(4*g, 16*g, 0)
		must(t, err)
		if p == 0 || uint64(p)%(16*g) != 0 {
			t.Errorf("reserved %#x, aligned to %#x was asked for", uint64(p), 16*g)
		}
		must(t, d.AddressFree(p, 4*g))
		_, err = d.AddressReserve(g+1, g, 0)
		wants(t, err, cuda.ErrInvalidValue)
		_, err = d.AddressReserve(0, g, 0)
		wants(t, err, cuda.ErrInvalidValue)
	})
	t.Run("memory", func(t *testing.T) {
		_, err := d.MemCreate(g+1, prop)
		wants(t, err, cuda.ErrInvalidValue)
		_, err = d.MemCreate(0, prop)
		wants(t, err, cuda.ErrInvalidValue)
		_, err = d.MemAlloc(dev, 0)
		wants(t, err, cuda.ErrInvalidValue)
		fails(t, "an address that was not allocated", d.MemFree(dev, 12345))

		free, total, err := d.MemInfo(dev)
		must(t, err)
		if free == 0 || free > total {
			t.Errorf("%d free of %d", free, total)
		}
		much := (info.TotalBytes + 16*g) / g * g
		_, err = d.MemCreate(much, prop)
		wants(t, err, cuda.ErrOutOfMemory)
		_, err = d.MemAlloc(dev, much)
		wants(t, err, cuda.ErrOutOfMemory)
		must(t, d.MemRelease(create(t, g))) // what fits succeeds afterwards
		p, err := d.MemAlloc(dev, 1000)
		must(t, err)
		if uint64(p)%256 != 0 { // cuMemAlloc: "suitably aligned for any kind of variable"
			t.Errorf("allocated %#x", uint64(p))
		}
		must(t, d.MemFree(dev, p))
	})
	t.Run("a released chunk stays while it is mapped", func(t *testing.T) {
		size := 32 * g
		before, _, err := d.MemInfo(dev)
		must(t, err)
		p, h := reserve(t, size), create(t, size)
		must(t, d.MemMap(p, size, h))
		must(t, d.MemRelease(h))
		held, _, err := d.MemInfo(dev)
		must(t, err)
		if held+size > before {
			t.Errorf("free went from %d to %d with %d mapped", before, held, size)
		}
		must(t, d.MemUnmap(p, size))
		if after, _, err := d.MemInfo(dev); err != nil || after < held+size {
			t.Errorf("free went from %d to %d when %d were unmapped, %v", held, after, size, err)
		}
	})
	t.Run("host memory", func(t *testing.T) { hostMemory(t, d, dev, g) })
	t.Run("managed memory", func(t *testing.T) { managedMemory(t, d, dev, g) })
	t.Run("host memory as chunks", func(t *testing.T) { hostChunks(t, d, dev, g) })
	t.Run("copies", func(t *testing.T) { copies(t, d, dev, g) })
	t.Run("pools", func(t *testing.T) { pools(t, d, dev, g) })
	t.Run("streams of one's own", func(t *testing.T) { ownStreams(t, d, dev) })
	t.Run("sharing", func(t *testing.T) { sharing(t, d, dev, g) })
	t.Run("events", func(t *testing.T) {
		e, err := d.EventCreate(dev)
		must(t, err)
		if done, err := d.EventQuery(dev, e); !done || err != nil {
			t.Errorf("never recorded: done %v, %v", done, err)
		}
		for _, s := range []cuda.Stream{cuda.StreamNull, cuda.StreamLegacy, cuda.StreamPerThread} {
			must(t, d.EventRecord(dev, e, s))
			must(t, d.StreamWaitEvent(dev, cuda.StreamPerThread, e))
			must(t, d.EventSynchronize(dev, e))
			if done, err := d.EventQuery(dev, e); !done || err != nil {
				t.Errorf("stream %d: waited for and done %v, %v", s, done, err)
			}
			must(t, d.StreamSynchronize(dev, s))
		}
		must(t, d.ContextSynchronize(dev))
		must(t, d.EventRecord(dev, e, cuda.StreamLegacy))
		must(t, d.EventDestroy(dev, e)) // with its work pending or not
	})
	t.Run("captured nodes", func(t *testing.T) { capturedNodes(t, d, dev) })
	t.Run("streams", func(t *testing.T) {
		runtime.LockOSThread() // the per-thread stream is this thread's
		defer runtime.UnlockOSThread()
		id := map[cuda.Stream]cuda.StreamID{}
		for _, s := range []cuda.Stream{cuda.StreamNull, cuda.StreamLegacy, cuda.StreamPerThread} {
			id[s], err = d.StreamID(dev, s)
			must(t, err)
			if again, err := d.StreamID(dev, s); again != id[s] || err != nil {
				t.Errorf("stream %d is %+v, then %+v, %v", s, id[s], again, err)
			}
			if status, capture, err := d.StreamCapture(dev, s); status != cuda.CaptureNone || capture != 0 || err != nil {
				t.Errorf("stream %d: capture %v, %d, %v", s, status, capture, err)
			}
			if capture, nodes, err := d.StreamCaptureNodes(dev, s); capture != 0 || len(nodes) != 0 || err != nil {
				t.Errorf("stream %d: nodes of capture %d: %v, %v", s, capture, nodes, err)
			}
		}
		if id[cuda.StreamNull] != id[cuda.StreamLegacy] {
			t.Errorf("the null stream is %+v, the legacy stream %+v", id[cuda.StreamNull], id[cuda.StreamLegacy])
		}
		if id[cuda.StreamPerThread] == id[cuda.StreamLegacy] || id[cuda.StreamPerThread].Context != id[cuda.StreamLegacy].Context {
			t.Errorf("the per-thread stream is %+v, the legacy stream %+v", id[cuda.StreamPerThread], id[cuda.StreamLegacy])
		}
	})
}

// peersConform tests what package cuda promises of two devices that may use each other's memory, or not.
func peersConform(t *testing.T, d cuda.Driver) {
	const dev, peer = cuda.Device(0), cuda.Device(1)
	can, err := d.CanAccessPeer(peer, dev)
	must(t, err)
	for _, pair := range [][2]cuda.Device{{-1, 0}, {0, -1}, {99, 0}, {0, 99}} {
		_, err := d.CanAccessPeer(pair[0], pair[1])
		wants(t, err, cuda.ErrInvalidDevice)
	}
	must(t, d.RetainContext(peer))
	if active, err := d.ContextActive(dev); !active && err == nil {
		wants(t, d.EnablePeerAccess(peer, dev), cuda.ErrInvalidContext)
		if active, _ := d.ContextActive(dev); active {
			t.Error("asking for access made a context")
		}
	}
	must(t, d.RetainContext(dev))
	if !can {
		wants(t, d.EnablePeerAccess(peer, dev), cuda.ErrPeerAccessUnsupported)
		return
	}
	must(t, d.EnablePeerAccess(peer, dev))
	wants(t, d.EnablePeerAccess(peer, dev), cuda.ErrPeerAccessAlreadyEnabled)
	must(t, d.EnablePeerAccess(dev, peer)) // the other way is another matter
	info, err := d.DeviceInfo(dev)
	must(t, err)
	g := info.Granularity
	p, err := d.AddressReserve(2*g, g, 0)
	must(t, err)
	h, err := d.MemCreate(g, cuda.MemProp{Device: dev})
	must(t, err)
	for i, devs := range [][]cuda.Device{{dev, peer}, {peer}} {
		at := p + cuda.Ptr(uint64(i)*g)
		must(t, d.MemMap(at, g, h))
		must(t, d.MemSetAccess(at, g, devs))
	}
	must(t, d.MemSetAccess(p, 2*g, []cuda.Device{peer, dev}))
	must(t, d.MemUnmap(p, 2*g))
	must(t, d.MemRelease(h))
	must(t, d.AddressFree(p, 2*g))
	peerCopies(t, d, dev, peer, g)
}

func TestConformance(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		d, err := Open("sim:1GiB")
		must(t, err)
		conforms(t, d)
	})
	t.Run("real", func(t *testing.T) {
		d, err := Open("nvidia")
		if err != nil {
			t.Skip(err)
		}
		conforms(t, d)
	})
}

// TestPeers is TestConformance for two devices.
func TestPeers(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		d, err := Open("sim:1GiBx2")
		must(t, err)
		peersConform(t, d)
		peersConform(t, sim.New(sim.Options{Devices: 2, Isolated: true}))
	})
	t.Run("real", func(t *testing.T) {
		d, err := Open("nvidia")
		if err != nil {
			t.Skip(err)
		}
		if n, _ := d.DeviceCount(); n < 2 {
			t.Skip("one device only")
		}
		peersConform(t, d)
	})
}

// must stops the test on an error.
var must = testkit.Must

func wants(t *testing.T, err error, code cuda.Code) {
	t.Helper()
	var e *cuda.Error
	if !errors.Is(err, code) || !errors.As(err, &e) {
		t.Errorf("%v; want %v", err, code)
	}
}

func fails(t *testing.T, what string, err error) {
	t.Helper()
	var e *cuda.Error
	if !errors.As(err, &e) {
		t.Errorf("%s: %v; want one of CUDA's errors", what, err)
	}
}
