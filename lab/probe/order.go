package probe

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
)

// order measures events, waits and questions about streams.
func (p *probe) order() error {
	for _, l := range p.loads {
		if p.late("order") {
			return nil
		}
		loaded := p.work // the stream whose work is not done yet
		if !l.idle {
			loaded = l.stream
		}
		waits := 0
		for i := 0; i < p.reps && waits < 4; i++ {
			var e, pending cuda.Event
			for _, step := range []struct {
				name string
				call func() error
			}{
				{"cuEventCreate", func() (err error) { e, err = p.EventCreate(p.dev); return err }},
				{"cuEventRecord on an idle stream", func() error { return p.EventRecord(p.dev, e, p.work) }},
				{"cuEventQuery", func() error { _, err := p.EventQuery(p.dev, e); return err }},
				{"cuStreamWaitEvent on an idle stream", func() error { return p.StreamWaitEvent(p.dev, p.work, e) }},
				{"cuEventRecord on legacy", func() error { return p.EventRecord(p.dev, e, cuda.StreamLegacy) }},
				{"cuEventRecord on the loaded stream", func() (err error) {
					if pending, err = p.EventCreate(p.dev); err != nil {
						return err
					}
					return p.EventRecord(p.dev, pending, loaded)
				}},
				{"cuEventQuery of pending work", func() error {
					done, err := p.EventQuery(p.dev, pending)
					if done && !l.idle {
						return errors.New("done while the kernel runs")
					}
					return err
				}},
				{"cuEventDestroy", func() error { return p.EventDestroy(p.dev, e) }},
				{"cuEventDestroy of pending work", func() error { return p.EventDestroy(p.dev, pending) }},
				{"cuStreamGetCtx+Id", func() error { _, err := p.StreamID(p.dev, p.work); return err }},
				{"cuStreamGetCtx+Id of legacy", func() error { _, err := p.StreamID(p.dev, cuda.StreamLegacy); return err }},
				{"cuStreamGetCaptureInfo", func() error { _, _, err := p.StreamCapture(p.dev, p.work); return err }},
				{"cuStreamGetCaptureInfo of legacy", func() error {
					_, _, err := p.StreamCapture(p.dev, cuda.StreamLegacy)
					return err
				}},
				{"cuMemGetInfo", func() error { _, _, err := p.MemInfo(p.dev); return err }},
				{"cuDevicePrimaryCtxGetState", func() error { _, err := p.ContextActive(p.dev); return err }},
				{"cuStreamSynchronize, idle stream", func() error { return p.StreamSynchronize(p.dev, p.work) }},
			} {
				if err := p.keep(l); err != nil {
					return err
				}
				d, err := p.table.measure(key{"order", step.name, 0, l.name}, step.call)
				if err != nil && errors.Is(err, cuda.ErrIllegalAddress) {
					return err
				}
				if d > waited && !l.idle {
					waits++
				}
			}
		}
		if err := p.await(l); err != nil {
			return err
		}
	}
	for _, s := range []struct {
		name   string
		stream cuda.Stream
	}{{"work", p.work}, {"null", cuda.StreamNull}, {"legacy", cuda.StreamLegacy}, {"per-thread", cuda.StreamPerThread}} {
		id, err := p.StreamID(p.dev, s.stream)
		p.table.remark(key{section: "stream ids", call: s.name}, fmt.Sprintf("%+v %v", id, err))
	}
	return nil
}

// beside measures how long other streams' work is held up by calls made while a kernel runs.
func (p *probe) beside() error {
	const size = 64 * mib
	va, err := p.AddressReserve(size, p.info.Granularity, 0)
	if err != nil {
		return err
	}
	h, err := p.MemCreate(size, p.prop)
	if err != nil {
		return err
	}
	side := p.loads[1]
	reach := func(call string, before func() error) error {
		k := key{"beside", "a kernel on another stream after " + call, 0, side.name}
		for range 3 {
			if err := p.keep(side); err != nil {
				return err
			}
			_, err := p.table.measure(k, func() error {
				if err := before(); err != nil {
					return err
				}
				if err := p.Spin(p.dev, p.work, time.Microsecond); err != nil {
					return err
				}
				return p.StreamSynchronize(p.dev, p.work)
			})
			if err != nil {
				return err
			}
			if call == "map and access" {
				if err := p.MemUnmap(va, size); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := reach("nothing", func() error { return nil }); err != nil {
		return err
	}
	mapped := func() error {
		if err := p.MemMap(va, size, h); err != nil {
			return err
		}
		return p.MemSetAccess(va, size, []cuda.Device{p.dev})
	}
	if err := reach("map and access", mapped); err != nil {
		return err
	}
	if err := reach("map, access and unmap", func() error {
		if err := mapped(); err != nil {
			return err
		}
		return p.MemUnmap(va, size)
	}); err != nil {
		return err
	}
	if err := p.await(side); err != nil {
		return err
	}
	return errors.Join(p.MemRelease(h), p.AddressFree(va, size))
}

// capture tries every call beside a capture in global mode, the strictest, and looks whether the capture survives.
func (p *probe) capture() error {
	const section = "capture"
	size := p.info.Granularity
	var va, ptr cuda.Ptr
	var h cuda.Handle
	var e cuda.Event
	var captured cuda.Stream
	calls := []struct {
		name string
		call func() error
	}{
		{"cuMemAddressReserve", func() (err error) { va, err = p.AddressReserve(size, size, 0); return err }},
		{"cuMemCreate", func() (err error) { h, err = p.MemCreate(size, p.prop); return err }},
		{"cuMemMap", func() error { return p.MemMap(va, size, h) }},
		{"cuMemSetAccess", func() error { return p.MemSetAccess(va, size, []cuda.Device{p.dev}) }},
		{"cuMemUnmap", func() error { return p.MemUnmap(va, size) }},
		{"cuMemRelease", func() error { return p.MemRelease(h) }},
		{"cuMemAddressFree", func() error { return p.AddressFree(va, size) }},
		{"cuMemAlloc", func() (err error) { ptr, err = p.MemAlloc(p.dev, size); return err }},
		{"cuMemFree", func() error { return p.MemFree(p.dev, ptr) }},
		{"cuMemGetInfo", func() error { _, _, err := p.MemInfo(p.dev); return err }},
		{"cuEventCreate", func() (err error) { e, err = p.EventCreate(p.dev); return err }},
		{"cuEventRecord on another stream", func() error { return p.EventRecord(p.dev, e, p.work) }},
		{"cuEventQuery", func() error { _, err := p.EventQuery(p.dev, e); return err }},
		{"cuEventSynchronize", func() error { return p.EventSynchronize(p.dev, e) }},
		{"cuStreamWaitEvent on another stream", func() error { return p.StreamWaitEvent(p.dev, p.work, e) }},
		{"cuStreamSynchronize of another stream", func() error { return p.StreamSynchronize(p.dev, p.work) }},
		{"cuEventRecord on legacy", func() error { return p.EventRecord(p.dev, e, cuda.StreamLegacy) }},
		{"cuEventDestroy", func() error { return p.EventDestroy(p.dev, e) }},
		{"cuStreamGetCaptureInfo of legacy", func() error { _, _, err := p.StreamCapture(p.dev, cuda.StreamLegacy); return err }},
		{"cuStreamGetCtx+Id of legacy", func() error { _, err := p.StreamID(p.dev, cuda.StreamLegacy); return err }},
		{"cuStreamGetCtx+Id of the captured stream", func() error { _, err := p.StreamID(p.dev, captured); return err }},
		{"cuStreamGetCtx+Id of another stream", func() error { _, err := p.StreamID(p.dev, p.work); return err }},
		{"cuStreamGetCtx+Id of per-thread", func() error { _, err := p.StreamID(p.dev, cuda.StreamPerThread); return err }},
		{"cuStreamGetCaptureInfo of per-thread", func() error { _, _, err := p.StreamCapture(p.dev, cuda.StreamPerThread); return err }},
		{"cuEventCreate again", func() (err error) { e, err = p.EventCreate(p.dev); return err }},
		{"cuEventRecord on per-thread", func() error { return p.EventRecord(p.dev, e, cuda.StreamPerThread) }},
		{"cuEventRecord on the captured stream", func() error { return p.EventRecord(p.dev, e, captured) }},
		{"cuEventQuery of a captured event", func() error {
			if err := p.EventRecord(p.dev, e, captured); err != nil {
				return err
			}
			_, err := p.EventQuery(p.dev, e)
			return err
		}},
		{"cuStreamWaitEvent of an outside event", func() error {
			if err := p.EventRecord(p.dev, e, p.work); err != nil {
				return err
			}
			return p.StreamWaitEvent(p.dev, captured, e)
		}},
		{"cuEventDestroy again", func() error { return p.EventDestroy(p.dev, e) }},
		{"cuStreamSynchronize of the captured stream", func() error { return p.StreamSynchronize(p.dev, captured) }},
		{"cuStreamSynchronize of legacy", func() error { return p.StreamSynchronize(p.dev, cuda.StreamLegacy) }},
		{"cuCtxSynchronize", func() error { return p.ContextSynchronize(p.dev) }},
	}
	for _, blocking := range []bool{false, true} {
		name := "a non-blocking stream captured"
		if blocking {
			name = "a blocking stream captured"
		}
		s, err := p.StreamCreate(p.dev, blocking)
		if err != nil {
			return err
		}
		captured = s
		for _, c := range calls {
			if err := p.CaptureBegin(p.dev, s, nvidia.CaptureGlobal); err != nil {
				return err
			}
			if err := p.Spin(p.dev, s, time.Microsecond); err != nil {
				return err
			}
			k := key{section: section, call: c.name, load: name}
			p.table.measure(k, c.call) // its line holds the error, which may be what CUDA promises
			status, id, err := p.StreamCapture(p.dev, s)
			if status != cuda.CaptureActive || id == 0 || err != nil {
				p.table.remark(k, fmt.Sprintf("the capture is %d afterwards, number %d, %v", status, id, err))
			}
			graph, err := p.CaptureEnd(p.dev, s)
			if err != nil {
				p.table.remark(k, fmt.Sprintf("the capture ends with %v", err))
			} else if err := p.GraphDestroy(p.dev, graph); err != nil {
				return err
			}
		}
		if err := p.StreamDestroy(p.dev, s); err != nil {
			return err
		}
	}
	return nil
}
