package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	driver "github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/open"
	"github.com/cistern-gpu/cistern/resource/resourcetest"
)

// stacks are what pools are tested over: names of upstreams, "" for what the device's options say. Two are a pool over a
// pool over the second.
var stacks = []struct {
	conf   string
	over   []string
	limit  uint64
	remote bool // the host cannot read it at its address, over the simulated device
}{
	{},
	{conf: "chunk:2MiB,cross_stream:ready"},
	{conf: "backend:malloc"},
	{conf: "single_handle:true"},
	{conf: "limit:64MiB", limit: 64 << 20},
	{over: []string{"device"}},
	{over: []string{"virtual"}},
	{over: []string{"async"}},
	{over: []string{"async:threshold=unlimited"}},
	{over: []string{"managed"}},
	{over: []string{"prefetch|managed"}},
	{over: []string{"pinned"}},
	{over: []string{"host_numa"}, remote: true},
	{over: []string{"nccl"}},
	{over: []string{"statistics|limiting:bytes=64MiB|tracking|device"}, limit: 64 << 20},
	{over: []string{"alignment:bytes=4KiB|device"}},
	{over: []string{"", ""}},
	{over: []string{"device", "pool"}},
	{over: []string{"async", "pool"}},
	{over: []string{"limiting:bytes=96MiB|virtual", "statistics", "pool"}, limit: 96 << 20},
	{conf: "backend:malloc", over: []string{"pinned", "pool"}},
}

func (s stackCase) name() string { return strings.Join(append([]string{s.conf}, s.over...), " < ") }

type stackCase struct {
	conf  string
	over  []string
	whole bool
	// started, if not nil, are allocators that are there already.
	started map[resourcetest.Machine]*engine.Allocator
}

// start makes the allocator and starts its device.
func (s stackCase) start(m resourcetest.Machine) (*engine.Allocator, error) {
	if a := s.started[m]; a != nil {
		delete(s.started, m)
		return a, nil
	}
	opts, err := config.Parse(s.conf)
	if err != nil {
		return nil, err
	}
	a, err := engine.New(m, opts)
	if err == nil {
		_, err = a.Device(0)
	}
	return a, err
}

// make builds the pools of a case, one over the other, and returns the last one's resource, and what gives all back.
func (s stackCase) make(m resourcetest.Machine) (r resource.Resource, done func() error, err error) {
	a, err := s.start(m)
	if err != nil {
		return nil, nil, err
	}
	d, err := a.Device(0)
	if err != nil {
		return nil, nil, err
	}
	var pools []*engine.Pool
	var below []resource.Resource
	done = func() error {
		var errs []error
		for i := len(pools) - 1; i >= 0; i-- {
			errs = append(errs, pools[i].Release())
			pools = pools[:i] // if that fails, trimming does the rest
		}
		errs = append(errs, a.Trim(), a.Close())
		if err := errors.Join(errs...); err != nil {
			return err
		}
		for len(below) > 0 {
			if x, ok := resource.As[resource.Trimmer](below[0]); ok {
				if err := x.Trim(); err != nil {
					return err
				}
			}
			if err := resource.Close(below[0]); err != nil {
				return err
			}
			below = below[1:]
		}
		return nil
	}
	if s.over == nil {
		return d.DefaultPool().Resource(), done, nil
	}
	for i, words := range s.over {
		o := config.PoolOptions{SegmentPerBlock: s.whole}
		switch words {
		case "":
		case "pool":
			o.Upstream = r
		case "statistics":
			r = resource.Statistics(r)
			continue
		default:
			if o.Upstream, err = open.Parse(m, 0, words); err != nil {
				return nil, nil, errors.Join(err, done())
			}
			below = append(below, o.Upstream)
		}
		p, err := d.NewPool(memory.PoolID{1, uint64(i)}, o)
		if err != nil {
			return nil, nil, errors.Join(err, done())
		}
		pools = append(pools, p)
		r = p.Resource()
	}
	return r, done, nil
}

func eachStack(f func(name string, k stackCase, c resourcetest.Case)) {
	for _, s := range stacks {
		for _, whole := range []bool{false, true} {
			if whole && (s.over == nil || s.limit != 0) {
				continue
			}
			k := stackCase{conf: s.conf, over: s.over, whole: whole}
			name := k.name()
			if whole {
				name += " whole"
			}
			f(name, k, resourcetest.Case{New: k.make, Limit: s.limit, Remote: s.remote})
		}
	}
}

// A pool is a resource like any other, over whatever it is: /sim over the simulated device, /real over the GPU, where
// there is one.
func TestPoolsAsResources(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		eachStack(func(name string, _ stackCase, c resourcetest.Case) {
			t.Run(name, func(t *testing.T) { resourcetest.Run(t, resourcetest.Simulated(2, 1<<30), c) })
		})
	})
	t.Run("real", func(t *testing.T) {
		m := resourcetest.GPU(t, func() (cuda.Driver, error) { return driver.Open("nvidia") })
		eachStack(func(name string, _ stackCase, c resourcetest.Case) {
			c.Remote = false
			t.Run(name, func(t *testing.T) { resourcetest.Run(t, m, c) })
		})
	})
}

// A failure at every driver call, under every stack of pools, on a device that is in use.
func TestPoolsAsResourcesFail(t *testing.T) {
	eachStack(func(name string, k stackCase, c resourcetest.Case) {
		t.Run(name, func(t *testing.T) {
			k.started = map[resourcetest.Machine]*engine.Allocator{}
			c.New = k.make
			resourcetest.Failures(t, func() *resourcetest.Sim {
				m := resourcetest.Simulated(2, 256<<20)
				a, err := k.start(m)
				must(t, err)
				clear(k.started)
				k.started[m] = a
				return m
			}, c)
		})
	})
}
