// Package gpu puts work on a real GPU, for tests and probes of everything that must hold while kernels run: kernels
// that take time, that fill memory with a pattern made from a seed, and that check it. The kernels are PTX in
// kernels.go; pattern.go has the same pattern for the host.
//
// A GPU may be used from any goroutine; it is changed by nothing but Use, which locks.
package gpu

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
)

// Driver is a cuda.Driver that can also put work on the GPU. *nvidia.Driver is one.
type Driver interface {
	cuda.Driver
	EventCreateTiming(dev cuda.Device) (cuda.Event, error)
	EventElapsed(dev cuda.Device, from, to cuda.Event) (time.Duration, error)
	CopyToDevice(dev cuda.Device, to cuda.Ptr, from []byte) error
	CopyFromDevice(dev cuda.Device, to []byte, from cuda.Ptr) error
	Memset(dev cuda.Device, p cuda.Ptr, value byte, size uint64, s cuda.Stream) error
	ModuleLoad(dev cuda.Device, ptx string) (uintptr, error)
	ModuleUnload(dev cuda.Device, module uintptr) error
	ModuleFunction(dev cuda.Device, module uintptr, name string) (uintptr, error)
	Launch(dev cuda.Device, function uintptr, grid, block int, s cuda.Stream, args ...uint64) error
	CaptureBegin(dev cuda.Device, s cuda.Stream, mode nvidia.CaptureMode) error
	CaptureEnd(dev cuda.Device, s cuda.Stream) (graph uintptr, err error)
	GraphInstantiate(dev cuda.Device, graph uintptr) (exec uintptr, err error)
	GraphLaunch(dev cuda.Device, exec uintptr, s cuda.Stream) error
	GraphExecDestroy(dev cuda.Device, exec uintptr) error
	GraphDestroy(dev cuda.Device, graph uintptr) error
}

// GPU is a driver with the kernels loaded on those devices that were used.
type GPU struct {
	Driver

	mu     sync.Mutex // over loading; kernels is read without it
	loaded []atomic.Pointer[kernels]
}

type kernels struct {
	spin, fill, check uintptr
	blocks            int // that fill the device
}

// threads is the size of a block.
const threads = 256

// Open opens NVIDIA's driver. The error says in one line what is missing.
func Open() (*GPU, error) { return OpenLibrary("") }

// OpenLibrary is Open with the path of the driver library; empty is the installed one.
func OpenLibrary(path string) (*GPU, error) {
	d, err := nvidia.Open(path)
	if err != nil {
		return nil, err
	}
	return New(d)
}

// New is a GPU over a driver that is open already.
func New(d cuda.Driver) (*GPU, error) {
	w, ok := d.(Driver)
	if !ok {
		return nil, fmt.Errorf("driver %s runs no kernels", d.Name())
	}
	n, err := d.DeviceCount()
	if err != nil {
		return nil, err
	}
	return &GPU{Driver: w, loaded: make([]atomic.Pointer[kernels], n)}, nil
}

// Use makes the device's context and loads the kernels. The other methods do so when first called; a test that
// measures, captures or counts calls Use before.
func (g *GPU) Use(dev cuda.Device) error {
	_, err := g.kernels(dev)
	return err
}

func (g *GPU) kernels(dev cuda.Device) (*kernels, error) {
	if dev < 0 || int(dev) >= len(g.loaded) {
		return nil, &cuda.Error{Op: "cuDeviceGet", Device: dev, Code: cuda.ErrInvalidDevice}
	}
	if k := g.loaded[dev].Load(); k != nil {
		return k, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if k := g.loaded[dev].Load(); k != nil {
		return k, nil
	}
	info, err := g.DeviceInfo(dev)
	if err != nil {
		return nil, err
	}
	if err := g.RetainContext(dev); err != nil {
		return nil, err
	}
	module, err := g.ModuleLoad(dev, ptx)
	if err != nil {
		return nil, fmt.Errorf("loading the test kernels: %w", err)
	}
	k := &kernels{blocks: 8 * max(info.Multiproc, 1)}
	for name, f := range map[string]*uintptr{"spin": &k.spin, "fill": &k.fill, "check": &k.check} {
		if *f, err = g.ModuleFunction(dev, module, name); err != nil {
			return nil, err
		}
	}
	g.loaded[dev].Store(k)
	return k, nil
}

// Spin queues a kernel that takes d on s, and little of the device: one thread on one multiprocessor.
func (g *GPU) Spin(dev cuda.Device, s cuda.Stream, d time.Duration) error {
	k, err := g.kernels(dev)
	if err != nil {
		return err
	}
	return g.Launch(dev, k.spin, 1, 1, s, uint64(d.Nanoseconds()))
}

// Fill queues a kernel on s that writes the seed's pattern over bytes bytes at p, which is 8-byte aligned.
func (g *GPU) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, bytes, seed uint64) error {
	k, err := g.kernels(dev)
	if err != nil || bytes == 0 {
		return err
	}
	return g.Launch(dev, k.fill, k.grid(bytes), threads, s, uint64(p), bytes, mix(seed))
}

// Check queues a kernel on s that compares bytes bytes at p, 8-byte aligned, with the seed's pattern, and adds the
// number of differences to the 64-bit counter at counter in device memory: words, and single bytes behind the last
// whole word.
func (g *GPU) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, bytes, seed uint64, counter cuda.Ptr) error {
	k, err := g.kernels(dev)
	if err != nil || bytes == 0 {
		return err
	}
	return g.Launch(dev, k.check, k.grid(bytes), threads, s, uint64(p), bytes, mix(seed), uint64(counter))
}

// grid is the number of blocks for a range: a thread for each word, the rest included, but no more than fill the GPU.
func (k *kernels) grid(bytes uint64) int {
	return int(min(bytes/8/threads+1, uint64(k.blocks)))
}

// Counter is the value of a 64-bit counter in device memory. It waits for the whole device: it is for the end of a
// test.
func (g *GPU) Counter(dev cuda.Device, counter cuda.Ptr) (uint64, error) {
	if err := g.ContextSynchronize(dev); err != nil {
		return 0, err
	}
	var b [8]byte
	err := g.CopyFromDevice(dev, b[:], counter)
	var n uint64
	for i, v := range b {
		n |= uint64(v) << (8 * i)
	}
	return n, err
}

// NewCounter makes a 64-bit counter in device memory, at zero. cuMemAlloc gives it, so that it lies outside of any
// memory under test.
func (g *GPU) NewCounter(dev cuda.Device) (cuda.Ptr, error) {
	if err := g.Use(dev); err != nil {
		return 0, err
	}
	p, err := g.MemAlloc(dev, 8)
	if err != nil {
		return 0, err
	}
	return p, g.CopyToDevice(dev, p, make([]byte, 8))
}
