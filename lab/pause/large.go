package pause

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// large measures much memory: dropped, warm, cold, through a file.
func (b *bench) large() error {
	for _, part := range []func() error{b.dropped, b.kept, b.cold, b.throughFile} {
		if err := part(); err != nil {
			return err
		}
		if err := errors.Join(b.freeAll(), b.d.PauseBuffers(0)); err != nil {
			return err
		}
	}
	return nil
}

const eachBlock = 256 << 20

var selected = cistern.Selection{Tag: tag}

func (b *bench) dropped() error {
	drop := cistern.PauseOptions{Keep: cistern.KeepNone}
	first := func(name string, each uint64) (float64, error) {
		if err := errors.Join(b.freeAll(), b.alloc(b.d.DefaultPool(), b.size, each)); err != nil {
			return 0, err
		}
		out, _, r, err := b.named(name, selected, drop)
		if err == nil && r.Bytes < b.size {
			err = fmt.Errorf("%d bytes of %d were paused", r.Bytes, b.size)
		}
		return perGiB(max(1, r.Physical), out), err
	}
	var err error
	if b.r.OneDropMS, err = first("fresh memory, one block", b.size); err != nil {
		return err
	}
	for range b.rounds {
		ms, err := first("fresh memory", eachBlock)
		if err != nil {
			return err
		}
		b.r.FirstDrops = append(b.r.FirstDrops, ms)
	}
	b.r.FirstDropMS = meter.Median(b.r.FirstDrops)
	var outs, ins []time.Duration
	for range b.repeat {
		out, in, _, err := b.named("dropped", selected, drop)
		if err != nil {
			return err
		}
		outs, ins = append(outs, out), append(ins, in)
	}
	b.r.DropMS, b.r.DropResumeMS = perGiB(b.size, meter.Median(outs)), perGiB(b.size, meter.Median(ins))
	return nil
}

// cold has pauses get their buffers.
func (b *bench) cold() error {
	for range b.rounds {
		if err := b.freshBlocks(); err != nil {
			return err
		}
		if err := b.once("cold"); err != nil {
			return err
		}
	}
	b.r.ColdOut = meter.Median(b.r.ColdOuts)
	return b.check()
}

// kept has them used again, after one that got them.
func (b *bench) kept() error {
	if err := b.freshBlocks(); err != nil {
		return err
	}
	if err := b.once("very first"); err != nil {
		return err
	}
	var outs, ins []time.Duration
	for range b.repeat {
		out, in, _, err := b.named("warm", selected, cistern.PauseOptions{})
		if err != nil {
			return err
		}
		outs, ins = append(outs, out), append(ins, in)
	}
	b.r.WarmOut, b.r.WarmIn = rate(b.size, meter.Median(outs)), rate(b.size, meter.Median(ins))
	return b.check()
}

// once is a pause that gets its buffers.
func (b *bench) once(name string) error {
	out, _, r, err := b.named(name, selected, cistern.PauseOptions{})
	b.r.ColdOuts = append(b.r.ColdOuts, rate(r.Kept, out))
	return err
}

// freshBlocks makes blocks with contents, and has no buffers.
func (b *bench) freshBlocks() error {
	if err := errors.Join(b.freeAll(), b.d.PauseBuffers(0)); err != nil {
		return err
	}
	return b.alloc(b.d.DefaultPool(), b.size, eachBlock)
}

func (b *bench) throughFile() error {
	if b.disk == 0 {
		return nil
	}
	if err := b.alloc(b.d.DefaultPool(), b.disk, eachBlock); err != nil {
		return err
	}
	out, in, r, err := b.cycle(selected, cistern.PauseOptions{Keep: cistern.KeepDisk, Dir: b.dir})
	if err != nil {
		return err
	}
	b.r.DiskBytes, b.r.DiskOut, b.r.DiskIn = r.Kept, rate(r.Kept, out), rate(r.Kept, in)
	return b.check()
}

// named is cycle, and notes what the driver's calls took under a name.
func (b *bench) named(name string, sel cistern.Selection, o cistern.PauseOptions) (out, in time.Duration, r cistern.PauseReport, err error) {
	return b.cycleWith(sel, o, func(half string) {
		b.r.Calls[name+", "+half] = calls(b.clock)
	})
}

// cycle pauses and resumes once. The GPU has nothing to do meanwhile.
func (b *bench) cycle(sel cistern.Selection, o cistern.PauseOptions) (out, in time.Duration, r cistern.PauseReport, err error) {
	return b.cycleWith(sel, o, func(string) {})
}

func (b *bench) cycleWith(sel cistern.Selection, o cistern.PauseOptions, after func(half string)) (out, in time.Duration, r cistern.PauseReport, err error) {
	if err = b.drv.ContextSynchronize(b.dev); err != nil {
		return
	}
	b.clock.Reset()
	out, err = b.timed(func() (err error) {
		r, err = b.d.Pause(sel, o)
		return err
	})
	after("pause")
	if err == nil {
		b.clock.Reset()
		in, err = b.timed(func() error {
			_, err := b.d.Resume(sel)
			return err
		})
		after("resume")
	}
	return
}
