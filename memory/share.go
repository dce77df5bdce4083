package memory

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// ErrNotExported is what errors.Is finds where an export has ended, or never was.
var ErrNotExported = errors.New("not shared any more")

// Shared is what another process must know of an export besides the descriptors.
type Shared struct {
	UUID   [16]byte      // of the device that the memory lies on
	Size   uint64        // of the block in bytes, rounded
	Offset uint64        // of the block within the chunks, or the segment
	Chunks []SharedChunk // in address order; none where IPC is used
	IPC    cuda.IpcHandle
	// Pool is what the segment is called in a pool of stream-ordered memory; zero where it is not of one. The descriptor of its one
	// chunk is the pool's then.
	Pool cuda.PoolPtr
	// ReadOnly has the memory mapped such that work here only reads it. It holds for chunks alone.
	ReadOnly bool
}

// SharedChunk is a chunk of an export.
type SharedChunk struct {
	Size   uint64 // bytes
	Serial uint64 // names the memory among the device's, as the exporting process counts; never reused
}
