package config

// StreamOption qualifies a stream when it is made known to a device.
type StreamOption uint8

const (
	// StreamDurable promises that the stream is not destroyed while the allocator is in use, as PyTorch's pooled streams
	// are not. Its frees then need no event of their own.
	StreamDurable StreamOption = 1 << iota
)
