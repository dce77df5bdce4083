package analyze

import (
	"reflect"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

func TestStackLibrary(t *testing.T) {
	tr := &recording.Trace{Frames: []recording.Frame{{Func: "torch::empty", File: "??"}, {Func: "f", File: "/x/site-packages/torch/a.py"},
		{Func: "main", File: "train.py"}}, Stacks: []recording.Stack{nil, {0, 1, 2}, {0, 2}, {0}}}
	for stack, want := range []string{UnknownLibrary, "torch", OwnCode, UnknownLibrary, UnknownLibrary} {
		if got := StackLibrary(tr, uint32(stack)); got != want {
			t.Errorf("stack %d is of %q, want %q", stack, got, want)
		}
	}
}

// A block's library is the one that allocated it; memory by tag, library and thread adds up to what is live.
func TestLabelsOfAMoment(t *testing.T) {
	tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil, {0}}, Frames: []recording.Frame{{Func: "f", File: "a.py"}},
		Tags: []string{"", "weights", "cache"}, Libraries: []string{"", "torch"}, Threads: map[uint32]string{7: "main"},
		Initial: []recording.Block{{Addr: 1 << 40, Requested: 1000, Tag: 1, Library: 1, State: recording.Active}, {Addr: 2 << 40, Requested: 50, State: recording.Inactive}}}
	for i, e := range []event.Event{{Size: 100, Tag: 1, Library: 1, Thread: 7, Stack: 1}, {Size: 10, Tag: 2, Thread: 8, Stack: 1}, {Size: 1},
		{Size: 20, Tag: 2, Library: 1, Thread: 7, Stack: 1}, {Size: 3, Tag: 1, Library: 9}} {
		e.Kind, e.Addr, e.TimeUS = event.Alloc, uint64(i+1)<<20, int64(i+1)
		tr.Events = append(tr.Events, e)
	}
	p := Inspect(tr).Peak
	want := Moment{Tags: []LabelUse{{"weights", 3, 1103}, {"cache", 2, 30}, {NoTag, 1, 1}},
		Libraries: []LabelUse{{"torch", 3, 1120}, {OwnCode, 1, 10}, {"library 9", 1, 3}, {UnknownLibrary, 1, 1}},
		Threads:   []LabelUse{{NoThread, 3, 1004}, {"main 7", 2, 120}, {"8", 1, 10}}}
	if !reflect.DeepEqual(p.Tags, want.Tags) || !reflect.DeepEqual(p.Libraries, want.Libraries) || !reflect.DeepEqual(p.Threads, want.Threads) {
		t.Errorf("by tag %v, by library %v, by thread %v", p.Tags, p.Libraries, p.Threads)
	}
	for _, h := range p.Holders {
		if h.Stack == 1 && (!reflect.DeepEqual(h.Tags, []string{"weights", "cache"}) || !reflect.DeepEqual(h.Libraries, []string{"torch"})) {
			t.Errorf("the stack has tags %v and libraries %v", h.Tags, h.Libraries)
		}
	}
	// Without labels there is nothing to tell, and nothing is made up.
	for i := range tr.Events {
		tr.Events[i].Tag, tr.Events[i].Library, tr.Events[i].Thread, tr.Events[i].Stack = 0, 0, 0, 0
	}
	tr.Initial = nil
	if p := Inspect(tr).Peak; p.Tags != nil || p.Libraries != nil || p.Threads != nil {
		t.Errorf("by tag %v, by library %v, by thread %v of a file that tells none", p.Tags, p.Libraries, p.Threads)
	}
	// Lifetimes have what the page tells them apart by.
	tr.Events[0].Tag, tr.Events[0].Library, tr.Events[0].Thread = 2, 1, 7
	if b := LifetimesOf(tr).Blocks[0]; b.Tag != 2 || b.Library != 1 || b.Thread != 7 {
		t.Errorf("the first block is %+v", b)
	}
}

// Two runs are distinguished by tag and by library that said so.
func TestDiffByLabel(t *testing.T) {
	run := func(sizes ...uint64) *recording.Trace {
		tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, Tags: []string{"", "weights"},
			Libraries: []string{"", "torch"}, FromStart: true}
		for i, n := range sizes {
			tr.Events = append(tr.Events, event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 30, Size: n, TimeUS: int64(i + 1), Tag: uint16(i % 2),
				Library: uint8(i % 2)})
		}
		return tr
	}
	a, b := run(10, 100), run(15, 300, 1)
	b.Tags[1] = "params" // another name is another tag
	d := Diff(a, b, false)
	got := map[string][2]uint64{}
	for _, c := range append(d.Tag, d.Library...) {
		got[c.Name] = [2]uint64{c.BytesA, c.BytesB}
	}
	want := map[string][2]uint64{"weights": {100, 0}, "params": {0, 300}, NoTag: {10, 16}, "torch": {100, 300}, UnknownLibrary: {10, 16}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
	for _, tr := range []*recording.Trace{a, b} {
		for i := range tr.Events {
			tr.Events[i].Tag = 0
		}
	}
	if d := Diff(a, b, false); d.Tag != nil {
		t.Errorf("by tag %v of runs without", d.Tag)
	}
}
