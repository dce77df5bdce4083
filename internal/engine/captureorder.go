package engine

import (
	"slices"

	"github.com/cistern-gpu/cistern/internal/engine/timeline"
)

// Reuse within a capture. A block that other streams used waits, when it is given back, until their work is over. The driver
// cannot say that of captured work. But the graph has an order: where the capture has joined the other streams, all that its
// stream does from then on comes after that work, and may use the memory. So such a free notes the last nodes of the other
// streams, and a request of the block's stream completes the free if all of them come before whatever the stream captures next.
// This is PyTorch's graph_capture_record_stream_reuse. Off, such a free completes after the capture.

// SetReuse turns reuse within captures on; off is what the option says (Options.CaptureReuse). It counts for frees from now on.
func (ca *Captures) SetReuse(on bool) { ca.frees.captureReuse.Store(on || ca.gpu.opts.CaptureReuse) }

// noteCaptured has a free that waits for other streams complete within the capture that gave the block out, if the graph's
// order allows that. Uses of the block before that capture do not matter: a capture is given only memory whose uses are over.
// The caller holds Device.mu and the arena's lock.
func (f *pendingFree) noteCaptured(streams []*timeline.Stream) {
	d, s := f.heap.dev, f.heap
	if d.state.frees.captureReuse.Load() && s.hot.Capture != 0 && s.blocks.At(f.block).Capture == s.hot.Capture {
		f.captured = timeline.LastCaptured(streams)
	}
}

// orderOf is the order of the capture that a request's stream is in; nil where there is none or no free asks for it. The caller
// holds Device.mu and the arena's lock.
//
// +checklocks:fr.gpu.mu
func (fr *frees) orderOf(held *streamHeap) *timeline.GraphOrder {
	if held == nil || held.hot.Capture == 0 || held.stream.timeline.Queue.PerThread() || fr.gpu.health.Broken() != nil ||
		!slices.ContainsFunc(fr.pending, func(f pendingFree) bool { return f.captured.Captured() && f.heap.stream == held.stream }) {
		return nil
	}
	t := held.stream
	if t.order == nil {
		t.order = &timeline.GraphOrder{}
	}
	if !t.order.Update(&t.timeline) {
		return nil
	}
	return t.order
}

// follows reports whether whatever the request's stream captures next comes after the work that a free waits for, and the block
// is that stream's. The caller holds Device.mu.
func (f *pendingFree) follows(order *timeline.GraphOrder, held *streamHeap) bool {
	s := f.heap
	return order != nil && s.stream == held.stream && s.hot.Capture != 0 && s.blocks.At(f.block).Capture == s.hot.Capture && order.Follows(&f.captured)
}
