package resource

import (
	"fmt"
	"runtime"
	"sort"
	"strings"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// Outstanding is memory that is out through a TrackingAdaptor.
type Outstanding struct {
	Ptr    cuda.Ptr
	Size   uint64 // bytes
	Align  uint64 // bytes
	Stream cuda.Stream
	Serial uint64 // counts allocations, from 1
	Stack  string // where it was allocated, a frame a line, where stacks are kept
}

// FreeError is memory given back that is not out: freed before, never allocated here, or of another size. Nothing was
// done with it.
type FreeError struct {
	Ptr  cuda.Ptr
	Size uint64 // bytes that were said
	// Reason is "double free", "unknown pointer" or "wrong size".
	Reason string
	// Allocated is the size that it was allocated with, where that is known, and Stack where it was freed, or with a
	// wrong size where it was allocated, if stacks are kept.
	Allocated uint64
	Stack     string
}

func (e *FreeError) Error() string {
	s := fmt.Sprintf("free of %d bytes at %#x: %s", e.Size, uint64(e.Ptr), e.Reason)
	if e.Reason == wrongSize {
		s += fmt.Sprintf(" (it was allocated with %d)", e.Allocated)
	}
	if frame, _, _ := strings.Cut(e.Stack, "\n"); frame != "" {
		s += map[string]string{doubleFree: "; freed at ", wrongSize: "; allocated at "}[e.Reason] + frame
	}
	return s
}

const (
	doubleFree = "double free"
	unknown    = "unknown pointer"
	wrongSize  = "wrong size"
	// freedKept is how many addresses that were freed are remembered.
	freedKept = 4096
	// depth is how many frames of a stack are kept.
	depth = 32
)

// TrackingAdaptor keeps a list of what is out, as RMM's tracking_resource_adaptor, with stacks where wanted. Unlike
// RMM's, which logs it, it refuses to free what is not out, and says why.
type TrackingAdaptor struct {
	adaptor
	stacks bool

	mu   sync.Mutex
	live map[cuda.Ptr]tracked // +checklocks:mu
	// +checklocks:mu
	freed map[cuda.Ptr]tracked // with where they were freed
	// +checklocks:mu
	order  []cuda.Ptr // of freed, a ring of freedKept
	next   int        // +checklocks:mu
	bytes  uint64     // +checklocks:mu
	serial uint64     // +checklocks:mu
}

type tracked struct {
	size, align uint64
	stream      cuda.Stream
	serial      uint64
	stack       []uintptr
}

// Tracking makes that adaptor. Stacks cost a microsecond a call.
func Tracking(up Resource, stacks bool) *TrackingAdaptor {
	return &TrackingAdaptor{adaptor: adaptor{up}, stacks: stacks, live: map[cuda.Ptr]tracked{}, freed: map[cuda.Ptr]tracked{},
		order: make([]cuda.Ptr, freedKept)}
}

func (t *TrackingAdaptor) callers() []uintptr {
	if !t.stacks {
		return nil
	}
	pcs := make([]uintptr, depth)
	return pcs[:runtime.Callers(3, pcs)] // without Callers, callers, and Alloc or Free
}

func (t *TrackingAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	p, err := t.up.Alloc(size, align, st)
	if err != nil || p == 0 {
		return p, err
	}
	stack := t.callers()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.serial++
	t.live[p] = tracked{size, align, st, t.serial, stack}
	delete(t.freed, p)
	t.bytes += size
	return p, nil
}

// Free forgets memory before it goes, as another thread may be given the address at once.
func (t *TrackingAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	if p == 0 {
		return nil
	}
	stack := t.callers()
	t.mu.Lock()
	x, out := t.live[p]
	old, before := t.freed[p]
	switch {
	case !out && before:
		t.mu.Unlock()
		return &FreeError{p, size, doubleFree, old.size, frames(old.stack)}
	case !out:
		t.mu.Unlock()
		return &FreeError{Ptr: p, Size: size, Reason: unknown}
	case x.size != size:
		t.mu.Unlock()
		return &FreeError{p, size, wrongSize, x.size, frames(x.stack)}
	}
	delete(t.live, p)
	t.bytes -= size
	delete(t.freed, t.order[t.next])
	t.order[t.next] = p
	t.next = (t.next + 1) % freedKept
	t.freed[p] = tracked{size: size, stack: stack}
	t.mu.Unlock()
	err := t.up.Free(p, size, align, st)
	if err != nil {
		t.mu.Lock()
		t.live[p] = x
		t.bytes += size
		delete(t.freed, p)
		t.mu.Unlock()
	}
	return err
}

// Allocated is how many bytes are out.
func (t *TrackingAdaptor) Allocated() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bytes
}

// Outstanding lists what is out, the oldest first.
func (t *TrackingAdaptor) Outstanding() []Outstanding {
	t.mu.Lock()
	list := make([]Outstanding, 0, len(t.live))
	stacks := map[uint64][]uintptr{}
	for p, x := range t.live {
		list = append(list, Outstanding{Ptr: p, Size: x.size, Align: x.align, Stream: x.stream, Serial: x.serial})
		stacks[x.serial] = x.stack
	}
	t.mu.Unlock()
	sort.Slice(list, func(i, j int) bool { return list[i].Serial < list[j].Serial })
	for i := range list {
		list[i].Stack = frames(stacks[list[i].Serial])
	}
	return list
}

// String lists what is out, for people.
func (t *TrackingAdaptor) String() string {
	list := t.Outstanding()
	var b strings.Builder
	for _, o := range list {
		fmt.Fprintf(&b, "%#x: %d bytes, stream %#x\n", uint64(o.Ptr), o.Size, uint64(o.Stream))
		for line := range strings.Lines(o.Stack) {
			b.WriteString("\t" + line)
		}
	}
	return b.String()
}

// frames writes a stack, "function file:line" a frame.
func frames(pcs []uintptr) string {
	if len(pcs) == 0 {
		return ""
	}
	var b strings.Builder
	for f := runtime.CallersFrames(pcs); ; {
		frame, more := f.Next()
		fmt.Fprintf(&b, "%s %s:%d\n", frame.Function, frame.File, frame.Line)
		if !more {
			return b.String()
		}
	}
}

func (t *TrackingAdaptor) Equal(other Resource) bool { return sameResource(t, other) }
