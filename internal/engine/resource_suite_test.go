package engine_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
	from "github.com/cistern-gpu/cistern/resource/open"
	"github.com/cistern-gpu/cistern/resource/resourcetest"
)

// Pools in the suite that every resource passes, as TestPoolsAsResources has them over every kind of memory: here nobody
// releases them, but closes the allocator, and adaptors stand before them too.

// pools are the pools; over is what a pool's memory comes from, before what stands before it.
var pools = []struct {
	name         string
	options      config.PoolOptions
	over, before string
	nested       bool
	limit        uint64
}{
	{name: "single handles", options: config.PoolOptions{Kind: config.PoolSingleHandle}},
	{name: "a limit", options: config.PoolOptions{Limit: 512 << 20}, limit: 512 << 20},
	{name: "over async", over: "async:threshold=unlimited"},
	{name: "over adaptors", over: "tracking|statistics|alignment:bytes=4MiB|limiting:bytes=512MiB|virtual", limit: 512 << 20},
	{name: "under adaptors", before: "adaptors"},
	{name: "over a pool", nested: true},
}

// newPool makes an allocator with the pool and the resource that is tested; done closes the allocator.
func newPool(m resourcetest.Machine, i int) (resource.Resource, func() error, error) {
	x := pools[i]
	opts, err := config.Parse("")
	if err != nil {
		return nil, nil, err
	}
	a, err := engine.New(m, opts)
	if err != nil {
		return nil, nil, err
	}
	var up resource.Resource
	fail := func(err error) (resource.Resource, func() error, error) {
		if up != nil {
			resource.Close(up)
		}
		a.Close()
		return nil, nil, err
	}
	d, err := a.Device(0)
	if err != nil {
		return fail(err)
	}
	o := x.options
	if x.over != "" {
		if up, err = from.Parse(m, 0, x.over); err != nil {
			return fail(err)
		}
		o.Upstream = up
	}
	if x.nested {
		inner, err := d.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		if err != nil {
			return fail(err)
		}
		o.Upstream = inner.Resource()
	}
	p, err := d.NewPool(memory.PoolID{0, 2}, o)
	if err != nil {
		return fail(err)
	}
	r := p.Resource()
	if x.before != "" {
		aligned, err := resource.Alignment(resource.Limiting(r, 512<<20), 8<<20, 2<<20)
		if err != nil {
			return fail(err)
		}
		r = resource.Statistics(resource.Tracking(aligned, true))
	}
	return r, func() error {
		if err := a.Close(); err != nil {
			return err
		}
		if up == nil {
			return nil
		}
		return resource.Close(up)
	}, nil
}

func poolCase(i int) resourcetest.Case {
	return resourcetest.Case{Limit: pools[i].limit,
		New: func(m resourcetest.Machine) (resource.Resource, func() error, error) { return newPool(m, i) }}
}

// TestPoolsClosed: /sim over the simulated device, /real over the GPU, where there is one.
func TestPoolsClosed(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		for i, x := range pools {
			t.Run(x.name, func(t *testing.T) { resourcetest.Run(t, resourcetest.Simulated(2, 1<<30), poolCase(i)) })
		}
	})
	t.Run("real", func(t *testing.T) {
		m := resourcetest.GPU(t, func() (cuda.Driver, error) { return open.Open("nvidia") })
		for i, x := range pools {
			t.Run(x.name, func(t *testing.T) { resourcetest.Run(t, m, poolCase(i)) })
		}
	})
}

// A failure at every driver call.
func TestPoolsClosedFail(t *testing.T) {
	for i, x := range pools {
		t.Run(x.name, func(t *testing.T) {
			resourcetest.Failures(t, func() *resourcetest.Sim { return resourcetest.Simulated(1, 1<<30) }, poolCase(i))
		})
	}
}
