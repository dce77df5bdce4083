package audit

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/cputime"
)

// Watch looks for processes below a traced program that use the driver and are not traced, from outside: in /proc, at
// what the kernel tells of them. Nothing is asked of a process that was started with what the audit library needs, but for
// its numbers and once its environment: it is taken for traced. The others are looked at for the driver among what they
// have mapped, until they have it, or the ring.
//
// Below the program are its children, theirs, and those that were so when they were seen first, with any parent
// now; the processes of a session that one of them leads; and those that wrote to the ring. A process
// whose parent ended between two looks is not known to belong to it.
//
// A wrong report is worse than none: what can still become a traced process is not listed, see untraced_linux.go.
type Watch struct {
	proc    string // where the kernel tells of processes
	tracer  int
	program int
	begun   uint64 // when the program was started, in the kernel's ticks; 0: it had ended by then
	about   traceable
	busy    func(pid int) bool // the driver is known to serve it

	looks    int
	others   map[int]bool // processes that are not below the program; their numbers may be others' later
	below    map[int]*descendant
	reported map[image]bool

	mu sync.Mutex
	// +checklocks:mu
	heard []int // since the last look
	known map[int]bool
}

// descendant is a process below the program.
type descendant struct {
	stat
	excuse
	decided bool      // it is traced, or was listed: nothing is to be found until it becomes another program
	seen    time.Time // since when it is seen to use the driver
}

// stat is what the kernel tells of every process.
type stat struct {
	pid, parent, session int
	state                byte
	name                 string
	start                uint64
	image
}

// image tells a program that a process runs from the one before it, and from others': addresses, which differ from
// start to start, and stay over a fork. All are zero where the kernel does not tell.
type image struct{ code, stack, args, env, envEnd uint64 }

// NewWatch begins to watch a program that was just started with the ring. busy says of a process which cannot be
// looked into whether the driver serves it; that may come to be known later.
func (r *Ring) NewWatch(program int, busy func(pid int) bool) *Watch {
	w := newWatch("/proc", os.Getpid(), program, traceable{uid: os.Geteuid(), value: r.Value()}, busy)
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(w.tracer) {
		w.begun = 0 // a /proc of others
	}
	if st, err := r.file.Stat(); err == nil {
		w.about.inode = inodeOf(st)
	}
	return w
}

func newWatch(proc string, tracer, program int, about traceable, busy func(pid int) bool) *Watch {
	w := &Watch{proc: proc, tracer: tracer, program: program, about: about, busy: busy, others: map[int]bool{}, below: map[int]*descendant{},
		reported: map[image]bool{}, known: map[int]bool{}}
	w.about.proc = proc
	if s, err := w.stat(program); err == nil && s.parent == tracer {
		w.begun = s.start
	}
	return w
}

// Heard says that a process wrote to the ring. It may be called while Look is under way.
func (w *Watch) Heard(pid uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.known[int(pid)] {
		w.known[int(pid)] = true
		w.heard = append(w.heard, int(pid))
	}
}

func (w *Watch) heardFrom(pid int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.known[pid]
}

// othersFor is how many looks believe that a number is still that of a process which has nothing to do with the program.
const othersFor = 16

// Look is the processes that are known by now and were not listed before, and the CPU time of the look: elapsed
// time includes that of others where the machine is busy. It belongs to one goroutine.
func (w *Watch) Look(now time.Time) ([]Untraced, time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := cputime.Thread()
	list := w.look(now)
	return list, cputime.Thread() - begin
}

func (w *Watch) look(now time.Time) []Untraced {
	if w.begun == 0 {
		return nil
	}
	if w.looks++; w.looks%othersFor == 0 {
		clear(w.others)
	}
	w.find()
	var out []Untraced
	for _, pid := range slices.Sorted(maps.Keys(w.below)) { // parents before what they forked, mostly
		p := w.below[pid]
		if p.decided || p.state == 'Z' || p.state == 'X' {
			continue
		}
		if u := w.examine(p, now); u != nil {
			out = append(out, *u)
		}
	}
	return out
}

// find brings up to date which processes are below the program.
func (w *Watch) find() {
	dir, err := os.Open(w.proc)
	if err != nil {
		return
	}
	names, _ := dir.Readdirnames(-1)
	dir.Close()
	now, others := map[int]stat{}, map[int]bool{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == w.tracer {
			continue
		}
		if w.others[pid] {
			others[pid] = true
			continue
		}
		if s, err := w.stat(pid); err == nil {
			now[pid] = s
		}
	}
	w.others = others
	for pid, p := range w.below {
		if s, ok := now[pid]; !ok || s.start != p.start {
			delete(w.below, pid)
		} else if s.image != p.image {
			*p = descendant{stat: s}
		} else {
			p.stat = s
		}
	}
	asked := map[int]bool{}
	for pid := range now {
		w.belongs(pid, now, asked)
	}
	w.mu.Lock()
	heard := w.heard
	w.heard = nil
	w.mu.Unlock()
	for _, pid := range heard {
		// In a namespace of its own a process knows itself by another number, which here may be any process's.
		if s, err := w.stat(pid); err == nil && w.below[pid] == nil && w.about.mapped(pid) == hasRing {
			w.below[pid] = &descendant{stat: s}
			delete(w.others, pid)
		}
	}
}

// belongs says whether a process is below the program, if that is known: its parent may have ended meanwhile. What is
// found is kept in below and others; asked are those of this look.
func (w *Watch) belongs(pid int, now map[int]stat, asked map[int]bool) (is, known bool) {
	s, there := now[pid]
	switch {
	case pid == w.tracer || pid == 0 || w.others[pid]:
		return false, true
	case w.below[pid] != nil:
		return true, true
	case !there || asked[pid]:
		return false, false
	}
	asked[pid] = true
	led := false
	if leader, there := now[s.session]; there && s.session != pid && leader.session == s.session && leader.start <= s.start {
		led, _ = w.belongs(s.session, now, asked)
	}
	switch {
	case s.start < w.begun:
		is, known = false, true
	case pid == w.program || s.parent == w.tracer || s.session == w.tracer || led:
		is, known = true, true
	default:
		is, known = w.belongs(s.parent, now, asked)
		if parent := w.below[s.parent]; is && parent.start > s.start {
			return false, false
		}
	}
	if is {
		w.below[pid] = &descendant{stat: s}
	} else if known {
		w.others[pid] = true
	}
	return is, known
}

func (w *Watch) stat(pid int) (stat, error) {
	text, err := os.ReadFile(fmt.Sprintf("%s/%d/stat", w.proc, pid))
	if err != nil {
		return stat{}, err
	}
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return stat{}, fmt.Errorf("process %d: %q", pid, text)
	}
	field := strings.Fields(string(text[end+1:])) // from the third on
	if len(field) < 49 {
		return stat{}, fmt.Errorf("process %d: %d fields", pid, len(field)+2)
	}
	n := func(i int) uint64 { v, _ := strconv.ParseUint(field[i-3], 10, 64); return v }
	return stat{pid: pid, parent: int(n(4)), session: int(n(6)), state: field[0][0], name: string(text[open+1 : end]), start: n(22),
		image: image{n(26), n(28), n(48), n(50), n(51)}}, nil
}
