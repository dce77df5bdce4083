package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Stream is a CUDA stream that a device knows, by context and id. A stream with a handle that was used before is another
// Stream. It is valid for as long as the program has it.
type Stream struct{ engine *engine.Stream }

// Stream returns a CUDA stream of the device by its handle. Call it once for a stream and keep the result: it asks the
// driver for the stream's id. The per-thread default stream is that of the calling thread.
func (d Device) Stream(h cuda.Stream, opts ...StreamOption) (Stream, error) {
	st, err := d.engine.Stream(h, opts...)
	return Stream{st}, err
}

// Streams are the streams that the device knows, by index: the numbers of Segment.Stream and event.Event.Stream. The index
// of a stream that may have been destroyed is reused, but not while an event of the history names it.
func (d Device) Streams() []Stream {
	var out []Stream
	for _, st := range d.engine.Views.Streams() {
		out = append(out, Stream{st})
	}
	return out
}

// Handle is the CUDA handle that Device.Stream was called with.
func (st Stream) Handle() cuda.Stream { return st.engine.Handle() }

// ID identifies the stream for the life of the process.
func (st Stream) ID() cuda.StreamID { return st.engine.ID() }

// Device is the device of the stream.
func (st Stream) Device() Device { return Device{st.engine.Device()} }
