package report

import (
	"maps"
	"math/bits"
	"slices"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
)

// The tables from which the page computes any moment: every stack once, as a tree of frames; from when to when each
// block and each reserved range was there; the driver calls. They are written column by column, since values of one
// kind compress best among their like. web/src/decode.js reads them, web/src/lives.js computes.

// stackTable numbers the frames and stacks that a page shows. Stacks are a tree, outermost frame first: a stack is the
// node of its innermost frame, and node 0, the root, is the empty stack.
type stackTable struct {
	t        *recording.Trace
	nodes    map[uint32]uint32 // Trace.Stacks → node
	frameIDs map[string]uint32
	ofFrame  map[uint32]uint32 // Trace.Frames → frames
	frames   []string
	library  []int    // of each frame an index into libraries, -1 where it has no file
	parents  []uint32 // of each node but the root
	names    []uint32 // its frame
	children map[[2]uint32]uint32

	libraries  []string
	libraryIDs map[string]int
	tags       int      // numbers of tags that blocks have are below
	threads    []uint32 // that blocks have, in the order in which they are seen
	threadIDs  map[uint32]int
}

func newStackTable(t *recording.Trace) *stackTable {
	return &stackTable{t: t, nodes: map[uint32]uint32{}, frameIDs: map[string]uint32{}, ofFrame: map[uint32]uint32{},
		frames: []string{}, children: map[[2]uint32]uint32{}, library: []int{}, libraries: []string{}, libraryIDs: map[string]int{},
		threadIDs: map[uint32]int{}}
}

// node is the tree's node of a stack of the trace.
func (s *stackTable) node(stack uint32) uint32 {
	if n, ok := s.nodes[stack]; ok {
		return n
	}
	at := uint32(0)
	if int(stack) < len(s.t.Stacks) {
		of := s.t.Stacks[stack]
		for i := len(of) - 1; i >= 0; i-- {
			if int(of[i]) < len(s.t.Frames) {
				at = s.child(at, s.frame(of[i]))
			}
		}
	}
	s.nodes[stack] = at
	return at
}

// named is the node of a stack of frames by name, innermost first.
func (s *stackTable) named(frames []string) uint32 {
	at := uint32(0)
	for i := len(frames) - 1; i >= 0; i-- {
		at = s.child(at, s.name(frames[i]))
	}
	return at
}

func (s *stackTable) frame(f uint32) uint32 {
	id, ok := s.ofFrame[f]
	if !ok {
		id = s.name(s.t.Frames[f].String())
		s.ofFrame[f] = id
		if name := s.t.Frames[f].Library(); name != "" {
			s.library[id] = s.libraryID(name)
		}
	}
	return id
}

func (s *stackTable) libraryID(name string) int {
	n, ok := s.libraryIDs[name]
	if !ok {
		n = len(s.libraries)
		s.libraryIDs[name] = n
		s.libraries = append(s.libraries, name)
	}
	return n
}

func (s *stackTable) name(frame string) uint32 {
	id, ok := s.frameIDs[frame]
	if !ok {
		id = uint32(len(s.frames))
		s.frameIDs[frame] = id
		s.frames = append(s.frames, frame)
		s.library = append(s.library, -1)
	}
	return id
}

// child is the node of a frame called from another node.
func (s *stackTable) child(parent, frame uint32) uint32 {
	key := [2]uint32{parent, frame}
	if n, ok := s.children[key]; ok {
		return n
	}
	s.parents = append(s.parents, parent)
	s.names = append(s.names, frame)
	n := uint32(len(s.parents))
	s.children[key] = n
	return n
}

// short is the short name of each frame (recording.ShortFrame); "" where that is the same.
func (s *stackTable) short() []string {
	all := make([]string, len(s.frames))
	for i, f := range s.frames {
		if short := recording.ShortFrame(f); short != f {
			all[i] = short
		}
	}
	return all
}

// layers is the layer of each frame (recording.Layer).
func (s *stackTable) layers() []int {
	all := make([]int, len(s.frames))
	for i, f := range s.frames {
		all[i] = int(recording.LayerOf(f))
	}
	return all
}

// stackNames writes what the stacks are called that blocks have (analyze.NameStacks): count, then columns of how far behind the
// last node the next is, the frame of its name, and those that it is through and from plus 1, 0 for none.
func (e *encoder) stackNames(s *stackTable) {
	stacks := map[uint32][]recording.Frame{} // of a node; what reads alike is one
	for stack, node := range s.nodes {
		if node != 0 && stacks[node] == nil {
			stacks[node] = s.t.FramesOf(stack)
		}
	}
	nodes := slices.Sorted(maps.Keys(stacks))
	all := make([][]recording.Frame, len(nodes))
	for i, n := range nodes {
		all[i] = stacks[n]
	}
	names := analyze.NameStacks(all)
	// A stack of which no frame says anything is called by the innermost.
	id := func(i, at int) uint32 { return s.name(all[i][max(0, at)].String()) }
	e.uint(uint64(len(nodes)))
	last := uint32(0)
	for _, n := range nodes {
		e.uint(uint64(n - last))
		last = n
	}
	e.column(len(nodes), func(i int) uint64 { return uint64(id(i, names[i].Name)) })
	for _, at := range []func(n analyze.StackName) int{func(n analyze.StackName) int { return n.Through }, func(n analyze.StackName) int { return n.From }} {
		e.column(len(nodes), func(i int) uint64 {
			if at(names[i]) < 0 {
				return 0
			}
			return uint64(id(i, at(names[i]))) + 1
		})
	}
}

// stacks writes count, then of each node but the root how far behind its parent it comes and its frame.
func (e *encoder) stacks(s *stackTable) {
	e.uint(uint64(len(s.parents)))
	for i, p := range s.parents {
		e.uint(uint64(i+1) - uint64(p))
	}
	for _, f := range s.names {
		e.uint(uint64(f))
	}
}

// addresses writes a shift and the addresses as differences of what remains when it is taken off.
func (e *encoder) addresses(n int, addr func(i int) uint64) {
	all := uint64(0)
	for i := range n {
		all |= addr(i)
	}
	shift := uint64(0)
	if all != 0 {
		shift = uint64(bits.TrailingZeros64(all))
	}
	e.uint(shift)
	last := uint64(0)
	for i := range n {
		a := addr(i) >> shift
		e.int(int64(a - last))
		last = a
	}
}

// column writes a number of each of n things.
func (e *encoder) column(n int, value func(i int) uint64) {
	for i := range n {
		e.uint(value(i))
	}
}

// lifetimes writes what is in l, and returns the kinds of its driver calls.
func (e *encoder) lifetimes(l *analyze.Lifetimes, s *stackTable) []callKind {
	e.blocks(l.Blocks, s)
	e.segments(l.Segments)
	return e.calls(l.Calls, s)
}

// ends writes from which event to which n things were there: from as differences of from+1, then to-from, 0 for never.
func (e *encoder) ends(n int, at func(i int) (from, to int32)) {
	last := int32(0)
	for i := range n {
		from, _ := at(i)
		e.uint(uint64(from + 1 - last))
		last = from + 1
	}
	for i := range n {
		if from, to := at(i); to == analyze.Never {
			e.uint(0)
		} else {
			e.uint(uint64(to - from))
		}
	}
}

func (e *encoder) blocks(all []analyze.BlockLife, s *stackTable) {
	n := len(all)
	e.uint(uint64(n))
	e.ends(n, func(i int) (from, to int32) { return all[i].From, all[i].To })
	// When it was given back: 0 never; else how long before its end, or where it has none, how long after its begin, plus 1.
	e.column(n, func(i int) uint64 {
		switch b := &all[i]; {
		case b.Freed == analyze.Never:
			return 0
		case b.To != analyze.Never:
			return uint64(b.To - b.Freed)
		default:
			return uint64(b.Freed-b.From) + 1
		}
	})
	e.addresses(n, func(i int) uint64 { return all[i].Addr })
	e.column(n, func(i int) uint64 { return all[i].Size })
	e.column(n, func(i int) uint64 { return uint64(all[i].Stream) })
	e.column(n, func(i int) uint64 { return uint64(all[i].Pool) })
	e.column(n, func(i int) uint64 { return uint64(s.node(all[i].Stack)) })
	e.labels(all, s)
}

// What labels blocks have, as bits: the columns that follow.
const (
	hasTags = 1 << iota
	hasLibraries
	hasThreads
)

// labels writes which labels blocks have, and a column of numbers for each: the tag as the trace numbers it, the recorded
// library as its place in libraries plus 1, the place of the thread in threads plus 1; 0 is none.
func (e *encoder) labels(all []analyze.BlockLife, s *stackTable) {
	has := uint64(0)
	for i := range all {
		b := &all[i]
		if b.Tag != 0 {
			has |= hasTags
			s.tags = max(s.tags, int(b.Tag)+1)
		}
		if b.Library != 0 {
			has |= hasLibraries
		}
		if b.Thread != 0 {
			has |= hasThreads
			if s.threadIDs[b.Thread] == 0 {
				s.threads = append(s.threads, b.Thread)
				s.threadIDs[b.Thread] = len(s.threads)
			}
		}
	}
	e.uint(has)
	if has&hasTags != 0 {
		e.column(len(all), func(i int) uint64 { return uint64(all[i].Tag) })
	}
	if has&hasLibraries != 0 {
		e.column(len(all), func(i int) uint64 {
			if all[i].Library == 0 {
				return 0
			}
			return uint64(s.libraryID(s.t.LibraryName(all[i].Library))) + 1
		})
	}
	if has&hasThreads != 0 {
		e.column(len(all), func(i int) uint64 { return uint64(s.threadIDs[all[i].Thread]) })
	}
}

func (e *encoder) segments(all []analyze.SegmentLife) {
	n := len(all)
	e.uint(uint64(n))
	e.ends(n, func(i int) (from, to int32) { return all[i].From, all[i].To })
	e.addresses(n, func(i int) uint64 { return all[i].Addr })
	e.column(n, func(i int) uint64 { return all[i].Size })
	e.column(n, func(i int) uint64 { return uint64(all[i].Stream) })
	e.column(n, func(i int) uint64 { return uint64(all[i].Pool) })
	e.column(n, func(i int) uint64 {
		if all[i].Expandable {
			return 1
		}
		return 0
	})
}

// callKind is a function of the driver, or an event that stands for one, as the page's table of names has it.
type callKind struct {
	Name string         `json:"name"`
	Does analyze.Effect `json:"does"`
}

// calls writes driver calls, and returns the kinds that there are: each call has the number of its own.
func (e *encoder) calls(all []analyze.DriverCall, s *stackTable) []callKind {
	kinds := []callKind{}
	numbers := map[string]int{}
	for i := range all {
		if _, ok := numbers[all[i].Name]; !ok {
			numbers[all[i].Name] = len(kinds)
			kinds = append(kinds, callKind{all[i].Name, all[i].Does})
		}
	}
	n := len(all)
	e.uint(uint64(n))
	last := int32(0)
	for i := range all {
		e.int(int64(all[i].Event - last))
		last = all[i].Event
	}
	e.column(n, func(i int) uint64 { return uint64(numbers[all[i].Name]) })
	e.addresses(n, func(i int) uint64 { return all[i].Addr })
	e.column(n, func(i int) uint64 { return all[i].Size })
	e.column(n, func(i int) uint64 { return all[i].TookNS })
	e.column(n, func(i int) uint64 { return uint64(s.named(all[i].Frames)) })
	return kinds
}
