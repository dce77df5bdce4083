package resource

import (
	"github.com/cistern-gpu/cistern/cuda"
)

// HostOrderedAdaptor makes a stream-ordered resource host-ordered: everything is queued on a stream of its own,
// and done when the call returns. So the stream that a request names may be captured, in use or destroyed, and memory
// may be used on any. As with any resource that is not stream-ordered, a caller that frees memory knows that the GPU is done with it.
type HostOrderedAdaptor struct {
	adaptor
	drv    cuda.Driver
	dev    cuda.Device
	stream cuda.Stream // non-blocking; destroyed by Close
	left   strays
}

// HostOrdered makes that adaptor. A resource that is not stream-ordered needs none and is returned as it is.
func HostOrdered(drv cuda.Driver, up Resource) (Resource, error) {
	t := up.Traits()
	if !t.StreamOrdered {
		return up, nil
	}
	if err := drv.RetainContext(t.Device); err != nil {
		return nil, err
	}
	s, err := drv.StreamCreate(t.Device, false)
	if err != nil {
		return nil, err
	}
	return &HostOrderedAdaptor{adaptor: adaptor{up}, drv: drv, dev: t.Device, stream: s, left: strays{up: up}}, nil
}

func (h *HostOrderedAdaptor) Alloc(size, align uint64, _ cuda.Stream) (cuda.Ptr, error) {
	p, err := h.up.Alloc(size, align, h.stream)
	if err != nil || p == 0 {
		return p, err
	}
	if err := h.drv.StreamSynchronize(h.dev, h.stream); err != nil {
		h.left.drop(p, size, align, h.stream)
		return 0, err
	}
	return p, nil
}

// Free waits until the memory is back, so that a request after it can have it. Once it is given back there is no
// failure: the next call returns what keeps the stream from being waited for.
func (h *HostOrderedAdaptor) Free(p cuda.Ptr, size, align uint64, _ cuda.Stream) error {
	if err := h.up.Free(p, size, align, h.stream); err != nil || p == 0 {
		return err
	}
	_ = h.drv.StreamSynchronize(h.dev, h.stream)
	return nil
}

// Close destroys the stream; all memory was given back.
func (h *HostOrderedAdaptor) Close() error {
	if h.stream == 0 {
		return nil
	}
	if err := h.left.drain(); err != nil {
		return err
	}
	if err := h.drv.StreamDestroy(h.dev, h.stream); err != nil {
		return err
	}
	h.stream = 0
	return nil
}

// Equal: memory may be given back to any that is over an equal resource.
func (h *HostOrderedAdaptor) Equal(other Resource) bool {
	if x, ok := other.(*HostOrderedAdaptor); ok {
		return h == x || h.up.Equal(x.up)
	}
	return false
}

// Traits are the upstream's, host-ordered.
func (h *HostOrderedAdaptor) Traits() Traits {
	t := h.up.Traits()
	t.StreamOrdered = false
	return t
}
