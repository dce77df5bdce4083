package health

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Driver is a driver as one device uses it. It counts the calls that may reach CUDA: every one but Name, Version, Now and
// DeviceCount, which are the driver's own.
type Driver struct {
	cuda.Driver
	// Admit (nil: always) says whether the driver may be asked for new memory of a device. It is set before the first call.
	Admit func(dev cuda.Device, size uint64) bool
	calls atomic.Uint64
}

// admitted is nil, or the error of a call that the driver is not asked for: it would have no memory but what others were granted.
func admitted(c *Driver, op string, dev cuda.Device, size uint64) error {
	if c.Admit == nil || c.Admit(dev, size) {
		return nil
	}
	return &cuda.Error{Op: op, Device: dev, Size: size, Code: cuda.ErrOutOfMemory}
}

// Calls is the number of calls so far.
func (c *Driver) Calls() uint64 { return c.calls.Load() }

func (c *Driver) DeviceInfo(d cuda.Device) (cuda.DeviceInfo, error) {
	c.calls.Add(1)
	return c.Driver.DeviceInfo(d)
}

func (c *Driver) ProbeHandles(d cuda.Device) (cuda.HandleType, error) {
	c.calls.Add(1)
	return c.Driver.ProbeHandles(d)
}

func (c *Driver) ContextActive(d cuda.Device) (bool, error) {
	c.calls.Add(1)
	return c.Driver.ContextActive(d)
}

func (c *Driver) RetainContext(d cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.RetainContext(d)
}

func (c *Driver) CanAccessPeer(d, peer cuda.Device) (bool, error) {
	c.calls.Add(1)
	return c.Driver.CanAccessPeer(d, peer)
}

func (c *Driver) EnablePeerAccess(d, peer cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.EnablePeerAccess(d, peer)
}

func (c *Driver) MemInfo(d cuda.Device) (free, total uint64, err error) {
	c.calls.Add(1)
	return c.Driver.MemInfo(d)
}

func (c *Driver) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	if err := admitted(c, "cuMemAlloc", d, size); err != nil {
		return 0, err
	}
	c.calls.Add(1)
	return c.Driver.MemAlloc(d, size)
}

func (c *Driver) MemFree(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.MemFree(d, p)
}

func (c *Driver) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.AddressReserve(size, align, hint)
}

func (c *Driver) AddressFree(p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.AddressFree(p, size)
}

func (c *Driver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	if prop.Location == cuda.LocationDevice {
		if err := admitted(c, "cuMemCreate", prop.Device, size); err != nil {
			return 0, err
		}
	}
	c.calls.Add(1)
	return c.Driver.MemCreate(size, prop)
}

func (c *Driver) MemRelease(h cuda.Handle) error {
	c.calls.Add(1)
	return c.Driver.MemRelease(h)
}

func (c *Driver) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	c.calls.Add(1)
	return c.Driver.MemMap(p, size, h)
}

func (c *Driver) MemUnmap(p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.MemUnmap(p, size)
}

func (c *Driver) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.MemSetAccess(p, size, devs)
}

func (c *Driver) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.MemSetReadOnly(p, size, devs)
}

func (c *Driver) MemExport(h cuda.Handle) (fd int, err error) {
	c.calls.Add(1)
	return c.Driver.MemExport(h)
}

func (c *Driver) MemImport(dev cuda.Device, fd int) (cuda.Handle, error) {
	c.calls.Add(1)
	return c.Driver.MemImport(dev, fd)
}

func (c *Driver) IpcExport(d cuda.Device, p cuda.Ptr) (cuda.IpcHandle, error) {
	c.calls.Add(1)
	return c.Driver.IpcExport(d, p)
}

func (c *Driver) IpcOpen(d cuda.Device, h cuda.IpcHandle) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.IpcOpen(d, h)
}

func (c *Driver) IpcClose(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.IpcClose(d, p)
}

func (c *Driver) StreamID(d cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	c.calls.Add(1)
	return c.Driver.StreamID(d, s)
}

func (c *Driver) StreamCapture(d cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	c.calls.Add(1)
	return c.Driver.StreamCapture(d, s)
}

func (c *Driver) StreamCaptureNodes(d cuda.Device, s cuda.Stream) (capture uint64, after []cuda.GraphNode, err error) {
	c.calls.Add(1)
	return c.Driver.StreamCaptureNodes(d, s)
}

func (c *Driver) GraphNodeDependencies(d cuda.Device, n cuda.GraphNode) ([]cuda.GraphNode, error) {
	c.calls.Add(1)
	return c.Driver.GraphNodeDependencies(d, n)
}

func (c *Driver) StreamWaitEvent(d cuda.Device, s cuda.Stream, e cuda.Event) error {
	c.calls.Add(1)
	return c.Driver.StreamWaitEvent(d, s, e)
}

func (c *Driver) StreamSynchronize(d cuda.Device, s cuda.Stream) error {
	c.calls.Add(1)
	lockrank.MayWait()
	return c.Driver.StreamSynchronize(d, s)
}

func (c *Driver) ContextSynchronize(d cuda.Device) error {
	c.calls.Add(1)
	lockrank.MayWait()
	return c.Driver.ContextSynchronize(d)
}

func (c *Driver) EventCreate(d cuda.Device) (cuda.Event, error) {
	c.calls.Add(1)
	return c.Driver.EventCreate(d)
}

func (c *Driver) EventDestroy(d cuda.Device, e cuda.Event) error {
	c.calls.Add(1)
	return c.Driver.EventDestroy(d, e)
}

func (c *Driver) EventRecord(d cuda.Device, e cuda.Event, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.EventRecord(d, e, s)
}

func (c *Driver) EventQuery(d cuda.Device, e cuda.Event) (bool, error) {
	c.calls.Add(1)
	return c.Driver.EventQuery(d, e)
}

func (c *Driver) EventSynchronize(d cuda.Device, e cuda.Event) error {
	c.calls.Add(1)
	lockrank.MayWait()
	return c.Driver.EventSynchronize(d, e)
}

func (c *Driver) StreamCreate(d cuda.Device, blocking bool) (cuda.Stream, error) {
	c.calls.Add(1)
	return c.Driver.StreamCreate(d, blocking)
}

func (c *Driver) StreamDestroy(d cuda.Device, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.StreamDestroy(d, s)
}

func (c *Driver) StreamBlocking(d cuda.Device, s cuda.Stream) (bool, error) {
	c.calls.Add(1)
	return c.Driver.StreamBlocking(d, s)
}

func (c *Driver) MemcpyAsync(d cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemcpyAsync(d, dst, src, size, s)
}

func (c *Driver) HostAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.HostAlloc(d, size)
}

func (c *Driver) HostFree(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.HostFree(d, p)
}

func (c *Driver) HostRegister(d cuda.Device, p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.HostRegister(d, p, size)
}

func (c *Driver) HostUnregister(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.HostUnregister(d, p)
}

func (c *Driver) ManagedAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.ManagedAlloc(d, size)
}

func (c *Driver) MemPrefetch(d cuda.Device, p cuda.Ptr, size uint64, to cuda.Location, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemPrefetch(d, p, size, to, s)
}

func (c *Driver) MemSetHostAccess(p cuda.Ptr, size uint64, node int) error {
	c.calls.Add(1)
	return c.Driver.MemSetHostAccess(p, size, node)
}

func (c *Driver) MemPoolCreate(props cuda.MemPoolProps) (cuda.MemPool, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolCreate(props)
}

func (c *Driver) MemPoolDestroy(d cuda.Device, pool cuda.MemPool) error {
	c.calls.Add(1)
	return c.Driver.MemPoolDestroy(d, pool)
}

func (c *Driver) MemPoolDefault(d cuda.Device) (cuda.MemPool, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolDefault(d)
}

func (c *Driver) MemPoolGet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr) (uint64, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolGet(d, pool, attr)
}

func (c *Driver) MemPoolSet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr, value uint64) error {
	c.calls.Add(1)
	return c.Driver.MemPoolSet(d, pool, attr, value)
}

func (c *Driver) MemPoolTrim(d cuda.Device, pool cuda.MemPool, keep uint64) error {
	c.calls.Add(1)
	return c.Driver.MemPoolTrim(d, pool, keep)
}

func (c *Driver) MemPoolSetAccess(d cuda.Device, pool cuda.MemPool, devs []cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.MemPoolSetAccess(d, pool, devs)
}

func (c *Driver) MemAllocAsync(d cuda.Device, size uint64, pool cuda.MemPool, s cuda.Stream) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.MemAllocAsync(d, size, pool, s)
}

func (c *Driver) MemFreeAsync(d cuda.Device, p cuda.Ptr, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemFreeAsync(d, p, s)
}

func (c *Driver) EventCreateShared(d cuda.Device) (cuda.Event, error) {
	c.calls.Add(1)
	return c.Driver.EventCreateShared(d)
}

func (c *Driver) EventExport(d cuda.Device, e cuda.Event) (cuda.EventHandle, error) {
	c.calls.Add(1)
	return c.Driver.EventExport(d, e)
}

func (c *Driver) EventOpen(d cuda.Device, h cuda.EventHandle) (cuda.Event, error) {
	c.calls.Add(1)
	return c.Driver.EventOpen(d, h)
}

func (c *Driver) MemPoolExport(d cuda.Device, pool cuda.MemPool) (fd int, err error) {
	c.calls.Add(1)
	return c.Driver.MemPoolExport(d, pool)
}

func (c *Driver) MemPoolImport(d cuda.Device, fd int) (cuda.MemPool, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolImport(d, fd)
}

func (c *Driver) MemPoolExportPtr(d cuda.Device, p cuda.Ptr) (cuda.PoolPtr, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolExportPtr(d, p)
}

func (c *Driver) MemPoolImportPtr(d cuda.Device, pool cuda.MemPool, h cuda.PoolPtr) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolImportPtr(d, pool, h)
}
