// Command gpusoak is the engine's random test on a real GPU: operations of several threads over several streams, with
// private pools, blocks that other streams use (RecordStream), streams that are destroyed, trims, and a limit on memory
// that makes the engine move what it holds. Every block is filled with a pattern of its own by a kernel on its stream
// and compared by a kernel before it is given back; differences are counted on the GPU. So memory that is handed out
// twice, reused before the GPU is done with it, or unmapped while in use shows as wrong bytes or a broken context.
//
// It also measures: host time of a cached pair and of churn, and the time of every driver call beside what the
// simulated device charges for the same calls.
//
// Files: main.go flags and phases; work.go what the program does; gpu.go the two devices; timed.go the measuring
// driver; bench.go host time; report.go the table and the JSON line.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

func main() {
	driver := flag.String("driver", "nvidia", "`driver`: nvidia, nvidia:/path/to/libcuda.so.1 or sim")
	device := flag.Int("device", 0, "`ordinal` of the GPU")
	ops := flag.Int("ops", 1_000_000, "allocations and frees together")
	workers := flag.Int("workers", 4, "threads of the second half; each has two of the eight streams")
	limit := flag.String("limit", "40GiB", "memory that the engine may hold")
	conf := flag.String("conf", "", "further settings, as in CISTERN_CONF")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random numbers")
	longest := flag.Duration("duration", 75*time.Second, "stop the random test after this time; stopping early is a failure")
	jsonFile := flag.String("json", "", "also write the JSON line to `FILE`")
	flag.Parse()
	bytes, err := units.ParseBytes(*limit)
	if err != nil || flag.NArg() != 0 || *ops < 1000 || *workers < 1 || *workers > streams {
		fmt.Fprintln(os.Stderr, "gpusoak: takes flags only: -ops of at least 1000, -workers from 1 to 8, -limit a size such as 40GiB")
		os.Exit(2)
	}
	opts, err := cistern.ParseOptions(*conf)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpusoak: -conf:", err)
		os.Exit(2)
	}
	opts.Limit = bytes
	r := report{Driver: *driver, Seed: *seed, Limit: bytes, Conf: opts.String(), CPUs: runtime.NumCPU()}
	if err := soak(&r, cuda.Device(*device), *ops, *workers, opts, *longest); err != nil {
		r.Error = err.Error()
	}
	r.print(os.Stdout)
	if err := r.write(*jsonFile); err != nil {
		fmt.Fprintln(os.Stderr, "gpusoak:", err)
		os.Exit(2)
	}
	if r.Error != "" || r.Wrong != 0 {
		os.Exit(1)
	}
}

// soak runs the phases: the check of the checker, one thread, several threads, host time.
func soak(r *report, dev cuda.Device, ops, workers int, opts cistern.Options, longest time.Duration) error {
	m, err := openMachine(r.Driver, dev)
	if err != nil {
		return err
	}
	if r.Checked, err = m.detects(); err != nil {
		return fmt.Errorf("checking the checker: %w", err)
	}
	td, err := newTimed(m.driver(), dev)
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
	deadline := time.Now().Add(longest)
	for _, phase := range []struct {
		name    string
		workers int
	}{{"one thread", 1}, {"several threads", workers}} {
		td.reset()
		began := time.Now()
		end := min(time.Until(deadline), longest*2/3)
		done, ooms, err := run(m, a, d, all, ops/2, phase.workers, r.Seed, time.Now().Add(end))
		r.Operations += done
		r.OOMs += ooms
		p := phaseReport{Name: phase.name, Workers: phase.workers, Operations: done, Seconds: time.Since(began).Seconds(), Calls: td.calls()}
		p.sum()
		r.Phases = append(r.Phases, p)
		if err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
		if done < ops/2 {
			r.Error = fmt.Sprintf("%s: only %d of %d operations in the time given", phase.name, done, ops/2)
		}
	}
	r.Stats = d.Stats()
	if r.Wrong, err = m.wrong(); err != nil {
		return fmt.Errorf("reading the count of differences: %w", err)
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
		if err := m.destroyStream(s.handle); err != nil {
			return err
		}
	}
	return hostTimes(r, m, dev, opts)
}
