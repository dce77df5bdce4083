package resource

import (
	"fmt"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// AlignmentAdaptor aligns memory to more than the upstream does, as RMM's aligned_resource_adaptor: it asks for so much
// more that an aligned part lies within. Requests for an alignment that the upstream does not have are met too.
type AlignmentAdaptor struct {
	adaptor
	align     uint64
	threshold uint64

	mu sync.Mutex
	// +checklocks:mu
	moved map[cuda.Ptr]shifted // memory that does not begin where the upstream's does, or is longer
}

// shifted is what the upstream gave out.
type shifted struct {
	base cuda.Ptr
	size uint64
}

// Alignment makes that adaptor: requests of at least threshold bytes are aligned to align bytes, a power of two; smaller
// ones to what they ask for or the upstream has.
func Alignment(up Resource, align, threshold uint64) (*AlignmentAdaptor, error) {
	if align == 0 || align&(align-1) != 0 {
		return nil, fmt.Errorf("%w of %d bytes is not a power of two", ErrAlign, align)
	}
	return &AlignmentAdaptor{adaptor: adaptor{up}, align: align, threshold: threshold, moved: map[cuda.Ptr]shifted{}}, nil
}

// Alloc asks for align more than is needed, less what the upstream aligns to anyhow.
func (a *AlignmentAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	t := a.up.Traits()
	if err := Check(t.Name, t.Device, size, align, max(align, 1)); err != nil {
		return 0, err
	}
	want := align
	if size >= a.threshold {
		want = max(want, a.align)
	}
	if want <= t.Align {
		return a.up.Alloc(size, want, st)
	}
	if err := Check(t.Name, t.Device, want, 0, 0); err != nil {
		return 0, err
	}
	whole := roundUp(size, want) + want - t.Align
	base, err := a.up.Alloc(whole, t.Align, st)
	if err != nil {
		return 0, err
	}
	p := cuda.Ptr(roundUp(uint64(base), want))
	a.mu.Lock()
	a.moved[p] = shifted{base, whole}
	a.mu.Unlock()
	return p, nil
}

// Free gives back what the upstream gave out.
func (a *AlignmentAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	a.mu.Lock()
	x, moved := a.moved[p]
	delete(a.moved, p) // first: the upstream may give the address out again at once
	a.mu.Unlock()
	if !moved {
		if size >= a.threshold {
			align = max(align, a.align)
		}
		return a.up.Free(p, size, align, st)
	}
	err := a.up.Free(x.base, x.size, a.up.Traits().Align, st)
	if err != nil {
		a.mu.Lock()
		a.moved[p] = x
		a.mu.Unlock()
	}
	return err
}

func (a *AlignmentAdaptor) original(p cuda.Ptr, size uint64) (cuda.Ptr, uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if x, ok := a.moved[p]; ok {
		return x.base, x.size
	}
	return p, size
}

// forwards: an address here is not the upstream's, so that As must not look past this adaptor.
func (a *AlignmentAdaptor) forwards(has func(Resource) bool) bool { return has(a.up) }

// Unback and Back are the upstream's, of what holds the memory at p.
func (a *AlignmentAdaptor) Unback(p cuda.Ptr, size uint64) error {
	b, ok := As[Backing](a.up)
	if !ok {
		return cuda.ErrNotSupported
	}
	return b.Unback(a.original(p, size))
}

func (a *AlignmentAdaptor) Back(p cuda.Ptr, size uint64) error {
	b, ok := As[Backing](a.up)
	if !ok {
		return cuda.ErrNotSupported
	}
	return b.Back(a.original(p, size))
}

func (a *AlignmentAdaptor) Equal(other Resource) bool { return sameResource(a, other) }

// Traits are the upstream's; memory is aligned to more, where every request is.
func (a *AlignmentAdaptor) Traits() Traits {
	t := a.up.Traits()
	if a.threshold <= 1 {
		t.Align = max(t.Align, a.align)
	}
	return t
}
