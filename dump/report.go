package dump

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
)

// MostFiles is how many files a Reporter leaves in a folder: those of the first failures, and the last one of the newest, which
// is written anew as often as costs a program little that runs out of memory again and again (last.go).
const MostFiles = 5

// mostEvents is how many events a file has at most. They are copied while the engine waits, and take some seconds of the bound
// to write; what would have met the request shows over far fewer.
const mostEvents = 4_000_000

// Reporter writes a file for a request that failed: what was held, what led to it, what else was in the way. It never fails
// its caller: what goes wrong is a line. Set the fields before its first use; To says where files go.
type Reporter struct {
	Allocator Source
	// Names is asked for each file. Nil: numbers stand for themselves, stacks are Go's.
	Names func() Names
	// Getenv and Environ are the environment's. Nil: package os's.
	Getenv  func(string) string
	Environ func() []string
	// Library is the folder of the library that the command lies beside, "" none.
	Library string
	// Start starts the command that explains a file. Nil: as a child of this Go program.
	Start func(Child) error
	// Say is given lines for people. Nil: they go to standard error.
	Say func(line string)
	// Bound is how long a file may take, 0: 5 s. Where that is too short for all events, fewer are written, the newest; what
	// takes longer all the same is given up.
	Bound time.Duration

	mu    sync.Mutex
	dir   string // +checklocks:mu
	child bool   // +checklocks:mu

	failures atomic.Int64  // of which a file was wanted
	tried    atomic.Int64  // files, and of the first failures those without one
	writing  chan struct{} // holds one while a file is made; made under mu
	// +checklocks:mu
	stuck bool // the file that is being made was given up, but its thread has not come back
	// +checklocks:mu
	next time.Time // when the last file may be written anew
	last lastFile
}

// To has files written to a folder from now on, which is made when it is first needed; "" for none. child has a report of
// each computed at once, by another process.
func (r *Reporter) To(dir string, child bool) error {
	if dir != "" {
		abs, err := filepath.Abs(dir) // the program may go elsewhere
		if err != nil {
			return err
		}
		dir = abs
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dir, r.child = dir, child
	if r.writing == nil {
		r.writing = make(chan struct{}, 1)
	}
	return nil
}

// On reports whether files are written, as far as is known without waiting.
func (r *Reporter) On() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dir != ""
}

// OutOfMemory writes the file of a request that failed; lines are the message that its caller gets. No lock of the engine may
// be held. It returns the name of the file, "" where there is none. The first wait for each other; later ones do not wait.
func (r *Reporter) OutOfMemory(oom *cistern.OutOfMemoryError, lines []string) string {
	r.mu.Lock()
	dir, child, stuck := r.dir, r.child, r.stuck
	r.mu.Unlock()
	if dir == "" {
		return ""
	}
	number := r.failures.Add(1)
	later := r.tried.Load() >= MostFiles
	if later && !r.due() {
		return ""
	}
	bound := cmp.Or(r.Bound, 5*time.Second)
	clock, cancel := deadline.WithTimeout(bound)
	defer cancel()
	what := fmt.Sprintf("out of memory on device %d", oom.Device)
	if later {
		select {
		case r.writing <- struct{}{}:
		default:
			return ""
		}
	} else {
		if stuck {
			r.tried.Add(1)
			r.say(what + ": no file of it: an earlier one is still being written")
			return ""
		}
		select {
		case r.writing <- struct{}{}:
		case <-clock.Done():
			r.tried.Add(1)
			r.say(what + ": no file of it: others are being written")
			return ""
		}
	}
	n := r.tried.Add(1)
	if n > MostFiles && !r.due() { // another thread has just written it
		<-r.writing
		return ""
	}
	j := job{r: r, oom: oom, lines: lines, dir: dir, n: int(min(n, MostFiles)), number: number, clock: clock, bound: bound}
	if r.Names != nil {
		j.d.names = r.Names()
	}
	began := time.Now()
	if !j.copy() { // with the engine's locks, and so here: a panic there concerns the caller
		<-r.writing
		return ""
	}
	done := make(chan error, 1)
	go func() {
		err := j.write()
		r.spaceOut(began)
		r.ended(&j)
		<-r.writing
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-clock.Done():
		if j.state.CompareAndSwap(0, givenUp) {
			r.giveUp(&j)
			err = fmt.Errorf("given up after %v", bound)
		} else {
			err = <-done // it is being moved to its place
		}
	}
	switch {
	case j.n == MostFiles:
		r.sayLast(what, &j, child, err)
	case err != nil:
		r.say(fmt.Sprintf("%s: no file of it: %v", what, err))
	default:
		line := j.wrote(what)
		if child {
			if err := r.explain(j.file); err != nil {
				line += fmt.Sprintf(" (it is not started here: %v)", err)
			} else {
				line += fmt.Sprintf(", and is writing %s.html and %s.txt", j.file, j.file)
			}
		}
		r.say(line)
	}
	if err != nil {
		return ""
	}
	return j.file
}

// giveUp and ended are of a job without a waiting caller, and of one whose thread has come back, whichever is first.
func (r *Reporter) giveUp(j *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stuck = !j.ended
}

func (r *Reporter) ended(j *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	j.ended, r.stuck = true, false
}

// fileFor is the name of a process's n-th file, or of a later one where another process had the same number, as those of
// containers have: its files stay.
func fileFor(dir string, n int) string {
	for ; ; n++ {
		file := filepath.Join(dir, fmt.Sprintf("oom-%d-%d.cistern", os.Getpid(), n))
		if _, err := os.Lstat(file); err != nil {
			return file
		}
	}
}

func (r *Reporter) say(line string) {
	if r.Say != nil {
		r.Say("cistern: " + line)
		return
	}
	fmt.Fprintln(os.Stderr, "cistern: "+line)
}

func (r *Reporter) getenv() func(string) string {
	if r.Getenv != nil {
		return r.Getenv
	}
	return environ.Get
}

// explain starts the command for a file.
func (r *Reporter) explain(file string) error {
	environ := os.Environ
	if r.Environ != nil {
		environ = r.Environ
	}
	c, err := childOf(file, r.Library, r.getenv(), environ())
	if err != nil {
		return err
	}
	if r.Start != nil {
		return r.Start(c)
	}
	return start(c)
}

// job is one file.
type job struct {
	r      *Reporter
	oom    *cistern.OutOfMemoryError
	lines  []string
	dir    string
	n      int   // of the file, MostFiles: the last
	number int64 // of the failure
	clock  *deadline.Context
	bound  time.Duration
	file   string // known once it is written
	d      dumping
	f      *recording.Failure
	ended  bool // guarded by r.mu: its thread has come back
	// How many events were written, and how many left out.
	events int
	left   uint64
	state  atomic.Int32 // 0, whole or givenUp: whichever is first
}

const (
	whole = 1 + iota
	givenUp
)

// errGivenUp says that the caller does not wait for the file any more.
var errGivenUp = errors.New("given up")

// copy copies what the engine knows.
func (j *job) copy() bool {
	a := j.r.Allocator
	j.d.a, j.d.failed = a, []*cistern.OutOfMemoryError{j.oom}
	if !j.d.add(j.oom.Device, mostEvents) {
		return false
	}
	j.f = failure(a, j.oom, j.lines, j.d.traces[0], &j.d.names)
	return true
}

// write completes the copy and writes it. It runs beside the host program, which a panic would end.
func (j *job) write() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("a bug in Cistern %s, please report it: %v\n%s", cistern.Version, r, debug.Stack())
		}
	}()
	if err := os.MkdirAll(j.dir, 0o777); err != nil {
		return err
	}
	if j.n < MostFiles {
		j.file = fileFor(j.dir, j.n)
	} else if j.file = j.r.last.place(j.dir); j.file == "" {
		return errNoPlace
	}
	recovered := make(chan any, 1)
	go func() {
		defer func() { recovered <- recover() }()
		surroundings(j.f, j.r.Allocator, j.oom, j.r.getenv())
	}()
	j.d.name()
	j.f.Stack = j.d.stacks[j.oom.Stack]
	for i, part := range parts {
		late := func() bool { return j.clock.Spent() >= j.bound*part.until/100 }
		if i == len(parts)-1 {
			late = func() bool { return false } // the caller gives up
		}
		t, left := j.newest(part.of)
		if recovered != nil {
			if p := <-recovered; p != nil {
				panic(p)
			}
			recovered = nil
		}
		f := *j.f
		f.Event = max(-1, f.Event-left) // -1 also where others have followed it by so many
		t.Failures = []*recording.Failure{&f}
		if err = j.writeTrace(t, late); !errors.Is(err, errSlow) {
			break
		}
	}
	if err == nil && j.n == MostFiles {
		j.r.last.written()
	}
	return err
}

// wrote is the line for a file.
func (j *job) wrote(what string) string {
	line := fmt.Sprintf("%s: wrote %s; cistern report %s explains it", what, j.file, j.file)
	if j.left > 0 {
		line += fmt.Sprintf(" (with the newest %d events)", j.events)
	}
	return line
}

// parts are the parts of the history that a file is tried to be written with, and until how much of the bound has passed, in
// percent: how long it takes depends on the machine, on how busy it is, and on the disk.
var parts = []struct {
	of    int
	until time.Duration
}{{1, 50}, {8, 75}, {64, 100}}

var errSlow = errors.New("it takes too long")

// newest is the trace with one of so many parts of its events, the newest, and how many were left out.
func (j *job) newest(of int) (*recording.Trace, int) {
	t := *j.d.traces[0]
	left := len(t.Events) - (len(t.Events)+of-1)/of
	t.Events = t.Events[left:]
	j.events, j.left = len(t.Events), j.d.older+uint64(left)
	t.Notes = slices.Clone(t.Notes)
	findStart(&t)
	if j.left > 0 {
		t.Notes = append(t.Notes, fmt.Sprintf("of the history only the newest %d events were written, so that it was done in time; %d older ones are not here", j.events, j.left))
	}
	if j.number > MostFiles {
		t.Notes = append(t.Notes, fmt.Sprintf("the process's out-of-memory number %d since files are written: of those after the first %d only the newest has a file", j.number, MostFiles-1))
	}
	return &t, left
}

// writeTrace writes the file, where that is done before it is late.
func (j *job) writeTrace(t *recording.Trace, late func() bool) error {
	return WriteFile(j.file, func(w io.Writer) error {
		if err := native.Write(&timely{w, late}, &recording.File{Path: j.file, Traces: []*recording.Trace{t}}); err != nil {
			return err
		}
		if !j.state.CompareAndSwap(0, whole) {
			return errGivenUp
		}
		return nil
	})
}

// timely is a writer that fails once it is too late.
type timely struct {
	w    io.Writer
	late func() bool
}

func (t *timely) Write(p []byte) (int, error) {
	if t.late() {
		return 0, errSlow
	}
	return t.w.Write(p)
}
