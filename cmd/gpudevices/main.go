// Command gpudevices is the test of several GPUs in one process. What one GPU wrote another reads, and the other way
// round: in memory of every kind that the engine hands out, mapped before and after access was enabled, and in memory
// that is given back while the other still uses it. Threads allocate on all devices at once, and free what others
// allocated elsewhere. In the end a kernel breaks one device, and the others go on. Every byte is written by a kernel and
// compared by a kernel.
//
// Over the simulated driver copies from and to page-locked memory take the kernels' place.
//
// Files: main.go flags and parts; machine.go the devices, real and simulated; peers.go, threads.go and broken.go the
// parts.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/units"
)

type part struct {
	name string
	run  func(*machine) error
}

// parts, in the order in which they run: nothing runs on a device after it was broken.
var parts = []part{
	{"peers", peers},
	{"threads", threads},
	{"broken", broken},
}

func main() {
	driver := flag.String("driver", "nvidia", "`driver`: nvidia, nvidia:/path/to/libcuda.so.1 or sim:8GiBx2")
	only := flag.String("part", "", "one `part` only: peers, threads or broken")
	size := flag.String("large", "70MiB", "`size` of a large block")
	flag.Parse()
	large, err := units.ParseBytes(*size)
	known := slices.ContainsFunc(parts, func(p part) bool { return p.name == *only })
	if err != nil || large < 1<<20 || flag.NArg() != 0 || *only != "" && !known {
		fmt.Fprintln(os.Stderr, "gpudevices: takes flags only; the parts are peers, threads and broken, a large block is 1MiB at least")
		os.Exit(2)
	}
	m, err := openMachine(*driver, large)
	if err == nil {
		err = m.run(*only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpudevices:", strings.ReplaceAll(err.Error(), "\n", "; "))
		os.Exit(1)
	}
}

// run runs one part, or all.
func (m *machine) run(only string) error {
	for _, p := range parts {
		if only != "" && only != p.name {
			continue
		}
		err := p.run(m)
		if s, ok := m.Driver.(*sim.Driver); ok {
			err = errors.Join(err, s.Fault())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Printf("ok: %s\n", p.name)
	}
	return nil
}

// balanced reports what is wrong with the statistics of a device: physical memory is active or inactive, and peaks are
// no lower than what is now.
func balanced(d *cistern.Device) error {
	s := d.Stats()
	if s.Reserved.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
		return fmt.Errorf("device %d: %d bytes reserved, %d active and %d inactive", d.ID(), s.Reserved.All.Current,
			s.ActiveBytes.All.Current, s.InactiveBytes.All.Current)
	}
	if s.Allocated.All.Current < 0 || s.Allocated.All.Current > s.ActiveBytes.All.Current || s.Reserved.All.Peak < s.Reserved.All.Current {
		return fmt.Errorf("device %d: the statistics make no sense: %+v", d.ID(), s)
	}
	return nil
}

// other is the device that is paired with dev.
func other(dev cuda.Device) cuda.Device { return 1 - dev }
