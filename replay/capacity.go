package replay

import (
	"fmt"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// capacity is the limit on reserved bytes of a replay, and where it came from.
func (p *Plan) capacity(opt Options) (bytes uint64, from string) {
	switch {
	case opt.Capacity > 0 && opt.CapacityFrom != "":
		return opt.Capacity, opt.CapacityFrom
	case opt.Capacity > 0:
		return opt.Capacity, "given"
	case opt.Unlimited:
		return 0, "unlimited"
	}
	return CapacityFromTrace(p.Trace)
}

// CapacityFromTrace is the limit on reserved bytes that explains the out-of-memories of a trace, and in words where it
// comes from; 0 for a trace without one. Where the device ran out of memory, the limit is what was reserved then and
// what the device still had. Where it had enough, a limit of the process was in the way: what was reserved then, or
// at any other time, since the limit allowed that. A trace that tells no segments is one of requests to the driver or to
// another upstream: what they held counts as reserved.
func CapacityFromTrace(t *recording.Trace) (bytes uint64, from string) {
	var reserved, peak uint64
	for _, s := range t.InitialSegments {
		reserved += s.Size
	}
	segments := reserved > 0
	for i := 0; i < len(t.Events) && !segments; i++ {
		segments = t.Events[i].Kind == event.SegmentAlloc || t.Events[i].Kind == event.SegmentMap
	}
	if !segments {
		reserved = t.InitialLive()
	}
	type shortage struct {
		event          int
		reserved, size uint64
		free           uint64
	}
	var ooms []shortage
	peak = reserved
	mapped := map[uint64]int{} // a handle that is mapped twice is memory once
	for i := range t.Events {
		switch e := &t.Events[i]; e.Kind {
		case event.SegmentAlloc, event.SegmentMap:
			if e.Handle != 0 {
				if mapped[e.Handle]++; mapped[e.Handle] > 1 {
					continue
				}
			}
			reserved += e.Size
			peak = max(peak, reserved)
		case event.SegmentFree, event.SegmentUnmap:
			if e.Handle != 0 {
				if mapped[e.Handle]--; mapped[e.Handle] > 0 {
					continue
				}
				delete(mapped, e.Handle)
			}
			reserved -= min(e.Size, reserved)
		case event.Alloc:
			if !segments {
				reserved += e.Size
				peak = max(peak, reserved)
			}
		case event.FreeCompleted:
			if !segments {
				reserved -= min(e.Size, reserved)
			}
		case event.OOM:
			ooms = append(ooms, shortage{i, reserved, e.Size, e.Addr})
		}
	}
	from = "unlimited"
	for _, o := range ooms {
		if !segments && o.free == 0 {
			continue // RMM's log does not say what was free
		}
		limit, why := o.reserved, "reserved then"
		if o.free < o.size {
			limit, why = o.reserved+o.free, "reserved then and free on the device"
		} else if peak > limit && o.reserved+o.size > peak {
			limit, why = peak, "peak reserved, the least that the run was allowed"
		}
		if limit > bytes {
			bytes, from = limit, fmt.Sprintf("oom at event %d: %s", o.event, why)
		}
	}
	return bytes, from
}
