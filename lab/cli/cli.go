// Package cli is what the commands of lab share: flags, the device that they work on, exit statuses, and files of results.
package cli

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Command is one command of lab.
type Command struct {
	Name, Summary string
	Run           func(args []string, out io.Writer) error
}

// ErrUsage is wrapped by errors of the command line.
var ErrUsage = errors.New("usage")

// Usage is an error of the command line.
func Usage(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUsage, fmt.Sprintf(format, args...))
}

// Flags are the flags of a command.
type Flags struct{ *flag.FlagSet }

// NewFlags has no flags yet.
func NewFlags(name string) Flags {
	f := Flags{flag.NewFlagSet(name, flag.ContinueOnError)}
	f.SetOutput(io.Discard) // errors are returned
	return f
}

// Parse reads the flags of a command that takes nothing else.
func (f Flags) Parse(args []string, out io.Writer) error {
	if err := f.ParseWith(args, out); err != nil {
		return err
	}
	if f.NArg() != 0 {
		return Usage("takes flags only, not %q", f.Arg(0))
	}
	return nil
}

// ParseWith reads the flags and leaves the arguments after them. With -h it prints them; the error is flag.ErrHelp then.
func (f Flags) ParseWith(args []string, out io.Writer) error {
	err := f.FlagSet.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		f.SetOutput(out)
		f.PrintDefaults()
	case err != nil:
		err = Usage("%v", err)
	}
	return err
}

// Size is a flag for a number of bytes, such as 4GiB.
func (f Flags) Size(p *uint64, name, value, usage string) {
	*p, _ = units.ParseBytes(value)
	f.Func(name, usage+" (default "+value+")", func(s string) (err error) {
		*p, err = units.ParseBytes(s)
		return err
	})
}

// Conf is a flag for the engine's settings.
func (f Flags) Conf(p *cistern.Options) {
	f.Func("conf", "the engine's `settings`, as in CISTERN_CONF", func(s string) (err error) {
		*p, err = cistern.ParseOptions(s)
		return err
	})
}

// JSON is a flag for a file of results.
func (f Flags) JSON(p *string) {
	f.StringVar(p, "json", "", "also write the results to `FILE` as JSON")
}

// WriteJSON writes the file that the flag names, if any: each value in a line.
func WriteJSON[T any](path string, values ...T) (err error) {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	e := json.NewEncoder(f)
	for _, v := range values {
		if err := e.Encode(v); err != nil {
			return err
		}
	}
	return nil
}

// Driver is a flag for a driver. Without it the driver is the one of CISTERN_CONF.
func (f Flags) Driver(p *string) {
	o, _ := cistern.ParseOptions(os.Getenv("CISTERN_CONF"))
	if *p = o.Driver; *p == "" {
		*p = "nvidia"
	}
	f.StringVar(p, "driver", *p, "`driver`: nvidia, nvidia:/path/to/libcuda.so.1, sim or sim:8GiBx2")
}

// Device is the device that a command works on.
type Device struct {
	Driver string
	ID     cuda.Device
}

// Device has the flags for the driver and the number of the device.
func (f Flags) Device(d *Device) {
	f.Driver(&d.Driver)
	f.Func("device", "`number` of the device (default 0)", func(s string) error {
		_, err := fmt.Sscanf(s, "%d", &d.ID)
		if err == nil && d.ID < 0 {
			err = errors.New("below 0")
		}
		return err
	})
}

// Open opens the driver for work on the device. Simulated devices are made by simulated from the options of the driver's
// name, if it is not nil.
func (d *Device) Open(simulated func(sim.Options) gpu.Machine) (gpu.Machine, error) {
	options, ok, err := open.Simulated(d.Driver)
	if err != nil {
		return nil, err
	}
	if !ok || simulated == nil {
		drv, err := open.Open(d.Driver)
		if err != nil {
			return nil, err
		}
		return gpu.NewMachine(drv, d.ID)
	}
	if options.Shared != "" {
		return nil, fmt.Errorf("driver %q: this command takes no simulated device that processes share", d.Driver)
	}
	options.Devices = max(options.Devices, int(d.ID)+1)
	m := simulated(options)
	return m, m.RetainContext(d.ID)
}

// Line is an error in one line.
func Line(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
