package cistern

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// counted is the driver as one device uses it: it counts the calls that are made, which the hot path does not. What asks
// nothing of CUDA (Name, Version, Now, DeviceCount) is the driver's own.
type counted struct {
	cuda.Driver
	calls atomic.Uint64
}

// mayWait checks, in tests, that no lock is held over a wait for the GPU but that of who pauses or resumes.
func mayWait() { lockrank.HoldsNone(lockrank.Private, "a wait for the GPU") }

// mayCall checks the same of a call of a function of the user's.
func mayCall() { lockrank.HoldsNone(lockrank.Private, "a call of the user's function") }

func (c *counted) DeviceInfo(d cuda.Device) (cuda.DeviceInfo, error) {
	c.calls.Add(1)
	return c.Driver.DeviceInfo(d)
}

func (c *counted) ProbeHandles(d cuda.Device) (cuda.HandleType, error) {
	c.calls.Add(1)
	return c.Driver.ProbeHandles(d)
}

func (c *counted) ContextActive(d cuda.Device) (bool, error) {
	c.calls.Add(1)
	return c.Driver.ContextActive(d)
}

func (c *counted) RetainContext(d cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.RetainContext(d)
}

func (c *counted) CanAccessPeer(d, peer cuda.Device) (bool, error) {
	c.calls.Add(1)
	return c.Driver.CanAccessPeer(d, peer)
}

func (c *counted) EnablePeerAccess(d, peer cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.EnablePeerAccess(d, peer)
}

func (c *counted) MemInfo(d cuda.Device) (free, total uint64, err error) {
	c.calls.Add(1)
	return c.Driver.MemInfo(d)
}

func (c *counted) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.MemAlloc(d, size)
}

func (c *counted) MemFree(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.MemFree(d, p)
}

func (c *counted) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.AddressReserve(size, align, hint)
}

func (c *counted) AddressFree(p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.AddressFree(p, size)
}

func (c *counted) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	c.calls.Add(1)
	return c.Driver.MemCreate(size, prop)
}

func (c *counted) MemRelease(h cuda.Handle) error {
	c.calls.Add(1)
	return c.Driver.MemRelease(h)
}

func (c *counted) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	c.calls.Add(1)
	return c.Driver.MemMap(p, size, h)
}

func (c *counted) MemUnmap(p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.MemUnmap(p, size)
}

func (c *counted) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.MemSetAccess(p, size, devs)
}

func (c *counted) MemExport(h cuda.Handle) (fd int, err error) {
	c.calls.Add(1)
	return c.Driver.MemExport(h)
}

func (c *counted) MemImport(dev cuda.Device, fd int) (cuda.Handle, error) {
	c.calls.Add(1)
	return c.Driver.MemImport(dev, fd)
}

func (c *counted) IpcExport(d cuda.Device, p cuda.Ptr) (cuda.IpcHandle, error) {
	c.calls.Add(1)
	return c.Driver.IpcExport(d, p)
}

func (c *counted) IpcOpen(d cuda.Device, h cuda.IpcHandle) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.IpcOpen(d, h)
}

func (c *counted) IpcClose(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.IpcClose(d, p)
}

func (c *counted) StreamID(d cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	c.calls.Add(1)
	return c.Driver.StreamID(d, s)
}

func (c *counted) StreamCapture(d cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	c.calls.Add(1)
	return c.Driver.StreamCapture(d, s)
}

func (c *counted) StreamCaptureNodes(d cuda.Device, s cuda.Stream) (capture uint64, after []cuda.GraphNode, err error) {
	c.calls.Add(1)
	return c.Driver.StreamCaptureNodes(d, s)
}

func (c *counted) GraphNodeDependencies(d cuda.Device, n cuda.GraphNode) ([]cuda.GraphNode, error) {
	c.calls.Add(1)
	return c.Driver.GraphNodeDependencies(d, n)
}

func (c *counted) StreamWaitEvent(d cuda.Device, s cuda.Stream, e cuda.Event) error {
	c.calls.Add(1)
	return c.Driver.StreamWaitEvent(d, s, e)
}

func (c *counted) StreamSynchronize(d cuda.Device, s cuda.Stream) error {
	c.calls.Add(1)
	mayWait()
	return c.Driver.StreamSynchronize(d, s)
}

func (c *counted) ContextSynchronize(d cuda.Device) error {
	c.calls.Add(1)
	mayWait()
	return c.Driver.ContextSynchronize(d)
}

func (c *counted) EventCreate(d cuda.Device) (cuda.Event, error) {
	c.calls.Add(1)
	return c.Driver.EventCreate(d)
}

func (c *counted) EventDestroy(d cuda.Device, e cuda.Event) error {
	c.calls.Add(1)
	return c.Driver.EventDestroy(d, e)
}

func (c *counted) EventRecord(d cuda.Device, e cuda.Event, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.EventRecord(d, e, s)
}

func (c *counted) EventQuery(d cuda.Device, e cuda.Event) (bool, error) {
	c.calls.Add(1)
	return c.Driver.EventQuery(d, e)
}

func (c *counted) EventSynchronize(d cuda.Device, e cuda.Event) error {
	c.calls.Add(1)
	mayWait()
	return c.Driver.EventSynchronize(d, e)
}

func (c *counted) StreamCreate(d cuda.Device, blocking bool) (cuda.Stream, error) {
	c.calls.Add(1)
	return c.Driver.StreamCreate(d, blocking)
}

func (c *counted) StreamDestroy(d cuda.Device, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.StreamDestroy(d, s)
}

func (c *counted) StreamBlocking(d cuda.Device, s cuda.Stream) (bool, error) {
	c.calls.Add(1)
	return c.Driver.StreamBlocking(d, s)
}

func (c *counted) MemcpyAsync(d cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemcpyAsync(d, dst, src, size, s)
}

func (c *counted) HostAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.HostAlloc(d, size)
}

func (c *counted) HostFree(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.HostFree(d, p)
}

func (c *counted) HostRegister(d cuda.Device, p cuda.Ptr, size uint64) error {
	c.calls.Add(1)
	return c.Driver.HostRegister(d, p, size)
}

func (c *counted) HostUnregister(d cuda.Device, p cuda.Ptr) error {
	c.calls.Add(1)
	return c.Driver.HostUnregister(d, p)
}

func (c *counted) ManagedAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.ManagedAlloc(d, size)
}

func (c *counted) MemPrefetch(d cuda.Device, p cuda.Ptr, size uint64, to cuda.Location, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemPrefetch(d, p, size, to, s)
}

func (c *counted) MemSetHostAccess(p cuda.Ptr, size uint64, node int) error {
	c.calls.Add(1)
	return c.Driver.MemSetHostAccess(p, size, node)
}

func (c *counted) MemPoolCreate(props cuda.MemPoolProps) (cuda.MemPool, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolCreate(props)
}

func (c *counted) MemPoolDestroy(d cuda.Device, pool cuda.MemPool) error {
	c.calls.Add(1)
	return c.Driver.MemPoolDestroy(d, pool)
}

func (c *counted) MemPoolDefault(d cuda.Device) (cuda.MemPool, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolDefault(d)
}

func (c *counted) MemPoolGet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr) (uint64, error) {
	c.calls.Add(1)
	return c.Driver.MemPoolGet(d, pool, attr)
}

func (c *counted) MemPoolSet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr, value uint64) error {
	c.calls.Add(1)
	return c.Driver.MemPoolSet(d, pool, attr, value)
}

func (c *counted) MemPoolTrim(d cuda.Device, pool cuda.MemPool, keep uint64) error {
	c.calls.Add(1)
	return c.Driver.MemPoolTrim(d, pool, keep)
}

func (c *counted) MemPoolSetAccess(d cuda.Device, pool cuda.MemPool, devs []cuda.Device) error {
	c.calls.Add(1)
	return c.Driver.MemPoolSetAccess(d, pool, devs)
}

func (c *counted) MemAllocAsync(d cuda.Device, size uint64, pool cuda.MemPool, s cuda.Stream) (cuda.Ptr, error) {
	c.calls.Add(1)
	return c.Driver.MemAllocAsync(d, size, pool, s)
}

func (c *counted) MemFreeAsync(d cuda.Device, p cuda.Ptr, s cuda.Stream) error {
	c.calls.Add(1)
	return c.Driver.MemFreeAsync(d, p, s)
}
