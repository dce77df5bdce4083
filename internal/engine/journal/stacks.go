package journal

import (
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/stacks"
)

// Stacks numbers the stacks of an allocator's requests.
type Stacks struct {
	stacks.Table
	Sample uint64                        // Go catches requests of at least so many bytes, and of smaller ones a share by their size
	known  [1 << knownBits]atomic.Uint64 // program counters and whether they are own
}

// goFrames is how many frames of a Go program's stack are kept.
const goFrames = 64

// knownBits is the logarithm of how many frames own remembers.
const knownBits = 8

// Go is the stack of a Go program's request: of the function that called the module. It is 0 for requests that are not among
// the sample.
func (s *Stacks) Go(size uint64) uint32 {
	if size == 0 || size < s.Sample && rand.Uint64N(s.Sample) >= size {
		return 0
	}
	var pcs [goFrames]uintptr
	var frames [goFrames]uint64
	n := runtime.Callers(2, pcs[:]) // without itself and this function
	first := 0
	for first < n && s.own(pcs[first]) {
		first++
	}
	for i, pc := range pcs[first:n] {
		frames[i] = uint64(pc)
	}
	return s.Of(frames[:n-first])
}

// own reports whether a frame is a function of the Go API, or of the engine behind it. How many of these there are depends on
// the function that the program called. The answer is kept under the frame's program counter: to find a name takes longer than
// to take the stack.
func (s *Stacks) own(pc uintptr) bool {
	const mine = 1
	at := &s.known[uint64(pc)*0x9e3779b97f4a7c15>>(64-knownBits)]
	if k := at.Load(); k>>1 == uint64(pc) {
		return k&mine != 0
	}
	k := uint64(pc) << 1
	if ownFunction(runtime.FuncForPC(pc - 1).Name()) { // pc is where the call returns to
		k |= mine
	}
	at.Store(k)
	return k&mine != 0
}

// The names of functions of the engine and of the module's root begin with these. Those of their external tests do not: a "_"
// follows the path of the package.
var (
	enginePath      = strings.TrimSuffix(reflect.TypeFor[Stacks]().PkgPath(), "/journal")
	engineFunctions = enginePath + "."
	rootFunctions   = strings.TrimSuffix(enginePath, "/internal/engine") + "."
)

func ownFunction(name string) bool {
	return strings.HasPrefix(name, rootFunctions) || strings.HasPrefix(name, engineFunctions)
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
