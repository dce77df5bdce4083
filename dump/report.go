package dump

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/trace"
)

// MostFiles is how many files a Reporter writes: a program that runs out of memory again and again goes on as if there were
// none.
const MostFiles = 5

// Reporter writes a file for a request that failed: what was held, what led to it, what else was in the way. It never fails
// its caller: what goes wrong is a line. Set the fields before its first use; To says where files go.
type Reporter struct {
	Allocator *cistern.Allocator
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
	// Bound is how long a file may take, 0: 5 s. What takes longer is given up.
	Bound time.Duration

	mu    sync.Mutex
	dir   string // guarded by mu
	child bool   // guarded by mu

	tried   atomic.Int32  // files, and failures without one
	once    sync.Once     // of the line that there are no more
	writing chan struct{} // holds one while a file is made; made under mu
	stuck   bool          // guarded by mu: the file that is being made was given up, but its thread has not come back
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
// be held. It returns the name of the file, "" where there is none.
func (r *Reporter) OutOfMemory(oom *cistern.OutOfMemoryError, lines []string) string {
	r.mu.Lock()
	dir, child, stuck := r.dir, r.child, r.stuck
	r.mu.Unlock()
	if dir == "" {
		return ""
	}
	if r.tried.Load() >= MostFiles {
		r.noMore(oom)
		return ""
	}
	bound := cmp.Or(r.Bound, 5*time.Second)
	over, stop := after(bound)
	defer stop()
	what := fmt.Sprintf("out of memory on device %d", oom.Device)
	if stuck {
		r.tried.Add(1)
		r.say(what + ": no file of it: an earlier one is still being written")
		return ""
	}
	select {
	case r.writing <- struct{}{}:
	case <-over:
		r.tried.Add(1)
		r.say(what + ": no file of it: others are being written")
		return ""
	}
	n := r.tried.Add(1)
	if n > MostFiles {
		<-r.writing
		r.noMore(oom)
		return ""
	}
	file := fileFor(dir, int(n))
	j := job{r: r, oom: oom, lines: lines, file: file}
	if r.Names != nil {
		j.d.names = r.Names()
	}
	if !j.copy() { // with the engine's locks, and so here: a panic there concerns the caller
		<-r.writing
		return ""
	}
	done := make(chan error, 1)
	go func() {
		err := j.write()
		r.ended(&j)
		<-r.writing
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-over:
		if j.state.CompareAndSwap(0, givenUp) {
			r.giveUp(&j)
			err = fmt.Errorf("given up after %v", bound)
		} else {
			err = <-done // it is being moved to its place
		}
	}
	if err != nil {
		r.say(fmt.Sprintf("%s: no file of it: %v", what, err))
		return ""
	}
	line := fmt.Sprintf("%s: wrote %s; cistern report %s explains it", what, file, file)
	if child {
		if err := r.explain(file); err != nil {
			line += fmt.Sprintf(" (it is not started here: %v)", err)
		} else {
			line += fmt.Sprintf(", and is writing %s.html and %s.txt", file, file)
		}
	}
	r.say(line)
	return file
}

// giveUp and ended are of a job that nobody waits for, and of one whose thread has come back, whichever is first.
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

// noMore says once that there are no more files.
func (r *Reporter) noMore(oom *cistern.OutOfMemoryError) {
	r.once.Do(func() {
		r.say(fmt.Sprintf("out of memory on device %d: no file of it, nor of later ones: %d are the most of a process", oom.Device, MostFiles))
	})
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
	return os.Getenv
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
	r     *Reporter
	oom   *cistern.OutOfMemoryError
	lines []string
	file  string
	d     dumping
	f     *trace.Failure
	state atomic.Int32 // 0, whole or givenUp: whoever is first
	ended bool         // guarded by r.mu: its thread has come back
}

const (
	whole = 1 + iota
	givenUp
)

// errGivenUp says that nobody waits for the file any more.
var errGivenUp = errors.New("given up")

// copy copies what the engine knows.
func (j *job) copy() bool {
	a := j.r.Allocator
	dev, ok := a.Started(j.oom.Device)
	if !ok {
		return false
	}
	j.d.a, j.d.failed = a, []*cistern.OutOfMemoryError{j.oom}
	j.d.add(dev)
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
	if err := os.MkdirAll(filepath.Dir(j.file), 0o777); err != nil {
		return err
	}
	told := make(chan any, 1)
	go func() {
		defer func() { told <- recover() }()
		surroundings(j.f, j.r.Allocator, j.oom, j.r.getenv())
	}()
	t := j.d.traces[0]
	j.d.name()
	j.f.Stack = j.d.stacks[j.oom.Stack]
	t.Failures = []*trace.Failure{j.f}
	if p := <-told; p != nil {
		panic(p)
	}
	return WriteFile(j.file, func(w io.Writer) error {
		if err := trace.WriteCistern(w, &trace.File{Path: j.file, Traces: j.d.traces}); err != nil {
			return err
		}
		if !j.state.CompareAndSwap(0, whole) {
			return errGivenUp
		}
		return nil
	})
}
