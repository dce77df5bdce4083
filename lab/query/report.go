package query

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/cistern-gpu/cistern/internal/units"
)

// report is what was found. Times are in milliseconds.
type report struct {
	Driver  string    `json:"driver"`
	Seed    uint64    `json:"seed"`
	Conf    string    `json:"conf"`
	Threads int       `json:"threads"`
	Rounds  int       `json:"rounds"`
	Queries int       `json:"queries"`
	Buffers int       `json:"buffers"` // allocated in a job
	Kernels int       `json:"kernels"`
	Bytes   uint64    `json:"allocated_bytes"`
	Peak    uint64    `json:"peak_live_bytes"`
	Small   int       `json:"buffers_up_to_4KiB"`
	Results []*result `json:"results"`
	Fastest string    `json:"fastest"` // of those that allocate
	Met     bool      `json:"met"`     // Cistern is the fastest, and as much so as was wanted
}

// describe sums the jobs up.
func (r *report) describe(jobs []*job) {
	for _, j := range jobs {
		r.Queries += j.queries
		r.Buffers += j.buffers
		r.Kernels += j.kernels
		r.Bytes += j.bytes
		r.Peak += j.peak
		for _, s := range j.steps {
			if s.what == stepAlloc && s.size <= 4096 {
				r.Small++
			}
		}
	}
}

func (r *report) of(name string) *result {
	for _, x := range r.Results {
		if x.Name == name {
			return x
		}
	}
	return nil
}

// judge finds the fastest, and whether that is enough.
func (r *report) judge(want float64) {
	best := r.Results[0]
	for _, x := range r.Results {
		if x.Name != "none" && x.Median < best.Median {
			best = x
		}
	}
	r.Fastest = best.Name
	r.Met = best.Name == "cistern" && best.Speed >= want
}

func (r *report) print(out io.Writer) {
	n := max(r.Queries, 1)
	fmt.Fprintf(out, "driver %s, seed %d, %d threads, settings %q\n", r.Driver, r.Seed, r.Threads, r.Conf)
	fmt.Fprintf(out, "a job: %d queries, %d buffers (%d a query, %d %% of them up to 4 KiB), %d kernels, %s allocated, %s live at the most\n\n",
		r.Queries, r.Buffers, r.Buffers/n, 100*r.Small/max(r.Buffers, 1), r.Kernels, units.FormatBytes(r.Bytes), units.FormatBytes(r.Peak))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "memory\tms a job\ttimes direct\tto none\tfirst job ms\tin allocations ms\tin frees ms\twaiting ms\theld\t")
	floor := r.of("none").Median
	for _, x := range r.Results {
		held := "-"
		if x.Held >= 0 {
			held = units.FormatBytes(uint64(x.Held))
		}
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.3f\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t\n", x.Name, x.Median, x.Speed, x.Median/floor, x.Cold, x.AllocMS,
			x.FreeMS, x.WaitMS, held)
	}
	w.Flush()
	fmt.Fprintf(out, "\nmedians of %d jobs each, taken in turns; the fastest that allocates is %s\n", r.Rounds, r.Fastest)
	for _, x := range r.Results {
		fmt.Fprintf(out, "  %s: %s\n", x.Name, x.Words)
	}
}
