package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
)

// What is promised of a GPU.
const (
	leastPart  = 0.9  // of a plain copy's bandwidth
	mostMS     = 10.0 // per GiB, where contents are dropped
	mostDevice = 4 << 20
	mostHost   = 16 << 20 // a Go program's own memory breathes
)

// bench is a device and what is paused on it.
type bench struct {
	config
	drv    cuda.Driver
	c      contents
	a      *cistern.Allocator
	d      *cistern.Device
	st     *cistern.Stream
	r      *Result
	blocks []block
}

type block struct {
	p          cuda.Ptr
	size, seed uint64
}

const tag = 7

func measure(c config) (*Result, error) {
	drv, work, promises, err := openDevice(c.driver, c.dev)
	if err != nil {
		return nil, err
	}
	a, err := cistern.New(drv, cistern.Options{})
	if err != nil {
		return nil, err
	}
	d, err := a.Device(c.dev)
	if err != nil {
		return nil, err
	}
	st, err := d.Stream(cuda.StreamNull)
	if err != nil {
		return nil, err
	}
	b := &bench{config: c, drv: drv, c: work, a: a, d: d, st: st, r: &Result{Device: d.Info().Name, Bytes: c.size, Cycles: c.cycles}}
	for _, part := range []func() error{b.plain, b.large, b.small} {
		if err := part(); err != nil {
			return nil, err
		}
	}
	if err := a.Close(); err != nil {
		return nil, err
	}
	if promises {
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
	miss(r.DropMS > mostMS || r.FirstDropMS > mostMS, "pausing takes %.2f ms per GiB, the first time %.2f", r.DropMS, r.FirstDropMS)
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
func (b *bench) alloc(pool *cistern.Pool, total, each uint64) error {
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
		if err := b.c.fill(x.p, x.size, x.seed); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) check() error {
	for _, x := range b.blocks {
		if err := b.c.check(x.p, x.size, x.seed); err != nil {
			return err
		}
	}
	n, err := b.c.wrong()
	if err == nil && n != 0 {
		err = fmt.Errorf("%d words are wrong after a resume", n)
	}
	return err
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

// cycle pauses and resumes once. The GPU has nothing to do meanwhile.
func (b *bench) cycle(sel cistern.Selection, o cistern.PauseOptions) (out, in time.Duration, r cistern.PauseReport, err error) {
	if err = b.drv.ContextSynchronize(b.dev); err != nil {
		return
	}
	out, err = b.timed(func() (err error) {
		r, err = b.d.Pause(sel, o)
		return err
	})
	if err == nil {
		in, err = b.timed(func() error {
			_, err := b.d.Resume(sel)
			return err
		})
	}
	return
}

// large measures much memory: cold, warm, through a file, dropped.
func (b *bench) large() error {
	sel := cistern.Selection{Tag: tag}
	if err := b.alloc(b.d.DefaultPool(), b.size, 256<<20); err != nil {
		return err
	}
	// First what chunks of all sizes cost that requests made.
	out, _, r, err := b.cycle(sel, cistern.PauseOptions{Keep: cistern.KeepNone})
	if err != nil {
		return err
	}
	b.r.FirstDropMS = perGiB(r.Physical, out)
	var outs, ins []time.Duration
	for range b.repeat {
		out, in, r, err := b.cycle(sel, cistern.PauseOptions{Keep: cistern.KeepNone})
		if err != nil {
			return err
		}
		if r.Bytes < b.size {
			return fmt.Errorf("%d bytes of %d were paused", r.Bytes, b.size)
		}
		outs, ins = append(outs, out), append(ins, in)
	}
	b.r.DropMS, b.r.DropResumeMS = perGiB(b.size, median(outs)), perGiB(b.size, median(ins))

	if err := b.fill(); err != nil {
		return err
	}
	out, _, r, err = b.cycle(sel, cistern.PauseOptions{})
	if err != nil {
		return err
	}
	b.r.ColdOut = rate(r.Kept, out)
	outs, ins = nil, nil
	for range b.repeat {
		out, in, _, err := b.cycle(sel, cistern.PauseOptions{})
		if err != nil {
			return err
		}
		outs, ins = append(outs, out), append(ins, in)
	}
	b.r.WarmOut, b.r.WarmIn = rate(b.size, median(outs)), rate(b.size, median(ins))
	if err := b.check(); err != nil {
		return err
	}
	if err := errors.Join(b.freeAll(), b.d.PauseBuffers(0)); err != nil || b.disk == 0 {
		return err
	}
	if err := b.alloc(b.d.DefaultPool(), b.disk, 256<<20); err != nil {
		return err
	}
	out, in, r, err := b.cycle(sel, cistern.PauseOptions{Keep: cistern.KeepDisk, Dir: b.dir})
	if err != nil {
		return err
	}
	b.r.DiskBytes, b.r.DiskOut, b.r.DiskIn = r.Kept, rate(r.Kept, out), rate(r.Kept, in)
	if err := b.check(); err != nil {
		return err
	}
	return errors.Join(b.freeAll(), b.d.PauseBuffers(0))
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}

// small cycles a small pool often, in all ways in turn, and looks at what is left over.
func (b *bench) small() error {
	pool, err := b.d.NewPool(cistern.PoolID{1, 0})
	if err != nil {
		return err
	}
	for _, each := range []uint64{4 << 10, 300 << 10, 5 << 20} {
		if err := b.alloc(pool, 4*each, each); err != nil {
			return err
		}
	}
	sel := cistern.Selection{Pool: pool}
	once := func(i int) error {
		o := cistern.PauseOptions{Dir: b.dir}
		switch {
		case i%50 == 49:
			o.Keep = cistern.KeepDisk
		case i%5 == 4:
			o.Keep = cistern.KeepNone
		}
		_, _, _, err := b.cycle(sel, o)
		if err == nil && o.Keep == cistern.KeepNone {
			err = b.fill()
		}
		if err == nil && i%100 == 0 {
			err = b.check()
		}
		return err
	}
	for i := range min(b.cycles, 100) { // so that what is kept for the next time is there
		if err := once(i); err != nil {
			return err
		}
	}
	before, err := b.look()
	if err != nil {
		return err
	}
	start := b.drv.Now()
	for i := range b.cycles {
		if err := once(i); err != nil {
			return fmt.Errorf("cycle %d: %w", i, err)
		}
	}
	took := b.drv.Now() - start
	if err := b.check(); err != nil {
		return err
	}
	after, err := b.look()
	if err != nil {
		return err
	}
	if b.cycles > 0 {
		b.r.CycleMS = took.Seconds() * 1e3 / float64(b.cycles)
	}
	b.r.DeviceGrown, b.r.HostGrown, b.r.FilesGrown = after.device-before.device, after.host-before.host, after.files-before.files
	if err := b.freeAll(); err != nil {
		return err
	}
	return errors.Join(pool.Release(), b.d.PauseBuffers(0))
}

// left is what a process holds.
type left struct {
	device, host int64 // bytes
	files        int
}

func (b *bench) look() (left, error) {
	runtime.GC()
	free, total, err := b.drv.MemInfo(b.dev)
	if err != nil {
		return left{}, err
	}
	l := left{device: int64(total - free)}
	if text, err := os.ReadFile("/proc/self/status"); err == nil {
		_, rest, _ := strings.Cut(string(text), "VmRSS:")
		if f := strings.Fields(rest); len(f) > 0 {
			kb, _ := strconv.ParseInt(f[0], 10, 64)
			l.host = kb << 10
		}
	}
	if names, err := os.ReadDir("/proc/self/fd"); err == nil {
		l.files = len(names)
	}
	return l, nil
}
