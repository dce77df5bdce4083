// Package nvml asks NVIDIA's management library which GPUs a machine has, how much of their memory is in use, and by
// which processes: what nvidia-smi shows. libnvidia-ml.so.1 is opened at run time, as package cuda/nvidia opens the
// driver, so that a program built with this package also starts where there is no GPU. Only Linux with cgo has it;
// elsewhere Open says so.
//
// # What may go wrong
//
// NVML can hang for as long as the kernel's driver does, a GPU can be gone, and any question can be one that this GPU
// or this driver does not answer. So every function takes a context and returns when that ends, whatever NVML does: the
// call goes on in a thread of its own, and until it comes back later questions fail with its name. What a device does
// not tell is an *Error of NVML's own words beside the rest of what is known of it.
//
// # Processes
//
// Which PIDs are listed depends on the caller's namespace. In a container with a PID namespace of its own, drivers tell nothing of
// the processes outside, or tell their PIDs as the host sees them, which name no process or another one here; the bytes
// are right in any case. So a process that cannot be found in /proc is not therefore gone, and what all processes have
// together may be less than what is used. Memory that the driver does not attribute (Windows' driver model, some
// virtual GPUs) is Known false.
//
// # Parts of a GPU
//
// A GPU that is divided (MIG) is listed, and after it each of its instances, as devices with MIG set and with names,
// UUIDs and memory of their own, by which CUDA knows them too. NVML measures no utilisation of instances. A process that may not
// see a GPU's processes may still see those of an instance that is the container's.
package nvml

import "fmt"

// Device is a GPU, or an instance of a divided one.
type Device struct {
	Index int // the GPU's, as nvidia-smi numbers them: by PCI bus; CUDA may number otherwise, the UUID is the same
	MIG   bool
	// Where MIG is set, the instance's numbers.
	GPUInstance, ComputeInstance int

	UUID  [16]byte
	Name  string
	BusID string // "00000000:0F:00.0"; an instance's is its GPU's

	Memory      Memory
	Utilization Utilization
	Processes   []Process // compute, then graphics; a process that does both comes twice

	// Errors is what could not be asked. The fields that it concerns are zero.
	Errors []error
}

// Memory is a device's, in bytes. Total is Used, Free and Reserved.
type Memory struct {
	Total, Used, Free uint64
	// Reserved is what driver and firmware keep for themselves; older drivers (before 510) count that as used.
	Reserved uint64
}

// Utilization is the share of the driver's last sampling period (up to a second), in percent, in which a kernel ran, and
// in which memory was read or written. Known says whether the device tells.
type Utilization struct {
	GPU, Memory int
	Known       bool
}

// Process is a process that has a context on a device.
type Process struct {
	PID      int    // see the package comment for what it means in a container
	Name     string // as NVML tells it, "" where it does not
	Bytes    uint64 // of the device's memory
	Known    bool   // whether Bytes is
	Graphics bool   // it draws; else it computes
}

// Error is a call of NVML's that failed. Words are NVML's.
type Error struct {
	Call  string // "nvmlDeviceGetMemoryInfo_v2"
	Code  int    // nvmlReturn_t; -1: the installed library does not have the call
	Words string
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Call, e.Words) }
