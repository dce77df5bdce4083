package analyze

import (
	"fmt"
	"maps"
	"reflect"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

func TestAlignLines(t *testing.T) {
	for _, c := range []struct {
		what string
		a, b []int
		want map[int]int // b → a
	}{
		{"the same", []int{3, 5}, []int{3, 5}, map[int]int{3: 3, 5: 5}},
		{"lines were added above", []int{10, 11, 14}, []int{17, 18, 21}, map[int]int{17: 10, 18: 11, 21: 14}},
		{"one line above, and calls on lines that follow each other", []int{10, 11}, []int{11, 12}, map[int]int{11: 10, 12: 11}},
		{"lines were added between", []int{10, 20, 30, 40}, []int{10, 23, 33, 43}, map[int]int{10: 10, 23: 20, 33: 30, 43: 40}},
		{"between, where as many move as stay", []int{10, 20, 30, 40}, []int{10, 20, 33, 43}, map[int]int{10: 10, 20: 20, 33: 30, 43: 40}},
		{"a call is new", []int{10, 20}, []int{10, 15, 20}, map[int]int{10: 10, 20: 20}},
		{"a call is new and all moved", []int{10, 20, 25}, []int{12, 17, 22, 27}, map[int]int{12: 10, 22: 20, 27: 25}},
		{"a call went", []int{10, 15, 20}, []int{10, 20}, map[int]int{10: 10, 20: 20}},
		{"a single call moved", []int{10}, []int{99}, map[int]int{99: 10}},
		{"of one run only", []int{10}, nil, map[int]int{}},
		{"without lines", []int{0}, []int{0}, map[int]int{0: 0}},
		{"nothing", nil, nil, map[int]int{}},
	} {
		if got := alignLines(c.a, c.b); !maps.Equal(got, c.want) {
			t.Errorf("%s: %v to %v pairs %v, want %v", c.what, c.a, c.b, got, c.want)
		}
		// Seen from the other run it is the same.
		back := map[int]int{}
		for b, a := range alignLines(c.b, c.a) {
			back[a] = b
		}
		for b, a := range c.want {
			if back[b] != a && c.what != "one line above, and calls on lines that follow each other" {
				t.Errorf("%s, backwards: line %d pairs with %d, want %d", c.what, b, back[b], a)
			}
		}
	}
	// Too many lines to try every shift: those that are equal still match.
	var many []int
	for i := range 2000 {
		many = append(many, 3*i)
	}
	if got := alignLines(many, many); len(got) != len(many) || got[300] != 300 {
		t.Errorf("of %d equal lines %d match", len(many), len(got))
	}
}

// runOf is a run whose blocks all stay: stack and size of each. A stack is named by "file:line function" frames.
func runOf(path string, blocks []struct {
	size  uint64
	stack []recording.Frame
}) *recording.Trace {
	t := &recording.Trace{Path: path, Streams: []uint64{0, 0x7f00}, Pools: []recording.PoolID{{}, {0, 3}}, Stacks: []recording.Stack{nil}, FromStart: true}
	ids := map[recording.Frame]uint32{}
	for i, b := range blocks {
		var st recording.Stack
		for _, f := range b.stack {
			id, ok := ids[f]
			if !ok {
				id = uint32(len(t.Frames))
				ids[f] = id
				t.Frames = append(t.Frames, f)
			}
			st = append(st, id)
		}
		n := uint32(0)
		if len(st) > 0 {
			n = uint32(len(t.Stacks))
			t.Stacks = append(t.Stacks, st)
		}
		t.Events = append(t.Events, event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 30, Size: b.size, TimeUS: int64(1000 + i), Stack: n,
			Pool: uint32(i % 2), Stream: uint32(i % 2)})
	}
	return t
}

type blocks = []struct {
	size  uint64
	stack []recording.Frame
}

// A program that was edited: moved to another folder, lines added above and inside, one call new, one gone.
func TestDiffOfAnEditedProgram(t *testing.T) {
	frame := func(folder, file, function string, n int) recording.Frame {
		return recording.Frame{File: folder + file, Func: function, Line: n}
	}
	stack := func(folder string, inner, outer int) []recording.Frame {
		return []recording.Frame{frame(folder, "model.py", "forward", inner), frame(folder, "train.py", "main", outer), {Func: "torch::run"}}
	}
	a := runOf("a", blocks{{100, stack("/old/", 10, 5)}, {200, stack("/old/", 11, 5)}, {300, stack("/old/", 30, 6)},
		{50, []recording.Frame{frame("/old/", "model.py", "helper", 50)}}, {7, nil}})
	b := runOf("b", blocks{{150, stack("/new/", 11, 8)}, {200, stack("/new/", 12, 8)}, {1000, stack("/new/", 20, 8)},
		{301, stack("/new/", 31, 9)}, {7, nil}, {9, nil}})
	d := Diff(a, b, false)
	type row struct {
		a, b uint64
		name string
	}
	var got []row
	for _, c := range d.Stack {
		got = append(got, row{c.BytesA, c.BytesB, c.Name})
		if c.Grew != int64(c.BytesB)-int64(c.BytesA) {
			t.Errorf("%s grew by %d, not from %d to %d", c.Name, c.Grew, c.BytesA, c.BytesB)
		}
	}
	want := []row{{0, 1000, "forward /new/model.py:20"}, {100, 150, "forward /new/model.py:11"}, {50, 0, "helper /old/model.py:50"},
		{7, 16, NoStack}, {300, 301, "forward /new/model.py:31"}, {200, 200, "forward /new/model.py:12"}} // the largest change first, then by name
	if !reflect.DeepEqual(got, want) {
		t.Errorf("by stack\n%v, want\n%v", got, want)
	}
	if d.A.Live != 657 || d.B.Live != 1667 || d.A.Event != 4 || d.B.Blocks != 6 {
		t.Errorf("sides %+v, %+v", d.A, d.B)
	}
	for what, list := range map[string][]Change{"size": d.Size, "exact size": d.Exact, "pool": d.Pool, "stream": d.Stream, "stack": d.Stack,
		"library": d.Library} {
		var sum int64
		blocksA := 0
		for _, c := range list {
			sum += c.Grew
			blocksA += c.BlocksA
		}
		if sum != 1667-657 || blocksA != 5 {
			t.Errorf("by %s the changes add up to %d of %d blocks, want %d of 5", what, sum, blocksA, 1667-657)
		}
	}
	if d.Pool[0].Name != "0,0" || d.Stream[0].Name == "" {
		t.Errorf("pools %+v, streams %+v", d.Pool, d.Stream)
	}
}

// Of the same run nothing has changed, at any moment; the other way round every change has the other sign.
func TestDiffOfRecordedRuns(t *testing.T) {
	read := func(name string) *recording.Trace {
		f, err := open.File("../recording/testdata/" + name + ".pickle.gz")
		if err != nil {
			t.Fatal(err)
		}
		return f.Traces[0]
	}
	one, other := read("gpt2_varlen"), read("detection")
	for _, atEnd := range []bool{false, true} {
		d := Diff(one, one, atEnd)
		for _, list := range [][]Change{d.Stack, d.Size, d.Exact, d.Pool, d.Stream} {
			for _, c := range list {
				if c.Grew != 0 || c.BlocksA != c.BlocksB {
					t.Fatalf("the same run changed: %+v", c)
				}
			}
		}
		if m := MomentAt(one, d.A.Event); m.Live != d.A.Live || m.Blocks != d.A.Blocks || m.Reserved != d.A.Reserved {
			t.Errorf("the moment is %+v, want live %d in %d blocks, reserved %d", d.A, m.Live, m.Blocks, m.Reserved)
		}
		there, back := Diff(one, other, atEnd), Diff(other, one, atEnd)
		grew := map[string]int64{}
		for _, c := range there.Exact {
			grew[c.Name] = c.Grew
		}
		for _, c := range back.Exact {
			if grew[c.Name] != -c.Grew {
				t.Errorf("%s grew by %d there and by %d back", c.Name, grew[c.Name], c.Grew)
			}
		}
		if len(there.Exact) != len(back.Exact) || fmt.Sprint(there.A) != fmt.Sprint(back.B) {
			t.Errorf("there and back differ")
		}
	}
}

func TestDiffSaysWhatIsMissing(t *testing.T) {
	a := runOf("a", blocks{{1, nil}})
	b := runOf("b", blocks{{1, []recording.Frame{{Func: "f"}}}})
	b.FromStart = false
	b.Settings.Conf = "expandable_segments:True"
	if d := Diff(a, b, false); len(d.Notes) != 3 {
		t.Errorf("notes %q", d.Notes)
	}
	if d := Diff(&recording.Trace{}, &recording.Trace{}, true); d.A.Event != -1 || len(d.Stack) != 0 {
		t.Errorf("of empty runs: %+v", d)
	}
}
