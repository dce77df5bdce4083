package native

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// What Cistern's format holds of labels, and of requests that failed: names of tags, libraries and
// threads, the labels of blocks, failures. Those of events are in their columns.

// failurePart is how much of a failure's JSON is in one block.
const failurePart = blockFill

// syncLabels writes the names and failures that t has gained.
func (w *Writer) syncLabels(i int, t *recording.Trace) {
	wt := &w.traces[i]
	names := func(which uint64, all []string, written *int) {
		from := *written
		w.list(blockNames, len(all)-from, func() { w.u(uint64(i)); w.u(which) }, func(k int, _ bool) {
			w.s(clipName(all[from+k]))
		})
		*written = max(from, len(all))
	}
	names(namesTags, t.Tags, &wt.tags)
	names(namesLibraries, t.Libraries, &wt.libraries)

	var fresh []uint32
	for thread, name := range t.Threads {
		if known, ok := wt.threads[thread]; !ok || known != name {
			fresh = append(fresh, thread)
		}
	}
	slices.Sort(fresh)
	w.list(blockNames, len(fresh), func() { w.u(uint64(i)); w.u(namesThreads) }, func(k int, _ bool) {
		w.u(uint64(fresh[k]))
		w.s(clipName(t.Threads[fresh[k]]))
	})
	if len(fresh) > 0 {
		wt.threads = maps.Clone(t.Threads)
	}

	for ; wt.failures < len(t.Failures); wt.failures++ {
		w.failure(i, t.Failures[wt.failures])
	}
}

// knows is an error where a label has no name in the file, so that no reader would take it.
func (wt *writtenTrace) knows(tag uint16, library uint8) error {
	if tag != 0 && int(tag) >= wt.tags || library != 0 && int(library) >= wt.libraries {
		return fmt.Errorf("tag %d and library %d, where %d and %d were written; Sync writes those that a trace has gained",
			tag, library, wt.tags, wt.libraries)
	}
	return nil
}

// clipName cuts a name that no block can hold.
func clipName(s string) string { return s[:min(len(s), blockMax/2)] }

func (w *Writer) failure(i int, f *recording.Failure) {
	whole, err := json.Marshal(f)
	if err != nil {
		if w.err == nil {
			w.err = fmt.Errorf("a failure: %w", err)
		}
		return
	}
	for more := byte(1); more != 0; {
		part := whole[:min(len(whole), failurePart)]
		if whole = whole[len(part):]; len(whole) == 0 {
			more = 0
		}
		w.b = w.b[:0]
		w.u(uint64(i))
		w.u8(more)
		w.s(string(part))
		w.block(blockFailure)
	}
}

func (w *Writer) identity(i int, id *recording.Identity) {
	if id == nil {
		return
	}
	text, err := json.Marshal(id)
	if err == nil && len(text) > identityMax {
		err = fmt.Errorf("%d bytes; at most %d fit", len(text), identityMax)
	}
	if err != nil {
		w.err = cmp.Or(w.err, fmt.Errorf("the identity of a process: %w", err))
		return
	}
	w.b = w.b[:0]
	w.u(uint64(i))
	w.s(string(text))
	w.block(blockIdentity)
}

// identityMax is the most bytes of the JSON of an identity.
const identityMax = 64 << 10

// identity takes in whose trace it is.
func (r *reader) identity(tr *readTrace, c *tables.Cursor) error {
	data := c.Bytes()
	if c.Bad || len(data) > identityMax {
		return errPayload
	}
	if err := r.b.Take(int64(len(data)) * failureFactor); err != nil {
		return err
	}
	id := &recording.Identity{}
	if err := json.Unmarshal(data, id); err != nil {
		return fmt.Errorf("the identity of a process: %s", err)
	}
	for _, s := range []*string{&id.Job, &id.Run, &id.Launcher, &id.Node} {
		*s = text.Clean(*s)
	}
	text.CleanAll(id.Disagreements)
	for name, n := range id.Coordinates {
		if plain := text.Clean(name); plain != name {
			delete(id.Coordinates, name)
			id.Coordinates[plain] = n
		}
	}
	tr.t.Identity = id
	return nil
}

// blockLabels writes the labels of the blocks that have one.
func (w *Writer) blockLabels(trace, list, seg int, blocks []recording.Block) {
	var labelled []int
	wt := &w.traces[trace]
	for k := range blocks {
		b := &blocks[k]
		if b.Tag == 0 && b.Library == 0 {
			continue
		}
		if err := wt.knows(b.Tag, b.Library); err != nil {
			w.err = cmp.Or(w.err, err)
			return
		}
		labelled = append(labelled, k)
	}
	last := 0
	head := func() { w.u(uint64(trace)); w.u(uint64(list)); w.u(uint64(seg)) }
	w.list(blockLabels, len(labelled), head, func(k int, first bool) {
		if first {
			last = 0
		}
		b := &blocks[labelled[k]]
		w.u(uint64(labelled[k] - last))
		last = labelled[k]
		w.u(uint64(b.Tag))
		w.u8(b.Library)
	})
}

// names takes in a block of names.
func (r *reader) names(tr *readTrace, c *tables.Cursor) error {
	t := tr.t
	which := c.U()
	if which > namesThreads && !c.Bad {
		return fmt.Errorf("list %d of names", which)
	}
	size := 1
	if which == namesThreads {
		size = 2
	}
	for range c.Count(size) {
		var thread uint32
		if which == namesThreads {
			thread = c.Ref()
		}
		s := c.Text()
		if c.Bad {
			return errPayload
		}
		if err := r.b.Take(int64(len(s)) + tables.NameSize); err != nil {
			return err
		}
		switch which {
		case namesTags:
			t.Tags = append(t.Tags, s)
		case namesLibraries:
			t.Libraries = append(t.Libraries, s)
		default:
			if t.Threads == nil {
				t.Threads = map[uint32]string{}
			}
			t.Threads[thread] = s
		}
	}
	if len(t.Tags) > math.MaxUint16+1 || len(t.Libraries) > math.MaxUint8+1 {
		return fmt.Errorf("%d tags and %d libraries; expected at most %d and %d", len(t.Tags), len(t.Libraries),
			math.MaxUint16+1, math.MaxUint8+1)
	}
	return nil
}

// blockLabels takes in the labels of blocks that were read.
func (r *reader) blockLabels(tr *readTrace, c *tables.Cursor) error {
	blocks, err := blockList(tr.t, c.U(), c.U())
	if err != nil {
		return err
	}
	at := uint64(0)
	for range c.Count(3) {
		at += c.U()
		tag, library := c.U(), c.U8()
		if c.Bad || at >= uint64(len(*blocks)) || tag > math.MaxUint16 {
			return errPayload
		}
		b := &(*blocks)[at]
		b.Tag, b.Library = uint16(tag), library
	}
	return nil
}

// blockList is one of the lists of blocks of a trace: 0 initial blocks, 1 of final segments, 2 of initial segments.
func blockList(t *recording.Trace, list, seg uint64) (*[]recording.Block, error) {
	switch {
	case list == 0 && seg == 0:
		return &t.Initial, nil
	case list == 1 && seg < uint64(len(t.Final)):
		return &t.Final[seg].Blocks, nil
	case list == 2 && seg < uint64(len(t.InitialSegments)):
		return &t.InitialSegments[seg].Blocks, nil
	}
	return nil, fmt.Errorf("list %d, segment %d of blocks", list, seg)
}

// failureFactor is how many bytes a failure takes in memory for each of its JSON, at most: "{}," makes a FailureStep, in
// a slice that may have grown to twice its length while the one before was still there.
const failureFactor = 64

// failure takes in a failure, or a part of one.
func (r *reader) failure(tr *readTrace, c *tables.Cursor) error {
	more, part := c.U8(), c.Bytes()
	if c.Bad || more > 1 {
		return errPayload
	}
	if err := r.b.Take(int64(len(part)) * failureFactor); err != nil {
		return err
	}
	tr.failure = append(tr.failure, part...)
	if more != 0 {
		return nil
	}
	f := &recording.Failure{}
	if err := json.Unmarshal(tr.failure, f); err != nil {
		return fmt.Errorf("a failure: %s", err)
	}
	clean(f)
	tr.failure = nil
	tr.t.Failures = append(tr.t.Failures, f)
	return r.b.Take(512)
}

// clean makes text of what was read.
func clean(f *recording.Failure) {
	for _, s := range []*string{&f.Version, &f.Conf, &f.Upstream, &f.Device, &f.UUID, &f.OthersUnknown} {
		*s = text.Clean(*s)
	}
	text.CleanAll(f.Program)
	text.CleanAll(f.Lines)
	for i := range f.Steps {
		f.Steps[i].Stage, f.Steps[i].Note = text.Clean(f.Steps[i].Stage), text.Clean(f.Steps[i].Note)
	}
	for i := range f.Limits {
		f.Limits[i].Kind, f.Limits[i].From = text.Clean(f.Limits[i].Kind), text.Clean(f.Limits[i].From)
	}
	for i := range f.Others {
		f.Others[i].Name = text.Clean(f.Others[i].Name)
	}
}

// checkLabels checks what blocks and failures refer to. What a file that was cut off has lost is not held against it.
func checkLabels(t *recording.Trace, cut bool) bool {
	known := func(tag uint16, library uint8) bool {
		return (tag == 0 || int(tag) < len(t.Tags)) && (library == 0 || int(library) < len(t.Libraries))
	}
	all := func(blocks []recording.Block) bool {
		for i := range blocks {
			if !known(blocks[i].Tag, blocks[i].Library) {
				return false
			}
		}
		return true
	}
	if !all(t.Initial) {
		return false
	}
	for _, segs := range [][]recording.Segment{t.InitialSegments, t.Final} {
		for i := range segs {
			if !all(segs[i].Blocks) {
				return false
			}
		}
	}
	for _, f := range t.Failures {
		if f.Event >= len(t.Events) && cut {
			f.Event, f.Cut = -1, true
		}
		if f.Event < -1 || f.Event >= len(t.Events) || f.Stack != 0 && int(f.Stack) >= len(t.Stacks) || !known(f.Tag, f.Library) {
			return false
		}
	}
	return true
}
