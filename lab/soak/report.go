package soak

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/units"
)

// report is what a run found.
type report struct {
	Driver       string        `json:"driver"`
	Seed         uint64        `json:"seed"`
	Conf         string        `json:"conf"`
	Limit        uint64        `json:"limit_bytes"`
	CPUs         int           `json:"cpus"`
	Checked      bool          `json:"checker_detects"` // false on the simulated device, which has no contents
	Operations   int           `json:"operations"`
	OOMs         int           `json:"ooms"`
	Error        string        `json:"error,omitempty"`
	Phases       []phaseReport `json:"phases"`
	Stats        cistern.Stats `json:"stats"`
	PairNS       float64       `json:"pair_ns"`        // allocate and free 1 MiB from the cache
	Churn2000NS  float64       `json:"churn_2000_ns"`  // free one of 2,000 blocks and allocate another size
	Churn20000NS float64       `json:"churn_20000_ns"` // the same among 20,000
}

// phaseReport is one phase. The sums leave out the calls that wait for the GPU.
type phaseReport struct {
	Name       string       `json:"name"`
	Workers    int          `json:"workers"`
	Operations int          `json:"operations"`
	Seconds    float64      `json:"seconds"`
	MeasuredUS float64      `json:"measured_us"`
	ModelledUS float64      `json:"modelled_us"`
	Ratio      float64      `json:"modelled_to_measured"`
	Calls      []callReport `json:"calls"`
}

type callReport struct {
	Name       string  `json:"name"`
	Count      int64   `json:"count"`
	MeasuredUS float64 `json:"measured_us"`
	ModelledUS float64 `json:"modelled_us"`
	SlowestUS  float64 `json:"slowest_us"`
	Waits      bool    `json:"waits,omitempty"`
}

func (p *phaseReport) sum() {
	for _, c := range p.Calls {
		if !c.Waits {
			p.MeasuredUS += c.MeasuredUS
			p.ModelledUS += c.ModelledUS
		}
	}
	if p.MeasuredUS > 0 {
		p.Ratio = p.ModelledUS / p.MeasuredUS
	}
}

func (r *report) print(out io.Writer) {
	fmt.Fprintf(out, "driver %s, seed %d, limit %s, settings %q\n", r.Driver, r.Seed, units.FormatBytes(r.Limit), r.Conf)
	for _, p := range r.Phases {
		fmt.Fprintf(out, "\n%s (%d): %d operations in %.1f s, %.2f us each\n", p.Name, p.Workers, p.Operations, p.Seconds,
			p.Seconds*1e6/float64(max(p.Operations, 1)))
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(w, "call\tcount\tmeasured us\tmodelled us\tus/call\tmodel us/call\tslowest us\t")
		for _, c := range p.Calls {
			note := ""
			if c.Waits {
				note = " (waits)"
			}
			fmt.Fprintf(w, "%s%s\t%d\t%.0f\t%.0f\t%.3f\t%.3f\t%.1f\t\n", c.Name, note, c.Count, c.MeasuredUS, c.ModelledUS,
				c.MeasuredUS/float64(c.Count), c.ModelledUS/float64(c.Count), c.SlowestUS)
		}
		fmt.Fprintf(w, "all but waits\t\t%.0f\t%.0f\t\t\t\t\n", p.MeasuredUS, p.ModelledUS)
		w.Flush()
		fmt.Fprintf(out, "modelled / measured: %.3f\n", p.Ratio)
	}
	s := r.Stats
	fmt.Fprintf(out, "\noperations %d, contents checked: %v, out of memory %d times\n", r.Operations, r.Checked, r.OOMs)
	fmt.Fprintf(out, "engine: peak reserved %s, peak allocated %s, remaps %d, device allocs %d, frees %d, retries %d, slow path: fit %d collect %d remap %d grow %d lend %d\n",
		units.FormatBytes(uint64(s.Reserved.All.Peak)), units.FormatBytes(uint64(s.Allocated.All.Peak)), s.Remaps, s.DeviceAllocs, s.DeviceFrees, s.Retries,
		s.ByFit, s.ByCollect, s.ByRemap, s.ByGrow, s.ByLend)
	fmt.Fprintf(out, "host time: cached pair %.1f ns, churn among 2,000 blocks %.1f ns, among 20,000 %.1f ns\n", r.PairNS, r.Churn2000NS, r.Churn20000NS)
	if r.Error != "" {
		fmt.Fprintln(out, "FAILED:", r.Error)
	}
}
