package replay

import (
	"fmt"

	"github.com/cistern-gpu/cistern/event"
)

// Verify is how far a model agreed with the record. Its JSON is part of the command's contract.
type Verify struct {
	Recorded          int     `json:"recorded"` // segment and oom events in the file
	Matched           int     `json:"matched"`  // those that the model made too, in order and size
	Placements        int     `json:"placements"`
	PlacementsMatched int     `json:"placements_matched"` // allocations at the recorded address
	FirstMismatch     *string `json:"first_mismatch"`
}

// verifier compares what a torch model does with what was recorded, and gives it the recorded addresses of segments.
// For each request it knows the segment events that the record has between the request before and this one.
type verifier struct {
	p      *Plan
	v      Verify
	events []int // indices of the recorded segment and oom events
	at     int   // the next of them
	end    int   // end of those that belong to the current request
	begun  bool  // the first event has come
}

// verifiable reports whether a policy can be held against the record: PyTorch's own, with the trace's settings.
func verifiable(p *Plan, spec Spec) bool {
	if spec.Name != "torch" || p.Trace.Format != "pytorch-snapshot" {
		return false
	}
	if !spec.HasConf {
		return true
	}
	own, _ := TorchConfOf(p.Trace.Settings)
	c, err := ParseTorchConf(spec.Conf)
	return err == nil && c.String() == own.String()
}

func newVerifier(p *Plan) *verifier {
	v := &verifier{p: p}
	for i := range p.Trace.Events {
		switch p.Trace.Events[i].Kind {
		case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap, event.OOM:
			v.events = append(v.events, i)
		case event.Alloc:
			if p.Block[i] >= 0 {
				v.v.Placements++
			}
		}
	}
	v.v.Recorded = len(v.events)
	return v
}

// expect begins the request of event i: what the record has before it is what the model should do now.
func (v *verifier) expect(i int) {
	v.begun = v.begun || i >= 0
	v.finish()
	v.end = v.at
	for v.end < len(v.events) && v.events[v.end] <= i {
		v.end++
	}
}

// expectRelease begins a release that the record shows as count events from event i on.
func (v *verifier) expectRelease(i, count int) {
	v.begun = true
	v.finish()
	for v.at < len(v.events) && v.events[v.at] < i {
		v.mismatch(v.events[v.at], "the model did nothing like it")
		v.at++
	}
	v.end = min(v.at+count, len(v.events))
}

// finish ends the current request: what the model left out is a mismatch.
func (v *verifier) finish() {
	for ; v.at < v.end; v.at++ {
		v.mismatch(v.events[v.at], "the model did nothing like it")
	}
}

// address is the recorded address of the segment event that the model is about to make, if it is of that kind.
func (v *verifier) address(kind event.Kind) (uint64, bool) {
	if v.at < v.end {
		if e := &v.p.Trace.Events[v.events[v.at]]; e.Kind == kind {
			return e.Addr, true
		}
	}
	return 0, false
}

// shortageAhead reports whether the record has memory given back for the current request; false for a nil verifier.
func (v *verifier) shortageAhead() bool {
	if v == nil || v.at >= v.end {
		return false
	}
	k := v.p.Trace.Events[v.events[v.at]].Kind
	return k == event.SegmentFree || k == event.SegmentUnmap
}

// emitted compares a segment event of the model.
func (v *verifier) emitted(e event.Event) { v.compare(e, e.Kind != event.OOM) }

// oom compares a request that failed, as it did when it was recorded.
func (v *verifier) oom(size uint64) { v.compare(event.Event{Kind: event.OOM, Size: size}, false) }

func (v *verifier) compare(e event.Event, addr bool) {
	if !v.begun {
		return // the state at the first event is being taken over
	}
	if v.at >= v.end {
		at := "after the last event"
		if v.at < len(v.events) {
			at = fmt.Sprintf("before event %d", v.events[v.at])
		}
		v.note(fmt.Sprintf("%s: the model made a %s of %d bytes that is not in the record", at, e.Kind, e.Size))
		return
	}
	i := v.events[v.at]
	r := &v.p.Trace.Events[i]
	if r.Handle != 0 && r.Kind == e.Kind && r.Size < e.Size {
		v.pages(e)
		return
	}
	v.at++
	if r.Kind != e.Kind || r.Size != e.Size || addr && r.Addr != e.Addr {
		v.mismatch(i, fmt.Sprintf("the model made a %s of %d bytes at %#x", e.Kind, e.Size, e.Addr))
		return
	}
	v.v.Matched++
}

// pages compares a map or unmap with a record that has an event for each handle, as Recording makes it.
func (v *verifier) pages(e event.Event) {
	for rest := e; rest.Size > 0; {
		page := rest
		if v.at < v.end {
			page.Size = min(rest.Size, v.p.Trace.Events[v.events[v.at]].Size)
		}
		rest.Addr += page.Size
		rest.Size -= page.Size
		v.compare(page, true)
	}
}

func (v *verifier) placed(i int, addr uint64) {
	if i < 0 {
		return
	}
	if r := v.p.Trace.Events[i].Addr; r != addr {
		v.note(fmt.Sprintf("event %d: recorded at %#x, placed at %#x", i, r, addr))
		return
	}
	v.v.PlacementsMatched++
}

func (v *verifier) failed(i int, size uint64) {
	v.note(fmt.Sprintf("event %d: the model ran out of memory at a request of %d bytes", i, size))
}

func (v *verifier) avoided(i int, size uint64) {
	v.note(fmt.Sprintf("event %d: the model met a request of %d bytes that had failed", i, size))
}

func (v *verifier) mismatch(i int, what string) {
	r := &v.p.Trace.Events[i]
	v.note(fmt.Sprintf("event %d: recorded %s of %d bytes at %#x: %s", i, r.Kind, r.Size, r.Addr, what))
}

func (v *verifier) note(s string) {
	if v.v.FirstMismatch == nil {
		v.v.FirstMismatch = &s
	}
}

// result closes the comparison; nil for a nil verifier.
func (v *verifier) result() *Verify {
	if v == nil {
		return nil
	}
	v.finish()
	for ; v.at < len(v.events); v.at++ {
		v.mismatch(v.events[v.at], "the model did nothing like it")
	}
	return &v.v
}

// addressesAbove is an address above everything recorded.
func (p *Plan) addressesAbove() uint64 {
	top := uint64(firstAddr)
	for i := range p.Trace.Events {
		if e := &p.Trace.Events[i]; e.Kind != event.OOM && e.Kind != event.Annotation {
			top = max(top, e.Addr+e.Size)
		}
	}
	const step = 1 << 40
	return (top + step - 1) / step * step
}
