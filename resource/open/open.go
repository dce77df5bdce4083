// Package open makes a resource from its name, as pools are given one in settings, through C and from Python.
//
//	STAGE{|STAGE}     STAGE is NAME or NAME:KEY=VALUE{,KEY=VALUE}
//
// The last stage is an upstream, those before it are adaptors, the outermost first. A value holds neither comma nor bar.
//
//	device                                   cuMemAlloc
//	virtual                                  each range one physical handle, mapped
//	async:threshold=1GiB,initial=512MiB      a stream-ordered pool; threshold=unlimited, max=SIZE,
//	                                         reuse=follow+opportunistic+internal or none, handles=none, posix or fabric
//	async:pool=default                       the device's own pool, as it is
//	managed, managed:prefetch=true           managed memory; the second is prefetch|managed
//	pinned                                   page-locked host memory
//	host_numa:node=0                         memory of a NUMA node of the host, mapped for the device and the host
//	nccl:library=/path/libnccl.so.2          ncclMemAlloc; the library, where the process has not loaded one
//	external:library=/path/lib.so,alloc=NAME,free=NAME    two C functions of a library (package resource/external)
//
//	statistics                               counts bytes and allocations
//	limiting:bytes=2GiB                      no more than that
//	logging:file=/tmp/memory.csv             RMM's log
//	tracking:stacks=true                     refuses to free what is not out
//	alignment:bytes=4KiB,threshold=1MiB      aligns what is at least threshold, else everything
//	prefetch                                 moves managed memory to the device when it is handed out
//
// Files: open.go the stages and what they mean; words.go reads the words; log.go the files of logs.
package open

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/external"
	"github.com/cistern-gpu/cistern/resource/nccl"
)

// Parse makes the resource that words name, for a device. Its owner calls resource.Close once all its memory is back.
// The error for words that name none is one line, with the word and the choices.
func Parse(drv cuda.Driver, dev cuda.Device, words string) (resource.Resource, error) {
	return (&maker{drv, dev, createLog}).make(words)
}

// Check reports what is wrong with words: Parse would fail. Nothing is kept, and no file is touched.
func Check(drv cuda.Driver, dev cuda.Device, words string) error {
	r, err := (&maker{drv, dev, func(string) (io.Writer, error) { return io.Discard, nil }}).make(words)
	if err != nil {
		return err
	}
	return resource.Close(r)
}

// Words reports what of words is wrong without a device: names and keys. Values are looked at by Parse.
func Words(words string) error {
	_, err := stagesOf(words)
	return err
}

// Load is Words, and loads the libraries that words name functions of. The caller holds no lock, as constructors of libraries
// run.
func Load(words string) error {
	stages, err := stagesOf(words)
	if err != nil {
		return err
	}
	for _, s := range stages {
		if s.kind.load == nil {
			continue
		}
		if err := s.kind.load(&s.options); err != nil {
			return fmt.Errorf("upstream %s: %w", quote(words), err)
		}
	}
	return nil
}

// maker is where resources are made for.
type maker struct {
	drv cuda.Driver
	dev cuda.Device
	log func(path string) (io.Writer, error)
}

// kind is a name that a stage may have.
type kind struct {
	name string
	keys []string
	must int // how many of keys have to be there
	// One of them: an adaptor is over another resource.
	upstream func(m *maker, o *options) (resource.Resource, error)
	adaptor  func(m *maker, o *options, up resource.Resource) (resource.Resource, error)
	load     func(o *options) error // what Load does for it; nil: nothing
}

var kinds = []kind{
	{name: "device", upstream: func(m *maker, _ *options) (resource.Resource, error) {
		return resource.Device(m.drv, m.dev), nil
	}},
	{name: "virtual", upstream: func(m *maker, _ *options) (resource.Resource, error) {
		return some(resource.Segments(m.drv, m.dev))
	}},
	{name: "async", keys: []string{"threshold", "initial", "max", "reuse", "handles", "pool"}, upstream: async},
	{name: "managed", keys: []string{"prefetch"}, upstream: func(m *maker, o *options) (resource.Resource, error) {
		prefetch := o.boolean("prefetch")
		if o.err != nil {
			return nil, o.err
		}
		r := resource.Managed(m.drv, m.dev)
		if prefetch {
			return some(resource.Prefetch(r, m.drv))
		}
		return r, nil
	}},
	{name: "pinned", upstream: func(m *maker, _ *options) (resource.Resource, error) {
		return resource.Pinned(m.drv, m.dev), nil
	}},
	{name: "host_numa", keys: []string{"node"}, upstream: func(m *maker, o *options) (resource.Resource, error) {
		node := o.number("node", -1)
		if o.err != nil {
			return nil, o.err
		}
		return some(resource.HostNUMA(m.drv, m.dev, node))
	}},
	{name: "nccl", keys: []string{"library"}, upstream: func(m *maker, o *options) (resource.Resource, error) {
		return nccl.New(m.drv, m.dev, o.text("library"))
	}},
	{name: "external", keys: []string{"library", "alloc", "free"}, must: 3, load: func(o *options) error {
		return external.Load(functions(o))
	}, upstream: func(m *maker, o *options) (resource.Resource, error) {
		return external.New(m.drv, m.dev, functions(o))
	}},

	{name: "statistics", adaptor: func(_ *maker, _ *options, up resource.Resource) (resource.Resource, error) {
		return resource.Statistics(up), nil
	}},
	{name: "limiting", keys: []string{"bytes"}, must: 1, adaptor: func(_ *maker, o *options, up resource.Resource) (resource.Resource, error) {
		limit := o.size("bytes")
		return resource.Limiting(up, limit), o.err
	}},
	{name: "logging", keys: []string{"file"}, must: 1, adaptor: func(m *maker, o *options, up resource.Resource) (resource.Resource, error) {
		w, err := m.log(o.text("file"))
		if err != nil {
			return nil, err
		}
		return resource.Logging(up, w), nil
	}},
	{name: "tracking", keys: []string{"stacks"}, adaptor: func(_ *maker, o *options, up resource.Resource) (resource.Resource, error) {
		stacks := o.boolean("stacks")
		return resource.Tracking(up, stacks), o.err
	}},
	{name: "alignment", keys: []string{"bytes", "threshold"}, must: 1, adaptor: func(_ *maker, o *options, up resource.Resource) (resource.Resource, error) {
		align, threshold := o.size("bytes"), o.size("threshold")
		if o.err != nil {
			return nil, o.err
		}
		return some(resource.Alignment(up, align, threshold))
	}},
	{name: "prefetch", adaptor: func(m *maker, _ *options, up resource.Resource) (resource.Resource, error) {
		return some(resource.Prefetch(up, m.drv))
	}},
}

// some is r as a resource, or none: a nil pointer is a resource that is not nil.
func some[T resource.Resource](r T, err error) (resource.Resource, error) {
	if err != nil {
		return nil, err
	}
	return r, nil
}

func functions(o *options) external.Options {
	return external.Options{Library: o.text("library"), Alloc: o.text("alloc"), Free: o.text("free")}
}

func async(m *maker, o *options) (resource.Resource, error) {
	if o.has("pool") {
		if len(o.values) > 1 {
			return nil, errors.New("pool=default is the device's own pool and excludes all other options")
		}
		o.choice("pool", "default")
		if o.err != nil {
			return nil, o.err
		}
		return some(resource.AsyncDefault(m.drv, m.dev))
	}
	a := resource.AsyncOptions{Initial: o.size("initial"), Max: o.size("max")}
	if o.text("threshold") == "unlimited" {
		a.Threshold = resource.Unlimited
	} else {
		a.Threshold = o.size("threshold")
	}
	switch o.choice("handles", "none", "posix", "fabric") {
	case "posix":
		a.Handles = cuda.HandlePosix
	case "fabric":
		a.Handles = cuda.HandleFabric
	}
	if o.has("reuse") {
		for _, word := range strings.Split(o.text("reuse"), "+") {
			switch word {
			case "follow":
				a.Reuse |= resource.ReuseFollow
			case "opportunistic":
				a.Reuse |= resource.ReuseOpportunistic
			case "internal":
				a.Reuse |= resource.ReuseInternal
			case "none":
				a.Reuse |= resource.ReuseNone
			default:
				o.fail("reuse=%s: choose follow, opportunistic and internal, joined by +, or none", quote(o.text("reuse")))
			}
		}
	}
	if o.err != nil {
		return nil, o.err
	}
	return some(resource.Async(m.drv, m.dev, a))
}

// make reads the words, and then makes the resources from the inside out.
func (m *maker) make(words string) (r resource.Resource, err error) {
	stages, err := stagesOf(words)
	if err != nil {
		return nil, err
	}
	for i := len(stages) - 1; i >= 0; i-- {
		s := stages[i]
		var next resource.Resource
		if s.kind.upstream != nil {
			next, err = s.kind.upstream(m, &s.options)
		} else {
			next, err = s.kind.adaptor(m, &s.options, r)
		}
		if err != nil {
			if !strings.HasPrefix(err.Error(), s.kind.name) {
				err = fmt.Errorf("%s: %w", s.kind.name, err)
			}
			err = fmt.Errorf("upstream %s: %w", quote(words), err)
			if failed := resource.Close(r); failed != nil {
				err = fmt.Errorf("%w; and then: %w", err, failed)
			}
			return nil, err
		}
		r = next
	}
	return r, nil
}
