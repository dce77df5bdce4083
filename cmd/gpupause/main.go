// Command gpupause measures pausing and resuming on a GPU, and tests it: how fast contents come and go beside a plain
// copy from and to page-locked memory, cold and with warm buffers, through a file, and what pausing costs where contents
// are dropped, each several times and beside what is wanted, with the time that its driver calls take; then thousands of cycles of a small pool, after which device memory, host memory and descriptors must be
// where they were. Contents are written and compared by kernels. It fails where a figure misses what Cistern promises.
//
// Over the simulated driver the host writes and compares; the figures are the simulation's, and promise nothing.
//
// Files: main.go flags and output; measure.go the parts; large.go much memory, small.go little, often; calls.go the time
// of driver calls; contents.go what writes and compares.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
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

type config struct {
	driver    string
	dev       cuda.Device
	size      uint64
	disk      uint64
	dir       string
	cycles    int
	repeat    int
	rounds    int
	writeJSON bool
}

func main() {
	c := config{}
	flag.StringVar(&c.driver, "driver", "nvidia", "`driver`: nvidia, nvidia:/path/to/libcuda.so.1 or sim:8GiB")
	dev := flag.Int("device", 0, "`number` of the device")
	size := flag.String("size", "8GiB", "`bytes` that are paused")
	disk := flag.String("disk", "4GiB", "`bytes` that are paused into a file; 0 for none")
	flag.StringVar(&c.dir, "dir", "", "`folder` of the file; empty is the system's for such files")
	flag.IntVar(&c.cycles, "cycles", 10000, "cycles of the small pool")
	flag.IntVar(&c.repeat, "repeat", 5, "pauses with what was kept for them that the median is taken of")
	flag.IntVar(&c.rounds, "rounds", 3, "first pauses, of fresh memory and with fresh buffers, that the median is taken of")
	flag.BoolVar(&c.writeJSON, "json", false, "print the result as JSON")
	flag.Parse()
	c.dev = cuda.Device(*dev)
	var err error
	if c.size, err = units.ParseBytes(*size); err == nil {
		c.disk, err = units.ParseBytes(*disk)
	}
	if err != nil || flag.NArg() != 0 || c.size < 4<<20 || c.repeat < 1 || c.rounds < 1 || c.cycles < 0 {
		fmt.Fprintln(os.Stderr, "gpupause: takes flags only; at least 4MiB are paused, once at least")
		os.Exit(2)
	}
	r, err := measure(c)
	if err == nil {
		err = r.print(c.writeJSON)
	}
	if err == nil && len(r.Missed) > 0 {
		err = fmt.Errorf("missed: %s", strings.Join(r.Missed, "; "))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpupause:", strings.ReplaceAll(err.Error(), "\n", "; "))
		os.Exit(1)
	}
}

func (r *Result) print(asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	fmt.Printf("%s, %s of contents\n", r.Device, units.FormatBytes(r.Bytes))
	fmt.Printf("  a plain page-locked copy      out %6.2f GB/s   in %6.2f GB/s\n", r.PlainOut, r.PlainIn)
	fmt.Printf("  pause, resume with contents   out %6.2f GB/s   in %6.2f GB/s   (%.1f %% and %.1f %%; wanted %.0f %%)\n", r.WarmOut, r.WarmIn,
		100*r.WarmOut/r.PlainOut, 100*r.WarmIn/r.PlainIn, 100*leastPart)
	fmt.Printf("  the first pause               out %6.2f GB/s   (each %.2f; aimed at %.0f with 16 threads, this is %d)\n", r.ColdOut, r.ColdOuts, coldAim,
		runtime.GOMAXPROCS(0))
	if r.DiskBytes > 0 {
		fmt.Printf("  through a file (%s)        out %6.2f GB/s   in %6.2f GB/s\n", units.FormatBytes(r.DiskBytes), r.DiskOut, r.DiskIn)
	}
	fmt.Printf("  contents dropped: pause %.2f, resume %.2f ms per GiB (wanted %.0f)\n", r.DropMS, r.DropResumeMS, mostMS)
	fmt.Printf("    the first time of fresh memory %.2f (each %.2f), of one block %.2f (wanted %.0f)\n", r.FirstDropMS, r.FirstDrops, r.OneDropMS, mostMS)
	for _, k := range slices.Sorted(maps.Keys(r.Calls)) {
		fmt.Printf("  driver calls, ms (number), %s: %s\n", k, words(r.Calls[k]))
	}
	fmt.Printf("  %d cycles, %.3f ms each: device memory %+d bytes, host memory %+d bytes, descriptors %+d\n", r.Cycles, r.CycleMS,
		r.DeviceGrown, r.HostGrown, r.FilesGrown)
	return nil
}
