//go:build linux && cgo

package nvidia

/*
#include <stdlib.h>
#include "driver.h"

#cgo noescape nv_event_elapsed
#cgo nocallback nv_event_elapsed
#cgo nocallback nv_capture_begin
#cgo noescape nv_capture_end
#cgo nocallback nv_capture_end
#cgo noescape nv_graph_instantiate
#cgo nocallback nv_graph_instantiate
#cgo nocallback nv_graph_launch
#cgo nocallback nv_graph_exec_destroy
#cgo nocallback nv_graph_destroy
#cgo noescape nv_module_load
#cgo nocallback nv_module_load
#cgo nocallback nv_module_unload
#cgo noescape nv_module_function
#cgo nocallback nv_module_function
#cgo noescape nv_launch
#cgo nocallback nv_launch
#cgo noescape nv_copy_to_device
#cgo nocallback nv_copy_to_device
#cgo noescape nv_copy_from_device
#cgo nocallback nv_copy_from_device
#cgo nocallback nv_memset
*/
import "C"

import (
	"fmt"
	"strings"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// EventCreateTiming makes an event that EventElapsed can use.
func (d *Driver) EventCreateTiming(dev cuda.Device) (cuda.Event, error) { return d.eventCreate(dev, 0) }

// EventElapsed is the time that the GPU took between two recorded and completed timing events.
func (d *Driver) EventElapsed(dev cuda.Device, from, to cuda.Event) (time.Duration, error) {
	var ms C.float
	r := C.nv_event_elapsed(d.c, C.intptr_t(dev), C.uintptr_t(from), C.uintptr_t(to), &ms)
	return time.Duration(float64(ms) * float64(time.Millisecond)), d.check(r, dev)
}

// CopyToDevice copies host memory to the device, on the legacy default stream, and waits until that is done.
func (d *Driver) CopyToDevice(dev cuda.Device, to cuda.Ptr, from []byte) error {
	r := C.nv_copy_to_device(d.c, C.intptr_t(dev), C.CUdeviceptr(to), unsafe.Pointer(unsafe.SliceData(from)), C.size_t(len(from)))
	if r != 0 {
		return d.failure(r, dev, uint64(len(from)))
	}
	return nil
}

// CopyFromDevice copies device memory to the host, on the legacy default stream, and waits until that is done.
func (d *Driver) CopyFromDevice(dev cuda.Device, to []byte, from cuda.Ptr) error {
	r := C.nv_copy_from_device(d.c, C.intptr_t(dev), unsafe.Pointer(unsafe.SliceData(to)), C.CUdeviceptr(from), C.size_t(len(to)))
	if r != 0 {
		return d.failure(r, dev, uint64(len(to)))
	}
	return nil
}

// Memset sets size bytes to value, on stream s.
func (d *Driver) Memset(dev cuda.Device, p cuda.Ptr, value byte, size uint64, s cuda.Stream) error {
	r := C.nv_memset(d.c, C.intptr_t(dev), C.CUdeviceptr(p), C.uchar(value), C.size_t(size), C.uintptr_t(s))
	if r != 0 {
		return d.failure(r, dev, size)
	}
	return nil
}

// ModuleLoad compiles PTX for the device and loads it (CUmodule). The error holds the compiler's own words.
func (d *Driver) ModuleLoad(dev cuda.Device, ptx string) (uintptr, error) {
	image := C.CString(ptx)
	defer C.free(unsafe.Pointer(image))
	var m C.uintptr_t
	var log [4096]C.char
	if r := C.nv_module_load(d.c, C.intptr_t(dev), image, &m, &log[0], C.size_t(len(log))); r != 0 {
		err := d.failure(r, dev, 0)
		log[len(log)-1] = 0
		if words := strings.Fields(C.GoString(&log[0])); len(words) > 0 {
			err = fmt.Errorf("%w: %s", err, strings.Join(words, " "))
		}
		return 0, err
	}
	return uintptr(m), nil
}

// ModuleUnload unloads device code.
func (d *Driver) ModuleUnload(dev cuda.Device, m uintptr) error {
	return d.check(C.nv_module_unload(d.c, C.intptr_t(dev), C.uintptr_t(m)), dev)
}

// ModuleFunction finds a kernel by its name (CUfunction).
func (d *Driver) ModuleFunction(dev cuda.Device, m uintptr, name string) (uintptr, error) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var f C.uintptr_t
	if r := C.nv_module_function(d.c, C.intptr_t(dev), C.uintptr_t(m), c, &f); r != 0 {
		return 0, fmt.Errorf("kernel %s: %w", name, d.failure(r, dev, 0))
	}
	return uintptr(f), nil
}

// Launch queues a kernel of one-dimensional grid and block on s. Every parameter of the kernel must be 8 bytes wide;
// there may be 16.
func (d *Driver) Launch(dev cuda.Device, f uintptr, grid, block int, s cuda.Stream, args ...uint64) error {
	r := C.nv_launch(d.c, C.intptr_t(dev), C.uintptr_t(f), C.uint(grid), C.uint(block), C.uintptr_t(s),
		(*C.uint64_t)(unsafe.SliceData(args)), C.size_t(len(args)))
	return d.check(r, dev)
}

// CaptureBegin starts capturing the work queued on s into a graph.
func (d *Driver) CaptureBegin(dev cuda.Device, s cuda.Stream, mode CaptureMode) error {
	return d.check(C.nv_capture_begin(d.c, C.intptr_t(dev), C.uintptr_t(s), C.int(mode)), dev)
}

// CaptureEnd ends a capture, in the thread that began it unless that was relaxed, and returns the graph (CUgraph).
func (d *Driver) CaptureEnd(dev cuda.Device, s cuda.Stream) (uintptr, error) {
	var graph C.uintptr_t
	r := C.nv_capture_end(d.c, C.intptr_t(dev), C.uintptr_t(s), &graph)
	return uintptr(graph), d.check(r, dev)
}

// GraphInstantiate makes an executable graph (CUgraphExec).
func (d *Driver) GraphInstantiate(dev cuda.Device, graph uintptr) (uintptr, error) {
	var exec C.uintptr_t
	r := C.nv_graph_instantiate(d.c, C.intptr_t(dev), C.uintptr_t(graph), &exec)
	return uintptr(exec), d.check(r, dev)
}

// GraphLaunch queues an executable graph on s.
func (d *Driver) GraphLaunch(dev cuda.Device, exec uintptr, s cuda.Stream) error {
	return d.check(C.nv_graph_launch(d.c, C.intptr_t(dev), C.uintptr_t(exec), C.uintptr_t(s)), dev)
}

// GraphExecDestroy destroys an executable graph.
func (d *Driver) GraphExecDestroy(dev cuda.Device, exec uintptr) error {
	return d.check(C.nv_graph_exec_destroy(d.c, C.intptr_t(dev), C.uintptr_t(exec)), dev)
}

// GraphDestroy destroys a graph.
func (d *Driver) GraphDestroy(dev cuda.Device, graph uintptr) error {
	return d.check(C.nv_graph_destroy(d.c, C.intptr_t(dev), C.uintptr_t(graph)), dev)
}
