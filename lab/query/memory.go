package query

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/open"
)

// memory is where a thread of the job gets its memory from.
type memory interface {
	// alloc gets the next buffer.
	alloc(size uint64) (cuda.Ptr, error)
	// free gives it back; work queued on the thread's stream so far may still use it.
	free(p cuda.Ptr, size uint64) error
}

// contender is one way to get memory, for all threads of the job.
type contender struct {
	name    string
	words   string                                        // what it is
	threads func(streams []cuda.Stream) ([]memory, error) // made once, used in every round
	close   func() error
}

// contenders are those that are compared. The first is what ratios are to.
func contenders(m gpu.Machine, dev cuda.Device, opts cistern.Options, also []string) ([]*contender, error) {
	list := []*contender{
		byName(m, dev, "direct", "device", "cuMemAlloc and cuMemFree for each buffer"),
		byName(m, dev, "async 0", "async", "a stream-ordered pool with release threshold 0, CUDA's own"),
		byName(m, dev, "async all", "async:threshold=unlimited", "a stream-ordered pool that keeps everything"),
		engine(m, dev, opts),
	}
	for _, words := range also {
		if err := open.Check(m, dev, words); err != nil {
			return nil, err
		}
		list = append(list, byName(m, dev, words, words, "that resource"))
	}
	return list, nil
}

// byName is a resource, as it is.
func byName(m gpu.Machine, dev cuda.Device, name, words, what string) *contender {
	c := &contender{name: name, words: what, close: func() error { return nil }}
	c.threads = func(streams []cuda.Stream) ([]memory, error) {
		r, err := open.Parse(m, dev, words)
		if err != nil {
			return nil, err
		}
		c.close = func() error { return resource.Close(r) }
		out := make([]memory, len(streams))
		for i, s := range streams {
			out[i] = &ofResource{r, m, dev, s, r.Traits().StreamOrdered}
		}
		return out, nil
	}
	return c
}

type ofResource struct {
	r       resource.Resource
	m       gpu.Machine
	dev     cuda.Device
	stream  cuda.Stream
	ordered bool
}

func (o *ofResource) alloc(size uint64) (cuda.Ptr, error) { return o.r.Alloc(size, 0, o.stream) }

// free waits for the stream where the resource does not: cuMemFree happens to wait for more than that, but nothing may
// rely on it.
func (o *ofResource) free(p cuda.Ptr, size uint64) error {
	if !o.ordered {
		if err := o.m.StreamSynchronize(o.dev, o.stream); err != nil {
			return err
		}
	}
	return o.r.Free(p, size, 0, o.stream)
}

// engine is Cistern as a Go program uses it.
func engine(m gpu.Machine, dev cuda.Device, opts cistern.Options) *contender {
	c := &contender{name: "cistern", words: "this engine, by Device.Alloc and Allocator.Free"}
	c.close = func() error { return nil }
	c.threads = func(streams []cuda.Stream) ([]memory, error) {
		a, err := cistern.New(m, opts)
		if err != nil {
			return nil, err
		}
		c.close = a.Close
		d, err := a.Device(dev)
		if err != nil {
			return nil, err
		}
		out := make([]memory, len(streams))
		for i, s := range streams {
			st, err := d.Stream(s, cistern.StreamDurable)
			if err != nil {
				return nil, err
			}
			out[i] = &ofEngine{a, d, st}
		}
		return out, nil
	}
	return c
}

type ofEngine struct {
	a  *cistern.Allocator
	d  cistern.Device
	st cistern.Stream
}

func (e *ofEngine) alloc(size uint64) (cuda.Ptr, error) { return e.d.Alloc(size, e.st) }

func (e *ofEngine) free(p cuda.Ptr, _ uint64) error { return e.a.Free(p) }

// planned is the job without an allocator, which nothing can be faster than: every buffer's place was decided before, in
// one allocation for each thread.
func planned(m gpu.Machine, dev cuda.Device, jobs []*job) *contender {
	c := &contender{name: "none", words: "no allocator: every place decided beforehand"}
	c.close = func() error { return nil }
	c.threads = func(streams []cuda.Stream) ([]memory, error) {
		var bases []cuda.Ptr
		c.close = func() error {
			for _, p := range bases {
				if err := m.MemFree(dev, p); err != nil {
					return err
				}
			}
			return nil
		}
		out := make([]memory, len(streams))
		for i := range streams {
			offsets, size := plan(jobs[i])
			p, err := m.MemAlloc(dev, size)
			if err != nil {
				return nil, fmt.Errorf("%d bytes for the buffers of a thread: %w", size, err)
			}
			bases = append(bases, p)
			out[i] = &ofPlan{base: p, offsets: offsets}
		}
		return out, nil
	}
	return c
}

type ofPlan struct {
	base    cuda.Ptr
	offsets []uint64 // by buffer
	next    int
}

func (o *ofPlan) alloc(uint64) (cuda.Ptr, error) {
	p := o.base + cuda.Ptr(o.offsets[o.next])
	o.next = (o.next + 1) % len(o.offsets)
	return p, nil
}

func (o *ofPlan) free(cuda.Ptr, uint64) error { return nil }

// plan places every buffer of a job, first fit in units of 512 bytes, and says how much memory that takes.
func plan(j *job) (offsets []uint64, size uint64) {
	type gap struct{ lo, hi uint64 }
	const unit = 512
	offsets = make([]uint64, j.buffers)
	gaps := []gap{{0, 1 << 62}}
	round := func(n uint64) uint64 { return (n + unit - 1) / unit * unit }
	for _, s := range j.steps {
		n := round(s.size)
		switch s.what {
		case stepAlloc:
			i := slices.IndexFunc(gaps, func(h gap) bool { return h.hi-h.lo >= n })
			offsets[s.buffer] = gaps[i].lo
			if gaps[i].lo += n; gaps[i].lo == gaps[i].hi {
				gaps = slices.Delete(gaps, i, i+1)
			}
			size = max(size, offsets[s.buffer]+n)
		case stepFree:
			lo := offsets[s.buffer]
			i, _ := slices.BinarySearchFunc(gaps, lo, func(h gap, lo uint64) int { return cmp.Compare(h.lo, lo) })
			gaps = slices.Insert(gaps, i, gap{lo, lo + n})
			if i+1 < len(gaps) && gaps[i].hi == gaps[i+1].lo {
				gaps[i].hi = gaps[i+1].hi
				gaps = slices.Delete(gaps, i+1, i+2)
			}
			if i > 0 && gaps[i-1].hi == gaps[i].lo {
				gaps[i-1].hi = gaps[i].hi
				gaps = slices.Delete(gaps, i, i+1)
			}
		}
	}
	return offsets, size
}
