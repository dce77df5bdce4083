package cistern

import (
	"math/rand/v2"
	"runtime"
)

// Stacks of requests that name none. The engine finds them out for Go programs whose settings say stacks:native; where
// others call it, as the C library does, whose callers are no Go code, it is they who know.

// CatchStacks sets the function (nil: none) that finds out the stack of a request that names none, by the request's size:
// a number from StackOf, or 0. It is called before the request is looked at, with no lock held, directly by the function of
// this package that the program called. Settings that say stacks:native begin with one that takes the stacks of Go
// programs (GoFrames) of as many requests as stack_sample says.
//
// Who passes stacks, and 0 where a request is to have none, sets nil. Requests through C code in front of the engine
// (AllocFront) are not caught.
func (a *Allocator) CatchStacks(f func(size uint64) uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.catch = nil
	if f != nil {
		a.catch = &f
	}
	a.started(func(d *Device) error {
		d.catch.Store(a.catch)
		return nil
	})
}

// goFrames is how many frames of a Go program's stack are kept.
const goFrames = 64

// goStack is the stack of a Go program's request, or 0 where it is not one of those that are caught.
func (a *Allocator) goStack(size uint64) uint32 {
	if !sampled(size, a.opts.StackSample) {
		return 0
	}
	var pcs [goFrames]uintptr
	var frames [goFrames]uint64
	n := runtime.Callers(3, pcs[:]) // beside itself, this function and the one that called it
	for i, pc := range pcs[:n] {
		frames[i] = uint64(pc)
	}
	return a.stacks.Of(frames[:n])
}

// sampled reports whether a request is caught (Options.StackSample).
func sampled(size, sample uint64) bool {
	return size != 0 && (size >= sample || rand.Uint64N(sample) < size)
}

// GoFrames are the functions and lines of a stack of a Go program, innermost first, as the engine caught it.
func (a *Allocator) GoFrames(stack uint32) []runtime.Frame {
	var pcs []uintptr
	for _, f := range a.StackFrames(stack) {
		pcs = append(pcs, uintptr(f))
	}
	if len(pcs) == 0 {
		return nil
	}
	var out []runtime.Frame
	list := runtime.CallersFrames(pcs)
	for {
		f, more := list.Next()
		out = append(out, f)
		if !more {
			return out
		}
	}
}
