package engine_test

import (
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// interposed is a driver that calls a function before it makes a call, so that a test decides what other threads of the
// program do between a check of the engine's and the call that the check was for. Calls that the function causes do not
// call it again.
type interposed struct {
	cuda.Driver
	before func(call string, dev cuda.Device) // set before the driver is used
	inside atomic.Bool
}

func (i *interposed) at(call string, dev cuda.Device) {
	if i.before != nil && i.inside.CompareAndSwap(false, true) {
		defer i.inside.Store(false)
		i.before(call, dev)
	}
}

const noDevice cuda.Device = -1 // of calls that are no device's

func (i *interposed) DeviceInfo(d cuda.Device) (cuda.DeviceInfo, error) {
	i.at("cuDeviceGetAttribute", d)
	return i.Driver.DeviceInfo(d)
}

func (i *interposed) ProbeHandles(d cuda.Device) (cuda.HandleType, error) {
	i.at("cuMemCreate", d)
	return i.Driver.ProbeHandles(d)
}

func (i *interposed) ContextActive(d cuda.Device) (bool, error) {
	i.at("cuDevicePrimaryCtxGetState", d)
	return i.Driver.ContextActive(d)
}

func (i *interposed) RetainContext(d cuda.Device) error {
	i.at("cuDevicePrimaryCtxRetain", d)
	return i.Driver.RetainContext(d)
}

func (i *interposed) CanAccessPeer(d, peer cuda.Device) (bool, error) {
	i.at("cuDeviceCanAccessPeer", d)
	return i.Driver.CanAccessPeer(d, peer)
}

func (i *interposed) EnablePeerAccess(d, peer cuda.Device) error {
	i.at("cuCtxEnablePeerAccess", d)
	return i.Driver.EnablePeerAccess(d, peer)
}

func (i *interposed) MemInfo(d cuda.Device) (free, total uint64, err error) {
	i.at("cuMemGetInfo", d)
	return i.Driver.MemInfo(d)
}

func (i *interposed) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	i.at("cuMemAlloc", d)
	return i.Driver.MemAlloc(d, size)
}

func (i *interposed) MemFree(d cuda.Device, p cuda.Ptr) error {
	i.at("cuMemFree", d)
	return i.Driver.MemFree(d, p)
}

func (i *interposed) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	i.at("cuMemAddressReserve", noDevice)
	return i.Driver.AddressReserve(size, align, hint)
}

func (i *interposed) AddressFree(p cuda.Ptr, size uint64) error {
	i.at("cuMemAddressFree", noDevice)
	return i.Driver.AddressFree(p, size)
}

func (i *interposed) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	i.at("cuMemCreate", noDevice)
	return i.Driver.MemCreate(size, prop)
}

func (i *interposed) MemRelease(h cuda.Handle) error {
	i.at("cuMemRelease", noDevice)
	return i.Driver.MemRelease(h)
}

func (i *interposed) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	i.at("cuMemMap", noDevice)
	return i.Driver.MemMap(p, size, h)
}

func (i *interposed) MemUnmap(p cuda.Ptr, size uint64) error {
	i.at("cuMemUnmap", noDevice)
	return i.Driver.MemUnmap(p, size)
}

func (i *interposed) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	i.at("cuMemSetAccess", noDevice)
	return i.Driver.MemSetAccess(p, size, devs)
}

func (i *interposed) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	i.at("cuMemSetAccess", noDevice)
	return i.Driver.MemSetReadOnly(p, size, devs)
}

func (i *interposed) MemExport(h cuda.Handle) (fd int, err error) {
	i.at("cuMemExportToShareableHandle", noDevice)
	return i.Driver.MemExport(h)
}

func (i *interposed) MemImport(dev cuda.Device, fd int) (cuda.Handle, error) {
	i.at("cuMemImportFromShareableHandle", dev)
	return i.Driver.MemImport(dev, fd)
}

func (i *interposed) IpcExport(d cuda.Device, p cuda.Ptr) (cuda.IpcHandle, error) {
	i.at("cuIpcGetMemHandle", d)
	return i.Driver.IpcExport(d, p)
}

func (i *interposed) IpcOpen(d cuda.Device, h cuda.IpcHandle) (cuda.Ptr, error) {
	i.at("cuIpcOpenMemHandle", d)
	return i.Driver.IpcOpen(d, h)
}

func (i *interposed) IpcClose(d cuda.Device, p cuda.Ptr) error {
	i.at("cuIpcCloseMemHandle", d)
	return i.Driver.IpcClose(d, p)
}

func (i *interposed) StreamID(d cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	i.at("cuStreamGetId", d)
	return i.Driver.StreamID(d, s)
}

func (i *interposed) StreamCapture(d cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	i.at("cuStreamGetCaptureInfo", d)
	return i.Driver.StreamCapture(d, s)
}

func (i *interposed) StreamCaptureNodes(d cuda.Device, s cuda.Stream) (capture uint64, after []cuda.GraphNode, err error) {
	i.at("cuStreamGetCaptureInfo", d)
	return i.Driver.StreamCaptureNodes(d, s)
}

func (i *interposed) GraphNodeDependencies(d cuda.Device, n cuda.GraphNode) ([]cuda.GraphNode, error) {
	i.at("cuGraphNodeGetDependencies", d)
	return i.Driver.GraphNodeDependencies(d, n)
}

func (i *interposed) StreamWaitEvent(d cuda.Device, s cuda.Stream, e cuda.Event) error {
	i.at("cuStreamWaitEvent", d)
	return i.Driver.StreamWaitEvent(d, s, e)
}

func (i *interposed) StreamSynchronize(d cuda.Device, s cuda.Stream) error {
	i.at("cuStreamSynchronize", d)
	return i.Driver.StreamSynchronize(d, s)
}

func (i *interposed) ContextSynchronize(d cuda.Device) error {
	i.at("cuCtxSynchronize", d)
	return i.Driver.ContextSynchronize(d)
}

func (i *interposed) EventCreateShared(d cuda.Device) (cuda.Event, error) {
	i.at("cuEventCreate", d)
	return i.Driver.EventCreateShared(d)
}

func (i *interposed) EventExport(d cuda.Device, e cuda.Event) (cuda.EventHandle, error) {
	i.at("cuIpcGetEventHandle", d)
	return i.Driver.EventExport(d, e)
}

func (i *interposed) EventOpen(d cuda.Device, h cuda.EventHandle) (cuda.Event, error) {
	i.at("cuIpcOpenEventHandle", d)
	return i.Driver.EventOpen(d, h)
}

func (i *interposed) EventCreate(d cuda.Device) (cuda.Event, error) {
	i.at("cuEventCreate", d)
	return i.Driver.EventCreate(d)
}

func (i *interposed) EventDestroy(d cuda.Device, e cuda.Event) error {
	i.at("cuEventDestroy", d)
	return i.Driver.EventDestroy(d, e)
}

func (i *interposed) EventRecord(d cuda.Device, e cuda.Event, s cuda.Stream) error {
	i.at("cuEventRecord", d)
	return i.Driver.EventRecord(d, e, s)
}

func (i *interposed) EventQuery(d cuda.Device, e cuda.Event) (bool, error) {
	i.at("cuEventQuery", d)
	return i.Driver.EventQuery(d, e)
}

func (i *interposed) EventSynchronize(d cuda.Device, e cuda.Event) error {
	i.at("cuEventSynchronize", d)
	return i.Driver.EventSynchronize(d, e)
}

func (i *interposed) StreamCreate(d cuda.Device, blocking bool) (cuda.Stream, error) {
	i.at("cuStreamCreate", d)
	return i.Driver.StreamCreate(d, blocking)
}

func (i *interposed) StreamDestroy(d cuda.Device, s cuda.Stream) error {
	i.at("cuStreamDestroy", d)
	return i.Driver.StreamDestroy(d, s)
}

func (i *interposed) StreamBlocking(d cuda.Device, s cuda.Stream) (bool, error) {
	i.at("cuStreamGetFlags", d)
	return i.Driver.StreamBlocking(d, s)
}

func (i *interposed) MemcpyAsync(d cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	i.at("cuMemcpyAsync", d)
	return i.Driver.MemcpyAsync(d, dst, src, size, s)
}

func (i *interposed) HostAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	i.at("cuMemHostAlloc", d)
	return i.Driver.HostAlloc(d, size)
}

func (i *interposed) HostFree(d cuda.Device, p cuda.Ptr) error {
	i.at("cuMemFreeHost", d)
	return i.Driver.HostFree(d, p)
}

func (i *interposed) HostRegister(d cuda.Device, p cuda.Ptr, size uint64) error {
	i.at("cuMemHostRegister", d)
	return i.Driver.HostRegister(d, p, size)
}

func (i *interposed) HostUnregister(d cuda.Device, p cuda.Ptr) error {
	i.at("cuMemHostUnregister", d)
	return i.Driver.HostUnregister(d, p)
}

func (i *interposed) ManagedAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	i.at("cuMemAllocManaged", d)
	return i.Driver.ManagedAlloc(d, size)
}

func (i *interposed) MemPrefetch(d cuda.Device, p cuda.Ptr, size uint64, to cuda.Location, s cuda.Stream) error {
	i.at("cuMemPrefetchAsync", d)
	return i.Driver.MemPrefetch(d, p, size, to, s)
}

func (i *interposed) MemSetHostAccess(p cuda.Ptr, size uint64, node int) error {
	i.at("cuMemSetAccess", noDevice)
	return i.Driver.MemSetHostAccess(p, size, node)
}

func (i *interposed) MemPoolCreate(props cuda.MemPoolProps) (cuda.MemPool, error) {
	i.at("cuMemPoolCreate", noDevice)
	return i.Driver.MemPoolCreate(props)
}

func (i *interposed) MemPoolExport(d cuda.Device, pool cuda.MemPool) (fd int, err error) {
	i.at("cuMemPoolExportToShareableHandle", d)
	return i.Driver.MemPoolExport(d, pool)
}

func (i *interposed) MemPoolImport(d cuda.Device, fd int) (cuda.MemPool, error) {
	i.at("cuMemPoolImportFromShareableHandle", d)
	return i.Driver.MemPoolImport(d, fd)
}

func (i *interposed) MemPoolExportPtr(d cuda.Device, p cuda.Ptr) (cuda.PoolPtr, error) {
	i.at("cuMemPoolExportPointer", d)
	return i.Driver.MemPoolExportPtr(d, p)
}

func (i *interposed) MemPoolImportPtr(d cuda.Device, pool cuda.MemPool, h cuda.PoolPtr) (cuda.Ptr, error) {
	i.at("cuMemPoolImportPointer", d)
	return i.Driver.MemPoolImportPtr(d, pool, h)
}

func (i *interposed) MemPoolDestroy(d cuda.Device, pool cuda.MemPool) error {
	i.at("cuMemPoolDestroy", d)
	return i.Driver.MemPoolDestroy(d, pool)
}

func (i *interposed) MemPoolDefault(d cuda.Device) (cuda.MemPool, error) {
	i.at("cuDeviceGetDefaultMemPool", d)
	return i.Driver.MemPoolDefault(d)
}

func (i *interposed) MemPoolGet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr) (uint64, error) {
	i.at("cuMemPoolGetAttribute", d)
	return i.Driver.MemPoolGet(d, pool, attr)
}

func (i *interposed) MemPoolSet(d cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr, value uint64) error {
	i.at("cuMemPoolSetAttribute", d)
	return i.Driver.MemPoolSet(d, pool, attr, value)
}

func (i *interposed) MemPoolTrim(d cuda.Device, pool cuda.MemPool, keep uint64) error {
	i.at("cuMemPoolTrimTo", d)
	return i.Driver.MemPoolTrim(d, pool, keep)
}

func (i *interposed) MemPoolSetAccess(d cuda.Device, pool cuda.MemPool, devs []cuda.Device) error {
	i.at("cuMemPoolSetAccess", d)
	return i.Driver.MemPoolSetAccess(d, pool, devs)
}

func (i *interposed) MemAllocAsync(d cuda.Device, size uint64, pool cuda.MemPool, s cuda.Stream) (cuda.Ptr, error) {
	i.at("cuMemAllocFromPoolAsync", d)
	return i.Driver.MemAllocAsync(d, size, pool, s)
}

func (i *interposed) MemFreeAsync(d cuda.Device, p cuda.Ptr, s cuda.Stream) error {
	i.at("cuMemFreeAsync", d)
	return i.Driver.MemFreeAsync(d, p, s)
}

// TestEveryCallIsInterposed: a function that is added to the driver's interface is interposed, too.
func TestEveryCallIsInterposed(t *testing.T) {
	driver := reflect.TypeFor[cuda.Driver]()
	for n := range driver.NumMethod() {
		name, called := driver.Method(n).Name, false
		i := &interposed{before: func(string, cuda.Device) { called = true }}
		m := reflect.ValueOf(i).MethodByName(name)
		args := make([]reflect.Value, m.Type().NumIn())
		for k := range args {
			args[k] = reflect.Zero(m.Type().In(k))
		}
		func() {
			defer func() { recover() }() // there is no driver
			m.Call(args)
		}()
		switch name {
		case "Name", "Version", "Now", "DeviceCount": // which ask nothing of CUDA
			if called {
				t.Errorf("%s is interposed", name)
			}
		default:
			if !called {
				t.Errorf("%s is not interposed", name)
			}
		}
	}
}
