package dump

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// said collects what a Reporter says.
type said struct {
	mu    sync.Mutex
	lines []string
}

func (s *said) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, line)
}

func (s *said) all() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.lines, "\n")
}

// enough is time for a file on any machine.
const enough = time.Hour

// reporter is a Reporter whose names are the test's, and that is in no hurry.
func reporter(t *testing.T, a *cistern.Allocator, dir string) (*Reporter, *said) {
	t.Helper()
	s := &said{}
	r := &Reporter{Allocator: a, Names: func() Names { return testNames }, Say: s.say, Bound: enough}
	if err := r.To(dir, false); err != nil {
		t.Fatal(err)
	}
	return r, s
}

// fails makes a request that cannot be met.
func fails(t *testing.T, dev cistern.Device, st cistern.Stream, size uint64, o cistern.AllocOptions) *cistern.OutOfMemoryError {
	t.Helper()
	_, err := dev.AllocWith(size, st, o)
	var oom *cistern.OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatalf("%d bytes: %v", size, err)
	}
	return oom
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestReporter: the file has all that is known.
func TestReporter(t *testing.T) {
	t.Setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
	for _, history := range []string{"history:1000,", ""} {
		a, dev, st := engine(t, history+"limit:100MiB")
		a.KeepStacks(true)
		pool, err := dev.NewPoolWith(cistern.PoolID{7, 8}, cistern.PoolOptions{Limit: 60 * mib})
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "made", "here")
		r, s := reporter(t, a, dir)
		stack := a.StackOf([]uint64{1, 3})
		if _, err := dev.AllocWith(40*mib, st, cistern.AllocOptions{Tag: 2, Library: 3, Stack: stack}); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.AllocTagged(30*mib, st, 2); err != nil {
			t.Fatal(err)
		}
		oom := fails(t, dev, st, 50*mib-5, cistern.AllocOptions{Pool: pool, Tag: 4, Stack: a.StackOf([]uint64{5}), Thread: uint32(os.Getpid())})
		lines := append([]string{oom.Error()}, oom.Findings(cistern.Names{})...)
		file := r.OutOfMemory(oom, lines)
		if want := filepath.Join(dir, fmt.Sprintf("oom-%d-1.cistern", os.Getpid())); file != want || !slices.Equal(files(t, dir), []string{want}) {
			t.Fatalf("%q, files %v, want %s; said %s", file, files(t, dir), want, s.all())
		}
		if want := fmt.Sprintf("cistern: out of memory on device 0: wrote %s; cistern report %s explains it", file, file); s.all() != want {
			t.Errorf("said %q, want %q", s.all(), want)
		}
		read, err := open.File(file)
		if err != nil {
			t.Fatal(err)
		}
		tr := read.Traces[0]
		if len(tr.Failures) != 1 {
			t.Fatalf("%d failures", len(tr.Failures))
		}
		f := tr.Failures[0]
		if history == "" {
			if f.Event != -1 || len(tr.Events) != 0 {
				t.Errorf("event %d of %d", f.Event, len(tr.Events))
			}
		} else if e := tr.Events[f.Event]; e.Kind != event.OOM || e.TimeUS != f.TimeUS || e.Size != f.Need || e.Stack != f.Stack {
			t.Errorf("event %d is %+v", f.Event, e)
		}
		if calls(tr, f.Stack) != "f5" || tr.Tags[f.Tag] != "tag-4" || tr.Libraries[f.Library] != "library-9" || f.Thread != uint32(os.Getpid()) {
			t.Errorf("%s, %q, %q, %d", calls(tr, f.Stack), tr.Tags[f.Tag], tr.Libraries[f.Library], f.Thread)
		}
		if f.Requested != oom.Requested || f.Need != oom.Need || f.Reserved != oom.Reserved || f.Limit != 100*mib || f.PoolLimit != oom.PoolLimit ||
			f.DeviceTotal == 0 || f.Pool != (recording.PoolID{7, 8}) || !slices.Equal(f.Lines, lines) || f.Version != cistern.Version ||
			f.Conf != a.Options().String() || !strings.HasPrefix(f.UUID, "GPU-") || f.Device == "" {
			t.Errorf("%+v", f)
		}
		if tr.Threads[f.Thread] == "" {
			t.Errorf("the thread's name is not among %v", tr.Threads)
		}
		if exe, _ := os.Executable(); len(f.Program) == 0 || filepath.Base(f.Program[0]) != filepath.Base(exe) {
			t.Errorf("program %q", f.Program)
		}
		if len(f.Steps) != len(oom.Steps) || len(f.Steps) == 0 || f.Steps[0].Stage != "fit" {
			t.Errorf("steps %+v of %+v", f.Steps, oom.Steps)
		}
		kinds := map[string]uint64{}
		for _, l := range f.Limits {
			if l.From == "" {
				t.Errorf("%+v", l)
			}
			kinds[l.Kind] = l.Bytes
		}
		if _, mps := kinds["mps"]; kinds["cistern"] != 100*mib || kinds["device"] != oom.DriverTotal || kinds["pool"] != oom.PoolLimit || !mps {
			t.Errorf("limits %+v", f.Limits)
		}
		if f.OthersUnknown == "" || len(f.Others) != 0 {
			t.Errorf("others %+v, unknown %q", f.Others, f.OthersUnknown)
		}
		// Fields that are added to a failure must be filled in as well.
		unfilled := map[string]bool{"Event": true, "Cut": true, "Upstream": true, "Stream": true, "Pending": true, "Cached": true, "Pinned": true,
			"PoolsElsewhere": true, "Elsewhere": true, "UsedElsewhere": true, "Paused": true, "Largest": true, "Others": true, "DeviceFree": true}
		for i, v := 0, reflect.ValueOf(*f); i < v.NumField(); i++ {
			if name := v.Type().Field(i).Name; v.Field(i).IsZero() && !unfilled[name] {
				t.Errorf("%s is not filled in", name)
			}
		}
		held := map[string]uint64{}
		for _, g := range tr.Final {
			for _, b := range g.Blocks {
				if b.State == recording.Active {
					held[calls(tr, b.Stack)] += b.Requested
				}
			}
		}
		if held["f1 < f3"] != 40*mib || held[""] != 30*mib {
			t.Errorf("held %v", held)
		}
	}
}

// TestFailuresAtOnce: each file is whole, and there are no more than five.
func TestFailuresAtOnce(t *testing.T) {
	a, dev, st := engine(t, "limit:10MiB,history:100")
	dir := t.TempDir()
	r, s := reporter(t, a, dir)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			oom := fails(t, dev, st, 50*mib+uint64(i)*mib, cistern.AllocOptions{Thread: uint32(i + 1)})
			r.OutOfMemory(oom, []string{fmt.Sprint(i)})
		})
	}
	wg.Wait()
	list := files(t, dir)
	if len(list) != MostFiles {
		t.Errorf("files %v; said\n%s", list, s.all())
	}
	for _, file := range list {
		read, err := open.File(file)
		if err != nil {
			t.Fatal(err)
		}
		f := read.Traces[0].Failures[0]
		if e := read.Traces[0].Events[f.Event]; f.Lines[0] != fmt.Sprint(f.Thread-1) || e.Thread != f.Thread || e.Size != f.Need {
			t.Errorf("%s: %+v of %+v", file, f, e)
		}
	}
}

// TestFilesOfOthers: what a process with the same number has written stays.
func TestFilesOfOthers(t *testing.T) {
	a, dev, st := engine(t, "limit:10MiB")
	dir := t.TempDir()
	name := func(n int) string { return filepath.Join(dir, fmt.Sprintf("oom-%d-%d.cistern", os.Getpid(), n)) }
	for _, n := range []int{1, 3} {
		if err := os.WriteFile(name(n), []byte("theirs"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	r, s := reporter(t, a, dir)
	oom := fails(t, dev, st, 50*mib, cistern.AllocOptions{})
	if first, second := r.OutOfMemory(oom, nil), r.OutOfMemory(oom, nil); first != name(2) || second != name(4) {
		t.Errorf("%s, %s; said %s", first, second, s.all())
	}
	for _, n := range []int{1, 3} {
		if text, err := os.ReadFile(name(n)); err != nil || string(text) != "theirs" {
			t.Errorf("%q, %v", text, err)
		}
	}
}

// TestTroubleWriting: each of the first failures is a line, and once it can be written there is a file of the newest.
func TestTroubleWriting(t *testing.T) {
	a, dev, st := engine(t, "limit:10MiB")
	dir := t.TempDir()
	inTheWay := filepath.Join(dir, "file")
	if err := os.WriteFile(inTheWay, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	r, s := reporter(t, a, filepath.Join(inTheWay, "folder"))
	oom := fails(t, dev, st, 50*mib, cistern.AllocOptions{})
	for range 20 {
		if file := r.OutOfMemory(oom, nil); file != "" {
			t.Error(file)
		}
	}
	lines := strings.Split(s.all(), "\n")
	if len(lines) != MostFiles || !strings.Contains(lines[0], inTheWay) || !strings.HasSuffix(lines[MostFiles-1], "; that is not said of later ones") {
		t.Errorf("said\n%s", s.all())
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	makeDue(r)
	file := filepath.Join(inTheWay, "folder", fmt.Sprintf("oom-%d-5.cistern", os.Getpid()))
	if got := r.OutOfMemory(oom, nil); got != file || !strings.Contains(s.all(), "wrote "+file) {
		t.Errorf("%s; said\n%s", got, s.all())
	}
	// Turned off nothing happens.
	r, s = reporter(t, a, "")
	if r.On() || r.OutOfMemory(oom, nil) != "" || s.all() != "" {
		t.Errorf("said %s", s.all())
	}
}

// TestGivenUp: what takes too long, or has a bug, is given up, and leaves nothing.
func TestGivenUp(t *testing.T) {
	a, dev, st := engine(t, "limit:10MiB")
	a.KeepStacks(true)
	dir := t.TempDir()
	r, s := reporter(t, a, dir)
	r.Bound = 100 * time.Millisecond
	oom := fails(t, dev, st, 50*mib, cistern.AllocOptions{Stack: a.StackOf([]uint64{1})})
	release := make(chan struct{})
	r.Names = func() Names {
		n := testNames
		n.Frames = func(numbers []uint64) [][]recording.Frame {
			<-release
			return testNames.Frames(numbers)
		}
		return n
	}
	if file := r.OutOfMemory(oom, nil); file != "" || !strings.Contains(s.all(), "given up after 100ms") { // while it is still being written

		t.Errorf("%q; said %s", file, s.all())
	}
	if file := r.OutOfMemory(oom, nil); file != "" || !strings.Contains(s.all(), "an earlier one is still being written") {
		t.Errorf("%q; said %s", file, s.all())
	}
	close(release)
	r.writing <- struct{}{} // its thread has come back
	<-r.writing
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	r.Names = func() Names { return testNames }
	r.Bound = enough
	if file := r.OutOfMemory(oom, nil); file == "" {
		t.Errorf("the next one is not written: %s", s.all())
	}
	r.Names = func() Names { return Names{Frames: func([]uint64) [][]recording.Frame { panic("injected") }} }
	if file := r.OutOfMemory(oom, nil); file != "" || !strings.Contains(s.all(), "a bug in Cistern") || !strings.Contains(s.all(), "injected") {
		t.Errorf("%q; said %s", file, s.all())
	}
}

// TestGivenUpLate: a file's thread may come back in the moment in which it is given up. It does not stand in the way of later
// files then.
func TestGivenUpLate(t *testing.T) {
	for _, endsFirst := range []bool{false, true} {
		r, j := &Reporter{}, &job{}
		if endsFirst {
			r.ended(j)
		}
		r.giveUp(j)
		if r.stuck == endsFirst {
			t.Errorf("ends first %v: stuck is %v", endsFirst, r.stuck)
		}
		if r.ended(j); r.stuck {
			t.Errorf("ends first %v: stuck for good", endsFirst)
		}
	}
}

// TestNewest: where the time is too short for all events the newest are written, whole, and a note says so.
func TestNewest(t *testing.T) {
	const all = 400_000
	a, dev, st := engine(t, fmt.Sprintf("history:%d,limit:100MiB", all))
	held, err := dev.Alloc(40*mib, st)
	if err != nil {
		t.Fatal(err)
	}
	for range all/2 + 1000 {
		p, err := dev.Alloc(mib, st)
		if err == nil {
			err = a.Free(p)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	oom := fails(t, dev, st, 80*mib, cistern.AllocOptions{})
	r, s := reporter(t, a, t.TempDir())
	file := r.OutOfMemory(oom, nil)
	if file == "" || strings.Contains(s.all(), "newest") {
		t.Fatalf("with time enough it says %s", s.all())
	}
	events := func(file string) *recording.Trace {
		t.Helper()
		read, err := open.File(file)
		if err != nil {
			t.Fatal(err)
		}
		tr := read.Traces[0]
		if e := tr.Failures[0].Event; e != len(tr.Events)-1 || tr.Events[e].Kind != event.OOM {
			t.Errorf("%s: it failed at event %d of %d", file, e, len(tr.Events))
		}
		live := uint64(0)
		for _, b := range tr.Initial {
			live += b.Requested
		}
		if live < 40*mib || live > 41*mib || held == 0 {
			t.Errorf("%s: %d bytes before the first event", file, live)
		}
		return tr
	}
	whole := events(file)
	if len(whole.Events) != all {
		t.Errorf("%d events of %d", len(whole.Events), all)
	}
	usual := slices.Clone(parts)
	defer func() { parts = usual }()
	for n, of := range []int{8, 64} {
		parts[n].until = 0 // as where that much takes too long
		file = r.OutOfMemory(oom, nil)
		tr := events(file)
		if want := all / of; len(tr.Events) != want || !slices.Equal(tr.Events, whole.Events[all-want:]) {
			t.Errorf("%d events, want the newest %d", len(tr.Events), want)
		}
		if want := fmt.Sprintf("(with the newest %d events)", all/of); !strings.Contains(s.all(), want) || !slices.ContainsFunc(tr.Notes, func(n string) bool { return strings.Contains(n, "were written, so that it was done in time") }) {
			t.Errorf("said %s, notes %q", s.all(), tr.Notes)
		}
	}
}

// TestChild: the command is found, is given the file and nothing of what has Cistern act, and is not waited for.
func TestChild(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the command is a shell script")
	}
	a, dev, st := engine(t, "limit:10MiB")
	dir := t.TempDir()
	command := filepath.Join(dir, "bin", "cistern")
	if err := os.Mkdir(filepath.Dir(command), 0o777); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\nwhile [ ! -e \"$2.go\" ]; do [ -e \"$2\" ] || exit 1; sleep 0.01; done\necho \"$@\"\nenv | grep -e CISTERN -e LD_ -e PYTHONPATH\necho to standard error >&2\nread nothing || echo no input\necho done >\"$4\"\n"
	if err := os.WriteFile(command, []byte(script), 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LD_PRELOAD", "")
	t.Setenv("CISTERN_CONF", "report:/nowhere")
	t.Setenv("_CISTERN_INJECT", "run")
	oom := fails(t, dev, st, 50*mib, cistern.AllocOptions{})
	for name, set := range map[string]func(*testing.T, *Reporter){
		"named": func(t *testing.T, r *Reporter) {
			t.Setenv("CISTERN_COMMAND", command)
			t.Setenv("PATH", "/usr/bin:/bin")
		},
		"beside the library": func(t *testing.T, r *Reporter) { r.Library = filepath.Dir(command) },
		"in ../bin":          func(t *testing.T, r *Reporter) { r.Library = filepath.Join(dir, "lib") },
		"in PATH":            func(t *testing.T, r *Reporter) { t.Setenv("PATH", filepath.Dir(command)+":/usr/bin:/bin") },
	} {
		t.Run(name, func(t *testing.T) {
			r, s := reporter(t, a, t.TempDir())
			set(t, r)
			r.child = true
			file := r.OutOfMemory(oom, nil) // while the command waits
			if file == "" || !strings.HasSuffix(s.all(), fmt.Sprintf("and is writing %s.html and %s.txt", file, file)) {
				t.Fatal(s.all())
			}
			if err := os.WriteFile(file+".go", nil, 0o666); err != nil {
				t.Fatal(err)
			}
			waitFor(t, file+".html")
			text, err := os.ReadFile(file + ".txt")
			if want := fmt.Sprintf("report %s -o %s.html --private\nto standard error\nno input\n", file, file); err != nil || string(text) != want {
				t.Errorf("%q, %v, want %q", text, err, want)
			}
		})
	}
	t.Run("nowhere", func(t *testing.T) {
		t.Setenv("PATH", "/nowhere")
		r, s := reporter(t, a, t.TempDir())
		r.child = true
		if file := r.OutOfMemory(oom, nil); file == "" || !strings.Contains(s.all(), "set CISTERN_COMMAND to its path") {
			t.Errorf("%q; said %s", file, s.all())
		}
		t.Setenv("CISTERN_COMMAND", dir)
		if r.OutOfMemory(oom, nil); !strings.Contains(s.all(), "is not a program") {
			t.Errorf("said %s", s.all())
		}
	})
}

func waitFor(t *testing.T, file string) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(file); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not come", file)
		}
	}
}

// TestCleaned: what else is in the environment stays.
func TestCleaned(t *testing.T) {
	pkg := t.TempDir()
	inject := filepath.Join(pkg, "_inject")
	if err := os.WriteFile(filepath.Join(pkg, "_injected.py"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(inject, 0o777); err != nil {
		t.Fatal(err)
	}
	sep := string(os.PathListSeparator)
	got := cleaned([]string{"HOME=/h", "LD_AUDIT=/x.so", "LD_PRELOAD=/y.so", "LD_LIBRARY_PATH=/z", "CISTERN_CONF=a", "_CISTERN_INJECT=run",
		"CISTERN_AUDIT=1", "PYTHONPATH=" + inject + sep + "/mine" + sep + "/its/_inject", "X=CISTERN_CONF=a"})
	want := []string{"HOME=/h", "LD_LIBRARY_PATH=/z", "PYTHONPATH=/mine" + sep + "/its/_inject", "X=CISTERN_CONF=a"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
