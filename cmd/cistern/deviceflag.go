package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/recording"
)

// chosenDevice is the flag --device: of each recording only this device is used.
type chosenDevice struct {
	given  bool
	number int
}

func (d *chosenDevice) add(c *cobra.Command) {
	c.Flags().Var(d, "device", "use only device `N` of each recording (default all)")
}

func (d *chosenDevice) String() string {
	if !d.given {
		return ""
	}
	return strconv.Itoa(d.number)
}

func (d *chosenDevice) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return errors.New("expected the number of a device, 0 or more")
	}
	*d = chosenDevice{true, n}
	return nil
}

func (d *chosenDevice) Type() string { return "int" }

// of takes all other devices out of a file. A file without events has its own error, later.
func (d *chosenDevice) of(f *recording.File) error {
	if !d.given || len(f.Traces) == 0 {
		return nil
	}
	var kept []*recording.Trace
	var there []string
	for _, t := range f.Traces {
		if t.Device == d.number {
			kept = append(kept, t)
		}
		if name := strconv.Itoa(t.Device); !slices.Contains(there, name) {
			there = append(there, name)
		}
	}
	switch {
	case len(kept) > 0:
		f.Traces = kept
		return nil
	case len(there) == 1:
		return fmt.Errorf("--device %d: the recording has device %s only", d.number, there[0])
	}
	last := len(there) - 1
	return fmt.Errorf("--device %d: the recording has devices %s and %s", d.number, strings.Join(there[:last], ", "), there[last])
}
