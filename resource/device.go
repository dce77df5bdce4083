package resource

import "github.com/cistern-gpu/cistern/cuda"

// Virtual is the device's own memory as chunks (cuMemCreate).
func Virtual(drv cuda.Driver, prop cuda.MemProp, granularity uint64) Chunks {
	return &virtual{drv, prop, granularity}
}

type virtual struct {
	drv         cuda.Driver
	prop        cuda.MemProp
	granularity uint64
}

func (v *virtual) Create(size uint64) (cuda.Handle, error) { return v.drv.MemCreate(size, v.prop) }
func (v *virtual) Release(h cuda.Handle) error             { return v.drv.MemRelease(h) }
func (v *virtual) Granularity() uint64                     { return v.granularity }

// natural is what the driver's own allocators align to, in bytes: 256 is documented, 512 is what every GPU gives.
const natural = 512

// driverMemory is an upstream that is one driver call to get memory and one to give it back.
type driverMemory struct {
	drv    cuda.Driver
	traits Traits
	alloc  func(dev cuda.Device, size uint64) (cuda.Ptr, error)
	free   func(dev cuda.Device, p cuda.Ptr) error
}

// Device is the device's own memory as cuMemAlloc makes it, which legacy IPC handles and RDMA registration accept. Each
// request is a driver call, and so is each Free, which waits for the GPU.
func Device(drv cuda.Driver, dev cuda.Device) Resource {
	return &driverMemory{drv, Traits{Name: "device", Device: dev, OnDevice: true, DeviceAccessible: true, Align: natural},
		drv.MemAlloc, drv.MemFree}
}

// Managed is memory that host and devices use at one address and that migrates between them (cuMemAllocManaged). It may
// be more than the device has, so it is not the device's own. Prefetch moves it to the device when it is handed out.
func Managed(drv cuda.Driver, dev cuda.Device) Resource {
	return &driverMemory{drv, Traits{Name: "managed", Device: dev, DeviceAccessible: true, HostAccessible: true,
		Migrates: true, Align: natural}, drv.ManagedAlloc, drv.MemFree}
}

// Pinned is page-locked host memory that every device uses at the host's address, over the bus (cuMemHostAlloc).
func Pinned(drv cuda.Driver, dev cuda.Device) Resource {
	return &driverMemory{drv, Traits{Name: "pinned", Device: dev, DeviceAccessible: true, HostAccessible: true, Align: natural},
		drv.HostAlloc, drv.HostFree}
}

func (m *driverMemory) Alloc(size, align uint64, _ cuda.Stream) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	if err := Check(m.traits.Name, m.traits.Device, size, align, natural); err != nil {
		return 0, err
	}
	return m.alloc(m.traits.Device, size)
}

func (m *driverMemory) Free(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error {
	if p == 0 {
		return nil
	}
	return m.free(m.traits.Device, p)
}

func (m *driverMemory) MemInfo() (free, total uint64, err error) {
	if m.traits.Name == "pinned" {
		return hostMemory(-1)
	}
	return m.drv.MemInfo(m.traits.Device)
}

func (m *driverMemory) Equal(other Resource) bool {
	o, ok := other.(*driverMemory)
	return ok && o.drv == m.drv && o.traits == m.traits
}

func (m *driverMemory) Traits() Traits { return m.traits }

// EnablePeer lets work of the peer use the memory. What host and devices share needs nothing.
func (m *driverMemory) EnablePeer(peer cuda.Device) error {
	if m.traits.HostAccessible || peer == m.traits.Device {
		return nil
	}
	return enablePeer(m.drv, peer, m.traits.Device)
}
