package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/nvml"
)

// Which card a traced process means by a number. CUDA's numbers depend on variables that the process may have set itself and
// on an order (the fastest first) that nothing outside tells, so this is known only where there is no choice, where the
// variables it was started with say it by UUID or by the bus, or where the driver sees it on one card alone.

// liveCards asks NVML, beside everything else, as long as there is a process whose cards are not known. One that begins slowly,
// as on a busy machine or where a driver starts with it, is waited for; one that hangs keeps one goroutine.
type liveCards struct {
	open func(ctx context.Context, path string) (*nvml.Library, error)

	mu      sync.Mutex
	library *nvml.Library // +checklocks:mu
	list    []nvml.Device // +checklocks:mu
	// +checklocks:mu
	asking bool // a goroutine does
	// +checklocks:mu
	failed bool      // there is no NVML
	asked  time.Time // +checklocks:mu
}

const cardsEvery = 2 * time.Second

// of is the card that a process calls by this number, empty where that is not known.
func (c *liveCards) of(p *liveProcess, ordinal int) nvml.Device {
	if d, ok := p.cards[ordinal]; ok {
		return d
	}
	all := c.all()
	if len(all) == 0 {
		return nvml.Device{}
	}
	visible, order := cudaVariables(p.pid)
	d, ok := cardOf(all, p.pid, visible, order, ordinal, len(p.run.Devices()))
	if ok {
		p.cards[ordinal] = d
	}
	return d
}

// all is the cards as they were read last.
func (c *liveCards) all() []nvml.Device {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.asking && !c.failed && time.Since(c.asked) > cardsEvery {
		c.asking = true
		go c.ask()
	}
	return c.list
}

func (c *liveCards) ask() {
	ctx := context.Background()
	c.mu.Lock()
	library := c.library
	c.mu.Unlock()
	var list []nvml.Device
	var err error
	if library == nil {
		library, err = c.open(ctx, "")
	}
	failed := err != nil
	if !failed {
		list, err = library.Devices(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.library, c.asking, c.failed, c.asked = library, false, failed, time.Now()
	if err == nil {
		c.list = list
	}
}

// cudaVariables are CUDA_VISIBLE_DEVICES, entry by entry, and CUDA_DEVICE_ORDER of the environment that a process was started
// with.
func cudaVariables(pid int) (visible []string, order string) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil, ""
	}
	for v := range strings.SplitSeq(string(text), "\x00") {
		if list, ok := strings.CutPrefix(v, "CUDA_VISIBLE_DEVICES="); ok {
			visible = strings.Split(list, ",")
		}
		if o, ok := strings.CutPrefix(v, "CUDA_DEVICE_ORDER="); ok {
			order = o
		}
	}
	return visible, order
}

// cardOf is the card with CUDA's number in a process that uses so many.
func cardOf(all []nvml.Device, pid int, visible []string, order string, ordinal, used int) (nvml.Device, bool) {
	divided := map[int]bool{}
	for _, d := range all {
		divided[d.Index] = divided[d.Index] || d.MIG
	}
	var cards, on []nvml.Device // that CUDA can use; those that it is seen on
	for _, d := range all {
		if d.MIG != divided[d.Index] || d.UUID == [16]byte{} {
			continue
		}
		cards = append(cards, d)
		if slices.ContainsFunc(d.Processes, func(p nvml.Process) bool { return p.PID == pid }) {
			on = append(on, d)
		}
	}
	one := func(from []nvml.Device, is func(d nvml.Device) bool) (nvml.Device, bool) {
		i := slices.IndexFunc(from, is)
		if i < 0 || slices.ContainsFunc(from[i+1:], is) {
			return nvml.Device{}, false
		}
		return from[i], true
	}
	whichever := func(nvml.Device) bool { return true }
	if d, ok := one(cards, whichever); ok && ordinal == 0 {
		return d, true
	}
	if d, ok := one(on, whichever); ok && used == 1 {
		return d, true
	}
	// From here on it is the variables, unless the driver sees the process elsewhere: then it has set them anew.
	seen := func(d nvml.Device) bool {
		return len(on) == 0 || slices.ContainsFunc(on, func(o nvml.Device) bool { return o.UUID == d.UUID })
	}
	named := strconv.Itoa(ordinal)
	if visible != nil {
		if ordinal >= len(visible) {
			return nvml.Device{}, false
		}
		named = strings.TrimSpace(visible[ordinal])
	}
	if strings.HasPrefix(named, "GPU-") || strings.HasPrefix(named, "MIG-") {
		return one(cards, func(d nvml.Device) bool { return strings.HasPrefix(cardName(d), named) && seen(d) })
	}
	index, err := strconv.Atoi(named)
	if err != nil || order != "PCI_BUS_ID" {
		return nvml.Device{}, false
	}
	return one(cards, func(d nvml.Device) bool { return d.Index == index && seen(d) })
}

// cardName is a device's UUID as CUDA and NVML write it.
func cardName(d nvml.Device) string {
	kind := "GPU"
	if d.MIG {
		kind = "MIG"
	}
	u := d.UUID
	return fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
