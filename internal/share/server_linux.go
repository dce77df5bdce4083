package share

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/socket"
)

// maxPeers is how many importers are answered at once. More are turned away: those that hang are gone after Timeout.
const maxPeers = 64

// server answers importers.
type server struct {
	p       *Process
	path    string
	at      socket.Socket // that listens
	poller  *poller
	stopped atomic.Bool
	done    sync.WaitGroup

	mu    sync.Mutex
	peers map[*conn]bool // +checklocks:mu
}

// serve makes the socket and starts to answer.
func (p *Process) serve() (*server, error) {
	path, fd, err := p.place()
	if err != nil {
		return nil, err
	}
	at, err := socket.Of(fd)
	if err == nil {
		p.guard.Opened(fd)
		s := &server{p: p, path: path, at: at, peers: map[*conn]bool{}}
		if s.poller, err = newPoller(p.guard); err == nil {
			p.guard.Listening(path)
			s.done.Add(1)
			go s.accept()
			return s, nil
		}
		p.guard.Closing(fd)
	}
	os.Remove(path)
	_ = syscall.Rmdir(filepath.Dir(path))
	syscall.Close(fd)
	return nil, err
}

// place makes a listening socket in the first folder that can have one. Another user may have taken the name of the usual
// one, but not that of one that is made up.
func (p *Process) place() (path string, fd int, err error) {
	usual := fmt.Sprintf("cistern-%d", p.user)
	unused := fmt.Sprintf("%s-%x", usual, rand.Uint64())
	folders := []string{filepath.Join(shm, usual)}
	if run := environ.Get("XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
		folders = append(folders, filepath.Join(run, "cistern"))
	}
	for _, parent := range []string{shm, environ.TempDir(), "/tmp"} {
		folders = append(folders, filepath.Join(parent, unused))
	}
	for _, folder := range folders {
		path, fd, e := p.bind(folder)
		if errors.Is(e, os.ErrNotExist) { // a process that ended removed the folder
			path, fd, e = p.bind(folder)
		}
		if e == nil {
			return path, fd, nil
		}
		if err == nil {
			err = e
		}
	}
	return "", -1, err
}

// shm is a folder that all processes of a machine have in common. Tests have their own.
var shm = "/dev/shm"

// bind makes a listening socket in the folder. It gets its name once it listens, so that no sweeper takes it for one that
// was left behind. After a failure the folder is gone, unless it has something in it.
func (p *Process) bind(folder string) (path string, fd int, err error) {
	fd, err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return "", -1, os.NewSyscallError("socket", err)
	}
	if path, err = p.listenIn(folder, fd); err != nil {
		syscall.Close(fd)
		return "", -1, err
	}
	return path, fd, nil
}

func (p *Process) listenIn(folder string, fd int) (path string, err error) {
	if err := own(folder, p.user); err != nil {
		return "", err
	}
	path = filepath.Join(folder, fmt.Sprintf("%d-%016x.sock", os.Getpid(), rand.Uint64()))
	newborn := strings.TrimSuffix(path, ".sock") + ".new"
	defer func() {
		if err != nil {
			os.Remove(newborn)
			_ = syscall.Rmdir(folder)
		}
	}()
	sweep(folder)
	if !usable(path) {
		return "", fmt.Errorf("%s: a handle cannot have this path", path)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: newborn}); err != nil {
		return "", &os.PathError{Op: "bind", Path: newborn, Err: err}
	}
	if err := syscall.Listen(fd, maxPeers); err != nil {
		return "", os.NewSyscallError("listen", err)
	}
	return path, os.Rename(newborn, path)
}

// own makes a folder that only the user may enter, or makes sure that it is one: another user could have made it first.
func own(folder string, user uint32) error {
	if err := os.Mkdir(folder, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	st, err := os.Lstat(folder)
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || !st.IsDir() || sys.Uid != user || st.Mode().Perm()&0o077 != 0 {
		return &os.PathError{Op: "use", Path: folder, Err: errors.New("it is not a folder that only this user can use")}
	}
	return nil
}

// sweep removes sockets without a listener, and those that did not come as far.
func sweep(folder string) {
	f, err := nopoll.Open(folder)
	if err != nil {
		return
	}
	defer f.Close()
	names, err := f.ReadDir(-1)
	if err != nil {
		return
	}
	for _, n := range names {
		path := filepath.Join(folder, n.Name())
		if n.Type() != os.ModeSocket {
			continue
		}
		switch filepath.Ext(path) {
		case ".new":
			if st, err := n.Info(); err == nil && time.Since(st.ModTime()) > time.Minute {
				os.Remove(path)
			}
		case ".sock":
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
			if err != nil {
				return
			}
			if syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}) == syscall.ECONNREFUSED {
				os.Remove(path)
			}
			syscall.Close(fd)
		}
	}
}

// alive reports whether it answers: the program may have closed its sockets.
func (s *server) alive() bool { return s.at.Ours() && s.poller.near.Ours() && s.poller.wake.Ours() }

func (s *server) stop() {
	s.stopped.Store(true)
	os.Remove(s.path)
	_ = syscall.Rmdir(filepath.Dir(s.path)) // unless others have theirs there
	s.mu.Lock()
	for c := range s.peers {
		c.hurry() // what they wait for does not come
	}
	s.mu.Unlock()
	s.poller.stop()
	s.done.Wait()
	s.at.CloseBy(s.p.guard)
}

// accept answers each importer in a goroutine of its own.
func (s *server) accept() {
	defer s.done.Done()
	for {
		if !s.poller.await(s.at.FD, socket.In, time.Time{}) || s.stopped.Load() || !s.alive() {
			return
		}
		fd, _, err := syscall.Accept4(s.at.FD, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
		if err != nil {
			if err != syscall.EAGAIN && err != syscall.EINTR && err != syscall.ECONNABORTED { // no descriptors left: importers wait in line
				_ = socket.Poll(nil, 50*time.Millisecond)
			}
			continue
		}
		c, err := newConn(fd, s.p.guard, s.p.timeout)
		if err != nil {
			continue
		}
		c.poller = s.poller
		s.done.Add(1)
		go s.converse(c)
	}
}

// converse is the whole conversation with one importer.
func (s *server) converse(c *conn) {
	defer s.done.Done()
	defer s.leave(c)
	defer func() {
		if v := recover(); v != nil {
			c.send(refusal(fmt.Sprintf("a bug in Cistern: %v", v)))
			s.p.guard.Panicked(v)
		}
	}()
	err := s.enter(c)
	if err == nil {
		err = s.answer(c)
	}
	if err != nil {
		c.send(refusal(err.Error()))
	}
}

func (s *server) enter(c *conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.peers) == maxPeers {
		return fmt.Errorf("%d processes are being answered already", maxPeers)
	}
	if s.stopped.Load() {
		return errors.New("it no longer shares memory")
	}
	s.peers[c] = true
	return nil
}

func (s *server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.peers, c)
	c.close()
}

// answer is one conversation. An error is for the importer; one that hung up gets none.
func (s *server) answer(c *conn) error {
	user, err := c.user()
	if err != nil {
		return err
	}
	if user != s.p.user {
		return fmt.Errorf("memory of user %d is not shared with user %d", s.p.user, user)
	}
	_, b, err := c.next(nil, kindHello)
	if err != nil {
		return spoken(err)
	}
	token, id := parseHello(b)
	if subtle.ConstantTimeCompare(token[:], s.p.token[:]) != 1 {
		return errors.New("the handle is not one of this process's")
	}
	e, err := s.p.a.Sharing.Exported(id)
	if err == nil {
		err = e.Live()
	}
	if err != nil {
		return err
	}
	if b, err = offer(e.Shared); err != nil {
		return err
	}
	if err := c.send(b); err != nil {
		return nil
	}
	var fds []int
	shut := func() {
		for _, fd := range fds {
			c.guard.Closing(fd)
			syscall.Close(fd)
		}
		fds = fds[:0]
	}
	defer shut()
	for {
		_, b, err := c.next(nil, kindWant)
		if err != nil {
			return spoken(err)
		}
		first, n := parseSpan(b)
		if n == 0 || n > maxBatch || uint64(first)+uint64(n) > uint64(len(e.Shared.Chunks)) {
			return fmt.Errorf("%d descriptors from %d on, of %d", n, first, len(e.Shared.Chunks))
		}
		for i := range int(n) {
			fd, err := e.Descriptor(int(first) + i)
			if err != nil {
				if i == 0 {
					return fmt.Errorf("%w%s", err, exhausted("the sharing process"))
				}
				break // the importer asks for the rest next
			}
			c.guard.Opened(fd)
			fds = append(fds, fd)
		}
		if c.send(span(kindBatch, int(first), len(fds)), fds...) != nil {
			return nil
		}
		shut()
	}
}

// spoken is an error of the conversation, nil where the importer is gone.
func spoken(err error) error {
	if errors.Is(err, errEnded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// exhausted adds to an error that there are no file descriptors left, where that is so.
func exhausted(who string) string {
	fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err == nil {
		syscall.Close(fd)
		return ""
	}
	var limit syscall.Rlimit
	if err != syscall.EMFILE || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return ""
	}
	return fmt.Sprintf(" (%s has reached its limit of %d file descriptors: raise ulimit -n)", who, limit.Cur)
}
