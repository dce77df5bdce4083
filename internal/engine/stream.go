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
	dev *Device
	// index is the stream's place in Device.streams, -1 while the device does not know it. Changed by holders of Device.mu.
	index    atomic.Int32
	timeline timeline.Stream
	route    atomic.Pointer[Pool] // set by setRoute
	// +checklocks:dev.mu
	active bool // it has allocated
	// +checklocks:dev.mu
	routes []route // those not ended; the last one counts
	// +checklocks:dev.mu
	order *timeline.GraphOrder // while it is captured; nil until it is needed
}

// Handle is the CUDA handle that the stream was made known by.
func (t *Stream) Handle() cuda.Stream { return t.timeline.Handle() }

// ID identifies the stream for the life of the process.
func (t *Stream) ID() cuda.StreamID { return t.timeline.ID() }

// Device is the device the stream belongs to.
func (t *Stream) Device() *Device { return t.dev }

// Stream makes a CUDA stream known to the device. Look a stream up once and keep the result: the look-up asks the
// driver for the stream's id. The per-thread default stream is the calling thread's.
func (d *Device) Stream(h cuda.Stream, opts ...config.StreamOption) (*Stream, error) {
	var o config.StreamOption
	for _, x := range opts {
		o |= x
	}
	if t := d.capturedStream(h); t != nil {
		t.qualify(o)
		return t, nil
	}
	id, err := d.drv.StreamID(d.id, h)
	if err != nil {
		return nil, d.health.Failed(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.byID[id] == nil {
		d.retire()
	}
	t := d.byID[id]
	if t == nil {
		if t = d.gone[id].Value(); t == nil {
			t = d.newStream(id, h)
		}
		d.enlist(t)
	}
	t.qualify(o)
	return t, nil
}

// qualify notes what a caller promises of a stream that is known.
func (t *Stream) qualify(o config.StreamOption) {
	if o&config.StreamDurable != 0 {
		t.timeline.SetDurable(true)
	}
}

// capturedStream is the stream of that handle whose capture is announced, nil if there is none. It exists until the capture
// ends, and until then the driver may give it another id (cuda.Driver.StreamID).
func (d *Device) capturedStream(h cuda.Stream) *Stream {
	if h == cuda.StreamPerThread || !d.timeline.Gate().Announced() {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.capturing {
		if t.Handle() == h {
			return t
		}
	}
	return nil
}

func (d *Device) newStream(id cuda.StreamID, h cuda.Stream) *Stream {
	t := &Stream{dev: d}
	t.timeline.Init(d.timeline, id, h)
	t.index.Store(-1)
	return t
}

// number is by what events name the stream.
//
// +checklocks:t.dev.mu
func (t *Stream) number() uint32 { return uint32(t.index.Load()) }
