// Command gpureplay runs the engine over a real GPU with the requests of a recorded run, and holds what its driver
// calls took against what the simulated device says they take.
//
//	gpureplay [-conf CISTERN_CONF] [-json] TRACE...
//
// It queues no work: requests follow each other as fast as the engine serves them, so every event is complete when it
// is asked for, which is a GPU lag of 0 in the simulation. The first device is used, of a trace the first that has
// events. For each trace it prints a table of driver calls: how often, measured, modelled; then the sums and their
// ratio. It exits with 1 when a trace cannot be replayed.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"text/tabwriter"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/trace"
)

func main() {
	conf := flag.String("conf", "", "settings, in CISTERN_CONF syntax")
	asJSON := flag.Bool("json", false, "also print one JSON line for each trace")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: gpureplay [-conf CONF] [-json] TRACE...")
		os.Exit(2)
	}
	failed := false
	for _, path := range flag.Args() {
		if err := replay(path, *conf, *asJSON); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}

func replay(path, conf string, asJSON bool) error {
	f, err := trace.ReadFile(path)
	if err != nil {
		return err
	}
	t := f.Traces[0]
	opts, err := cistern.ParseOptions(conf)
	if err != nil {
		return err
	}
	g, err := gpu.Open()
	if err != nil {
		return err
	}
	timed := gpu.NewTimed(g)
	real, err := run(t, timed, opts, func() (cuda.Stream, error) { return g.StreamCreate(0, false) })
	if err != nil {
		return err
	}
	simulated := sim.New(sim.Options{Check: sim.CheckUse})
	model, err := run(t, simulated, opts, func() (cuda.Stream, error) { return simulated.NewStreamNonBlocking(0), nil })
	if err != nil {
		return err
	}
	return report(path, t, real, model, asJSON)
}

// outcome is what one run did.
type outcome struct {
	host  time.Duration // wall time of all requests
	stats cistern.Stats
	timed []gpu.Call    // of a real GPU: what was measured
	model sim.CallStats // of the simulated one: what was charged
}

// run serves the requests of a trace.
func run(t *trace.Trace, drv cuda.Driver, opts cistern.Options, stream func() (cuda.Stream, error)) (outcome, error) {
	var out outcome
	a, err := cistern.New(drv, opts)
	if err != nil {
		return out, err
	}
	d, err := a.Device(0)
	if err != nil {
		return out, err
	}
	var streams []*cistern.Stream
	for i := range max(1, len(t.Streams)) {
		h := cuda.StreamNull
		if i < len(t.Streams) && t.Streams[i] != 0 {
			if h, err = stream(); err != nil {
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
	case *gpu.Timed:
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
	case *gpu.Timed:
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

func report(path string, t *trace.Trace, real, simulated outcome, asJSON bool) error {
	fmt.Printf("%s: %d events over %.2f s; peak reserved %d on the GPU, %d simulated; %d chunks got and %d moved, %d and %d\n",
		path, len(t.Events), float64(t.Duration())/1e6, real.stats.Reserved.All.Peak, simulated.stats.Reserved.All.Peak,
		real.stats.DeviceAllocs, real.stats.Remaps, simulated.stats.DeviceAllocs, simulated.stats.Remaps)
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "call\tmeasured n\tms\tus each\tmodelled n\tms\tus each\t")
	var sum, modelled time.Duration
	for _, c := range real.timed {
		m := simulated.model.Calls[c.Name]
		sum += c.Time
		modelled += m.Time
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.2f\t%d\t%.2f\t%.2f\t\n", c.Name, c.Count, ms(c.Time), each(c.Time, c.Count), m.Count,
			ms(m.Time), each(m.Time, int64(m.Count)))
	}
	w.Flush()
	ratio := float64(modelled) / float64(sum)
	fmt.Printf("driver time measured %.2f ms, modelled %.2f ms: modelled over measured %.3f; whole replay %.2f ms on the GPU\n\n",
		ms(sum), ms(modelled), ratio, ms(real.host))
	if !asJSON {
		return nil
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"path": path, "measured_us": ms(sum) * 1e3, "modelled_us": ms(modelled) * 1e3,
		"modelled_over_measured": ratio, "peak_reserved_bytes": real.stats.Reserved.All.Peak, "host_us": ms(real.host) * 1e3})
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func each(d time.Duration, n int64) float64 {
	if n == 0 {
		return 0
	}
	return float64(d) / 1e3 / float64(n)
}
