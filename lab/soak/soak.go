// Package soak is the engine's random test on a real GPU: operations of several threads over several streams, with
// private pools, blocks that other streams use (RecordStream), streams that are destroyed, trims, and a limit on memory
// that makes the engine move what it holds. Every block is filled with a pattern of its own by a kernel on its stream
// and compared by a kernel before it is given back; differences are counted on the GPU. So memory that is handed out
// twice, reused before the GPU is done with it, or unmapped while in use shows as wrong bytes or a broken context.
//
// It also measures: host time of a cached pair and of churn, and the time of every driver call beside what the
// simulated device charges for the same calls.
//
// Files: soak.go flags and phases; work.go the operations; model.go the measuring driver; bench.go host time; report.go the
// table.
package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/lab/cli"
)

// Run is the command.
func Run(args []string, out io.Writer) error {
	var device cli.Device
	var opts cistern.Options
	var file string
	var limit uint64
	f := cli.NewFlags("soak")
	f.Device(&device)
	f.JSON(&file)
	f.Conf(&opts)
	f.Size(&limit, "limit", "40GiB", "`bytes` that the engine may reserve")
	ops := f.Int("ops", 1_000_000, "allocations and frees together")
	workers := f.Int("workers", 4, "threads of the second half; each has two of the eight streams")
	seed := f.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random numbers")
	longest := f.Duration("duration", 75*time.Second, "stop the random test after this time; stopping early is a failure")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	if *ops < 1000 || *workers < 1 || *workers > streams {
		return cli.Usage("-ops is at least 1000, -workers from 1 to %d", streams)
	}
	opts.Limit = limit
	r := report{Driver: device.Driver, Seed: *seed, Limit: limit, Conf: opts.String(), CPUs: runtime.NumCPU()}
	err := soak(&r, device, *ops, *workers, opts, *longest)
	if err != nil {
		r.Error = err.Error()
	}
	r.print(out)
	return errors.Join(err, cli.WriteJSON(file, r))
}

// simulated judges by its checker, by the wall clock, and has no contents.
func simulated(o sim.Options) gpu.Machine {
	o.Check, o.RealTime, o.Lag = sim.CheckOrder, true, time.Millisecond
	return &gpu.Sim{Driver: sim.New(o)}
}

// soak runs the phases: the check of the checker, one thread, several threads, host time.
func soak(r *report, device cli.Device, ops, workers int, opts cistern.Options, longest time.Duration) error {
	m, err := device.Open(simulated)
	if err != nil {
		return err
	}
	dev := device.ID
	if r.Checked, err = detects(m, dev); err != nil {
		return fmt.Errorf("checking the checker: %w", err)
	}
	td, err := newModelled(m, dev)
	if err != nil {
		return err
	}
	a, err := cistern.New(td, opts)
	if err != nil {
		return err
	}
	d, err := a.Device(dev)
	if err != nil {
		return err
	}
	var all []*stream
	for i := range streams {
		s, err := newStream(m, d, i%4 < 2, i%2 == 0)
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	var late error // measured all the same
	whole, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	for _, phase := range []struct {
		name    string
		workers int
	}{{"one thread", 1}, {"several threads", workers}} {
		ctx, cancel := context.WithTimeout(whole, longest*2/3)
		defer cancel()
		td.reset()
		began := time.Now()
		done, ooms, err := run(ctx, m, a, d, all, ops/2, phase.workers, r.Seed)
		r.Operations += done
		r.OOMs += ooms
		p := phaseReport{Name: phase.name, Workers: phase.workers, Operations: done, Seconds: time.Since(began).Seconds(), Calls: td.report()}
		p.sum()
		r.Phases = append(r.Phases, p)
		if err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
		if done < ops/2 {
			late = fmt.Errorf("%s: only %d of %d operations in the time given", phase.name, done, ops/2)
		}
	}
	r.Stats = d.Stats()
	if err := m.Wrong(); err != nil {
		return err
	}
	if err := a.Trim(); err != nil {
		return err
	}
	if n := d.Stats().Reserved.All.Current; n != 0 {
		return fmt.Errorf("%d bytes are held after everything was given back", n)
	}
	if err := a.Close(); err != nil {
		return err
	}
	for _, s := range all {
		if err := m.StreamDestroy(dev, s.handle); err != nil {
			return err
		}
	}
	return errors.Join(late, hostTimes(r, m, dev, opts, min(10*ops, 1_000_000)))
}

// detects reports whether the machine finds a difference where there is one.
func detects(m gpu.Machine, dev cuda.Device) (bool, error) {
	const size = 1000
	p, err := m.MemAlloc(dev, size)
	if err != nil {
		return false, err
	}
	for _, step := range []func() error{
		func() error { return m.Fill(dev, cuda.StreamNull, p, size, 1) },
		func() error { return m.Check(dev, cuda.StreamNull, p, size, 1) },
		func() error { return m.Wrong() },
		func() error { return m.Check(dev, cuda.StreamNull, p, size, 2) },
	} {
		if err := step(); err != nil {
			return false, err
		}
	}
	found := m.Wrong() != nil
	if s, ok := m.(*gpu.Sim); !found && !(ok && s.Contents == 0) {
		return false, errors.New("another pattern is not found to differ")
	}
	return found, errors.Join(m.StreamSynchronize(dev, cuda.StreamNull), m.MemFree(dev, p))
}
