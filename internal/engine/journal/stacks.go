package journal

import (
	"math/rand/v2"
	"runtime"

	"github.com/cistern-gpu/cistern/internal/stacks"
)

// Stacks numbers the stacks of an allocator's requests.
type Stacks struct {
	stacks.Table
	Sample uint64 // Go catches requests of at least so many bytes, and of smaller ones a share by their size
}

// goFrames is how many frames of a Go program's stack are kept.
const goFrames = 64

// Go is the stack of a Go program's request: of the caller of the function that called it. It is 0 for requests that are not
// among the sample.
func (s *Stacks) Go(size uint64) uint32 {
	if size == 0 || size < s.Sample && rand.Uint64N(s.Sample) >= size {
		return 0
	}
	var pcs [goFrames]uintptr
	var frames [goFrames]uint64
	n := runtime.Callers(3, pcs[:]) // beside itself, this function and the one that called it
	for i, pc := range pcs[:n] {
		frames[i] = uint64(pc)
	}
	return s.Of(frames[:n])
}

// GoFrames are the functions and lines of a stack that Go caught, innermost first.
func (s *Stacks) GoFrames(stack uint32) (out []runtime.Frame) {
	var pcs []uintptr
	for _, f := range s.Frames(stack) {
		pcs = append(pcs, uintptr(f))
	}
	if len(pcs) == 0 {
		return nil
	}
	list := runtime.CallersFrames(pcs)
	for {
		f, more := list.Next()
		out = append(out, f)
		if !more {
			return out
		}
	}
}
