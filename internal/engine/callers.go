package engine

import "runtime"

// Stacks of requests that name none. The engine finds them out for Go programs whose settings say stacks:native. Other callers,
// such as the C library, find out the stacks of their programs themselves.

// Catch sets the function (nil: none) that finds out the stack of a request that names none, by the request's size: a number
// from Of, or 0. It is called before the request is looked at, with no lock held. Settings that say stacks:native begin with
// one that takes the stacks of Go programs (GoFrames), of as many requests as stack_sample says.
//
// A program that passes stacks, and 0 where a request is to have none, sets nil. Requests through Magazines.Alloc are not
// caught.
func (sk *Stacks) Catch(f func(size uint64) uint32) {
	sk.a.mu.Lock()
	defer sk.a.mu.Unlock()
	sk.a.catch = nil
	if f != nil {
		sk.a.catch = &f
	}
	sk.a.started(func(d *Device) error {
		d.catch.Store(sk.a.catch)
		return nil
	})
}

// GoFrames are the functions and lines of a stack of a Go program, innermost first, as the engine caught it.
func (sk *Stacks) GoFrames(stack uint32) []runtime.Frame { return sk.table.GoFrames(stack) }
