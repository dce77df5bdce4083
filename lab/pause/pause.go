// Package pause measures pausing and resuming on a GPU, and tests it: how fast contents come and go beside a plain copy from
// and to page-locked memory, cold and with warm buffers, through a file, and what pausing costs where contents are dropped,
// each several times and beside what is wanted, with the time that its driver calls take; then thousands of cycles of a
// small pool, after which device memory, host memory and descriptors must be where they were. Contents are written and
// compared by kernels. It fails where a figure misses what Cistern promises.
//
// Over the simulated driver the host writes and compares; the figures are the simulation's, and promise nothing.
//
// Files: pause.go flags and output; measure.go the parts; large.go much memory, small.go little, often.
package pause

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/lab/cli"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// Result is what was measured. Bandwidths are in GB/s (10^9 bytes), times in milliseconds.
type Result struct {
	Device string `json:"device"`
	Bytes  uint64 `json:"bytes"`

	PlainOut float64   `json:"plain_out"` // device to page-locked memory: the best of several
	PlainIn  float64   `json:"plain_in"`
	WarmOut  float64   `json:"warm_out"` // medians
	WarmIn   float64   `json:"warm_in"`
	ColdOut  float64   `json:"cold_out"`  // a pause that gets its buffers: the median of
	ColdOuts []float64 `json:"cold_outs"` // in their order; the first is the first of the process

	DiskBytes uint64  `json:"disk_bytes"`
	DiskOut   float64 `json:"disk_out"`
	DiskIn    float64 `json:"disk_in"`

	// Where contents are dropped, per GiB. The first pause of memory meets chunks as requests made them: of blocks of 256
	// MiB, each time anew, the median of them all, and of one block.
	FirstDropMS  float64   `json:"first_drop_ms"`
	FirstDrops   []float64 `json:"first_drops_ms"`
	OneDropMS    float64   `json:"one_drop_ms"`
	DropMS       float64   `json:"drop_ms"` // of memory that was resumed before: median
	DropResumeMS float64   `json:"drop_resume_ms"`

	// Calls is what the driver's calls took in one pause or resume of each kind.
	Calls map[string][]Call `json:"calls"`

	Cycles      int     `json:"cycles"`
	CycleMS     float64 `json:"cycle_ms"`
	DeviceGrown int64   `json:"device_grown"` // bytes, over the cycles
	HostGrown   int64   `json:"host_grown"`
	FilesGrown  int     `json:"files_grown"` // descriptors

	Missed []string `json:"missed,omitempty"` // promises that were not kept
}

// Call is what the driver's calls of one kind took.
type Call struct {
	Name  string  `json:"name"`
	Count int64   `json:"count"`
	MS    float64 `json:"ms"`
}

type config struct {
	device cli.Device
	size   uint64
	disk   uint64
	dir    string
	cycles int
	repeat int
	rounds int
}

// Run is the command.
func Run(args []string, out io.Writer) error {
	var c config
	var file string
	f := cli.NewFlags("pause")
	f.Device(&c.device)
	f.JSON(&file)
	f.Size(&c.size, "size", "8GiB", "`bytes` that are paused")
	f.Size(&c.disk, "disk", "4GiB", "`bytes` that are paused into a file; 0 for none")
	f.StringVar(&c.dir, "dir", "", "`folder` of the file; empty is the system's for such files")
	f.IntVar(&c.cycles, "cycles", 10000, "cycles of the small pool")
	f.IntVar(&c.repeat, "repeat", 5, "pauses with warm buffers that the median is taken of")
	f.IntVar(&c.rounds, "rounds", 3, "first pauses, of fresh memory and with fresh buffers, that the median is taken of")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	if c.size < 4<<20 || c.repeat < 1 || c.rounds < 1 || c.cycles < 0 {
		return cli.Usage("-size is at least 4MiB, -repeat and -rounds at least 1")
	}
	r, err := measure(c)
	if err != nil {
		return err
	}
	r.print(out)
	if err := cli.WriteJSON(file, r); err != nil {
		return err
	}
	if len(r.Missed) > 0 {
		return fmt.Errorf("missed: %s", strings.Join(r.Missed, "; "))
	}
	return nil
}

func (r *Result) print(out io.Writer) {
	fmt.Fprintf(out, "%s, %s of contents\n", r.Device, units.FormatBytes(r.Bytes))
	fmt.Fprintf(out, "  a plain page-locked copy      out %6.2f GB/s   in %6.2f GB/s\n", r.PlainOut, r.PlainIn)
	fmt.Fprintf(out, "  pause, resume with contents   out %6.2f GB/s   in %6.2f GB/s   (%.1f %% and %.1f %%; target %.0f %%)\n", r.WarmOut, r.WarmIn,
		100*r.WarmOut/r.PlainOut, 100*r.WarmIn/r.PlainIn, 100*leastPart)
	fmt.Fprintf(out, "  the first pause               out %6.2f GB/s   (each %.2f; aimed at %.0f with 16 threads, this is %d)\n", r.ColdOut, r.ColdOuts, coldAim,
		runtime.GOMAXPROCS(0))
	if r.DiskBytes > 0 {
		fmt.Fprintf(out, "  through a file (%s)        out %6.2f GB/s   in %6.2f GB/s\n", units.FormatBytes(r.DiskBytes), r.DiskOut, r.DiskIn)
	}
	fmt.Fprintf(out, "  contents dropped: pause %.2f, resume %.2f ms per GiB (target %.0f)\n", r.DropMS, r.DropResumeMS, mostMS)
	fmt.Fprintf(out, "    the first time of fresh memory %.2f (each %.2f), of one block %.2f (target %.0f)\n", r.FirstDropMS, r.FirstDrops, r.OneDropMS, mostMS)
	for _, k := range slices.Sorted(maps.Keys(r.Calls)) {
		fmt.Fprintf(out, "  driver calls, ms (number), %s: %s\n", k, words(r.Calls[k]))
	}
	fmt.Fprintf(out, "  %d cycles, %.3f ms each: device memory %+d bytes, host memory %+d bytes, descriptors %+d\n", r.Cycles, r.CycleMS,
		r.DeviceGrown, r.HostGrown, r.FilesGrown)
}

// calls is what a driver's calls took since the last reset.
func calls(d *meter.Driver) (out []Call) {
	for _, c := range d.Calls() {
		out = append(out, Call{c.Name, c.Count, meter.MS(c.Total)})
	}
	return out
}

// words is calls in one line, but for those that take next to nothing.
func words(list []Call) string {
	var out []string
	for _, c := range list {
		if c.MS >= 0.05 {
			out = append(out, fmt.Sprintf("%s %.2f (%d)", c.Name, c.MS, c.Count))
		}
	}
	return strings.Join(out, ", ")
}
