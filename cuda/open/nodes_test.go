package open

import (
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// capturing is what a test needs to capture work; each driver has its own functions for that.
type capturing struct {
	cuda.Driver
	begin func(s cuda.Stream) error
	end   func(s cuda.Stream) error
	work  func(s cuda.Stream) error
}

func newCapturing(t *testing.T, d cuda.Driver, dev cuda.Device) capturing {
	t.Helper()
	p, err := d.MemAlloc(dev, 4096)
	must(t, err)
	t.Cleanup(func() { must(t, d.MemFree(dev, p)) })
	if d, ok := d.(*sim.Driver); ok {
		return capturing{d, func(s cuda.Stream) error { return d.BeginCapture(dev, s) },
			func(s cuda.Stream) error { _, err := d.EndCapture(dev, s); return err },
			func(s cuda.Stream) error { return d.Use(dev, s, p, 512) }}
	}
	return newCapturingBinding(t, d, dev, p)
}

// capturedNodes tests that the order of a graph can be read while it is captured, without harm to the capture.
func capturedNodes(t *testing.T, driver cuda.Driver, dev cuda.Device) {
	d := newCapturing(t, driver, dev)
	s, err := d.StreamCreate(dev, false)
	must(t, err)
	must(t, d.begin(s))
	next := func(s cuda.Stream) []cuda.GraphNode {
		t.Helper()
		capture, nodes, err := d.StreamCaptureNodes(dev, s)
		must(t, err)
		if _, id, err := d.StreamCapture(dev, s); capture != id || id == 0 || err != nil {
			t.Errorf("capture %d by its nodes, %d by its status, %v", capture, id, err)
		}
		return nodes
	}
	after := func(n cuda.GraphNode) []cuda.GraphNode {
		t.Helper()
		nodes, err := d.GraphNodeDependencies(dev, n)
		must(t, err)
		return nodes
	}
	if n := next(s); len(n) != 0 {
		t.Errorf("before any work: %v", n)
	}
	must(t, d.work(s))
	first := next(s)
	must(t, d.work(s))
	second := next(s)
	if len(first) != 1 || len(second) != 1 || first[0] == second[0] {
		t.Fatalf("%v, then %v", first, second)
	}
	if a, b := after(first[0]), after(second[0]); len(a) != 0 || !slices.Equal(b, first) {
		t.Errorf("the first comes after %v, the second after %v", a, b)
	}
	joins(t, d, dev, s, next, after)
	must(t, d.end(s))
	if capture, nodes, err := d.StreamCaptureNodes(dev, s); capture != 0 || len(nodes) != 0 || err != nil {
		t.Errorf("after the end: capture %d, %v, %v", capture, nodes, err)
	}
	must(t, d.StreamDestroy(dev, s))
}

// joins captures work on a second stream beside work on s, and joins it.
func joins(t *testing.T, d capturing, dev cuda.Device, s cuda.Stream, next func(cuda.Stream) []cuda.GraphNode,
	after func(cuda.GraphNode) []cuda.GraphNode) {
	t.Helper()
	side, err := d.StreamCreate(dev, false)
	must(t, err)
	e, err := d.EventCreate(dev)
	must(t, err)
	order := func(from, to cuda.Stream) {
		t.Helper()
		must(t, d.EventRecord(dev, e, from))
		must(t, d.StreamWaitEvent(dev, to, e))
	}
	order(s, side)
	must(t, d.work(s))
	must(t, d.work(side))
	beside := next(side)
	reaches := func(n cuda.GraphNode) bool {
		todo, found := next(s), false
		for len(todo) > 0 && !found {
			found = todo[0] == n
			todo = append(todo[1:], after(todo[0])...)
		}
		return found
	}
	if len(beside) != 1 || reaches(beside[0]) {
		t.Errorf("the work beside is %v, and before the stream's next work: %v", beside, len(beside) == 1)
	}
	order(side, s)
	if len(beside) == 1 && !reaches(beside[0]) {
		t.Error("after the join the work beside is not before the stream's next work")
	}
	must(t, d.EventDestroy(dev, e))
	t.Cleanup(func() { must(t, d.StreamDestroy(dev, side)) })
}
