//go:build linux && cgo

package nvidia

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"regexp"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// places are where the driver library is looked for when no path is given: first wherever the dynamic linker finds it,
// then where containers, WSL and NixOS put it without telling the linker.
var places = []string{
	"libcuda.so.1",
	"/usr/local/nvidia/lib64/libcuda.so.1",
	"/usr/lib/wsl/lib/libcuda.so.1",
	"/run/opengl-driver/lib/libcuda.so.1",
}

// Driver is NVIDIA's driver. It lives until the process ends: the library cannot be unloaded safely.
type Driver struct {
	c       *C.nv_driver
	version int
	devices int
}

var _ cuda.Driver = (*Driver)(nil)

// Open opens the driver library at path, or the installed one if path is empty, and initialises it. No context is
// created. The driver's concrete type is *Driver. Where there is no usable GPU the error is one line that also names
// the simulated device.
func Open(path string) (cuda.Driver, error) {
	paths := places
	if path != "" {
		paths = []string{path}
	}
	c, err := load(paths)
	if err != nil {
		return nil, noGPU(err)
	}
	var version, devices C.int
	r := C.nv_init(c, &version, &devices)
	d := &Driver{c: c, version: int(version), devices: int(devices)}
	if r == 0 && devices == 0 {
		r = C.nv_result(C.NV_cuDeviceGetCount)<<32 | C.nv_result(cuda.ErrNoDevice)
	}
	if r != 0 {
		err := d.failure(r, noDevice, 0)
		C.nv_close(c)
		return nil, noGPU(err)
	}
	return d, nil
}

// load opens the first of the libraries that exists. The error is about the first.
func load(paths []string) (*C.nv_driver, error) {
	var first error
	for _, p := range paths {
		name := C.CString(p)
		var reason [512]C.char
		c := C.nv_open(name, &reason[0], C.size_t(len(reason)))
		C.free(unsafe.Pointer(name))
		if c != nil {
			return c, nil
		}
		if first == nil {
			first = fmt.Errorf("%s", C.GoString(&reason[0]))
		}
	}
	return nil, first
}

func noGPU(err error) error {
	return fmt.Errorf("no GPU to use: %w; for a simulated device set CISTERN_CONF=driver:sim", err)
}

// noDevice is the Device of an Error whose call is not about one.
const noDevice cuda.Device = -1

// MissingCallError is the failure of a call that the installed driver is too old to have. errors.Is sees
// cuda.ErrNotSupported in it, and errors.As finds a *cuda.Error.
type MissingCallError struct {
	Call    string // without version suffix: "cuMemCreate"
	Version int    // the installed driver's CUDA version: 11020 for 11.2
}

func (e *MissingCallError) Error() string {
	return fmt.Sprintf("%s: the installed driver (CUDA %d.%d) does not have it", e.Call, e.Version/1000, e.Version%1000/10)
}

func (e *MissingCallError) Unwrap() error {
	return &cuda.Error{Op: e.Call, Device: noDevice, Code: cuda.ErrNotSupported}
}

var versionSuffix = regexp.MustCompile(`_v\d+$`)

// failure is the error for a result that is not success.
func (d *Driver) failure(r C.nv_result, dev cuda.Device, size uint64) error {
	call := versionSuffix.ReplaceAllString(C.GoString(C.nv_call_name(C.int(r>>32))), "")
	code := uint32(r)
	if code == C.NV_MISSING {
		return &MissingCallError{Call: call, Version: d.version}
	}
	return &cuda.Error{Op: call, Device: dev, Size: size, Code: cuda.Code(code)}
}

// check is failure for a call that is about one device and no size, and nil for success.
func (d *Driver) check(r C.nv_result, dev cuda.Device) error {
	if r == 0 {
		return nil
	}
	return d.failure(r, dev, 0)
}
