package resource

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
)

// PrefetchAdaptor has managed memory moved to the device when it is handed out, in the order of the stream that it is
// for, as RMM's prefetch_resource_adaptor, so that kernels do not take it there page by page.
type PrefetchAdaptor struct {
	adaptor
	drv  cuda.Driver
	left strays
}

// Prefetch makes that adaptor. Memory that does not migrate, or a device that does not migrate it on demand, is an error.
func Prefetch(up Resource, drv cuda.Driver) (*PrefetchAdaptor, error) {
	t := up.Traits()
	if !t.Migrates {
		return nil, fmt.Errorf("prefetch: %s memory does not migrate; managed memory does", t.Name)
	}
	info, err := drv.DeviceInfo(t.Device)
	if err != nil {
		return nil, err
	}
	if !info.Managed {
		return nil, fmt.Errorf("prefetch: device %d (%s) does not share managed memory with the host", t.Device, info.Name)
	}
	return &PrefetchAdaptor{adaptor: adaptor{up}, drv: drv, left: strays{up: up}}, nil
}

func (a *PrefetchAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	p, err := a.up.Alloc(size, align, st)
	if err != nil || p == 0 {
		return p, err
	}
	if err := a.drv.MemPrefetch(a.up.Traits().Device, p, size, cuda.LocationDevice, st); err != nil {
		a.left.drop(p, size, align, st)
		return 0, err
	}
	return p, nil
}

func (a *PrefetchAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	return a.up.Free(p, size, align, st)
}

// Close gives back what could not be moved nor given back before.
func (a *PrefetchAdaptor) Close() error { return a.left.drain() }

// Equal: it keeps nothing, so what is equal below is equal here.
func (a *PrefetchAdaptor) Equal(other Resource) bool {
	if x, ok := other.(*PrefetchAdaptor); ok {
		return a == x || a.up.Equal(x.up)
	}
	return false
}
