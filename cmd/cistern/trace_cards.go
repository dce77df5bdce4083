package main

import (
	"context"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/nvml"
)

// The processes that NVML sees on GPUs, for those that cannot be looked into.

// liveCards asks NVML, beside everything else. One that begins slowly, as on a busy machine or where a driver starts with it, is
// waited for; one that hangs keeps one goroutine.
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
