package dump

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

const mib = 1 << 20

// engine is an allocator over a simulated machine, whose stacks are numbers of the test's own.
func engine(t *testing.T, conf string) (*cistern.Allocator, cistern.Device, cistern.Stream) {
	t.Helper()
	opts, err := cistern.ParseOptions(conf)
	if err != nil {
		t.Fatal(err)
	}
	a, err := cistern.New(sim.New(sim.Options{}), opts)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := a.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	st, err := dev.Stream(0)
	if err != nil {
		t.Fatal(err)
	}
	return a, dev, st
}

// testNames say "tag 3", and of a frame N that it is function fN, within gN where N is even.
var testNames = Names{
	Tag:            func(n uint32) string { return fmt.Sprintf("tag-%d", n) },
	Library:        func(n uint8) string { return fmt.Sprintf("library-%d", n) },
	DefaultLibrary: 9,
	Frames: func(numbers []uint64) (out [][]recording.Frame) {
		for _, n := range numbers {
			list := []recording.Frame{{File: "x.py", Func: fmt.Sprintf("f%d", n), Line: int(n)}}
			if n%2 == 0 {
				list = append(list, recording.Frame{File: "x.py", Func: fmt.Sprintf("g%d", n), Line: int(n)})
			}
			out = append(out, list)
		}
		return out
	},
}

// calls is a stack as text.
func calls(t *recording.Trace, stack uint32) string {
	var out []string
	for _, f := range t.Stacks[stack] {
		out = append(out, t.Frames[f].Func)
	}
	return strings.Join(out, " < ")
}

// TestDevices: what is held and what led to it, by name.
func TestDevices(t *testing.T) {
	a, dev, st := engine(t, "history:1000")
	a.KeepStacks(true)
	get := func(size uint64, o cistern.AllocOptions) cuda.Ptr {
		p, err := dev.AllocWith(size, st, o)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	gone := get(64*mib, cistern.AllocOptions{Tag: 5, Thread: 77, Stack: a.StackOf([]uint64{4, 1})})
	get(3*mib, cistern.AllocOptions{Tag: 2, Library: 3, Stack: a.StackOf([]uint64{1, 3}), Thread: uint32(os.Getpid())})
	get(5*mib, cistern.AllocOptions{})
	if err := a.FreeWith(gone, cistern.FreeOptions{Thread: uint32(os.Getpid())}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "x.cistern")
	if err := Write(file, a, testNames); err != nil {
		t.Fatal(err)
	}
	f, err := open.File(file)
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Traces[0]
	var got []string
	for _, e := range tr.Events {
		if e.Kind == event.Alloc || e.Kind == event.FreeRequested {
			got = append(got, fmt.Sprintf("%v %d MiB: %s, %s, thread %v, %s", e.Kind, e.Size/mib, entry(tr.Tags, int(e.Tag)),
				entry(tr.Libraries, int(e.Library)), e.Thread == uint32(os.Getpid()), calls(tr, e.Stack)))
		}
	}
	want := []string{
		"alloc 64 MiB: tag-5, library-9, thread false, f4 < g4 < f1",
		"alloc 3 MiB: tag-2, library-3, thread true, f1 < f3",
		"alloc 5 MiB: , library-9, thread false, ",
		"free_requested 64 MiB: tag-5, library-9, thread true, f4 < g4 < f1",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	held := map[uint64]string{}
	for i, s := range tr.Final {
		if i > 0 && s.Addr < tr.Final[i-1].Addr {
			t.Errorf("segments are not in address order: %#x after %#x", s.Addr, tr.Final[i-1].Addr)
		}
		for _, b := range s.Blocks {
			if b.State == recording.Active {
				held[b.Requested/mib] = fmt.Sprintf("%s, %s, %s", entry(tr.Tags, int(b.Tag)), entry(tr.Libraries, int(b.Library)), calls(tr, b.Stack))
			} else if b.Tag != 0 || b.Library != 0 || b.Stack != 0 {
				t.Errorf("a free block that has a label: %+v", b)
			}
		}
	}
	if d := cmp.Diff(map[uint64]string{3: "tag-2, library-3, f1 < f3", 5: ", library-9, "}, held); d != "" {
		t.Error(d)
	}
	if !tr.FromStart || len(tr.Initial) != 0 || tr.Threads[uint32(os.Getpid())] == "" || tr.Threads[77] != "" {
		t.Errorf("from the start %v, %d blocks before; threads %v", tr.FromStart, len(tr.Initial), tr.Threads)
	}

	// Chunks without an owner, held all the same.
	if err := dev.DefaultPool().Trim(); err != nil {
		t.Fatal(err)
	}
	other, err := dev.NewPool(cistern.PoolID{1, 1})
	if err != nil {
		t.Fatal(err)
	}
	p, err := other.Alloc(40*mib, st)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.Free(p), other.Release()); err != nil {
		t.Fatal(err)
	}
	if tr := Devices(a, testNames)[0]; !tr.FromStart || len(tr.InitialSegments) != 0 {
		t.Errorf("with spare chunks it did not begin at the start: %v", tr.InitialSegments)
	}

	// A history that begins in the middle.
	dev.SetHistory(1000)
	get(7*mib, cistern.AllocOptions{})
	tr = Devices(a, testNames)[0]
	if tr.FromStart || len(tr.Initial) != 2 || len(tr.Events) == 0 {
		t.Errorf("from the start %v, %d blocks before it, want 2", tr.FromStart, len(tr.Initial))
	}
	// None.
	dev.SetHistory(0)
	if tr = Devices(a, Names{})[0]; len(tr.Events) != 0 || len(tr.Initial) != 3 || len(tr.Notes) != 0 || tr.Tags[2] != "tag 2" {
		t.Errorf("%d events, %d blocks, notes %q, tags %q", len(tr.Events), len(tr.Initial), tr.Notes, tr.Tags)
	}
}

func entry(table []string, i int) string {
	if i < len(table) {
		return table[i]
	}
	return ""
}

// TestGoFrames: stacks that the engine caught in a Go program.
func TestGoFrames(t *testing.T) {
	a, dev, st := engine(t, "history:10,stacks:native")
	if _, err := dev.Alloc(mib, st); err != nil {
		t.Fatal(err)
	}
	tr := Devices(a, Names{})[0]
	for _, e := range tr.Events {
		if e.Kind != event.Alloc {
			continue
		}
		frames := tr.Stacks[e.Stack]
		if len(frames) == 0 {
			t.Fatal("a request without a stack")
		}
		if f := tr.Frames[frames[0]]; !strings.HasSuffix(f.Func, "dump.TestGoFrames") || !strings.HasSuffix(f.File, "dump_test.go") || f.Line == 0 {
			t.Errorf("it comes from %+v", f)
		}
	}
}

// TestNothingInUse: there is nothing to write.
func TestNothingInUse(t *testing.T) {
	a, err := cistern.New(sim.New(sim.Options{}), cistern.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(filepath.Join(t.TempDir(), "x"), a, Names{}); err == nil || !strings.Contains(err.Error(), "no device") {
		t.Error(err)
	}
}

// TestWriteFile: whole or not at all.
func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "x"), filepath.Join(dir, "link")
	put := func(name, text string, err error) error {
		return WriteFile(name, func(w io.Writer) error {
			if _, err := io.WriteString(w, text); err != nil {
				return err
			}
			return err
		})
	}
	if err := put(file, "one", nil); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	if err := put(file, "two", broken); !errors.Is(err, broken) {
		t.Error(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := put(link, "three", nil); err != nil {
		t.Error(err)
	}
	if err := put(filepath.Join(dir, "none", "x"), "four", nil); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "three" {
		t.Errorf("%q, %v", text, err)
	}
	var names []string
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, []string{"link", "x"}) {
		t.Errorf("left: %v", names)
	}
	if err := put(os.DevNull, "five", nil); err != nil {
		t.Error(err)
	}
}

// A file says which process of a job it is of, and nothing where it is of none.
func TestIdentity(t *testing.T) {
	variables := map[string]string{"RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_ID": "77", "CISTERN_COORDINATES": "pp=2"}
	n := Names{Getenv: func(name string) string { return variables[name] }}
	id := n.identity()
	if id == nil || id.Rank != 3 || id.World != 8 || id.Job != "77" || id.Coordinates["pp"] != 2 || id.PID != os.Getpid() {
		t.Errorf("%+v", id)
	}
	clear(variables)
	if id := n.identity(); id != nil {
		t.Errorf("%+v", id)
	}
}
