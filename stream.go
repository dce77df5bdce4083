package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Stream is a CUDA stream that a device knows, by context and id. A stream with a handle that was used before is another
// Stream. It is valid for as long as the program has it.
type Stream struct{ engine *engine.Stream }

// Stream makes a CUDA stream known to the device. Look a stream up once and keep the result: the look-up asks the driver for
// the stream's id. The per-thread default stream is that of the calling thread.
func (d Device) Stream(h cuda.Stream, opts ...StreamOption) (Stream, error) {
	st, err := d.engine.Stream(h, opts...)
	return Stream{st}, err
}

// Streams are the streams that the device knows, by index: the numbers of Segment.Stream and event.Event.Stream. The index of a
// stream that may have been destroyed is given to another in time, but not while the history names it.
func (d Device) Streams() []Stream {
	var out []Stream
	for _, st := range d.engine.Views.Streams() {
		out = append(out, Stream{st})
	}
	return out
}

// Handle is the CUDA handle that the stream was made known by.
func (st Stream) Handle() cuda.Stream { return st.engine.Handle() }

// ID identifies the stream for the life of the process.
func (st Stream) ID() cuda.StreamID { return st.engine.ID() }

// Device is the device of the stream.
func (st Stream) Device() Device { return Device{st.engine.Device()} }
