package engine

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
)

// Stream is a CUDA stream that the engine knows: by context and id, so that a recycled handle is another Stream. It is valid
// for as long as the program has it. The engine itself forgets a stream that may have been destroyed and that nothing
// depends on any more (retire.go); its next use makes it known again.
type Stream struct {
	gpu *gpu
	// index is the stream's place in streamTable.all, -1 while the device does not know it. Changed by holders of Device.mu.
	index    atomic.Int32
	timeline timeline.Stream
	route    atomic.Pointer[Pool] // set by setRoute
	// +checklocks:gpu.mu
	active bool // it has allocated
	// +checklocks:gpu.mu
	routes []route // those not ended; the last one counts
	// +checklocks:gpu.mu
	order *timeline.GraphOrder // while it is captured; nil until it is needed
}

// Handle is the CUDA handle that the stream was made known by.
func (t *Stream) Handle() cuda.Stream { return t.timeline.Queue.Handle() }

// ID identifies the stream for the life of the process.
func (t *Stream) ID() cuda.StreamID { return t.timeline.Queue.ID() }

// Device is the device the stream belongs to.
func (t *Stream) Device() *Device { return t.gpu.a.devices[t.gpu.id].Load() }

// stream is Device.Stream.
func (lu *lookup) stream(h cuda.Stream, opts ...config.StreamOption) (*Stream, error) {
	var o config.StreamOption
	for _, x := range opts {
		o |= x
	}
	if t := lu.capturedStream(h); t != nil {
		t.qualify(o)
		return t, nil
	}
	id, err := lu.gpu.drv.StreamID(lu.gpu.id, h)
	if err != nil {
		return nil, lu.gpu.health.Failed(err)
	}
	lu.gpu.mu.Lock()
	defer lu.gpu.mu.Unlock()
	if lu.streams.byID[id] == nil {
		lu.endings.retire()
	}
	t := lu.streams.byID[id]
	if t == nil {
		if t = lu.streams.gone[id].Value(); t == nil {
			t = lu.streams.make(id, h)
		}
		lu.streams.enlist(t)
	}
	t.qualify(o)
	return t, nil
}

// qualify notes what a caller promises of a stream that is known.
func (t *Stream) qualify(o config.StreamOption) {
	if o&config.StreamDurable != 0 {
		t.timeline.Queue.SetDurable(true)
	}
}

// capturedStream is the stream of that handle whose capture is announced, nil if there is none. It exists until the capture
// ends, and until then the driver may give it another id (cuda.Driver.StreamID).
func (lu *lookup) capturedStream(h cuda.Stream) *Stream {
	if h == cuda.StreamPerThread || !lu.gpu.timeline.Gate().Announced() {
		return nil
	}
	lu.gpu.mu.Lock()
	defer lu.gpu.mu.Unlock()
	for _, t := range lu.streams.capturing {
		if t.Handle() == h {
			return t
		}
	}
	return nil
}

func (ss *streamTable) make(id cuda.StreamID, h cuda.Stream) *Stream {
	t := &Stream{gpu: ss.gpu}
	t.timeline.Init(ss.gpu.timeline, id, h)
	t.index.Store(-1)
	return t
}

// number is by what events name the stream.
//
// +checklocks:t.gpu.mu
func (t *Stream) number() uint32 { return uint32(t.index.Load()) }

// Stream makes a CUDA stream known to the device. Look a stream up once and keep the result: the look-up asks the driver for
// the stream's id. The per-thread default stream is the calling thread's.
func (d *Device) Stream(h cuda.Stream, opts ...config.StreamOption) (*Stream, error) {
	return d.state.lookup.stream(h, opts...)
}
