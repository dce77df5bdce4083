package cistern

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// Reuse within a capture. A block that other streams used waits, when it is given back, until their work is over, which
// nobody can ask of captured work. But the graph has an order: where the capture has joined the other streams, all that its
// stream does from then on comes after that work, and may use the memory. So such a free notes the last nodes of the other
// streams, and a request of the block's stream completes the free if all of them come before whatever the stream captures
// next. This is PyTorch's graph_capture_record_stream_reuse. Off, such a free completes after the capture.

// graphOrder is which nodes come before whatever a stream captures next. It is guarded by Device.mu.
type graphOrder struct {
	capture uint64                      // the driver's number of the capture, 0 none
	last    []cuda.GraphNode            // on which the stream's next node depends
	before  map[cuda.GraphNode]struct{} // these, and all that come before them
	unknown bool                        // the order of this capture cannot be told
}

// SetCaptureReuse turns reuse within captures on; off is what the option says (Options.CaptureReuse). It counts for frees
// from now on.
func (d *Device) SetCaptureReuse(on bool) { d.captureReuse.Store(on || d.opts.CaptureReuse) }

// lastNodes are the last nodes of streams in the capture that all of them are in, and the driver's number of that; 0 where
// they are in none, or the order of what they do cannot be told. The caller holds Device.mu.
func lastNodes(streams []*Stream) (capture uint64, nodes []cuda.GraphNode) {
	for _, t := range streams {
		if t.perThread || t.dev.health.Broken() != nil {
			return 0, nil
		}
		id, last, err := t.dev.drv.StreamCaptureNodes(t.dev.id, t.handle)
		if err != nil {
			t.dev.health.Failed(err)
		}
		if err != nil || id == 0 || capture != 0 && id != capture {
			return 0, nil
		}
		capture = id
		nodes = append(nodes, last...)
	}
	return capture, nodes
}

// noteNodes has a free that waits for other streams complete within the capture that gave the block out, if the graph's order
// allows that. What used the block before that capture does not matter: a capture is given only what is over. The caller holds
// Device.mu and the lane's lock.
func (f *pendingFree) noteNodes(streams []*Stream) {
	d, s := f.space.dev, f.space
	if d.captureReuse.Load() && s.capture != 0 && s.heap.At(f.block).Capture == s.capture {
		f.capture, f.nodes = lastNodes(streams)
	}
}

// orderOf is the order of the capture that a request's stream is in; nil where there is none or no free asks for it. The caller
// holds Device.mu and the lane's lock.
//
// +checklocks:d.mu
func (d *Device) orderOf(held *space) *graphOrder {
	if held == nil || held.capture == 0 || held.stream.perThread || d.health.Broken() != nil ||
		!slices.ContainsFunc(d.pending, func(f pendingFree) bool { return f.capture != 0 && f.space.stream == held.stream }) {
		return nil
	}
	t := held.stream
	if t.order == nil {
		t.order = &graphOrder{}
	}
	if !t.order.update(t) {
		return nil
	}
	return t.order
}

// update learns what was captured since, and reports whether the order is known.
func (o *graphOrder) update(t *Stream) bool {
	capture, last, err := t.dev.drv.StreamCaptureNodes(t.dev.id, t.handle)
	if capture != o.capture {
		*o = graphOrder{capture: capture, before: map[cuda.GraphNode]struct{}{}}
	}
	if err != nil || o.unknown || capture == 0 {
		return o.fail(t, err)
	}
	if slices.Equal(last, o.last) {
		return true
	}
	// Usually all that came before the stream's work until now comes before its next as well. A program may change that.
	reached, err := o.add(t, last)
	if err == nil && reached < len(o.last) {
		clear(o.before)
		o.last = nil
		_, err = o.add(t, last)
	}
	if err != nil {
		return o.fail(t, err)
	}
	o.last = last
	return true
}

func (o *graphOrder) fail(t *Stream, err error) bool {
	o.unknown, o.last, o.before = true, nil, nil
	if err != nil {
		t.dev.health.Failed(err)
	}
	return false
}

// add adds nodes and all that come before them, and returns how many of o.last were met.
func (o *graphOrder) add(t *Stream, nodes []cuda.GraphNode) (reached int, err error) {
	met := make([]bool, len(o.last))
	for todo := slices.Clone(nodes); len(todo) > 0; {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if _, ok := o.before[n]; ok {
			if i := slices.Index(o.last, n); i >= 0 && !met[i] {
				met[i] = true
				reached++
			}
			continue
		}
		after, err := t.dev.drv.GraphNodeDependencies(t.dev.id, n)
		if err != nil {
			return 0, err
		}
		o.before[n] = struct{}{}
		todo = append(todo, after...)
	}
	return reached, nil
}

// comesAfter reports whether whatever the request's stream captures next comes after the work that a free waits for, and the
// block is that stream's. The caller holds Device.mu.
func (o *graphOrder) comesAfter(f *pendingFree, held *space) bool {
	s := f.space
	if o == nil || f.capture != o.capture || s.stream != held.stream || s.capture == 0 || s.heap.At(f.block).Capture != s.capture {
		return false
	}
	for _, n := range f.nodes {
		if _, ok := o.before[n]; !ok {
			return false
		}
	}
	return true
}
