package phys

import (
	"cmp"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
)

// Imports maps memory of other processes at addresses of its own. Nothing of it is counted. It needs no lock.
type Imports struct {
	Health      *health.State
	Granularity uint64 // of addresses, in bytes
}

// Imported is memory of another process, as chunks.
type Imported struct {
	Owner      cuda.Device // that it lies on
	Sizes      []uint64    // of the chunks
	Descriptor func(i int) (int, error)
	// Access makes what is mapped accessible.
	Access func(base cuda.Ptr, size uint64) error
}

// Map maps chunks one behind the other. When a call fails, those before it are undone.
func (m Imports) Map(x Imported) (cuda.Ptr, error) {
	drv, size := m.Health.Driver, uint64(0)
	for _, n := range x.Sizes {
		size += n
	}
	base, err := drv.AddressReserve(size, m.Granularity, 0)
	if err != nil {
		return 0, m.Health.Failed(err)
	}
	end := base
	for i, n := range x.Sizes {
		if err = m.chunk(end, n, x.Owner, i, x.Descriptor); err != nil {
			break
		}
		end += cuda.Ptr(n)
	}
	if err == nil {
		if err = x.Access(base, size); err == nil {
			return base, nil
		}
	}
	if end > base && drv.MemUnmap(base, uint64(end-base)) != nil {
		return 0, err // the addresses are lost, with what is mapped there
	}
	drv.AddressFree(base, size)
	return 0, err
}

// chunk maps one chunk, whose handle goes at once: the memory goes with the mapping.
func (m Imports) chunk(at cuda.Ptr, size uint64, owner cuda.Device, i int, descriptor func(i int) (int, error)) error {
	fd, err := descriptor(i)
	if err != nil {
		return err
	}
	drv := m.Health.Driver
	h, err := drv.MemImport(owner, fd)
	if err != nil {
		return m.Health.Failed(err)
	}
	err = drv.MemMap(at, size, h)
	if r := drv.MemRelease(h); r != nil {
		if err == nil {
			err = drv.MemUnmap(at, size)
		}
		drv.MemRelease(h) // once more: what stays is lost
		err = cmp.Or(err, r)
	}
	if err != nil {
		return m.Health.Failed(err)
	}
	return nil
}

// OpenIPC opens memory from cuMemAlloc for a device.
func (m Imports) OpenIPC(h cuda.IpcHandle) (cuda.Ptr, error) {
	return m.Health.Driver.IpcOpen(m.Health.ID, h)
}

// OpenPool maps memory of another process's stream-ordered pool, and returns the pool that was imported for it.
func (m Imports) OpenPool(h cuda.PoolPtr, descriptor func(i int) (int, error)) (cuda.Ptr, cuda.MemPool, error) {
	fd, err := descriptor(0)
	if err != nil {
		return 0, 0, err
	}
	drv := m.Health.Driver
	pool, err := drv.MemPoolImport(m.Health.ID, fd)
	if err != nil {
		return 0, 0, m.Health.Failed(err)
	}
	base, err := drv.MemPoolImportPtr(m.Health.ID, pool, h)
	if err != nil {
		_ = drv.MemPoolDestroy(m.Health.ID, pool)
		return 0, 0, m.Health.Failed(err)
	}
	return base, pool, nil
}

// ClosePool undoes OpenPool. The exporter may free the memory from then on.
func (m Imports) ClosePool(base cuda.Ptr, pool cuda.MemPool) error {
	drv := m.Health.Driver
	if err := drv.MemFree(m.Health.ID, base); err != nil {
		return m.Health.Failed(err)
	}
	return m.Health.Failed(drv.MemPoolDestroy(m.Health.ID, pool))
}

// Close undoes Map, or with size 0 OpenIPC.
func (m Imports) Close(base cuda.Ptr, size uint64) (err error) {
	drv := m.Health.Driver
	if size == 0 {
		err = drv.IpcClose(m.Health.ID, base)
	} else if err = drv.MemUnmap(base, size); err == nil {
		err = drv.AddressFree(base, size)
	}
	if err != nil {
		return m.Health.Failed(err)
	}
	return nil
}
