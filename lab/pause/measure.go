package pause

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// What is promised of a GPU.
const (
	leastPart  = 0.9  // of a plain copy's bandwidth
	mostMS     = 10.0 // per GiB, where contents are dropped
	coldAim    = 25.0 // GB/s, of a pause that gets its buffers: it is up to the host, so no promise
	mostDevice = 4 << 20
	mostHost   = 16 << 20 // a Go program's own memory breathes
)

// bench is a device and what is paused on it.
type bench struct {
	config
	drv    gpu.Machine
	dev    cuda.Device
	clock  *meter.Driver // what the engine has
	a      *cistern.Allocator
	d      cistern.Device
	st     cistern.Stream
	r      *Result
	blocks []block
}

type block struct {
	p          cuda.Ptr
	size, seed uint64
}

const tag = 7

func measure(c config) (*Result, error) {
	drv, err := c.device.Open(nil)
	if err != nil {
		return nil, err
	}
	clock := meter.New(drv)
	a, err := cistern.New(clock, cistern.Options{})
	if err != nil {
		return nil, err
	}
	d, err := a.Device(c.device.ID)
	if err != nil {
		return nil, err
	}
	st, err := d.Stream(cuda.StreamNull)
	if err != nil {
		return nil, err
	}
	b := &bench{config: c, drv: drv, dev: c.device.ID, clock: clock, a: a, d: d, st: st,
		r: &Result{Device: d.Info().Name, Bytes: c.size, Cycles: c.cycles, Calls: map[string][]Call{}}}
	for _, part := range []func() error{b.plain, b.large, b.small} {
		if err := part(); err != nil {
			return nil, err
		}
	}
	if err := a.Close(); err != nil {
		return nil, err
	}
	if _, simulated := drv.(*gpu.Sim); !simulated {
		b.r.judge()
	}
	return b.r, nil
}

// judge notes what is worse than promised.
func (r *Result) judge() {
	miss := func(bad bool, format string, args ...any) {
		if bad {
			r.Missed = append(r.Missed, fmt.Sprintf(format, args...))
		}
	}
	miss(r.WarmOut < leastPart*r.PlainOut, "pausing copies at %.2f GB/s, a plain copy at %.2f", r.WarmOut, r.PlainOut)
	miss(r.WarmIn < leastPart*r.PlainIn, "resuming copies at %.2f GB/s, a plain copy at %.2f", r.WarmIn, r.PlainIn)
	miss(r.DropMS > mostMS || r.FirstDropMS > mostMS || r.OneDropMS > mostMS, "pausing takes %.2f ms per GiB, the first time %.2f, of one block %.2f",
		r.DropMS, r.FirstDropMS, r.OneDropMS)
	miss(r.DropResumeMS > mostMS, "resuming takes %.2f ms per GiB", r.DropResumeMS)
	miss(r.DeviceGrown > mostDevice, "device memory grew by %d bytes", r.DeviceGrown)
	miss(r.HostGrown > mostHost, "host memory grew by %d bytes", r.HostGrown)
	miss(r.FilesGrown > 0, "%d more descriptors are open", r.FilesGrown)
}

// timed is how long f takes by the driver's clock.
func (b *bench) timed(f func() error) (time.Duration, error) {
	start := b.drv.Now()
	err := f()
	return b.drv.Now() - start, err
}

func rate(bytes uint64, took time.Duration) float64 {
	return float64(bytes) / 1e9 / max(took.Seconds(), 1e-9)
}

func perGiB(bytes uint64, took time.Duration) float64 {
	return took.Seconds() * 1e3 / (float64(bytes) / (1 << 30))
}

// plain copies between the device and page-locked memory as one does by hand.
func (b *bench) plain() error {
	n := min(b.size, 2<<30)
	host, err := b.drv.HostAlloc(b.dev, n)
	if err != nil {
		return err
	}
	p, err := b.drv.MemAlloc(b.dev, n)
	if err != nil {
		return err
	}
	s, err := b.drv.StreamCreate(b.dev, false)
	if err != nil {
		return err
	}
	best := func(to, from cuda.Ptr) (float64, error) {
		top := 0.0
		for range b.repeat {
			took, err := b.timed(func() error {
				return errors.Join(b.drv.MemcpyAsync(b.dev, to, from, n, s), b.drv.StreamSynchronize(b.dev, s))
			})
			if err != nil {
				return 0, err
			}
			top = max(top, rate(n, took))
		}
		return top, nil
	}
	if b.r.PlainOut, err = best(host, p); err != nil {
		return err
	}
	if b.r.PlainIn, err = best(p, host); err != nil {
		return err
	}
	return errors.Join(b.drv.StreamDestroy(b.dev, s), b.drv.MemFree(b.dev, p), b.drv.HostFree(b.dev, host))
}

// alloc gets so many bytes in blocks of a size, with contents.
func (b *bench) alloc(pool cistern.Pool, total, each uint64) error {
	for i := uint64(0); total > 0; i++ {
		n := min(total, each)
		p, err := pool.AllocTagged(n, b.st, tag)
		if err != nil {
			return err
		}
		b.blocks = append(b.blocks, block{p, n, i})
		total -= n
	}
	return b.fill()
}

func (b *bench) fill() error {
	for _, x := range b.blocks {
		if err := b.drv.Fill(b.dev, cuda.StreamNull, x.p, x.size, x.seed); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) check() error {
	for _, x := range b.blocks {
		if err := b.drv.Check(b.dev, cuda.StreamNull, x.p, x.size, x.seed); err != nil {
			return err
		}
	}
	if err := b.drv.Wrong(); err != nil {
		return fmt.Errorf("after a resume: %w", err)
	}
	return nil
}

func (b *bench) freeAll() error {
	for _, x := range b.blocks {
		if err := b.a.Free(x.p); err != nil {
			return err
		}
	}
	b.blocks = nil
	return b.d.Trim()
}
