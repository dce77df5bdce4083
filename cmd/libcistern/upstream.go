//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/open"
)

//export corePoolCreate
func corePoolCreate(d C.int, pool0, pool1 C.uint64_t, with *C.shim_pool) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	o, err := poolOptions(d, with)
	if err != nil {
		return fail(err)
	}
	dev, err := l.device(d)
	if err != nil {
		return fail(err)
	}
	m := made{words: wordsOf(with)}
	defer func() {
		if code != C.CISTERN_OK {
			m.end()
		}
	}()
	if with.upstream != nil {
		if o.Upstream, err = m.open(l, dev, "options.upstream", with.upstream); err != nil {
			return fail(err)
		}
	}
	if with.spill != nil {
		if o.Spill, err = m.open(l, dev, "options.spill", with.spill); err != nil {
			return fail(err)
		}
	}
	known := &l.devices[d].pools
	known.mu.Lock() // before the pool is released
	defer known.mu.Unlock()
	p, err := dev.NewPool(memory.PoolID{uint64(pool0), uint64(pool1)}, o)
	if err != nil {
		return fail(err)
	}
	if m.words != "" || m.owned != nil {
		if known.made == nil {
			known.made = map[*engine.Pool]made{}
		}
		known.made[p] = m
	}
	return C.CISTERN_OK
}

// wordsOf is what statistics say of where a pool's memory comes from.
func wordsOf(with *C.shim_pool) string {
	switch {
	case with.upstream != nil:
		return goString(with.upstream)
	case with.alloc != 0:
		return "external"
	case with.flags&C.CISTERN_POOL_IPC_LEGACY != 0:
		return "device"
	case with.flags&C.CISTERN_POOL_SINGLE_HANDLE != 0:
		return "virtual"
	}
	return ""
}

// open makes the resource that words name; from begins the words about bad ones.
func (m *made) open(l *library, dev *engine.Device, from string, words *C.char) (resource.Resource, error) {
	r, err := open.Parse(l.Driver(), dev.ID(), goString(words))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	r, o := own(r)
	m.owned = append(m.owned, o)
	return r, nil
}

// end says that no more requests reach the resources.
func (m *made) end() {
	for _, o := range m.owned {
		o.end()
	}
}

// poolOptions is what a pool is made of, but for what is found by name.
func poolOptions(d C.int, with *C.shim_pool) (o config.PoolOptions, err error) {
	flags := with.flags
	const kinds = C.CISTERN_POOL_IPC_LEGACY | C.CISTERN_POOL_SINGLE_HANDLE
	switch {
	case flags&^(C.CISTERN_POOL_NO_SPLIT|kinds) != 0:
		return o, &failure{C.CISTERN_INVALID, fmt.Sprintf("options.flags: %#x has unknown flags: expected those of CISTERN_POOL_", uint32(flags))}
	case with.upstream != nil && with.alloc != 0:
		return o, &failure{C.CISTERN_INVALID, "options.upstream and options.alloc: the pool's memory comes from one of them"}
	case with.upstream != nil && flags&kinds != 0:
		return o, &failure{C.CISTERN_INVALID, fmt.Sprintf("options.flags: %#x says what memory the pool has, and so does options.upstream: "+
			"choose one", uint32(flags))}
	}
	o.SegmentPerBlock, o.Limit = flags&C.CISTERN_POOL_NO_SPLIT != 0, uint64(with.limit)
	switch flags & kinds {
	case C.CISTERN_POOL_IPC_LEGACY:
		o.Kind = config.PoolMalloc
	case C.CISTERN_POOL_SINGLE_HANDLE:
		o.Kind = config.PoolSingleHandle
	case kinds:
		return o, &failure{C.CISTERN_INVALID, "options.flags: memory for cudaIpcGetMemHandle is from cuMemAlloc, which has no handle: " +
			"choose CISTERN_POOL_IPC_LEGACY or CISTERN_POOL_SINGLE_HANDLE"}
	}
	if with.alloc != 0 {
		if o.Upstream, err = external(d, with.alloc, with.free, with.ctx); err != nil {
			return o, err
		}
	}
	if fn, ctx := with.oom, with.oom_ctx; fn != 0 {
		o.OnOutOfMemory = func(missing uint64) bool { return C.shim_call_oom(fn, ctx, d, C.uint64_t(missing)) != 0 }
	}
	return o, nil
}

//export coreUpstreamCheck
func coreUpstreamCheck(d C.int, words *C.char) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	if err := open.Check(l.Driver(), dev.ID(), goString(words)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export corePoolSetLimit
func corePoolSetLimit(d C.int, pool0, pool1, bytes C.uint64_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(_ *library, _ *engine.Device, p *engine.Pool) error {
		p.SetLimit(uint64(bytes))
		return nil
	})
}

//export corePoolGetStats
func corePoolGetStats(d C.int, pool0, pool1 C.uint64_t, out *C.cistern_pool_stats) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(_ *library, _ *engine.Device, p *engine.Pool) error {
		s := p.Stats()
		out.reserved, out.peak_reserved = C.uint64_t(s.Reserved), C.uint64_t(s.PeakReserved)
		out.requested, out.allocated = C.uint64_t(s.Requested), C.uint64_t(s.Allocated)
		out.cached, out.paused, out.spilled = C.uint64_t(s.Cached), C.uint64_t(s.Paused), C.uint64_t(s.Spilled)
		out.limit, out.blocks = C.uint64_t(s.Limit), C.int64_t(s.Blocks)
		return nil
	})
}

//export coreUpstreamSet
func coreUpstreamSet(alloc, free, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err == nil && l.upstream.Load() != nil {
		err = &failure{C.CISTERN_INVALID, "pools have an upstream already: " + *l.upstream.Load()}
	}
	if err == nil {
		err = l.setUpstream("external", func(d cuda.Device) (resource.Resource, error) { return external(C.int(d), alloc, free, ctx) })
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// setUpstream has pools that name none get their memory from an upstream, which words name in statistics.
func (l *library) setUpstream(words string, open func(cuda.Device) (resource.Resource, error)) error {
	if err := l.SetUpstream(open); err != nil {
		return err
	}
	l.upstream.Store(&words)
	return nil
}

// external is memory from two functions of the host program. Functions and context are numbers here: only C looks behind
// them.
func external(d C.int, alloc, free, ctx C.uintptr_t) (resource.Resource, error) {
	return resource.External(resource.ExternalOptions{
		Alloc: func(size, _ uint64, st cuda.Stream) (cuda.Ptr, error) {
			return cuda.Ptr(C.shim_call_alloc(alloc, ctx, C.size_t(size), d, C.uintptr_t(st))), nil
		},
		Free: func(p cuda.Ptr, size, _ uint64, st cuda.Stream) error {
			C.shim_call_free(free, ctx, C.uintptr_t(p), C.size_t(size), d, C.uintptr_t(st))
			return nil
		},
		Traits: resource.Traits{Device: cuda.Device(d), OnDevice: true, DeviceAccessible: true, Align: 512},
	})
}
