// Package replay runs the engine over a real GPU with the requests of a recorded run, and holds what its driver calls took
// against what the simulated device says they take.
//
// It queues no work: requests follow each other as fast as the engine serves them, so every event is complete when it
// is asked for, which is a GPU lag of 0 in the simulation. Of a trace the first device that has events is replayed. For
// each trace it prints a table of driver calls: how often, measured, modelled; then the sums and their ratio, without the
// calls that wait for the GPU. A trace that cannot be replayed is an error; the others are replayed all the same.
package replay

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/lab/cli"
	"github.com/cistern-gpu/cistern/lab/meter"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// Result is what was found of a trace.
type Result struct {
	Path         string  `json:"path"`
	MeasuredUS   float64 `json:"measured_us"`
	ModelledUS   float64 `json:"modelled_us"`
	Ratio        float64 `json:"modelled_over_measured"`
	PeakReserved int64   `json:"peak_reserved_bytes"`
	HostUS       float64 `json:"host_us"`
}

// Run is the command.
func Run(args []string, out io.Writer) error {
	var device cli.Device
	var opts cistern.Options
	var file string
	f := cli.NewFlags("replay")
	f.Device(&device)
	f.Conf(&opts)
	f.JSON(&file)
	if err := f.ParseWith(args, out); err != nil {
		return err
	}
	if f.NArg() == 0 {
		return cli.Usage("no traces are named")
	}
	drv, err := device.Open(nil)
	if err != nil {
		return err
	}
	var results []*Result
	var failed error
	for _, path := range f.Args() {
		r, err := replay(path, drv, device.ID, opts, out)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", path, err))
			continue
		}
		results = append(results, r)
	}
	return errors.Join(failed, cli.WriteJSON(file, results...))
}

func replay(path string, drv cuda.Driver, dev cuda.Device, opts cistern.Options, out io.Writer) (*Result, error) {
	f, err := open.File(path)
	if err != nil {
		return nil, err
	}
	t := f.Traces[0]
	real, err := run(t, meter.New(drv), dev, opts)
	if err != nil {
		return nil, err
	}
	model, err := run(t, sim.New(sim.Options{Check: sim.CheckUse}), 0, opts)
	if err != nil {
		return nil, err
	}
	return report(path, t, real, model, out), nil
}

// outcome is what one run did.
type outcome struct {
	host  time.Duration // wall time of all requests
	stats cistern.Stats
	timed []meter.Call  // of a real GPU: what was measured
	model sim.CallStats // of the simulated one: what was charged
}

// run serves the requests of a trace.
func run(t *recording.Trace, drv cuda.Driver, dev cuda.Device, opts cistern.Options) (outcome, error) {
	var out outcome
	a, err := cistern.New(drv, opts)
	if err != nil {
		return out, err
	}
	d, err := a.Device(dev)
	if err != nil {
		return out, err
	}
	var streams []cistern.Stream
	for i := range max(1, len(t.Streams)) {
		h := cuda.StreamNull
		if i < len(t.Streams) && t.Streams[i] != 0 {
			if h, err = drv.StreamCreate(dev, false); err != nil {
				return out, err
			}
		}
		st, err := d.Stream(h, cistern.StreamDurable)
		if err != nil {
			return out, err
		}
		streams = append(streams, st)
	}
	switch x := drv.(type) { // starting is not part of it
	case *meter.Driver:
		x.Reset()
	case *sim.Driver:
		x.ResetCalls()
	}
	at := map[uint64]cuda.Ptr{}
	start := time.Now()
	for i := range t.Events {
		e := &t.Events[i]
		switch e.Kind {
		case event.Alloc:
			p, err := d.Alloc(e.Size, streams[e.Stream])
			if err != nil {
				return out, fmt.Errorf("event %d: %w", i, err)
			}
			at[e.Addr] = p
		case event.FreeCompleted:
			if err := a.Free(at[e.Addr]); err != nil {
				return out, fmt.Errorf("event %d: %w", i, err)
			}
			delete(at, e.Addr)
		}
	}
	out.host = time.Since(start)
	out.stats = d.Stats()
	switch x := drv.(type) {
	case *meter.Driver:
		out.timed = x.Calls()
	case *sim.Driver:
		out.model = x.Calls()
	}
	for _, p := range at {
		if err := a.Free(p); err != nil {
			return out, err
		}
	}
	return out, a.Close()
}

func report(path string, t *recording.Trace, real, simulated outcome, out io.Writer) *Result {
	fmt.Fprintf(out, "%s: %d events over %.2f s; peak reserved %d on the GPU, %d simulated; %d chunks got and %d moved, %d and %d\n",
		path, len(t.Events), float64(t.Duration())/1e6, real.stats.Reserved.All.Peak, simulated.stats.Reserved.All.Peak,
		real.stats.DeviceAllocs, real.stats.Remaps, simulated.stats.DeviceAllocs, simulated.stats.Remaps)
	w := tabwriter.NewWriter(out, 2, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "call\tmeasured n\tms\tus each\tmodelled n\tms\tus each\t")
	var sum, modelled time.Duration
	for _, c := range real.timed {
		m := simulated.model.Calls[c.Name]
		if !c.Waits {
			sum += c.Total
			modelled += m.Time
		}
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.2f\t%d\t%.2f\t%.2f\t\n", c.Name, c.Count, meter.MS(c.Total), each(c.Total, c.Count), m.Count,
			meter.MS(m.Time), each(m.Time, int64(m.Count)))
	}
	w.Flush()
	r := &Result{Path: path, MeasuredUS: meter.MS(sum) * 1e3, ModelledUS: meter.MS(modelled) * 1e3, Ratio: float64(modelled) / float64(max(sum, 1)),
		PeakReserved: real.stats.Reserved.All.Peak, HostUS: meter.MS(real.host) * 1e3}
	fmt.Fprintf(out, "driver time measured %.2f ms, modelled %.2f ms: modelled over measured %.3f; whole replay %.2f ms on the GPU\n\n",
		meter.MS(sum), meter.MS(modelled), r.Ratio, meter.MS(real.host))
	return r
}

// each is microseconds a call.
func each(d time.Duration, n int64) float64 { return meter.MS(d) * 1e3 / float64(max(n, 1)) }
