package dump

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// makeDue has so much time passed that the last file may be written anew; wait has it left alone.
func makeDue(r *Reporter) { setNext(r, time.Time{}) }
func wait(r *Reporter)    { setNext(r, time.Now().Add(time.Hour)) }

func setNext(r *Reporter, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next = at
}

// lastName is the name of this process's last file.
func lastName(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("oom-%d-%d.cistern", os.Getpid(), MostFiles))
}

// failureOf is the failure that a file is of.
func failureOf(t *testing.T, file string) (*recording.Failure, *recording.Trace) {
	t.Helper()
	read, err := open.File(file)
	if err != nil {
		t.Fatal(err)
	}
	return read.Traces[0].Failures[0], read.Traces[0]
}

// filled is a Reporter whose files are all there.
func filled(t *testing.T, conf, dir string) (*Reporter, *said, func(size uint64) *cistern.OutOfMemoryError) {
	t.Helper()
	a, dev, st := engine(t, conf)
	a.KeepStacks(true)
	r, s := reporter(t, a, dir)
	fail := func(size uint64) *cistern.OutOfMemoryError {
		t.Helper()
		return fails(t, dev, st, size, cistern.AllocOptions{Stack: a.StackOf([]uint64{size / mib})})
	}
	for n := range uint64(MostFiles) {
		if r.OutOfMemory(fail((50+n)*mib), []string{fmt.Sprint(n + 1)}) == "" {
			t.Fatal(s.all())
		}
	}
	return r, s, fail
}

// TestNewestIsLast: the files of the first failures stay, the last is the newest's, of whose many no more lines are printed.
func TestNewestIsLast(t *testing.T) {
	dir := t.TempDir()
	r, s, fail := filled(t, "limit:10MiB,history:100", dir)
	lines := strings.Split(s.all(), "\n")
	if len(lines) != MostFiles || strings.Contains(lines[MostFiles-2], "newest") || !strings.HasSuffix(lines[MostFiles-1], "; of later failures the newest takes its place") {
		t.Errorf("said\n%s", s.all())
	}
	if _, tr := failureOf(t, lastName(dir)); len(tr.Notes) != 0 {
		t.Errorf("notes of the fifth %q", tr.Notes)
	}
	oom := fail(60 * mib)
	wait(r)
	passed := uint64(0)
	took := enough // the shortest of a few times: on a busy machine one alone may take long
	for end := time.Now().Add(time.Minute); took > 2*time.Second && time.Now().Before(end); {
		begin := time.Now()
		for range 10_000 {
			if file := r.OutOfMemory(oom, []string{"x"}); file != "" {
				t.Fatal(file)
			}
		}
		took = min(took, time.Since(begin))
		passed += 10_000
	}
	if took > 2*time.Second {
		t.Errorf("ten thousand failures that write nothing took %v", took)
	}
	for n := range uint64(3) {
		makeDue(r)
		if file := r.OutOfMemory(fail((70+n)*mib), []string{"new"}); file != lastName(dir) {
			t.Fatalf("%q; said\n%s", file, s.all())
		}
		f, tr := failureOf(t, lastName(dir))
		want := fmt.Sprintf("the process's out-of-memory number %d since files are written: of those after the first 4 only the newest has a file", passed+6+n)
		if f.Requested != (70+n)*mib || f.Lines[0] != "new" || f.Event != len(tr.Events)-1 || calls(tr, f.Stack) == "" || !slices.Contains(tr.Notes, want) {
			t.Errorf("%+v, notes %q", f, tr.Notes)
		}
	}
	if list := files(t, dir); len(list) != MostFiles {
		t.Errorf("files %v", list)
	}
	for n := range uint64(MostFiles - 1) {
		if f, _ := failureOf(t, strings.Replace(lastName(dir), "-5.", fmt.Sprintf("-%d.", n+1), 1)); f.Requested != (50+n)*mib {
			t.Errorf("file %d is of %d bytes", n+1, f.Requested)
		}
	}
	if got := strings.Split(s.all(), "\n"); len(got) != MostFiles {
		t.Errorf("said\n%s", s.all())
	}
}

// TestShare: the longer a file takes, the longer it is left alone.
func TestShare(t *testing.T) {
	const took = 60 * time.Millisecond
	r, s, fail := filled(t, "limit:10MiB", t.TempDir())
	release := make(chan struct{})
	close(release)
	r.Names = func() Names {
		n := testNames
		n.Frames = func(numbers []uint64) [][]recording.Frame {
			time.Sleep(took)
			<-release
			return testNames.Frames(numbers)
		}
		return n
	}
	makeDue(r)
	begin := time.Now()
	if r.OutOfMemory(fail(50*mib), nil) == "" {
		t.Fatal(s.all())
	}
	ended := time.Now()
	r.mu.Lock()
	next := r.next
	r.mu.Unlock()
	if next.Before(begin.Add(20*took)) || next.After(ended.Add(20*ended.Sub(begin))) {
		t.Errorf("one that took %v is left alone until %v after it was begun", ended.Sub(begin), next.Sub(begin))
	}
	// What is given up counts for all of the time that it took.
	makeDue(r)
	r.Bound = took / 3
	release = make(chan struct{}) // no other thread is there
	begin = time.Now()
	if file := r.OutOfMemory(fail(50*mib), nil); file != "" {
		t.Fatal(file)
	}
	close(release)
	r.writing <- struct{}{} // its thread has come back
	<-r.writing
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stuck || r.next.Before(begin.Add(20*took)) {
		t.Errorf("stuck %v; one that was given up is left alone until %v after it was begun", r.stuck, r.next.Sub(begin))
	}
}

// TestWhileReplaced: until the newest file is whole the one before it is there, and later failures do not wait.
func TestWhileReplaced(t *testing.T) {
	dir := t.TempDir()
	r, s, fail := filled(t, "limit:10MiB", dir)
	before := s.all()
	reached, release := make(chan struct{}, 1), make(chan struct{})
	r.Names = func() Names {
		n := testNames
		n.Frames = func(numbers []uint64) [][]recording.Frame {
			reached <- struct{}{}
			<-release
			return testNames.Frames(numbers)
		}
		return n
	}
	makeDue(r)
	oom := fail(77 * mib)
	done := make(chan string)
	go func() { done <- r.OutOfMemory(oom, nil) }()
	<-reached
	later, waits := make(chan string), fail(78*mib)
	go func() { later <- r.OutOfMemory(waits, nil) }()
	select {
	case file := <-later:
		if file != "" {
			t.Errorf("%q", file)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("a later failure waits for an earlier one")
	}
	if f, _ := failureOf(t, lastName(dir)); f.Requested != 54*mib {
		t.Errorf("the one before was of %d bytes", f.Requested)
	}
	close(release)
	if file := <-done; file != lastName(dir) {
		t.Errorf("%q", file)
	}
	if f, _ := failureOf(t, lastName(dir)); f.Requested != 77*mib {
		t.Errorf("the new one is of %d bytes", f.Requested)
	}
	if s.all() != before {
		t.Errorf("said\n%s", s.all())
	}

	// What is given up leaves the file as it was. One line says so.
	release = make(chan struct{})
	r.Bound = 50 * time.Millisecond
	for range 3 {
		makeDue(r)
		if file := r.OutOfMemory(fail(79*mib), nil); file != "" {
			t.Errorf("%q", file)
		}
	}
	if got := strings.TrimPrefix(s.all(), before+"\n"); got != "cistern: out of memory on device 0: no file of it: given up after 50ms; that is not said of later ones" {
		t.Errorf("said\n%s", got)
	}
	close(release)
	r.writing <- struct{}{} // its thread has come back
	<-r.writing
	if f, _ := failureOf(t, lastName(dir)); f.Requested != 77*mib || len(files(t, dir)) != MostFiles {
		t.Errorf("%d bytes, files %v", f.Requested, files(t, dir))
	}
	<-reached
	r.Bound = enough
	makeDue(r)
	if file := r.OutOfMemory(fail(80*mib), nil); file != lastName(dir) {
		t.Errorf("the next one: %q; said\n%s", file, s.all())
	}
}

// TestReplacedByMany: a reader of the last file finds a whole one, whatever fails meanwhile.
func TestReplacedByMany(t *testing.T) {
	dir := t.TempDir()
	r, s, fail := filled(t, "limit:10MiB,history:100", dir)
	before := s.all()
	var wg sync.WaitGroup
	var over atomic.Bool
	defer over.Store(true)
	end := time.Now().Add(300 * time.Millisecond)
	for i := range uint64(4) {
		oom := fail((100 + i) * mib)
		wg.Go(func() {
			for !over.Load() {
				makeDue(r)
				r.OutOfMemory(oom, []string{fmt.Sprint(100 + i)})
			}
		})
	}
	seen := map[string]bool{}
	for time.Now().Before(end) || len(seen) < 3 && time.Since(end) < 2*time.Minute {
		f, _ := failureOf(t, lastName(dir))
		if f.Lines[0] != "5" && f.Lines[0] != fmt.Sprint(f.Requested/mib) {
			t.Fatalf("%q of %d bytes", f.Lines, f.Requested)
		}
		seen[f.Lines[0]] = true
	}
	over.Store(true)
	wg.Wait()
	if len(seen) < 3 || s.all() != before || len(files(t, dir)) != MostFiles {
		t.Errorf("seen %v, files %v; said\n%s", seen, files(t, dir), s.all())
	}
}

// TestLastPlace: the last file keeps its name, and takes no other file's.
func TestLastPlace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "oom")
	r, s, fail := filled(t, "limit:10MiB", dir)
	oom := fail(50 * mib)
	again := func() string {
		makeDue(r)
		return r.OutOfMemory(oom, nil)
	}
	// The folder goes.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if file := again(); file != lastName(dir) || len(files(t, dir)) != 1 {
		t.Errorf("%q, files %v", file, files(t, dir))
	}
	// Some file systems have a new number for the same file, as a copy has.
	text, err := os.ReadFile(lastName(dir))
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(lastName(dir))
	if err == nil {
		err = os.WriteFile(lastName(dir)+".copy", text, st.Mode().Perm())
	}
	if err == nil {
		err = os.Chtimes(lastName(dir)+".copy", st.ModTime(), st.ModTime())
	}
	if err == nil {
		err = os.Rename(lastName(dir)+".copy", lastName(dir))
	}
	if err != nil {
		t.Fatal(err)
	}
	if file := again(); file != lastName(dir) || len(files(t, dir)) != 1 {
		t.Errorf("%q, files %v", file, files(t, dir))
	}
	// Another program has a file of that name now, of a process with the same number, and takes the next names as well.
	name := lastName(dir)
	for n := MostFiles; n < 2*MostFiles-1; n++ {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("theirs"), 0o666); err != nil {
			t.Fatal(err)
		}
		name = again()
		if want := filepath.Join(dir, fmt.Sprintf("oom-%d-%d.cistern", os.Getpid(), n+1)); name != want {
			t.Fatalf("%q, want %s; said\n%s", name, want, s.all())
		}
		if file := again(); file != name {
			t.Fatalf("%q, want %s again", file, name)
		}
	}
	if err := os.WriteFile(name+".x", []byte("theirs"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".x", name); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if file := again(); file != "" {
			t.Errorf("%q", file)
		}
	}
	for _, file := range files(t, dir) {
		if text, err := os.ReadFile(file); err != nil || string(text) != "theirs" {
			t.Errorf("%s: %d bytes, %v", file, len(text), err)
		}
	}
	if lines := strings.Split(s.all(), "\n"); len(lines) != MostFiles+1 || !strings.Contains(lines[MostFiles], "again and again") {
		t.Errorf("said\n%s", s.all())
	}
	// Another folder has a last file of its own.
	other := t.TempDir()
	if err := r.To(other, false); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if file := again(); file != lastName(other) {
			t.Errorf("%q", file)
		}
	}
}

// TestChildOfFilesThatStay: what is replaced is not explained here, as the page would lie beside the file of another failure.
func TestChildOfFilesThatStay(t *testing.T) {
	a, dev, st := engine(t, "limit:10MiB")
	dir := t.TempDir()
	r, s := reporter(t, a, dir)
	var explained []string
	r.Start = func(c Child) error { explained = append(explained, c.Args[1]); return nil }
	r.Getenv = func(name string) string {
		if name == "CISTERN_COMMAND" {
			return os.Args[0]
		}
		return ""
	}
	if err := r.To(dir, true); err != nil {
		t.Fatal(err)
	}
	var want []string
	for n := range MostFiles + 2 {
		makeDue(r)
		file := r.OutOfMemory(fails(t, dev, st, 50*mib, cistern.AllocOptions{}), nil)
		if file == "" {
			t.Fatal(s.all())
		}
		if n < MostFiles-1 {
			want = append(want, file)
		}
	}
	lines := strings.Split(s.all(), "\n")
	if !slices.Equal(explained, want) || len(lines) != MostFiles || !strings.HasSuffix(lines[MostFiles-2], ".txt") ||
		!strings.HasSuffix(lines[MostFiles-1], "(it is not started here: of later failures the newest takes the file's place)") {
		t.Errorf("explained %v; said\n%s", explained, s.all())
	}
}
