package export

import (
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// ByStack is the table of stacks.
var ByStack = &Table{Name: "stacks", What: "one row for each stack that allocated on a device", fill: fillStacks, byFunction: true, Columns: []Column{
	{"device", Int, false, "number of the GPU"},
	{"pid", Int, true, pidDoc},
	{"functions", Text, true, "functions and files of the stack without folders and lines, innermost first, joined by '; ': the same " +
		"after lines moved; null for what was allocated without a stack"},
	{"allocs", Int, false, "allocations in the recording; those from before its first event not counted"},
	{"alloc_bytes", Uint, false, "their requested bytes"},
	{"peak_blocks", Int, false, "live when most bytes were live on the device, of the process"},
	{"peak_bytes", Uint, false, "their requested bytes"},
	{"end_blocks", Int, false, "not freed at the end of the recording"},
	{"end_bytes", Uint, false, "their requested bytes"},
	{"stack_id", Int, true, "number of the stack in this file; null where none was recorded"},
	{"caller", Text, true, "innermost frame with a known line: function file:line; if none has, the most specific one"},
	{"stack", Text, true, "all frames, innermost first, joined by '; '"},
}}

// functionsText is a stack without what moves when a program is edited or installed elsewhere.
func functionsText(t *recording.Trace, stack uint32) string {
	var b strings.Builder
	for i, f := range t.FramesOf(stack) {
		if i > 0 {
			b.WriteString("; ")
		}
		if j := strings.LastIndexAny(f.File, `/\`); j >= 0 {
			f.File = f.File[j+1:]
		}
		f.Line = 0
		b.WriteString(f.String())
	}
	return b.String()
}

func (w *words) addFunctions(t *recording.Trace) {
	for i := range t.Stacks {
		w.functions = append(w.functions, w.id(functionsText(t, uint32(i))))
	}
}

// usage is what a stack allocated and what of it was live.
type usage struct {
	allocs, peakBlocks, endBlocks int64
	bytes, peakBytes, endBytes    uint64
}

func (u *usage) atPeak(b block) {
	u.peakBlocks++
	u.peakBytes += b.size
}

func (u *usage) atEnd(b block) {
	u.endBlocks++
	u.endBytes += b.size
}

// usageOf is by stack; a stack that the file does not have is the empty one.
func usageOf(t *recording.Trace) []usage {
	found := make([]usage, max(1, len(t.Stacks)))
	of := func(stack uint32) *usage {
		if int(stack) >= len(found) {
			stack = 0
		}
		return &found[stack]
	}
	_, peak := t.PeakLive()
	w := newWalker(t)
	each := func(take func(*usage, block)) {
		for _, b := range w.live {
			take(of(b.stack), b)
		}
	}
	if peak < 0 {
		each((*usage).atPeak)
	}
	for i := range t.Events {
		if e := &t.Events[i]; e.Kind == event.Alloc {
			u := of(e.Stack)
			u.allocs++
			u.bytes += e.Size
		}
		w.apply(i)
		if i == peak {
			each((*usage).atPeak)
		}
	}
	each((*usage).atEnd)
	return found
}

func fillStacks(r rows, t *recording.Trace, _ clock, words *words) error {
	for stack, u := range usageOf(t) {
		if u == (usage{}) {
			continue
		}
		r.int(int64(t.Device))
		owner(r, t)
		if stack == 0 {
			r.null()
		} else {
			r.text(words.functions[stack])
		}
		r.int(u.allocs)
		r.uint(u.bytes)
		r.int(u.peakBlocks)
		r.uint(u.peakBytes)
		r.int(u.endBlocks)
		r.uint(u.endBytes)
		words.source(r, uint32(stack))
		if err := r.end(); err != nil {
			return err
		}
	}
	return nil
}
