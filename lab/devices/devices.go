// Package devices is the test of several GPUs in one process. One GPU writes memory and the other reads it, in both
// directions: memory of every kind that the engine hands out, mapped before and after access was enabled, and memory that
// is given back while the other GPU still uses it. Threads allocate on all devices at once, and free blocks that other
// threads allocated. In the end a kernel breaks one device, and the others go on. Every byte is written by a kernel and
// compared by a kernel; over the simulated driver, by the host.
package devices

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/lab/cli"
)

type part struct {
	name string
	run  func(*machine, io.Writer) error
}

// parts, in the order in which they run: nothing runs on a device after it was broken.
var parts = []part{
	{"peers", peers},
	{"threads", threads},
	{"broken", broken},
}

// Run is the command.
func Run(args []string, out io.Writer) error {
	var driver, only string
	var large uint64
	f := cli.NewFlags("devices")
	f.Driver(&driver)
	f.StringVar(&only, "part", "", "one `part` only: peers, threads or broken")
	f.Size(&large, "large", "70MiB", "`size` of a large block")
	if err := f.Parse(args, out); err != nil {
		return err
	}
	known := slices.ContainsFunc(parts, func(p part) bool { return p.name == only })
	if large < mib || only != "" && !known {
		return cli.Usage("the parts are peers, threads and broken; a large block is 1MiB at least")
	}
	m, err := openMachine(driver, large)
	if err != nil {
		return err
	}
	return m.run(only, out)
}

// run runs one part, or all.
func (m *machine) run(only string, out io.Writer) error {
	for _, p := range parts {
		if only != "" && only != p.name {
			continue
		}
		err := p.run(m, out)
		if s, ok := m.driver.(*sim.Driver); ok {
			err = errors.Join(err, s.Fault())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Fprintf(out, "ok: %s\n", p.name)
	}
	return nil
}

// balanced reports what is wrong with the statistics of a device: physical memory is active or inactive, and peaks are
// no lower than what is now.
func balanced(d cistern.Device) error {
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
