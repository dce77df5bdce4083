// Package stackspace makes space on the stack of a goroutine.
//
// A goroutine that C called into runs on a stack of a few KiB, on a thread of the program's. The kernel puts the frame of a
// signal whose handler lacks SA_ONSTACK on the stack that is in use, and the handler runs below it: where there is no space
// they overwrite whatever lies there. Stacks grow at the entry of functions, to what their frames need; so a function with a
// large frame leaves space behind.
package stackspace

// Bytes is how much space there is below the caller of Make once that has returned, until the stack shrinks. Stacks never do
// in a program that is linked with -X=runtime.godebugDefault=gcshrinkstackoff=1.
const Bytes = 224 << 10

// Make makes space on the stack of the calling goroutine. It touches none of it.
func Make()
