//go:build linux

package open

import (
	"os"
	"syscall"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// sharing is the part of conforms that is about memory for other processes, as far as one process can tell.
func sharing(t *testing.T, d cuda.Driver, dev cuda.Device, g uint64) {
	reserve := func(t *testing.T, size uint64) cuda.Ptr {
		p, err := d.AddressReserve(size, g, 0)
		must(t, err)
		t.Cleanup(func() { must(t, d.AddressFree(p, size)) })
		return p
	}
	t.Run("a chunk", func(t *testing.T) {
		handles, err := d.ProbeHandles(dev)
		must(t, err)
		if handles&cuda.HandlePosix == 0 {
			t.Skip("the device makes no chunks that a descriptor can name")
		}
		p := reserve(t, 4*g)
		once := func() int {
			h, err := d.MemCreate(2*g, cuda.MemProp{Device: dev, Handles: handles})
			must(t, err)
			fd, err := d.MemExport(h)
			must(t, err)
			again, err := d.MemExport(h)
			must(t, err)
			for _, x := range []int{fd, again} {
				if !closesOnExec(t, x) {
					t.Error("a program that this one starts would inherit the memory")
				}
			}
			must(t, shut(again))
			held, _, err := d.MemInfo(dev)
			must(t, err)
			k, err := d.MemImport(dev, fd)
			must(t, err)
			must(t, shut(fd))
			if free, _, err := d.MemInfo(dev); err != nil || free < held {
				t.Errorf("importing took memory: %d free, then %d, %v", held, free, err)
			}
			must(t, d.MemMap(p, 2*g, h))
			must(t, d.MemRelease(h))
			must(t, d.MemMap(p+cuda.Ptr(2*g), 2*g, k))
			must(t, d.MemSetAccess(p, 4*g, []cuda.Device{dev}))
			must(t, d.MemRelease(k))
			must(t, d.MemUnmap(p, 4*g))
			return testkit.Descriptors(t)
		}
		if first, second := once(), once(); first != second {
			t.Errorf("%d descriptors are open, then %d", first, second)
		}
	})
	t.Run("what cannot be", func(t *testing.T) {
		h, err := d.MemCreate(g, cuda.MemProp{Device: dev})
		must(t, err)
		_, err = d.MemExport(h)
		fails(t, "a chunk without handle types", err)
		must(t, d.MemRelease(h))
		f, err := os.Open("/dev/null")
		must(t, err)
		defer f.Close()
		_, err = d.MemImport(dev, int(f.Fd()))
		fails(t, "a file that is no chunk", err)
	})
	t.Run("a pool", func(t *testing.T) {
		info, err := d.DeviceInfo(dev)
		must(t, err)
		if info.PoolHandles&cuda.HandlePosix == 0 {
			t.Skip("the device makes no pools that a descriptor can name")
		}
		once := func() int {
			pool, err := d.MemPoolCreate(cuda.MemPoolProps{Device: dev, Handles: cuda.HandlePosix})
			must(t, err)
			fd, err := d.MemPoolExport(dev, pool)
			must(t, err)
			if !closesOnExec(t, fd) {
				t.Error("a program that this one starts would inherit the pool")
			}
			must(t, shut(fd))
			p, err := d.MemAllocAsync(dev, g, pool, cuda.StreamLegacy)
			must(t, err)
			h, err := d.MemPoolExportPtr(dev, p)
			must(t, err)
			if h == (cuda.PoolPtr{}) {
				t.Error("memory without a name")
			}
			must(t, d.MemFreeAsync(dev, p, cuda.StreamLegacy))
			must(t, d.StreamSynchronize(dev, cuda.StreamLegacy))
			must(t, d.MemPoolDestroy(dev, pool))
			return testkit.Descriptors(t)
		}
		if first, second := once(), once(); first != second {
			t.Errorf("%d descriptors are open, then %d", first, second)
		}
		plain, err := d.MemPoolCreate(cuda.MemPoolProps{Device: dev})
		must(t, err)
		_, err = d.MemPoolExport(dev, plain)
		fails(t, "a pool without handle types", err)
		must(t, d.MemPoolDestroy(dev, plain))
		f, err := os.Open("/dev/null")
		must(t, err)
		defer f.Close()
		_, err = d.MemPoolImport(dev, int(f.Fd()))
		fails(t, "a file that is no pool", err)
	})
	t.Run("an event", func(t *testing.T) {
		e, err := d.EventCreateShared(dev)
		must(t, err)
		h, err := d.EventExport(dev, e)
		must(t, err)
		if again, err := d.EventExport(dev, e); again != h || err != nil {
			t.Errorf("its name is %x, then %x, %v", h, again, err)
		}
		must(t, d.EventRecord(dev, e, cuda.StreamLegacy))
		must(t, d.StreamWaitEvent(dev, cuda.StreamLegacy, e))
		must(t, d.EventSynchronize(dev, e))
		if done, err := d.EventQuery(dev, e); !done || err != nil {
			t.Errorf("a record that was waited for is done: %v, %v", done, err)
		}
		must(t, d.EventDestroy(dev, e))
		own, err := d.EventCreate(dev)
		must(t, err)
		_, err = d.EventExport(dev, own)
		fails(t, "an event of this process alone", err)
		must(t, d.EventDestroy(dev, own))
	})
	t.Run("an allocation", func(t *testing.T) {
		p, err := d.MemAlloc(dev, 2*g)
		must(t, err)
		h, err := d.IpcExport(dev, p)
		must(t, err)
		if again, err := d.IpcExport(dev, p); again != h || err != nil {
			t.Errorf("its handle is %x, then %x, %v", h, again, err)
		}
		_, err = d.IpcOpen(dev, h)
		fails(t, "its own process", err)
		fails(t, "what is not open closed", d.IpcClose(dev, p))
		must(t, d.MemFree(dev, p))
		at := reserve(t, g)
		k, err := d.MemCreate(g, cuda.MemProp{Device: dev})
		must(t, err)
		must(t, d.MemMap(at, g, k))
		must(t, d.MemRelease(k))
		must(t, d.MemSetAccess(at, g, []cuda.Device{dev}))
		_, err = d.IpcExport(dev, at)
		fails(t, "a mapped chunk", err)
		must(t, d.MemUnmap(at, g))
	})
}

func shut(fd int) error { return os.NewFile(uintptr(fd), "shared").Close() }

func closesOnExec(t *testing.T, fd int) bool {
	t.Helper()
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	return flags&syscall.FD_CLOEXEC != 0
}
