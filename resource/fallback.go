package resource

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// FallbackAdaptor gets memory from one resource, and from another when the first is out of memory. What came from where
// is kept, so that each goes back to its own.
type FallbackAdaptor struct {
	adaptor
	other Resource

	mu sync.Mutex
	// +checklocks:mu
	there map[cuda.Ptr]struct{} // memory from other
}

// Fallback makes that adaptor.
func Fallback(primary, other Resource) *FallbackAdaptor {
	return &FallbackAdaptor{adaptor: adaptor{primary}, other: other, there: map[cuda.Ptr]struct{}{}}
}

// Other is the resource that is asked second.
func (f *FallbackAdaptor) Other() Resource { return f.other }

func (f *FallbackAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	p, err := f.up.Alloc(size, align, st)
	if err == nil || !errors.Is(err, cuda.ErrOutOfMemory) {
		return p, err
	}
	p, second := f.other.Alloc(size, align, st)
	if second != nil {
		return 0, both(err, second)
	}
	if p != 0 {
		f.mu.Lock()
		f.there[p] = struct{}{}
		f.mu.Unlock()
	}
	return p, nil
}

func (f *FallbackAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	f.mu.Lock()
	_, there := f.there[p]
	delete(f.there, p) // first: the address may be given out again at once
	f.mu.Unlock()
	if !there {
		return f.up.Free(p, size, align, st)
	}
	err := f.other.Free(p, size, align, st)
	if err != nil {
		f.mu.Lock()
		f.there[p] = struct{}{}
		f.mu.Unlock()
	}
	return err
}

// forwards: what is asked of this adaptor is asked of either resource.
func (f *FallbackAdaptor) forwards(has func(Resource) bool) bool { return has(f.up) || has(f.other) }

// EnablePeer opens the memory of both; what is the host's is open to every device.
func (f *FallbackAdaptor) EnablePeer(peer cuda.Device) error {
	for _, r := range []Resource{f.up, f.other} {
		if p, ok := As[Peers](r); ok {
			if err := p.EnablePeer(peer); err != nil {
				return err
			}
		} else if !r.Traits().HostAccessible {
			return fmt.Errorf("%s memory cannot be opened to device %d: %w", r.Traits().Name, peer, cuda.ErrNotSupported)
		}
	}
	return nil
}

// Trim has both give back what they keep.
func (f *FallbackAdaptor) Trim() error {
	var first error
	for _, r := range []Resource{f.up, f.other} {
		if t, ok := As[Trimmer](r); ok {
			first = both(first, t.Trim())
		}
	}
	return first
}

func (f *FallbackAdaptor) backing(p cuda.Ptr) (Backing, error) {
	r := f.up
	f.mu.Lock()
	if _, there := f.there[p]; there {
		r = f.other
	}
	f.mu.Unlock()
	if b, ok := As[Backing](r); ok {
		return b, nil
	}
	return nil, fmt.Errorf("%s memory keeps its pages: %w", r.Traits().Name, cuda.ErrNotSupported)
}

// Unback and Back are those of the resource that the memory came from.
func (f *FallbackAdaptor) Unback(p cuda.Ptr, size uint64) error {
	b, err := f.backing(p)
	if err != nil {
		return err
	}
	return b.Unback(p, size)
}

func (f *FallbackAdaptor) Back(p cuda.Ptr, size uint64) error {
	b, err := f.backing(p)
	if err != nil {
		return err
	}
	return b.Back(p, size)
}

func (f *FallbackAdaptor) Equal(other Resource) bool { return sameResource(f, other) }

// Traits are what holds of both; the name and whose memory it is are the first one's.
func (f *FallbackAdaptor) Traits() Traits {
	t, o := f.up.Traits(), f.other.Traits()
	t.DeviceAccessible = t.DeviceAccessible && o.DeviceAccessible
	t.HostAccessible = t.HostAccessible && o.HostAccessible
	t.StreamOrdered = t.StreamOrdered && o.StreamOrdered
	t.Migrates = t.Migrates && o.Migrates
	t.Registered = t.Registered || o.Registered
	t.Align = min(t.Align, o.Align)
	t.Handles &= o.Handles
	return t
}
