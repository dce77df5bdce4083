package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// streamKind is how a stream relates to the legacy default stream of its context.
type streamKind uint8

const (
	streamLegacy      streamKind = iota // waits for all blocking streams, and they for it
	streamBlocking                      // an ordinary stream, and the per-thread default streams
	streamNonBlocking                   // CU_STREAM_NON_BLOCKING
)

// stream is a queue of work. Work is not kept: done is all that time needs to know of it, and the vector clock all
// that order needs.
type stream struct {
	handle cuda.Stream // 0 for those without one
	id     uint64
	ctx    *context
	kind   streamKind
	done   time.Duration // when all work queued so far completes

	rank    int    // place in vector clocks; only with CheckOrder
	seen    vector // work that whatever is queued next comes after
	capture *capture
	branch  int    // index in capture.streams
	nodes   vector // of the capture: nodes that the next one depends on
}

// context is a CUDA context. Streams, events and poison belong to one.
type context struct {
	id         uint64
	device     *device
	legacy     *stream
	perThread  map[uint64]*stream
	done       time.Duration // latest completion of any work
	blocking   time.Duration // the same, of blocking streams
	blockSeen  vector        // work of blocking streams, for the legacy stream
	allSeen    vector        // work of all streams, for synchronisation
	poison     cuda.Code
	captures   []*capture // under way
	primary    bool
	lastThread uint64
	lastStream *stream
}

// Context identifies a context made by NewContext.
type Context uint64

// streamBase and streamStep make handles that look like pointers and are not the special streams 0, 1 and 2.
const (
	streamBase = 0x10000
	streamStep = 0x100
)

// primary is the device's primary context, made where there is none. d.mu is held.
func (d *Driver) primary(dev cuda.Device) *context {
	v := d.devices[dev]
	if v.primary == nil {
		v.primary = d.newContext(v)
		v.primary.primary = true
	}
	return v.primary
}

func (d *Driver) newContext(v *device) *context {
	ctx := &context{id: uint64(len(d.contexts) + 1), device: v}
	ctx.legacy = d.makeStream(ctx, streamLegacy)
	d.contexts = append(d.contexts, ctx)
	v.contexts = append(v.contexts, ctx)
	return ctx
}

func (d *Driver) makeStream(ctx *context, kind streamKind) *stream {
	d.streamID++
	s := &stream{id: d.streamID, ctx: ctx, kind: kind}
	if d.opt.Check >= CheckOrder {
		s.rank = d.order.enter(s.id)
	}
	return s
}

// NewContext makes a further context on the device, as another library in the process may have. It has its own
// streams (NewStreamIn) and default stream, and its own poison.
func (d *Driver) NewContext(dev cuda.Device) Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Context(d.newContext(d.devices[dev]).id)
}

// NewStream makes a stream in the device's primary context (which it makes too, if need be), as the program under
// which the caller runs would: it is no counted call. The stream synchronises with the legacy default stream.
func (d *Driver) NewStream(dev cuda.Device) cuda.Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.newStream(d.primary(dev), streamBlocking)
}

// NewStreamNonBlocking is NewStream without ties to the legacy default stream.
func (d *Driver) NewStreamNonBlocking(dev cuda.Device) cuda.Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.newStream(d.primary(dev), streamNonBlocking)
}

// NewStreamIn makes a stream in a context of NewContext.
func (d *Driver) NewStreamIn(ctx Context, nonBlocking bool) cuda.Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	kind := streamBlocking
	if nonBlocking {
		kind = streamNonBlocking
	}
	return d.newStream(d.contexts[ctx-1], kind)
}

func (d *Driver) newStream(ctx *context, kind streamKind) cuda.Stream {
	s := d.makeStream(ctx, kind)
	var slot uint32
	if n := len(d.freeStr); n > 0 {
		slot = d.freeStr[n-1] // the handle that was given up last comes back first, as with a driver's heap
		d.freeStr = d.freeStr[:n-1]
		d.streams[slot] = s
	} else {
		slot = uint32(len(d.streams))
		d.streams = append(d.streams, s)
	}
	s.handle = streamBase + cuda.Stream(slot)*streamStep
	d.live.streams++
	return s.handle
}

// DestroyStream destroys a stream made by NewStream. Its queued work still completes; its handle is given to a later
// stream, its id is not.
func (d *Driver) DestroyStream(dev cuda.Device, h cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	return d.destroyStream(dev, h)
}

func (d *Driver) destroyStream(dev cuda.Device, h cuda.Stream) error {
	s, slot := d.byHandle(h)
	adopted := d.adopted[h]
	if s == nil && adopted != nil {
		s = adopted
		delete(d.adopted, h)
	}
	if s == nil {
		return d.found(&Fault{Kind: FaultStream, Op: "cuStreamDestroy", Device: dev,
			Detail: "the stream does not exist (any more)", code: cuda.ErrInvalidHandle})
	}
	if s.capture != nil {
		s.capture.invalidate()
		s.capture.leave(s)
	}
	if d.opt.Check >= CheckOrder {
		d.order.retire(s.rank)
	}
	if s == adopted {
		return nil
	}
	d.streams[slot] = nil
	d.freeStr = append(d.freeStr, slot)
	d.live.streams--
	return nil
}

// StreamCreate makes a stream in the device's primary context. What that costs was not measured: programs do it seldom.
func (d *Driver) StreamCreate(dev cuda.Device, blocking bool) (cuda.Stream, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callStreamCreate, dev, 0, 0); err != nil {
		return 0, err
	}
	kind := streamNonBlocking
	if blocking {
		kind = streamBlocking
	}
	return d.newStream(d.devices[dev].primary, kind), nil
}

// StreamDestroy is DestroyStream as a counted call.
func (d *Driver) StreamDestroy(dev cuda.Device, h cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callStreamDestroy, dev, 0, 0); err != nil {
		return err
	}
	return d.destroyStream(dev, h)
}

// StreamBlocking reports whether the stream orders itself with the legacy stream. One that is being captured is not to
// be asked: see nvidia.Driver.StreamBlocking.
func (d *Driver) StreamBlocking(dev cuda.Device, h cuda.Stream) (bool, error) {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamGetFlags, dev, h, d.costs.StreamGetID)
	if err != nil {
		return false, err
	}
	if s.capture != nil && h != cuda.StreamPerThread {
		return false, d.errorOf(callStreamGetFlags, dev, 0, cuda.ErrStreamCaptureUnsupported)
	}
	return s.kind != streamNonBlocking, nil
}

// SetThread gives the driver a way to tell the calling thread, for StreamPerThread: goroutines cannot be distinguished.
// Without it all callers are one thread. f runs with the driver's lock held.
func (d *Driver) SetThread(f func() uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.thread = f
}

// AdoptStreams makes every other handle mean a stream as well: one of the device that it is first named on, made then. It
// is for programs that allocate through Cistern but have no way to make streams here, such as those in C.
func (d *Driver) AdoptStreams() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.adopted == nil {
		d.adopted = map[cuda.Stream]*stream{}
	}
}

func (d *Driver) adopt(dev cuda.Device, h cuda.Stream) *stream {
	s := d.adopted[h]
	if s == nil {
		s = d.makeStream(d.primary(dev), streamNonBlocking)
		s.handle = h
		d.adopted[h] = s
	}
	return s
}

func (d *Driver) byHandle(h cuda.Stream) (*stream, uint32) {
	if h < streamBase || (h-streamBase)%streamStep != 0 {
		return nil, 0
	}
	slot := (h - streamBase) / streamStep
	if slot >= cuda.Stream(len(d.streams)) {
		return nil, 0
	}
	return d.streams[slot], uint32(slot)
}

// resolve is the stream that a handle means in a call on dev; nil where there is none. Handles know their context,
// whatever dev is. d.mu is held.
func (d *Driver) resolve(dev cuda.Device, h cuda.Stream) *stream {
	switch h {
	case cuda.StreamNull, cuda.StreamLegacy:
		return d.primary(dev).legacy
	case cuda.StreamPerThread:
		return d.perThread(d.primary(dev))
	}
	s, _ := d.byHandle(h)
	if s == nil && d.adopted != nil {
		s = d.adopt(dev, h)
	}
	return s
}

func (d *Driver) perThread(ctx *context) *stream {
	var id uint64
	if d.thread != nil {
		id = d.thread()
	}
	if ctx.lastStream != nil && ctx.lastThread == id {
		return ctx.lastStream
	}
	s := ctx.perThread[id]
	if s == nil {
		if ctx.perThread == nil {
			ctx.perThread = map[uint64]*stream{}
		}
		s = d.makeStream(ctx, streamBlocking)
		ctx.perThread[id] = s
	}
	ctx.lastThread, ctx.lastStream = id, s
	return s
}

// ready is when the stream's queue, as it is, will have completed: work queued next starts no earlier.
func (s *stream) ready() time.Duration {
	switch s.kind {
	case streamLegacy:
		return max(s.done, s.ctx.blocking)
	case streamBlocking:
		return max(s.done, s.ctx.legacy.done)
	}
	return s.done
}

// extend notes that work now queued on s completes at t.
func (s *stream) extend(t time.Duration) {
	s.done = t
	s.ctx.done = max(s.ctx.done, t)
	if s.kind == streamBlocking {
		s.ctx.blocking = max(s.ctx.blocking, t)
	}
}

// queue adds work to s that takes the lag, or the given time where that is not negative, and returns when it
// completes. d.mu is held.
func (d *Driver) queue(s *stream, duration time.Duration) time.Duration {
	t := s.ready()
	if duration < 0 {
		if d.opt.Lag > 0 {
			t = max(t, d.clock.read()+d.opt.Lag)
		}
	} else {
		t = max(t, d.clock.read()) + duration
	}
	s.extend(t)
	return t
}

// StreamID identifies a stream.
func (d *Driver) StreamID(dev cuda.Device, h cuda.Stream) (cuda.StreamID, error) {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamGetID, dev, h, d.costs.StreamGetID)
	if err != nil {
		return cuda.StreamID{}, err
	}
	id := s.id
	if s.capture != nil {
		id = 1<<63 | s.capture.id<<32 | s.id // as the real one must: see nvidia.Driver.StreamID
	}
	return cuda.StreamID{Context: s.ctx.id, ID: id}, nil
}

// streamCall begins a call on a stream. A stream that was destroyed is a fault: the real driver's behaviour is
// undefined.
func (d *Driver) streamCall(c call, dev cuda.Device, h cuda.Stream, cost time.Duration) (*stream, error) {
	if err := d.beginContext(c, dev, 0, cost); err != nil {
		return nil, err
	}
	s := d.resolve(dev, h)
	if s == nil {
		return nil, d.found(&Fault{Kind: FaultStream, Op: callNames[c], Device: dev,
			Detail: "the stream does not exist (any more)", code: cuda.ErrInvalidHandle})
	}
	if s.ctx.poison != cuda.Success {
		return nil, d.errorOf(c, dev, 0, s.ctx.poison)
	}
	return s, nil
}

// StreamSynchronize waits, in virtual time, until the stream's work is done.
func (d *Driver) StreamSynchronize(dev cuda.Device, h cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamSynchronize, dev, h, d.costs.StreamSynchronize)
	if err != nil {
		return err
	}
	d.streamSyncs++
	if code := s.forbidden(); code != cuda.Success {
		return d.captureError(callStreamSynchronize, dev, code)
	}
	d.waitFor(d.behind(s.ready()))
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		d.hostSaw(s.seen)
	}
	d.shrinkPools(callStreamSynchronize)
	return nil
}

// ContextSynchronize waits, in virtual time, until all work of the primary context is done.
func (d *Driver) ContextSynchronize(dev cuda.Device) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callCtxSynchronize, dev, 0, d.costs.CtxSynchronize); err != nil {
		return err
	}
	d.deviceSyncs++
	ctx := d.devices[dev].primary
	if len(ctx.captures) > 0 {
		for _, c := range ctx.captures {
			c.invalidate()
		}
		return d.captureError(callCtxSynchronize, dev, cuda.ErrStreamCaptureUnsupported)
	}
	d.drain(ctx)
	if d.opt.Check >= CheckOrder {
		d.hostSaw(ctx.allSeen)
	}
	d.shrinkPools(callCtxSynchronize)
	return nil
}

// drain waits for all work of contexts.
func (d *Driver) drain(ctxs ...*context) {
	var t time.Duration
	for _, ctx := range ctxs {
		t = max(t, ctx.done)
	}
	d.waitFor(d.behind(t))
}

// behind is t, when known work completes, or later where streams are taken to be always busy.
func (d *Driver) behind(t time.Duration) time.Duration {
	if d.opt.Busy {
		return max(t, d.clock.read()+d.opt.Lag)
	}
	return t
}
