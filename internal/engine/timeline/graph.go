package timeline

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// GraphOrder is which nodes of a graph come before whatever a stream captures next. The zero value knows nothing. It has no
// lock of its own.
type GraphOrder struct {
	capture uint64                      // the driver's number of the capture, 0 none
	last    []cuda.GraphNode            // on which the stream's next node depends
	before  map[cuda.GraphNode]struct{} // these, and all that come before them
	unknown bool                        // the order of this capture cannot be determined
}

// CapturedWork is work that was captured into a graph. The zero value is none.
type CapturedWork struct {
	capture uint64 // the driver's number of the capture
	nodes   []cuda.GraphNode
}

// Captured reports whether there is any.
func (w *CapturedWork) Captured() bool { return w.capture != 0 }

// LastCaptured is the last work of streams in the capture that all of them are in; none where they are in no common one, or the
// order of what they do cannot be determined.
func LastCaptured(streams []*Stream) CapturedWork {
	var w CapturedWork
	for _, t := range streams {
		h := t.Queue.dev.health
		if t.Queue.PerThread() || h.Broken() != nil {
			return CapturedWork{}
		}
		id, last, err := h.Driver.StreamCaptureNodes(h.ID, t.Queue.handle)
		if err != nil {
			h.Failed(err)
		}
		if err != nil || id == 0 || w.capture != 0 && id != w.capture {
			return CapturedWork{}
		}
		w.capture = id
		w.nodes = append(w.nodes, last...)
	}
	return w
}

// Update learns what was captured since, and reports whether the order is known.
func (o *GraphOrder) Update(t *Stream) bool {
	h := t.Queue.dev.health
	capture, last, err := h.Driver.StreamCaptureNodes(h.ID, t.Queue.handle)
	if capture != o.capture {
		*o = GraphOrder{capture: capture, before: map[cuda.GraphNode]struct{}{}}
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

func (o *GraphOrder) fail(t *Stream, err error) bool {
	o.unknown, o.last, o.before = true, nil, nil
	if err != nil {
		t.Queue.dev.health.Failed(err)
	}
	return false
}

// add adds nodes and all that come before them, and returns how many of o.last were met.
func (o *GraphOrder) add(t *Stream, nodes []cuda.GraphNode) (reached int, err error) {
	h := t.Queue.dev.health
	met := make([]bool, len(o.last))
	for stack := slices.Clone(nodes); len(stack) > 0; {
		n := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if _, ok := o.before[n]; ok {
			if i := slices.Index(o.last, n); i >= 0 && !met[i] {
				met[i] = true
				reached++
			}
			continue
		}
		after, err := h.Driver.GraphNodeDependencies(h.ID, n)
		if err != nil {
			return 0, err
		}
		o.before[n] = struct{}{}
		stack = append(stack, after...)
	}
	return reached, nil
}

// Follows reports whether whatever the stream captures next comes after captured work of the same graph.
func (o *GraphOrder) Follows(w *CapturedWork) bool {
	if w.capture != o.capture {
		return false
	}
	for _, n := range w.nodes {
		if _, ok := o.before[n]; !ok {
			return false
		}
	}
	return true
}
