//go:build linux && cgo

package nvidia_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// Where there is nothing to use, one line says why and how to do without.
func TestNoGPU(t *testing.T) {
	refuses := func(name, path, says string, code error) {
		t.Helper()
		d, err := nvidia.Open(path)
		if err == nil {
			t.Fatalf("%s: opened %v", name, d)
		}
		if s := err.Error(); !strings.Contains(s, says) || !strings.Contains(s, "CISTERN_CONF=driver:sim") || strings.Contains(s, "\n") {
			t.Errorf("%s: %q; want one line with %q and the simulated device", name, s, says)
		}
		if code != nil && !errors.Is(err, code) {
			t.Errorf("%s: %v is not %v", name, err, code)
		}
	}
	refuses("no library", "/nowhere/libcuda.so.1", "/nowhere/libcuda.so.1", nil)

	text := filepath.Join(t.TempDir(), "libcuda.so.1")
	must(t, os.WriteFile(text, []byte("not a library"), 0o600))
	refuses("not a library", text, "libcuda.so.1", nil)
	refuses("not CUDA's library", standin.Build(t, "cuInit"), "not a CUDA driver library", nil)

	t.Setenv("STANDIN_DEVICES", "0")
	refuses("no device", standin.Build(t), "cuInit: CUDA_ERROR_NO_DEVICE", cuda.ErrNoDevice)
	t.Setenv("STANDIN_DEVICES", "")
	t.Setenv("STANDIN_FAIL", "cuInit=803")
	refuses("mismatch", standin.Build(t), "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", cuda.ErrSystemDriverMismatch)
	t.Setenv("STANDIN_FAIL", "cuDeviceGetCount=999")
	refuses("count", standin.Build(t), "cuDeviceGetCount: CUDA_ERROR_UNKNOWN", cuda.ErrUnknown)
}

func TestDeviceInfo(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	t.Setenv("STANDIN_VERSION", "12040")
	b := open(t)
	if n, err := b.DeviceCount(); n != 2 || err != nil || b.Version() != 12040 || b.Name() != "nvidia" {
		t.Errorf("%d devices (%v), version %d, name %s", n, err, b.Version(), b.Name())
	}
	info, err := b.DeviceInfo(1)
	must(t, err)
	want := cuda.DeviceInfo{
		Name: "Stand-in GPU 1", TotalBytes: 64 << 30, Granularity: chunk, VMM: true, RDMA: true, Multiproc: 132,
		Handles: cuda.HandleFabric | cuda.HandlePosix, Managed: true, Pools: true, HostVMM: true,
		PoolHandles: cuda.HandleFabric | cuda.HandlePosix, // and not the third that the device has
	}
	for i := range want.UUID {
		want.UUID[i] = byte(0x20 + i)
	}
	want.UUID[15] = 1
	if info != want {
		t.Errorf("device 1 is\n%+v; want\n%+v", info, want)
	}
	for _, bad := range []cuda.Device{-1, 2} {
		if _, err := b.DeviceInfo(bad); !errors.Is(err, cuda.ErrInvalidDevice) {
			t.Errorf("device %d: %v", bad, err)
		}
	}
	if active, err := b.ContextActive(1); active || err != nil {
		t.Errorf("looking made a context: %v, %v", active, err)
	}
}

// An old driver has fewer ways to say it, and an old GPU no virtual memory.
func TestDeviceInfoOld(t *testing.T) {
	info, err := open(t, "cuDeviceGetUuid_v2").DeviceInfo(0)
	must(t, err)
	if info.UUID[0] != 0x10 {
		t.Errorf("UUID % x", info.UUID)
	}
	none := func(name string, info cuda.DeviceInfo, err error) {
		t.Helper()
		if err != nil || info.VMM || info.Granularity != 0 || info.Handles != 0 || info.RDMA || info.TotalBytes == 0 {
			t.Errorf("%s: %+v, %v; want memory but no virtual memory", name, info, err)
		}
	}
	info, err = open(t, "cuMemGetAllocationGranularity").DeviceInfo(0)
	none("old driver", info, err)
	t.Setenv("STANDIN_FABRIC", "no vmm")
	info, err = open(t).DeviceInfo(0)
	none("old GPU", info, err)
}

// Handles are what a chunk could really be made with, whatever the attributes promise.
func TestProbeHandles(t *testing.T) {
	for fabric, want := range map[string]struct {
		handles cuda.HandleType
		calls   string
	}{
		"": {cuda.HandleFabric | cuda.HandlePosix, "cuMemCreate(size 2097152, handles 9, location 1:0, rdma 1) = 0, context -1\n" +
			"cuMemRelease() = 0, context -1"},
		"refused": {cuda.HandlePosix, "cuMemCreate(size 2097152, handles 9, location 1:0, rdma 1) = 800, context -1\n" +
			"cuMemCreate(size 2097152, handles 1, location 1:0, rdma 1) = 0, context -1\ncuMemRelease() = 0, context -1"},
		"missing": {cuda.HandlePosix, "cuMemCreate(size 2097152, handles 9, location 1:0, rdma 1) = 801, context -1\n" +
			"cuMemCreate(size 2097152, handles 1, location 1:0, rdma 1) = 0, context -1\ncuMemRelease() = 0, context -1"},
		"no handles": {cuda.HandleNone, "cuMemCreate(size 2097152, handles 9, location 1:0, rdma 1) = 801, context -1\n" +
			"cuMemCreate(size 2097152, handles 1, location 1:0, rdma 1) = 801, context -1\n" +
			"cuMemCreate(size 2097152, handles 0, location 1:0, rdma 1) = 0, context -1\ncuMemRelease() = 0, context -1"},
	} {
		t.Run("fabric "+fabric, func(t *testing.T) {
			t.Setenv("STANDIN_FABRIC", fabric)
			b := open(t)
			b.wants(want.calls, func() {
				if got, err := b.ProbeHandles(0); got != want.handles || err != nil {
					t.Errorf("granted %d, %v; want %d", got, err, want.handles)
				}
			})
		})
	}
	t.Run("out of memory is no refusal", func(t *testing.T) {
		b := open(t)
		t.Setenv("STANDIN_FAIL", "cuMemCreate=2")
		if got, err := b.ProbeHandles(0); got != 0 || !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("granted %d, %v; want out of memory", got, err)
		}
	})
	t.Run("nothing is granted", func(t *testing.T) {
		b := open(t)
		t.Setenv("STANDIN_FAIL", "cuMemCreate=801")
		if got, err := b.ProbeHandles(0); got != 0 || !errors.Is(err, cuda.ErrNotSupported) {
			t.Errorf("granted %d, %v; want not supported", got, err)
		}
	})
}

// A driver without virtual memory management cannot be probed for handles, and says which call it lacks.
func TestProbeHandlesWithoutVMM(t *testing.T) {
	b := open(t, "cuMemGetAllocationGranularity", "cuMemCreate")
	_, err := b.ProbeHandles(0)
	if err == nil || !errors.Is(err, cuda.ErrNotSupported) {
		t.Errorf("%v; want not supported", err)
	}
}
