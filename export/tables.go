package export

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Table is one of the tables that a run is written as.
type Table struct {
	Name    string
	What    string
	Columns []Column
	fill    func(r rows, t *recording.Trace, c clock, words *words) error
	whole   func(r rows, f *recording.File, speak func(*words)) error // instead of fill, for a file as a whole

	byFunction bool   // fill needs words.functions
	last       string // in the last column of each row, of a table by With
	with       bool
}

// With is the table with one more column, which has the same text in each row. It is not for the table of calls.
func (table *Table) With(column Column, text string) *Table {
	t := *table
	t.Columns = append(slices.Clone(table.Columns), column)
	t.last, t.with = text, true
	return &t
}

// withLast puts a text at the end of each row.
type withLast struct {
	rows
	last uint32
}

func (r withLast) end() error {
	r.rows.text(r.last)
	return r.rows.end()
}

// Column is one column of a table. The zero of a column that may be null is an empty field in CSV.
type Column struct {
	Name string
	Type Type
	Null bool // may be null
	Doc  string
}

// Type is the type of a column.
type Type uint8

const (
	Int    Type = iota // 64 bits, signed
	Uint               // 64 bits, unsigned
	Text               // UTF-8
	Truth              // true or false
	nTypes = 4
)

// String names the type as SQL does, DuckDB's way.
func (t Type) String() string {
	return [nTypes]string{"BIGINT", "UBIGINT", "VARCHAR", "BOOLEAN"}[t]
}

const (
	tagDoc     = "the program's tag of the allocation; null where it has none"
	libraryDoc = "library that allocated; null where it is unknown"
	pidDoc     = "number of the process, in a driver trace with several on a device; else null"
)

// Tables are what --table offers; the first is the default.
var Tables = []*Table{
	{Name: "events", What: "one row for each event, in recorded order", fill: fillEvents, Columns: []Column{
		{"device", Int, false, "number of the GPU"},
		{"pid", Int, true, pidDoc},
		{"event", Int, false, "number of the event on its device, and of its process where there is a pid, from 0"},
		{"time_us", Int, true, "microseconds since 1970; since midnight for RMM"},
		{"since_us", Int, true, "microseconds since the file's first event"},
		{"kind", Text, false, "alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, " +
			"snapshot, oom, annotate, retry"},
		{"address", Uint, true, "device address; null for oom and where there is none"},
		{"bytes", Uint, false, "as requested for alloc and frees, rounded for oom, whole for segments"},
		{"device_free_bytes", Uint, true, "oom: free memory of the device, where it was recorded"},
		{"stream", Uint, false, "handle or id of the stream"},
		{"pool", Text, false, "private pool, PyTorch's two numbers; default"},
		{"tag", Text, true, tagDoc},
		{"library", Text, true, libraryDoc},
		{"thread", Int, true, "the kernel's number of the thread that caused it; null where it was not recorded"},
		{"thread_name", Text, true, "its name, where known"},
		{"handle", Uint, true, "segment_map, segment_unmap: number of the physical memory, where known"},
		{"live_bytes", Uint, false, "requested bytes live after the event, from alloc to free_completed"},
		{"active_bytes", Uint, false, "the same, each block rounded up to 512"},
		{"reserved_bytes", Uint, false, "bytes reserved by the allocator after the event; 0 where they are unknown"},
		{"stack_id", Int, true, "number of the stack in this file; null where none was recorded"},
		{"caller", Text, true, "innermost frame with a known line: function file:line; if none has, the most specific one"},
		{"stack", Text, true, "all frames, innermost first, joined by '; '"},
	}},
	{Name: "allocations", What: "one row for each allocation; those from before the first event are first", fill: fillAllocations,
		Columns: []Column{
			{"device", Int, false, "number of the GPU"},
			{"pid", Int, true, pidDoc},
			{"alloc_event", Int, true, "number of the event that allocated it; null if that was before the first"},
			{"free_requested_event", Int, true, "number of the event that freed it"},
			{"free_completed_event", Int, true, "number of the event from which on its memory could be reused; if the file lacks " +
				"it, of the next allocation there"},
			{"alloc_us", Int, true, "microseconds since the file's first event"},
			{"free_requested_us", Int, true, "microseconds since the file's first event"},
			{"free_completed_us", Int, true, "microseconds since the file's first event"},
			{"lifetime_us", Int, true, "from alloc to free_completed; null where one of them is not in the file"},
			{"address", Uint, false, "device address"},
			{"bytes", Uint, false, "as requested"},
			{"stream", Uint, false, "handle or id of the stream"},
			{"pool", Text, false, "private pool, PyTorch's two numbers; default"},
			{"tag", Text, true, tagDoc},
			{"library", Text, true, libraryDoc},
			{"thread", Int, true, "the kernel's number of the thread that allocated it; null where it was not recorded"},
			{"thread_name", Text, true, "its name, where known"},
			{"at_peak", Truth, false, "live when most bytes were live on its device, of its process"},
			{"at_end", Truth, false, "not freed at the end of the recording"},
			{"stack_id", Int, true, "number of the stack in this file; null where none was recorded"},
			{"caller", Text, true, "innermost frame with a known line: function file:line; if none has, the most specific one"},
			{"stack", Text, true, "all frames, innermost first, joined by '; '"},
		}},
	ByStack,
	{Name: "calls", What: "one row for each driver call that cistern trace recorded", whole: fillCalls, Columns: callColumns},
}

// TableNames are what --table takes.
func TableNames() []string {
	names := make([]string, len(Tables))
	for i, t := range Tables {
		names[i] = t.Name
	}
	return names
}

// TableNamed is a table by its name; "" is the first.
func TableNamed(name string) (*Table, error) {
	for _, t := range Tables {
		if t.Name == name || name == "" {
			return t, nil
		}
	}
	names := TableNames()
	last := len(names) - 1
	return nil, fmt.Errorf("%s: expected %s or %s", name, strings.Join(names[:last], ", "), names[last])
}

// WriteCSV and WriteParquet write a table of every device of a file, one after the other.
func WriteCSV(w io.Writer, f *recording.File, table *Table) error {
	return table.write(newCSV(w, table.Columns), f)
}

// WriteParquet is WriteCSV as Parquet: zstd, texts in dictionaries, groups of 131,072 rows.
func WriteParquet(w io.Writer, f *recording.File, table *Table) error {
	return table.write(newParquet(w, aboutFile(f), table), f)
}

// rows takes a table cell by cell, in the order of its columns.
type rows interface {
	int(v int64)
	uint(v uint64)
	text(id uint32) // a word
	truth(v bool)
	null()
	end() error // of the row
	close() error
	// speak says which words text means from here on.
	speak(w *words)
}

func (table *Table) write(r rows, f *recording.File) error {
	if table.whole != nil {
		if err := table.whole(r, f, r.speak); err != nil {
			return err
		}
		return r.close()
	}
	c := clockOf(f)
	for _, t := range f.Traces {
		w := wordsOf(t)
		if table.byFunction {
			w.addFunctions(t)
		}
		to := r
		if table.with {
			to = withLast{r, w.id(table.last)}
		}
		r.speak(w)
		if err := table.fill(to, t, c, w); err != nil {
			return err
		}
	}
	return r.close()
}

// words are all the texts that the rows of one trace can have, each once.
type words struct {
	list   []string
	ids    map[string]uint32
	kinds  [event.NumKinds + 1]uint32
	pools  []uint32
	tags   []uint32 // of tag 0 and library 0, null is written
	libs   []uint32
	thread map[uint32]uint32 // names of threads
	caller []uint32          // by stack
	stack  []uint32
	// functions is by stack too, in the table of stacks alone.
	functions []uint32
}

func wordsOf(t *recording.Trace) *words {
	w := &words{ids: map[string]uint32{}, thread: map[uint32]uint32{}}
	for k := range w.kinds {
		w.kinds[k] = w.id(event.Kind(k).String())
	}
	for _, id := range t.Pools {
		w.pools = append(w.pools, w.id(poolName(id)))
	}
	if len(w.pools) == 0 {
		w.pools = []uint32{w.id(poolName(recording.PoolID{}))}
	}
	tags, libs := len(t.Tags), len(t.Libraries)
	for i := range t.Events {
		tags, libs = max(tags, int(t.Events[i].Tag)+1), max(libs, int(t.Events[i].Library)+1)
	}
	for i := range t.Initial {
		tags, libs = max(tags, int(t.Initial[i].Tag)+1), max(libs, int(t.Initial[i].Library)+1)
	}
	for i := range tags {
		w.tags = append(w.tags, w.id(t.TagName(uint16(i))))
	}
	for i := range libs {
		w.libs = append(w.libs, w.id(t.LibraryName(uint8(i))))
	}
	for _, n := range slices.Sorted(maps.Keys(t.Threads)) {
		w.thread[n] = w.id(t.Threads[n])
	}
	for i := range t.Stacks {
		w.caller = append(w.caller, w.id(callerText(t, uint32(i))))
		w.stack = append(w.stack, w.id(stackText(t, uint32(i))))
	}
	return w
}

func (w *words) id(s string) uint32 {
	id, ok := w.ids[s]
	if !ok {
		id = uint32(len(w.list))
		w.list = append(w.list, s)
		w.ids[s] = id
	}
	return id
}

func (w *words) kind(k event.Kind) uint32 { return w.kinds[min(k, event.NumKinds)] }

func (w *words) pool(i uint32) uint32 {
	if int(i) >= len(w.pools) {
		i = 0
	}
	return w.pools[i]
}

// label writes the four columns of a label.
func (w *words) label(r rows, b block) {
	if b.tag == 0 {
		r.null()
	} else {
		r.text(w.tags[b.tag])
	}
	if b.library == 0 {
		r.null()
	} else {
		r.text(w.libs[b.library])
	}
	knownInt(r, int64(b.thread), b.thread != 0)
	if name, ok := w.thread[b.thread]; ok && b.thread != 0 {
		r.text(name)
	} else {
		r.null()
	}
}

// source writes the three columns of a stack.
func (w *words) source(r rows, stack uint32) {
	if stack == 0 || int(stack) >= len(w.stack) {
		r.null()
		r.null()
		r.null()
		return
	}
	r.int(int64(stack))
	r.text(w.caller[stack])
	r.text(w.stack[stack])
}

// known writes a number, or null.
func known(r rows, v uint64, ok bool) {
	if ok {
		r.uint(v)
	} else {
		r.null()
	}
}

func knownInt(r rows, v int64, ok bool) {
	if ok {
		r.int(v)
	} else {
		r.null()
	}
}

// owner writes whose memory a trace is of.
func owner(r rows, t *recording.Trace) {
	if t.Owner == nil {
		r.null()
		return
	}
	r.int(int64(t.Owner.PID))
}

func fillEvents(r rows, t *recording.Trace, c clock, words *words) error {
	w := newWalker(t)
	line := c.line(t)
	for i := range t.Events {
		e := &t.Events[i]
		w.apply(i)
		us := line.at(e)
		r.int(int64(t.Device))
		owner(r, t)
		r.int(int64(i))
		knownInt(r, us, c.known)
		knownInt(r, us-c.start, c.known)
		r.text(words.kind(e.Kind))
		failed := e.Kind == event.OOM
		known(r, e.Addr, e.Addr != 0 && !failed)
		r.uint(e.Size)
		known(r, e.Addr, e.Addr != 0 && failed)
		r.uint(streamOf(t, e.Stream))
		r.text(words.pool(e.Pool))
		words.label(r, allocated(i, e))
		known(r, e.Handle, e.Handle != 0)
		r.uint(w.bytes)
		r.uint(w.active)
		r.uint(w.reserved)
		words.source(r, e.Stack)
		if err := r.end(); err != nil {
			return err
		}
	}
	return nil
}

// life is how long a block was there, in numbers of events.
type life struct{ alloc, requested, completed int32 }

const missing = -1

// livesOf are the lives of the blocks that were there before the first event, and then of all that were allocated, by
// the rules of walker.
func livesOf(t *recording.Trace, initial []uint64) []life {
	lives := make([]life, 0, len(initial)+t.Counts()[event.Alloc])
	live := make(map[uint64]int32, 1024) // by address
	for _, addr := range initial {
		live[addr] = int32(len(lives))
		lives = append(lives, life{missing, missing, missing})
	}
	for i := range t.Events {
		e := &t.Events[i]
		n, ok := live[e.Addr]
		switch e.Kind {
		case event.Alloc:
			if ok {
				lives[n].completed = int32(i)
			}
			live[e.Addr] = int32(len(lives))
			lives = append(lives, life{int32(i), missing, missing})
		case event.FreeRequested:
			if ok {
				lives[n].requested = int32(i)
			}
		case event.FreeCompleted:
			if ok {
				lives[n].completed = int32(i)
				delete(live, e.Addr)
			}
		}
	}
	return lives
}

// fillAllocations goes through the events once to find the ends, and writes what was found.
func fillAllocations(r rows, t *recording.Trace, c clock, words *words) error {
	initial := make([]block, 0, len(t.Initial))
	addrs := make([]uint64, 0, len(t.Initial))
	for i := range t.Initial {
		if b := &t.Initial[i]; b.State != recording.Inactive {
			initial = append(initial, initialBlock(b))
			addrs = append(addrs, b.Addr)
		}
	}
	times := make([]int64, 0, len(t.Events))
	line := c.line(t)
	for i := range t.Events {
		times = append(times, line.at(&t.Events[i])-c.start)
	}
	at := func(event int32) {
		if event != missing && c.known {
			r.int(times[event])
		} else {
			r.null()
		}
	}
	_, peak := t.PeakLive()
	for n, l := range livesOf(t, addrs) {
		var b block
		var addr uint64
		if l.alloc == missing {
			b, addr = initial[n], addrs[n]
		} else {
			e := &t.Events[l.alloc]
			b, addr = allocated(int(l.alloc), e), e.Addr
		}
		r.int(int64(t.Device))
		owner(r, t)
		knownInt(r, int64(l.alloc), l.alloc != missing)
		knownInt(r, int64(l.requested), l.requested != missing)
		knownInt(r, int64(l.completed), l.completed != missing)
		at(l.alloc)
		at(l.requested)
		at(l.completed)
		if l.alloc != missing && l.completed != missing && c.known {
			r.int(times[l.completed] - times[l.alloc])
		} else {
			r.null()
		}
		r.uint(addr)
		r.uint(b.size)
		r.uint(streamOf(t, b.stream))
		r.text(words.pool(b.pool))
		words.label(r, b)
		r.truth(int(l.alloc) <= peak && (l.completed == missing || int(l.completed) > peak))
		r.truth(l.completed == missing)
		words.source(r, b.stack)
		if err := r.end(); err != nil {
			return err
		}
	}
	return nil
}
