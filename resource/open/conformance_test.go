package open

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	driver "github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/resourcetest"
)

// words are resources by name. FILE stands for a file that can be written.
var words = []struct {
	words string
	limit uint64
	alike bool
}{
	{words: "device", alike: true},
	{words: "virtual"},
	{words: "async"},
	{words: "async:threshold=unlimited"},
	{words: "async:threshold=256MiB,initial=64MiB,reuse=follow,handles=posix"},
	{words: "async:max=256MiB,reuse=none", limit: 288 << 20},
	{words: "async:pool=default", alike: true},
	{words: "managed", alike: true},
	{words: "managed:prefetch=true", alike: true},
	{words: "pinned", alike: true},
	{words: "host_numa"},
	{words: "nccl"},
	{words: "statistics|device"},
	{words: "limiting:bytes=64MiB|device", limit: 64 << 20},
	{words: "limiting:bytes=64MiB|virtual", limit: 64 << 20},
	{words: "limiting:bytes=64MiB|managed", limit: 64 << 20},
	{words: "limiting:bytes=64MiB|pinned", limit: 64 << 20},
	{words: "logging:file=FILE|device"},
	{words: "tracking:stacks=true|device"},
	{words: "alignment:bytes=4KiB|device"},
	{words: "alignment:bytes=4MiB,threshold=1KiB|virtual"},
	{words: "alignment:bytes=64KiB,threshold=1MiB|async"},
	{words: "prefetch|limiting:bytes=64MiB|managed", limit: 64 << 20},
	{words: "statistics|limiting:bytes=96MiB|tracking|alignment:bytes=1KiB|logging:file=FILE|device", limit: 96 << 20},
	{words: "tracking|statistics|limiting:bytes=96MiB|async:threshold=unlimited", limit: 96 << 20},
	{words: "logging:file=FILE|tracking|host_numa"},
	{words: "statistics|alignment:bytes=4MiB|limiting:bytes=768MiB|virtual", limit: 768 << 20},
}

// Resources that have no words, for they hold functions or two resources.
var made = []struct {
	name string
	c    resourcetest.Case
}{
	{"external functions", resourcetest.Case{Silent: true, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		r, err := resource.External(resource.ExternalOptions{
			Alloc:  func(size, _ uint64, _ cuda.Stream) (cuda.Ptr, error) { return m.MemAlloc(0, size) },
			Free:   func(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error { return m.MemFree(0, p) },
			Traits: resource.Traits{OnDevice: true, DeviceAccessible: true}})
		return r, nil, err
	}}},
	{"a failure callback", resourcetest.Case{Limit: 64 << 20, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		tries := 0
		return resource.OnFailure(resource.Limiting(resource.Device(m, 0), 64<<20), func(uint64) bool {
			tries++
			return tries%3 != 0
		}), nil, nil
	}}},
	{"host-ordered async", resourcetest.Case{New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		a, err := resource.Async(m, 0, resource.AsyncOptions{})
		if err != nil {
			return nil, nil, err
		}
		r, err := resource.HostOrdered(m, a)
		if err != nil {
			return nil, nil, errors.Join(err, a.Close())
		}
		return r, nil, nil
	}}},
	{"a fallback to pinned memory", resourcetest.Case{Limit: 128 << 20, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		return resource.Fallback(resource.Limiting(resource.Device(m, 0), 64<<20),
			resource.Limiting(resource.Pinned(m, 0), 64<<20)), nil, nil
	}}},
	{"a fallback from segments to host NUMA memory", resourcetest.Case{Remote: true, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		s, err := resource.Segments(m, 0)
		if err != nil {
			return nil, nil, err
		}
		h, err := resource.HostNUMA(m, 0, -1)
		if err != nil {
			return nil, nil, err
		}
		return resource.Fallback(resource.Limiting(s, 48<<20), resource.Limiting(h, 48<<20)), nil, nil
	}}},
}

// cases are all of them, on a simulated machine or a real one.
func cases(t *testing.T, simulated bool) map[string]resourcetest.Case {
	all := map[string]resourcetest.Case{}
	for _, w := range words {
		spec := w.words
		// NCCL's memory is the process's; what stands for it over the simulated device keeps books.
		c := resourcetest.Case{Alike: w.alike || w.words == "nccl" && !simulated, Limit: w.limit}
		for {
			before, after, found := strings.Cut(spec, "FILE")
			if !found {
				break
			}
			spec = before + filepath.Join(t.TempDir(), "log.csv") + after
		}
		c.New = func(m resourcetest.Machine) (resource.Resource, func() error, error) {
			r, err := Parse(m, 0, spec)
			return r, nil, err
		}
		c.Remote = simulated && strings.Contains(w.words, "host_numa")
		all[w.words] = c
	}
	for _, x := range made {
		all[x.name] = x.c
	}
	return all
}

// TestConformance: /sim is every resource over the simulated device, /real over the GPU, where there is one.
func TestConformance(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		for name, c := range cases(t, true) {
			t.Run(name, func(t *testing.T) { resourcetest.Run(t, resourcetest.Simulated(2, 1<<30), c) })
		}
	})
	t.Run("real", func(t *testing.T) {
		m := resourcetest.GPU(t, func() (cuda.Driver, error) { return driver.Open("nvidia") })
		for name, c := range cases(t, false) {
			t.Run(name, func(t *testing.T) { resourcetest.Run(t, m, c) })
		}
	})
}

// A failure at every driver call, of every resource.
func TestFailures(t *testing.T) {
	for name, c := range cases(t, true) {
		t.Run(name, func(t *testing.T) {
			resourcetest.Failures(t, func() *resourcetest.Sim { return resourcetest.Simulated(1, 1<<30) }, c)
		})
	}
}
