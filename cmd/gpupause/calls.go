package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// clocked is the driver as the engine sees it, with the time that calls take which pausing makes. Those of several threads
// add up, as page-locking and copying, of which the one goes on while the other is waited for.
type clocked struct {
	cuda.Driver
	mu    sync.Mutex
	calls map[string]*Call
}

// Call is what calls of one kind took.
type Call struct {
	Name  string  `json:"name"`
	Count int     `json:"count"`
	MS    float64 `json:"ms"`
}

func (c *clocked) note(name string, start time.Duration) {
	took := c.Driver.Now() - start
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.calls[name]
	if x == nil {
		x = &Call{Name: name}
		c.calls[name] = x
	}
	x.Count++
	x.MS += took.Seconds() * 1e3
}

// reset forgets what was noted.
func (c *clocked) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = map[string]*Call{}
}

// list is what was noted, the longest first.
func (c *clocked) list() (out []Call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.calls {
		out = append(out, *x)
	}
	slices.SortFunc(out, func(a, b Call) int {
		if a.MS != b.MS {
			if a.MS > b.MS {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
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

func (c *clocked) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	defer c.note("create", c.Now())
	return c.Driver.MemCreate(size, prop)
}

func (c *clocked) MemRelease(h cuda.Handle) error {
	defer c.note("release", c.Now())
	return c.Driver.MemRelease(h)
}

func (c *clocked) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	defer c.note("map", c.Now())
	return c.Driver.MemMap(p, size, h)
}

func (c *clocked) MemUnmap(p cuda.Ptr, size uint64) error {
	defer c.note("unmap", c.Now())
	return c.Driver.MemUnmap(p, size)
}

func (c *clocked) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	defer c.note("set access", c.Now())
	return c.Driver.MemSetAccess(p, size, devs)
}

func (c *clocked) MemInfo(d cuda.Device) (free, total uint64, err error) {
	defer c.note("memory info", c.Now())
	return c.Driver.MemInfo(d)
}

func (c *clocked) MemcpyAsync(d cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	defer c.note("queue copy", c.Now())
	return c.Driver.MemcpyAsync(d, dst, src, size, s)
}

func (c *clocked) EventSynchronize(d cuda.Device, e cuda.Event) error {
	defer c.note("await event", c.Now())
	return c.Driver.EventSynchronize(d, e)
}

func (c *clocked) StreamSynchronize(d cuda.Device, s cuda.Stream) error {
	defer c.note("await stream", c.Now())
	return c.Driver.StreamSynchronize(d, s)
}

func (c *clocked) ContextSynchronize(d cuda.Device) error {
	defer c.note("await context", c.Now())
	return c.Driver.ContextSynchronize(d)
}

func (c *clocked) HostRegister(d cuda.Device, p cuda.Ptr, size uint64) error {
	defer c.note("page-lock", c.Now())
	return c.Driver.HostRegister(d, p, size)
}

func (c *clocked) HostAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	defer c.note("allocate page-locked", c.Now())
	return c.Driver.HostAlloc(d, size)
}
