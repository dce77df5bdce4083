package meter

import "github.com/cistern-gpu/cistern/cuda"

func (d *Driver) MemAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	defer d.since(memAlloc, d.Now())
	return d.Driver.MemAlloc(dev, size)
}

func (d *Driver) MemFree(dev cuda.Device, p cuda.Ptr) error {
	defer d.since(memFree, d.Now())
	return d.Driver.MemFree(dev, p)
}

func (d *Driver) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	defer d.since(addressReserve, d.Now())
	return d.Driver.AddressReserve(size, align, hint)
}

func (d *Driver) AddressFree(p cuda.Ptr, size uint64) error {
	defer d.since(addressFree, d.Now())
	return d.Driver.AddressFree(p, size)
}

func (d *Driver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	defer d.since(memCreate, d.Now())
	return d.Driver.MemCreate(size, prop)
}

func (d *Driver) MemRelease(h cuda.Handle) error {
	defer d.since(memRelease, d.Now())
	return d.Driver.MemRelease(h)
}

func (d *Driver) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	defer d.since(memMap, d.Now())
	return d.Driver.MemMap(p, size, h)
}

func (d *Driver) MemUnmap(p cuda.Ptr, size uint64) error {
	defer d.since(memUnmap, d.Now())
	return d.Driver.MemUnmap(p, size)
}

func (d *Driver) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	defer d.since(memSetAccess, d.Now())
	return d.Driver.MemSetAccess(p, size, devs)
}

func (d *Driver) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	defer d.since(memSetAccess, d.Now())
	return d.Driver.MemSetReadOnly(p, size, devs)
}

func (d *Driver) StreamID(dev cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	defer d.since(streamID, d.Now())
	return d.Driver.StreamID(dev, s)
}

func (d *Driver) StreamCapture(dev cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	defer d.since(streamCapture, d.Now())
	return d.Driver.StreamCapture(dev, s)
}

func (d *Driver) StreamWaitEvent(dev cuda.Device, s cuda.Stream, e cuda.Event) error {
	defer d.since(streamWaitEvent, d.Now())
	return d.Driver.StreamWaitEvent(dev, s, e)
}

func (d *Driver) EventCreate(dev cuda.Device) (cuda.Event, error) {
	defer d.since(eventCreate, d.Now())
	return d.Driver.EventCreate(dev)
}

func (d *Driver) EventDestroy(dev cuda.Device, e cuda.Event) error {
	defer d.since(eventDestroy, d.Now())
	return d.Driver.EventDestroy(dev, e)
}

func (d *Driver) EventRecord(dev cuda.Device, e cuda.Event, s cuda.Stream) error {
	defer d.since(eventRecord, d.Now())
	return d.Driver.EventRecord(dev, e, s)
}

func (d *Driver) EventQuery(dev cuda.Device, e cuda.Event) (bool, error) {
	defer d.since(eventQuery, d.Now())
	return d.Driver.EventQuery(dev, e)
}

func (d *Driver) MemInfo(dev cuda.Device) (free, total uint64, err error) {
	defer d.since(memInfo, d.Now())
	return d.Driver.MemInfo(dev)
}

func (d *Driver) MemcpyAsync(dev cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	defer d.since(memcpyAsync, d.Now())
	return d.Driver.MemcpyAsync(dev, dst, src, size, s)
}

func (d *Driver) HostAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	defer d.since(hostAlloc, d.Now())
	return d.Driver.HostAlloc(dev, size)
}

func (d *Driver) HostRegister(dev cuda.Device, p cuda.Ptr, size uint64) error {
	defer d.since(hostRegister, d.Now())
	return d.Driver.HostRegister(dev, p, size)
}

func (d *Driver) EventSynchronize(dev cuda.Device, e cuda.Event) error {
	defer d.since(eventSynchronize, d.Now())
	return d.Driver.EventSynchronize(dev, e)
}

func (d *Driver) StreamSynchronize(dev cuda.Device, s cuda.Stream) error {
	defer d.since(streamSynchronize, d.Now())
	return d.Driver.StreamSynchronize(dev, s)
}

func (d *Driver) ContextSynchronize(dev cuda.Device) error {
	defer d.since(contextSynchronize, d.Now())
	return d.Driver.ContextSynchronize(dev)
}
