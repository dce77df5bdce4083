package replay

import (
	"maps"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Recording is what a policy did, event by event, as a trace of its own.
type Recording struct {
	plan   *Plan
	events []event.Event
	placed []placement // by block number
	now    int64
	final  []recording.Segment
	ended  bool

	settings recording.Settings // of PyTorch's allocator, where the policy is that
}

// placement is where a block lies.
type placement struct {
	addr, size   uint64
	stream, pool uint32
}

func (r *Recording) begin(p *Plan) {
	*r = Recording{plan: p, placed: make([]placement, p.Blocks), now: p.startUS}
}

func (r *Recording) alloc(b int, addr, size uint64, stream, pool uint32, us int64) {
	r.placed[b] = placement{addr, size, stream, pool}
	r.at(us)
	r.events = append(r.events, event.Event{Kind: event.Alloc, Addr: addr, Size: size, Stream: stream, Pool: pool, TimeUS: r.now})
}

func (r *Recording) free(kind event.Kind, b int, us int64) {
	r.at(us)
	p := r.placed[b]
	r.events = append(r.events, event.Event{Kind: kind, Addr: p.addr, Size: p.size, Stream: p.stream, Pool: p.pool, TimeUS: r.now})
}

func (r *Recording) oom(e *event.Event) {
	r.at(e.TimeUS)
	o := *e
	o.Stack = 0
	r.events = append(r.events, o)
}

// at moves the clock of the recording.
func (r *Recording) at(us int64) { r.now = max(r.now, us) }

// segment takes an event of the policy.
func (r *Recording) segment(e event.Event) {
	e.TimeUS = r.now
	r.events = append(r.events, e)
}

func (r *Recording) end(p Policy) {
	r.ended = true
	if s, ok := p.(Snapshotter); ok {
		r.final = s.Segments()
		r.fillRequested()
		r.endMappings()
	}
}

// endMappings unmaps what is mapped beside the final segments: old mappings of memory that has moved, which the policy
// keeps until the GPU is done with them. So the events lead to the segments that the recording ends with.
func (r *Recording) endMappings() {
	mapped := map[uint64]event.Event{}
	for _, e := range r.events {
		switch e.Kind {
		case event.SegmentMap:
			mapped[e.Addr] = e
		case event.SegmentUnmap:
			delete(mapped, e.Addr)
		}
	}
	for _, s := range r.final {
		for addr := range mapped {
			if addr-s.Addr < s.Size {
				delete(mapped, addr)
			}
		}
	}
	for _, addr := range slices.Sorted(maps.Keys(mapped)) {
		e := mapped[addr]
		e.Kind = event.SegmentUnmap
		r.segment(e)
	}
}

// fillRequested adds to the blocks of the final segments what was requested, which a policy need not know.
func (r *Recording) fillRequested() {
	live := map[uint64]uint64{}
	for _, e := range r.events {
		switch e.Kind {
		case event.Alloc:
			live[e.Addr] = e.Size
		case event.FreeCompleted:
			delete(live, e.Addr)
		}
	}
	for i := range r.final {
		for j := range r.final[i].Blocks {
			if b := &r.final[i].Blocks[j]; b.State != recording.Inactive && b.Requested == 0 {
				b.Requested = live[b.Addr]
			}
		}
	}
}

// Trace is the recording as a trace, nil before the run has ended.
func (r *Recording) Trace() *recording.Trace {
	if !r.ended {
		return nil
	}
	t := r.plan.Trace
	return &recording.Trace{Path: t.Path, Format: "pytorch-snapshot", Device: t.Device, Events: r.events, Streams: t.Streams,
		Pools: r.plan.Pools, Stacks: []recording.Stack{nil}, Final: r.final, FromStart: true, Settings: r.settings}
}
