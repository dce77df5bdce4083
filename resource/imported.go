package resource

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
)

// Memory of an AsyncPool that another process uses, in the order of streams. The pool is passed as a descriptor, each
// allocation as 64 bytes; how they reach the other process is the program's matter (a Unix socket with SCM_RIGHTS passes both).
//
// The rules are the CUDA driver's (cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer, cuIpcOpenEventHandle in its
// API manual, and "Interprocess communication support" of stream-ordered memory in the programming guide):
//
//   - Nothing can be allocated from an imported pool.
//   - Its memory is accessible to the device that it lies on, whatever the exporter opened it to; EnablePeer opens it to another.
//   - The importer uses memory after the allocation is complete in the exporter's stream, and frees it before the exporter
//     does: the exporter's Free is on a stream that comes after the importer's Free, or the importer's is complete.
//   - Events carry that order between processes: cuda.Driver's EventCreateShared, EventExport and EventOpen. An event shows its
//     last record, so the process that waits must know, by other means, that the record was made. The process that made an
//     event destroys it when the others are done with it.
//   - A pool that can be exported may keep its memory whatever its threshold says, and through Trim.

// Export makes a file descriptor of the pool, which the caller closes. It may be made before the memory is.
func (a *AsyncPool) Export() (fd int, err error) {
	if err := a.exportable(); err != nil {
		return -1, err
	}
	return a.drv.MemPoolExport(a.dev, a.pool)
}

// ExportPtr names memory of the pool that starts at p, for ImportPtr. A name is used as often as needed.
func (a *AsyncPool) ExportPtr(p cuda.Ptr) (cuda.PoolPtr, error) {
	if err := a.exportable(); err != nil {
		return cuda.PoolPtr{}, err
	}
	return a.drv.MemPoolExportPtr(a.dev, p)
}

func (a *AsyncPool) exportable() error {
	if a.own && a.handles&cuda.HandlePosix == 0 {
		return fmt.Errorf("async: the pool of device %d was not made with handles of type %d: %w", a.dev, cuda.HandlePosix, cuda.ErrNotSupported)
	}
	return nil
}

// ImportedPool is another process's AsyncPool.
type ImportedPool struct {
	drv  cuda.Driver
	dev  cuda.Device
	pool cuda.MemPool
}

// ImportAsync makes a pool of a descriptor of AsyncPool.Export. The descriptor stays the caller's and is needed no longer.
func ImportAsync(drv cuda.Driver, dev cuda.Device, fd int) (*ImportedPool, error) {
	if err := supportsPools(drv, dev, cuda.HandlePosix); err != nil {
		return nil, err
	}
	pool, err := drv.MemPoolImport(dev, fd)
	if err != nil {
		return nil, err
	}
	return &ImportedPool{drv: drv, dev: dev, pool: pool}, nil
}

// ImportPtr maps memory of the pool and returns its address here. It takes no memory of the device.
func (m *ImportedPool) ImportPtr(h cuda.PoolPtr) (cuda.Ptr, error) {
	return m.drv.MemPoolImportPtr(m.dev, m.pool, h)
}

// Free ends the use of memory here, after the work queued on st so far. The exporter frees it later.
func (m *ImportedPool) Free(p cuda.Ptr, st cuda.Stream) error {
	if p == 0 {
		return nil
	}
	return m.drv.MemFreeAsync(m.dev, p, st)
}

// EnablePeer opens the pool's memory, mapped before or later, to another device. Where the pool's own device is not visible here,
// this is how the memory is opened to any.
func (m *ImportedPool) EnablePeer(peer cuda.Device) error {
	return m.drv.MemPoolSetAccess(m.dev, m.pool, []cuda.Device{peer})
}

// Close drops the pool. Memory that is still mapped stays so until it is freed.
func (m *ImportedPool) Close() error {
	if m.pool == 0 {
		return nil
	}
	if err := m.drv.MemPoolDestroy(m.dev, m.pool); err != nil {
		return err
	}
	m.pool = 0
	return nil
}
