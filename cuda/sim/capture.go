package sim

import (
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// What captures answer to each call, and which calls spoil them, was measured on an H200 with driver 580; the codes
// are the same here.

// capture is a stream capture, under way or ended. Streams join it by waiting for its events.
type capture struct {
	id      uint64
	origin  *stream
	streams []*stream
	status  cuda.CaptureStatus
	ended   bool
	nodes   []node
	byMark  map[mark]int       // indices in nodes, by branch and number there
	uses    map[*chunk]*ranges // order within the graph, with CheckOrder
}

// node is work in a graph.
type node struct {
	after      vector // nodes that it comes after
	dev        cuda.Device
	addr, size uint64
	duration   time.Duration
	read       bool
	seqs       []uint64 // of the regions that held the memory when it was captured
}

// invalidate spoils a capture under way: it goes on to be ended, but gives no graph.
func (c *capture) invalidate() {
	if !c.ended {
		c.status = cuda.CaptureInvalidated
	}
}

// observed is the code for querying or waiting for an event of the capture, which spoils it. The events of a capture
// that has ended mean nothing until they are recorded again.
func (c *capture) observed() cuda.Code {
	if c.ended {
		return cuda.ErrInvalidValue
	}
	c.invalidate()
	return cuda.ErrCapturedEvent
}

// leave takes a stream out of the capture.
func (c *capture) leave(s *stream) {
	s.capture = nil
	s.nodes = s.nodes[:0]
	for _, o := range c.streams {
		if o.ctx == s.ctx && o != s && o.capture == c {
			return
		}
	}
	s.ctx.captures = slices.DeleteFunc(s.ctx.captures, func(o *capture) bool { return o == c })
}

// join draws a stream in.
func (c *capture) join(s *stream) {
	s.capture = c
	s.branch = len(c.streams)
	s.nodes = s.nodes[:0]
	c.streams = append(c.streams, s)
	if !slices.Contains(s.ctx.captures, c) {
		s.ctx.captures = append(s.ctx.captures, c)
	}
}

// implicit is the code for queueing something on s in the light of captures: an invalidated capture fails it, and
// the legacy default stream cannot be used while a blocking stream captures, and spoils the capture.
func (s *stream) implicit() cuda.Code {
	if s.capture != nil {
		if s.capture.status == cuda.CaptureInvalidated {
			return cuda.ErrStreamCaptureInvalidated
		}
		return cuda.Success
	}
	if s.kind != streamLegacy {
		return cuda.Success
	}
	code := cuda.Success
	for _, c := range s.ctx.captures {
		if c.blocking(s.ctx) {
			c.invalidate()
			code = cuda.ErrStreamCaptureImplicit
		}
	}
	return code
}

// blocking reports whether a blocking stream of the context takes part.
func (c *capture) blocking(ctx *context) bool {
	for _, s := range c.streams {
		if s.capture == c && s.ctx == ctx && s.kind == streamBlocking {
			return true
		}
	}
	return false
}

// forbidden is the code for waiting for s: not while it is captured, which spoils the capture.
func (s *stream) forbidden() cuda.Code {
	if s.capture != nil {
		s.capture.invalidate()
		return cuda.ErrStreamCaptureUnsupported
	}
	return s.implicit()
}

// waitCaptured is StreamWaitEvent where s or e has to do with a capture.
func (s *stream) waitCaptured(e *event) cuda.Code {
	if code := s.implicit(); code != cuda.Success {
		return code
	}
	switch {
	case e.capture == nil && s.capture == nil:
		return cuda.Success
	case e.capture == nil:
		if !e.recorded {
			return cuda.Success
		}
		s.capture.invalidate()
		return cuda.ErrStreamCaptureIsolation
	case e.capture.ended:
		return cuda.ErrInvalidValue
	case e.capture.status == cuda.CaptureInvalidated:
		return cuda.ErrStreamCaptureInvalidated
	case s.kind == streamLegacy:
		e.capture.invalidate()
		return cuda.ErrStreamCaptureImplicit
	case s.capture == nil:
		e.capture.join(s)
	case s.capture != e.capture:
		s.capture.invalidate()
		e.capture.invalidate()
		return cuda.ErrStreamCaptureMerge
	}
	s.nodes.join(e.nodes)
	return cuda.Success
}

// captureError is the error of a driver call that a capture forbids. A call that spoilt the capture is a fault: the
// program would learn of it only at the end of its capture, and not from which call.
func (d *Driver) captureError(c call, dev cuda.Device, code cuda.Code) error {
	if d.opt.Check == CheckNone || code == cuda.ErrStreamCaptureInvalidated || code == cuda.ErrInvalidValue {
		return d.errorOf(c, dev, 0, code)
	}
	return d.found(&Fault{Kind: FaultCapture, Op: callNames[c], Device: dev, code: code,
		Detail: "the call is forbidden during the capture and has invalidated it"})
}

// BeginCapture begins to capture the stream (cuStreamBeginCapture, relaxed mode), as the program under which the
// caller runs would: it is no counted call.
func (d *Driver) BeginCapture(dev cuda.Device, h cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	const op = "cuStreamBeginCapture"
	s := d.resolve(dev, h)
	switch {
	case s == nil:
		return &cuda.Error{Op: op, Device: dev, Code: cuda.ErrInvalidHandle}
	case s.kind == streamLegacy:
		return &cuda.Error{Op: op, Device: dev, Code: cuda.ErrStreamCaptureUnsupported}
	case s.capture != nil:
		return &cuda.Error{Op: op, Device: dev, Code: cuda.ErrIllegalState}
	}
	d.captures++
	c := &capture{id: d.captures, origin: s, status: cuda.CaptureActive, byMark: map[mark]int{}}
	if d.opt.Check >= CheckOrder {
		c.uses = map[*chunk]*ranges{}
	}
	c.join(s)
	return nil
}

// EndCapture ends the capture that began on the stream. A capture that was spoilt, or that has streams whose work was
// not joined to the first, gives no graph.
func (d *Driver) EndCapture(dev cuda.Device, h cuda.Stream) (*Graph, error) {
	d.mu.Lock()
	defer d.leave()
	const op = "cuStreamEndCapture"
	s := d.resolve(dev, h)
	if s == nil {
		return nil, &cuda.Error{Op: op, Device: dev, Code: cuda.ErrInvalidHandle}
	}
	c := s.capture
	if c == nil {
		return nil, &cuda.Error{Op: op, Device: dev, Code: cuda.ErrIllegalState}
	}
	if c.origin != s {
		c.invalidate()
		return nil, &cuda.Error{Op: op, Device: dev, Code: cuda.ErrStreamCaptureUnmatched}
	}
	code := cuda.Success
	for i, o := range c.streams {
		if i < len(o.nodes) && o.capture == c && !s.nodes.covers(mark{i, o.nodes[i]}) {
			code = cuda.ErrStreamCaptureUnjoined
		}
	}
	if c.status == cuda.CaptureInvalidated {
		code = cuda.ErrStreamCaptureInvalidated
	}
	for _, o := range c.streams {
		if o.capture == c {
			c.leave(o)
		}
	}
	c.ended = true
	c.uses = nil
	if code != cuda.Success {
		c.status = cuda.CaptureInvalidated
		return nil, &cuda.Error{Op: op, Device: dev, Code: code}
	}
	return &Graph{d: d, nodes: c.nodes, id: c.id}, nil
}

// CaptureID is the capture that the stream takes part in, 0 for none. Unlike StreamCapture it is no counted call.
func (d *Driver) CaptureID(dev cuda.Device, h cuda.Stream) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.resolve(dev, h); s != nil && s.capture != nil {
		return s.capture.id
	}
	return 0
}

// StreamCapture reports whether the stream is being captured. As with the real call, asking the legacy default
// stream while a blocking stream of its context captures fails, without harm to the capture.
func (d *Driver) StreamCapture(dev cuda.Device, h cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamGetCaptureInfo, dev, h, d.costs.StreamGetCaptureInfo)
	if err != nil {
		return 0, 0, err
	}
	if s.capture != nil {
		return s.capture.status, s.capture.id, nil
	}
	if s.kind == streamLegacy {
		for _, c := range s.ctx.captures {
			if c.blocking(s.ctx) {
				return 0, 0, d.errorOf(callStreamGetCaptureInfo, dev, 0, cuda.ErrStreamCaptureImplicit)
			}
		}
	}
	return cuda.CaptureNone, 0, nil
}

// StreamCaptureNodes names the capture that the stream is in, and the nodes that come before what it does next.
func (d *Driver) StreamCaptureNodes(dev cuda.Device, h cuda.Stream) (uint64, []cuda.GraphNode, error) {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamGetCaptureInfo, dev, h, d.costs.StreamGetCaptureInfo)
	if err != nil || s.capture == nil || s.capture.status != cuda.CaptureActive {
		return 0, nil, err
	}
	return s.capture.id, s.capture.named(s.nodes), nil
}

// GraphNodeDependencies are the nodes that a node of a capture under way comes after.
func (d *Driver) GraphNodeDependencies(dev cuda.Device, n cuda.GraphNode) ([]cuda.GraphNode, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callGraphNodeGetDependencies, dev, 0, d.costs.StreamGetCaptureInfo); err != nil {
		return nil, err
	}
	for _, ctx := range d.contexts {
		for _, c := range ctx.captures {
			if i := uint64(n & maxNode); c.id == uint64(n>>nodeBits) && i < uint64(len(c.nodes)) {
				return c.named(c.nodes[i].after), nil
			}
		}
	}
	return nil, d.errorOf(callGraphNodeGetDependencies, dev, 0, cuda.ErrInvalidValue)
}

// A node's name outside is the capture's number and its index there.
const (
	nodeBits = 32
	maxNode  = 1<<nodeBits - 1
)

// named are the names of the last nodes of each branch that a vector knows, without those that come before others of them.
func (c *capture) named(v vector) []cuda.GraphNode {
	var out []cuda.GraphNode
	for branch, n := range v {
		m := mark{branch, n}
		before := n == 0
		for other, n := range v {
			before = before || other != branch && n > 0 && c.nodes[c.byMark[mark{other, n}]].after.covers(m)
		}
		if !before {
			out = append(out, cuda.GraphNode(c.id)<<nodeBits|cuda.GraphNode(c.byMark[m]))
		}
	}
	return out
}

// capturedWork adds a node to the capture of s.
func (d *Driver) capturedWork(s *stream, dev cuda.Device, addr, size uint64, duration time.Duration, read bool) error {
	c := s.capture
	n := node{after: slices.Clone(s.nodes), dev: dev, addr: addr, size: size, duration: duration, read: read}
	var before uint64
	if s.branch < len(s.nodes) {
		before = s.nodes[s.branch]
	}
	m := mark{s.branch, before + 1}
	s.nodes.set(m.rank, m.n)
	var bad *Fault
	if d.opt.Check >= CheckUse && size != 0 {
		f := d.mapped(dev, addr, size, launch)
		if f == nil && !read {
			f = d.readOnly(dev, addr, size, launch)
		}
		if f != nil {
			f.Stream = s.id
			return d.found(f)
		}
		for p := addr; p < addr+size; {
			k, r := d.regionAt(p)
			n.seqs = append(n.seqs, r.seq)
			hi := min(addr+size, r.base+r.size)
			if d.opt.Check >= CheckOrder {
				uses := c.uses[k.chunk]
				if uses == nil {
					uses = &ranges{hi: k.chunk.size}
					c.uses[k.chunk] = uses
				}
				if old, clash := uses.touch(p-k.base, hi-k.base, m, read, s.nodes, nil); clash && bad == nil {
					bad = &Fault{Kind: FaultRace, Op: launch, Device: dev, Stream: s.id, Addr: addr, Size: size, at: p,
						chunk: k.chunk, off: p - k.base, Detail: "within a capture, not ordered after a use of the " +
							"same bytes on stream " + itoa(c.streams[old.rank].id)}
				}
			}
			p = hi
		}
	}
	c.byMark[m] = len(c.nodes)
	c.nodes = append(c.nodes, n)
	return d.found(bad)
}

// Graph is work that was captured, to be launched any number of times at the addresses that it was captured with.
type Graph struct {
	d     *Driver
	id    uint64
	nodes []node
}

// ID is the id of the capture that made the graph.
func (g *Graph) ID() uint64 { return g.id }

// Nodes is the number of pieces of work in the graph.
func (g *Graph) Nodes() int { return len(g.nodes) }

// Check reports, as a fault, memory of the graph that is not mapped any more or was mapped anew since the capture: a
// launch would touch what is now someone else's.
func (g *Graph) Check() error {
	g.d.mu.Lock()
	defer g.d.leave()
	return g.d.found(g.changed())
}

func (g *Graph) changed() *Fault {
	d := g.d
	if d.opt.Check < CheckUse {
		return nil
	}
	const op = "cuGraphLaunch"
	for _, n := range g.nodes {
		if f := d.mapped(n.dev, n.addr, n.size, op); f != nil && n.size != 0 {
			f.Kind = FaultGraph
			return f
		}
		i := 0
		for p := n.addr; p < n.addr+n.size; i++ {
			m, r := d.regionAt(p)
			if i >= len(n.seqs) || r.seq != n.seqs[i] {
				return &Fault{Kind: FaultGraph, Op: op, Device: n.dev, Addr: n.addr, Size: n.size, at: p,
					chunk: m.chunk, off: p - m.base, Detail: "the memory was given back and mapped anew since the capture"}
			}
			p = r.base + r.size
		}
	}
	return nil
}

// Launch queues the graph's work on the stream as one piece.
func (g *Graph) Launch(dev cuda.Device, h cuda.Stream) error {
	d := g.d
	d.mu.Lock()
	defer d.leave()
	s, err := d.launchOn(dev, h)
	if err != nil {
		return err
	}
	if s.capture != nil {
		s.capture.invalidate()
		return &cuda.Error{Op: "cuGraphLaunch", Device: dev, Code: cuda.ErrStreamCaptureUnsupported}
	}
	if f := g.changed(); f != nil {
		f.Stream = s.id
		return d.found(f)
	}
	duration := lagged
	for _, n := range g.nodes {
		if n.duration >= 0 {
			duration = max(duration, 0) + n.duration
		}
	}
	t := d.queue(s, duration)
	if d.opt.Check == CheckNone {
		return nil
	}
	var m mark
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		m = d.order.next(s)
	}
	var first *Fault
	for _, n := range g.nodes {
		if f := d.touch(s, n.dev, n.addr, n.size, t, m, n.read, "cuGraphLaunch"); f != nil && first == nil {
			first = f
		}
	}
	return d.found(first)
}
