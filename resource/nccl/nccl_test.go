//go:build linux && cgo

package nccl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/resource"
)

// compile makes a library called libnccl.so.2 of a C file in a folder of its own.
func compile(t *testing.T, source string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), soname)
	out, err := exec.Command("cc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-Wl,-soname,"+soname, "-o", path, source, "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("the tests need a C compiler: %v\n%s", err, out)
	}
	return path
}

// The library is looked for in its order: what cannot be used is one line, what is loaded wins over a path. The
// process has one NCCL for good, so this is one test.
func TestLibrary(t *testing.T) {
	mu.Lock()
	loaded := open != nil
	mu.Unlock()
	if loaded {
		t.Skip("the process has its NCCL: this was tested")
	}
	cudaPath := standin.Build(t)
	t.Setenv("STANDIN_NCCL_DRIVER", cudaPath)
	t.Setenv("STANDIN_PEERS", "0")
	calls := standin.Log(t)
	drv, err := nvidia.Open(cudaPath)
	if err != nil {
		t.Fatal(err)
	}
	one := func(err error, words string) {
		t.Helper()
		if err == nil || !strings.HasPrefix(err.Error(), "nccl: ") || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v; want %q in one line", err, words)
		}
	}
	_, err = New(drv, 0, "")
	one(err, "name it with nccl:library=/path/to/libnccl.so.2")
	_, err = New(drv, 0, filepath.Join(t.TempDir(), "none.so"))
	one(err, "none.so")
	empty := filepath.Join(t.TempDir(), "empty.c")
	if err := os.WriteFile(empty, []byte("int nothing;\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = New(drv, 0, compile(t, empty))
	one(err, "has no ncclMemAlloc")

	// A Python environment.
	env := t.TempDir()
	wheel := filepath.Join(env, "lib", "python3.12", "site-packages", "nvidia", "nccl", "lib")
	if err := os.MkdirAll(wheel, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(compile(t, filepath.Join("testdata", "libnccl.c")), filepath.Join(wheel, soname)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("VIRTUAL_ENV", env)
	r, err := New(drv, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := New(drv, 0, filepath.Join(wheel, soname)); err != nil || !again.Equal(r) {
		t.Errorf("the path of what is loaded: %v", err)
	}
	_, err = New(drv, 0, filepath.Join(t.TempDir(), "none.so"))
	one(err, "none.so: no such file")
	_, err = New(drv, 0, empty)
	one(err, "the process already uses the NCCL of "+filepath.Join(wheel, soname)+", which is not "+empty)
	l, err := try(soname, true)
	if err != nil || l.words(4) != "invalid argument (run with NCCL_DEBUG=WARN for details)" {
		t.Errorf("the library is loaded: %v", err)
	}

	p, err := r.Alloc(1000, 0, 0)
	if err != nil || p == 0 {
		t.Fatalf("%#x, %v", uint64(p), err)
	}
	q, err := r.Alloc(8, 0, 0)
	if err != nil || q == p {
		t.Errorf("%#x, %v", uint64(q), err)
	}
	for _, x := range []cuda.Ptr{p, q} {
		if err := r.Free(x, 8, 0, 0); err != nil {
			t.Error(err)
		}
	}
	if p, err := r.Alloc(0, 0, 0); p != 0 || err != nil {
		t.Errorf("%#x, %v", uint64(p), err)
	}
	if err := r.Free(0, 0, 0, 0); err != nil {
		t.Error(err)
	}
	if _, err := r.Alloc(1<<50, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Error(err)
	}
	var e *Error
	if err := r.Free(12345, 8, 0, 0); !errors.As(err, &e) || e.Op != "ncclMemFree" || e.Code != unhandledCUDA {
		t.Error(err)
	}
	// Whether want of memory was the reason is seen by what is free.
	t.Setenv("STANDIN_NCCL_FAIL", "1")
	_, total, err := r.MemInfo()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Alloc(total, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) || !errors.As(err, &e) || !e.Memory {
		t.Error(err)
	}
	_, err = r.Alloc(8, 0, 0)
	if errors.Is(err, cuda.ErrOutOfMemory) || !errors.As(err, &e) {
		t.Errorf("there is memory: %v", err)
	} else if want := "ncclMemAlloc of 8 bytes on device 0: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"; err.Error() != want {
		t.Errorf("%q; want %q", err, want)
	}
	t.Setenv("STANDIN_NCCL_FAIL", "4")
	if _, err := r.Alloc(total, 0, 0); errors.Is(err, cuda.ErrOutOfMemory) || err == nil {
		t.Error(err)
	}

	// Calls are made in the device's context and in relaxed mode, and both are restored.
	log, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	made := 0
	for line := range strings.Lines(string(log)) {
		if strings.HasPrefix(line, "cuMemAlloc(") {
			made++
			if !strings.Contains(line, "in relaxed mode, context 0") {
				t.Error(line)
			}
		}
	}
	if made != 2 {
		t.Errorf("%d allocations in\n%s", made, log)
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, "context -1") {
		t.Errorf("the last call leaves %q", last)
	}
}

// A driver that has no contexts to make current cannot be used with the real library.
type other struct{ cuda.Driver }

func (other) Name() string { return "other" }

// Over the simulated device a range is one exportable handle, open to all devices, and its pages stay.
func TestSimulated(t *testing.T) {
	d := sim.New(sim.Options{Devices: 2, Capacity: 1 << 30, Handles: sim.Exportable, Check: sim.CheckOrder})
	if err := d.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	r, err := New(d, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(other{d}, 0, ""); err == nil || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
	p, err := r.Alloc(3<<20, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if h := d.Handles(0); len(h) != 1 || h[0].Prop.Handles != cuda.HandlePosix || h[0].Size != 4<<20 {
		t.Errorf("handles %+v", h)
	}
	if err := d.Use(1, d.NewStream(1), p, 3<<20); err != nil {
		t.Errorf("the other device: %v", err)
	}
	if err := r.(resource.Peers).EnablePeer(1); err != nil {
		t.Error(err)
	}
	if _, ok := resource.As[resource.Backing](r); ok {
		t.Error("NCCL's memory keeps its pages")
	}
	if err := d.ContextSynchronize(1); err != nil {
		t.Fatal(err)
	}
	if err := r.Free(p, 3<<20, 0, 0); err != nil {
		t.Error(err)
	}
	if l := d.Leaks(); l.Handles+l.Chunks+l.Mappings+l.Reservations != 0 {
		t.Errorf("left: %+v", l)
	}
	alone := sim.New(sim.Options{Capacity: 1 << 30})
	if _, err := New(alone, 0, ""); err == nil {
		t.Error("memory that cannot be exported")
	}
}
