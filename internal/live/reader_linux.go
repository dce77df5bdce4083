package live

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Reader reads the page of one process. It may be used by several goroutines.
type Reader struct {
	dir   string // of the process that publishes, in /proc
	pid   int
	inode uint64
	id    identity

	mu   sync.Mutex
	fd   int      // -1: closed
	held [2]int64 // the second for which locks are held: watching, asking for details
}

// List finds the processes that publish. Readers that are known already are found again or, where the process has ended or
// closed its page, closed; the others are new, and the caller closes them. What cannot be read is in the errors: that
// there is no /proc, or a page of another layout. Processes of other users are passed over silently, as /proc does not say
// whether they publish.
func List(ctx context.Context, known ...*Reader) ([]*Reader, []error) {
	return list(ctx, fileName, known)
}

// list is List of pages in files of another name.
func list(ctx context.Context, file string, known []*Reader) ([]*Reader, []error) {
	folder, err := os.Open("/proc")
	if err != nil {
		return nil, []error{fmt.Errorf("looking for processes: %w", err)}
	}
	defer folder.Close()
	names, err := folder.Readdirnames(-1)
	if err != nil {
		return nil, []error{fmt.Errorf("looking for processes: %w", err)}
	}
	s := scan{file: file, known: map[page]*Reader{}, seen: map[page]bool{}}
	for _, r := range known {
		s.known[page{r.pid, r.inode}] = r
	}
	for _, name := range names {
		if ctx.Err() != nil {
			s.failed = append(s.failed, fmt.Errorf("looking for processes: %w", context.Cause(ctx)))
			break
		}
		if pid, err := strconv.Atoi(name); err == nil {
			s.process(pid)
		}
		if s.full {
			s.failed = append(s.failed, fmt.Errorf("there are more than %d status segments; the others are not read", mostInAll))
			break
		}
	}
	for _, r := range s.known { // not found again
		if ctx.Err() == nil || s.full {
			r.Close()
		} else {
			s.found = append(s.found, r)
		}
	}
	return s.found, s.failed
}

// page tells pages apart.
type page struct {
	pid   int
	inode uint64
}

// mostPages bounds what is opened of a process, as each page takes a descriptor: one that follows others has a page for each.
const mostPages = 256

// mostInAll bounds what is opened of all processes: several times what a machine with sixteen GPUs has. Processes of one's own
// user can publish any number.
const mostInAll = 1024

// scan is one look at all processes.
type scan struct {
	file   string // what pages are called
	known  map[page]*Reader
	seen   map[page]bool // a process may have its page open more than once
	own    int           // pages of the process that is looked at; one that reads others' has these open as well
	found  []*Reader
	full   bool // as many were found as are looked at
	failed []error
}

// process looks through what a process has open.
func (s *scan) process(pid int) {
	dir := "/proc/" + strconv.Itoa(pid)
	folder, err := os.Open(dir + "/fd")
	if err != nil {
		return // another user's, or gone
	}
	defer folder.Close()
	target := make([]byte, len(memfd)+len(s.file)+16)
	s.own = 0
	for {
		names, err := folder.Readdirnames(256)
		for _, name := range names {
			n, err := unix.Readlinkat(int(folder.Fd()), name, target)
			if err != nil || !s.isPage(string(target[:n])) {
				continue
			}
			if s.full {
				return
			}
			if err := s.open(pid, dir, dir+"/fd/"+name); err != nil {
				s.failed = append(s.failed, fmt.Errorf("process %d: %w", pid, err))
				if err == errMany {
					return
				}
			}
		}
		if err != nil || len(names) == 0 {
			return
		}
	}
}

// memfd is before the name of a file in memory, as /proc shows it.
const memfd = "/memfd:"

// isPage says whether that is the name of a page's file, as /proc shows it.
func (s *scan) isPage(link string) bool {
	rest, ok := strings.CutPrefix(link, memfd+s.file)
	return ok && (rest == "" || rest == " (deleted)")
}

// open makes a reader of a file, unless it is known, not the page of the process that has it open, or gone meanwhile.
func (s *scan) open(pid int, dir, file string) error {
	// By now the descriptor may be anything else: opening it must not wait, nor do anything to it.
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	r := &Reader{dir: dir, pid: pid, fd: fd}
	link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	var st unix.Stat_t
	if err != nil || !s.isPage(link) || unix.Fstat(fd, &st) != nil {
		r.Close()
		return nil
	}
	r.inode = st.Ino
	if s.seen[page{pid, r.inode}] {
		r.Close()
		return nil
	}
	s.seen[page{pid, r.inode}] = true
	if old, ok := s.known[page{pid, r.inode}]; ok {
		r.Close()
		if !old.current() {
			return nil
		}
		delete(s.known, page{pid, r.inode})
		return s.find(old)
	}
	if r.id, err = decodeIdentity(file0(fd)); err != nil {
		r.Close()
		if errors.Is(err, errNotYet) {
			return nil
		}
		return err
	}
	if r.alive() != nil {
		r.Close()
		return nil
	}
	return s.find(r)
}

// errMany is of a process with more pages than needed.
var errMany = fmt.Errorf("it has more than %d status segments, which are not read", mostPages)

// find has found a page of the process that is looked at.
func (s *scan) find(r *Reader) error {
	if s.full = len(s.found) == mostInAll; s.full {
		r.Close()
		return nil
	}
	if s.own == mostPages {
		r.Close()
		return errMany
	}
	s.own++
	s.found = append(s.found, r)
	return nil
}

// file0 is a file that is read at places.
type file0 int

func (f file0) ReadAt(b []byte, at int64) (int, error) {
	for n := 0; ; {
		m, err := unix.Pread(int(f), b[n:], at+int64(n))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return n, err
		case m == 0:
			return n, io.EOF
		}
		if n += m; n == len(b) {
			return n, nil
		}
	}
}

// alive reports, as ErrEnded, that the process that made the page has ended, closed it, or is not the one that has it open (a
// child of fork), or that the process that the page is about has ended. The caller holds mu, or r is not shared yet.
func (r *Reader) alive() error {
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: aliveAt, Len: 1}
	if unix.FcntlFlock(uintptr(r.fd), unix.F_OFD_GETLK, &lock) == nil && lock.Type == unix.F_UNLCK {
		return ErrEnded
	}
	start, err := startOf(r.dir)
	if err != nil || start != r.id.MakerStart {
		return ErrEnded
	}
	if inner, err := innerPID(r.dir); err != nil || inner != r.id.Maker {
		return ErrEnded
	}
	if r.id.PID == r.id.Maker || r.id.Start == 0 {
		return nil
	}
	about := "/proc/" + strconv.Itoa(r.id.PID)
	if start, err := startOf(about); err != nil || start != r.id.Start || !speaksFor(r.dir, about) {
		return ErrEnded
	}
	return nil
}

// current reports whether the page is open and its process alive.
func (r *Reader) current() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fd >= 0 && r.alive() == nil
}

// speaksFor reports whether a process may say something of another: its own user's, and root of any.
func speaksFor(dir, about string) bool {
	var maker, other unix.Stat_t
	return unix.Stat(dir, &maker) == nil && unix.Stat(about, &other) == nil && (maker.Uid == 0 || maker.Uid == other.Uid)
}

// Read reads the page, and lets the process know that it is watched and, with details, that allocations are wanted; these are
// there soon after the first time. A process that has ended is ErrEnded.
func (r *Reader) Read(details bool) (Process, error) { return r.read(details, tries) }

// ReadOnce is Read without waiting where the page is being written.
func (r *Reader) ReadOnce(details bool) (Process, error) { return r.read(details, 1) }

func (r *Reader) read(details bool, tries int) (Process, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return Process{}, os.ErrClosed
	}
	if err := r.alive(); err != nil {
		return Process{}, err
	}
	now := time.Now().Unix()
	r.ask(0, watchedAt, now)
	if details {
		r.ask(1, askedAt, now)
	}
	p := Process{PID: r.id.PID, Start: r.id.Start, Name: r.id.Name, Args: r.id.Args, Kind: r.id.Kind, Version: r.id.Version, Conf: r.id.Conf, Place: r.id.Place}
	if r.id.PID == r.id.Maker {
		p.PID = r.pid
	}
	if err := decode(file0(r.fd), details, tries, &p); err != nil {
		return Process{}, fmt.Errorf("process %d: %w", r.pid, err)
	}
	return p, nil
}

// ask holds a lock that names the present second as one with a question. The caller holds mu.
func (r *Reader) ask(which int, at, now int64) {
	if r.held[which] == now {
		return
	}
	// A page that cannot be locked is refreshed all the same.
	_ = unix.FcntlFlock(uintptr(r.fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: at + now, Len: 1})
	if r.held[which] != 0 {
		_ = unix.FcntlFlock(uintptr(r.fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: at + r.held[which], Len: 1})
	}
	r.held[which] = now
}

// Close ends the reading.
func (r *Reader) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd >= 0 {
		unix.Close(r.fd)
		r.fd = -1
	}
}
