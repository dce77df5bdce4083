// Package open picks the driver that a setting names. It is the one place that knows both NVIDIA's driver and the
// simulated one, so that neither the engine nor a command imports either for it.
package open

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/units"
)

// maxDevices is how many devices a simulated machine may have.
const maxDevices = 64

// Open opens the driver that spec names, the value of the key driver in CISTERN_CONF:
//
//	nvidia              NVIDIA's driver, libcuda.so.1; also the empty spec
//	nvidia:/path/lib    that library instead
//	sim                 one simulated GPU, with the memory of an H200
//	sim:80GiB           with so much memory
//	sim:80GiBx2         two of them
//	sim:80GiB@/path     whose memory this process shares with all that name the same file
//
// Case matters. The error for anything else names the choices.
func Open(spec string) (cuda.Driver, error) {
	options, simulated, err := Simulated(spec)
	if err != nil {
		return nil, err
	}
	if simulated {
		drv, err := sim.Open(options)
		if err != nil {
			return nil, fmt.Errorf("driver %q: %w", spec, err)
		}
		return drv, nil
	}
	kind, rest, more := strings.Cut(spec, ":")
	switch {
	case kind == "" && !more:
		return nvidia.Open("")
	case kind == "nvidia" && (!more || rest != ""):
		return nvidia.Open(rest)
	}
	return nil, fmt.Errorf("driver %q: choose nvidia, nvidia:/path/to/libcuda.so.1, sim, sim:80GiB, sim:80GiBx2 or sim:80GiB@/path/to/file", spec)
}

// Simulated has the options of the simulated devices that spec names; ok is false where it names another driver. Options with Shared
// are for sim.Open.
func Simulated(spec string) (options sim.Options, ok bool, err error) {
	kind, rest, more := strings.Cut(spec, ":")
	if kind != "sim" {
		return options, false, nil
	}
	options = sim.Options{Devices: 1, Handles: sim.Exportable}
	if more {
		size, path, shared := strings.Cut(rest, "@")
		options.Capacity, options.Devices, err = machine(size)
		if options.Shared = path; err == nil && shared && !filepath.IsAbs(path) {
			err = fmt.Errorf("%q after @ is not the absolute path of a file", path)
		}
	}
	if err == nil {
		err = options.Validate()
	}
	if err != nil {
		err = fmt.Errorf("driver %q: %w", spec, err)
	}
	return options, true, err
}

// machine reads SIZE or SIZExDEVICES.
func machine(s string) (capacity uint64, devices int, err error) {
	size, count, several := strings.Cut(s, "x")
	devices = 1
	if several {
		if devices, err = strconv.Atoi(count); err != nil || devices < 1 || devices > maxDevices {
			return 0, 0, fmt.Errorf("%q is not a number of devices from 1 to %d", count, maxDevices)
		}
	}
	if capacity, err = units.ParseBytes(size); err != nil {
		return 0, 0, err
	}
	if capacity < sim.DefaultGranularity {
		return 0, 0, fmt.Errorf("a device of %s is too small: the smallest chunk is %s",
			units.FormatBytes(capacity), units.FormatBytes(sim.DefaultGranularity))
	}
	return capacity, devices, nil
}
