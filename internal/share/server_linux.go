package share

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// maxPeers is how many importers are answered at once. More are turned away: those that hang are gone after Patience.
const maxPeers = 64

// server answers importers.
type server struct {
	p       *Process
	path    string
	fd      int
	file    *os.File
	stopped atomic.Bool
	done    sync.WaitGroup

	mu    sync.Mutex
	peers map[*conn]bool // guarded by mu
}

// serve makes the socket and starts to answer.
func (p *Process) serve() (*server, error) {
	var first error
	for _, parent := range []string{"/dev/shm", os.TempDir(), "/tmp"} {
		path, fd, err := p.bind(filepath.Join(parent, fmt.Sprintf("cistern-%d", p.user)))
		if err != nil {
			if first == nil {
				first = err
			}
			continue
		}
		p.guard.Opened(fd)
		p.guard.Listening(path)
		s := &server{p: p, path: path, fd: fd, peers: map[*conn]bool{}, file: os.NewFile(uintptr(fd), path)}
		raw, err := s.file.SyscallConn()
		if err != nil {
			s.file.Close()
			return nil, err
		}
		s.done.Add(1)
		go s.accept(raw)
		return s, nil
	}
	return nil, first
}

// bind makes a listening socket in the folder. It gets its name once it listens, so that no sweeper takes it for one that
// was left behind.
func (p *Process) bind(folder string) (path string, fd int, err error) {
	if err := own(folder, p.user); err != nil {
		return "", -1, err
	}
	sweep(folder)
	var random [8]byte
	rand.Read(random[:])
	path = filepath.Join(folder, fmt.Sprintf("%d-%x.sock", os.Getpid(), random))
	if !usable(path) {
		return "", -1, fmt.Errorf("%s: no name that a handle could carry", path)
	}
	fd, err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return "", -1, os.NewSyscallError("socket", err)
	}
	newborn := strings.TrimSuffix(path, ".sock") + ".new"
	defer func() {
		if err != nil {
			os.Remove(newborn)
			syscall.Close(fd)
		}
	}()
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: newborn}); err != nil {
		return "", -1, &os.PathError{Op: "bind", Path: newborn, Err: err}
	}
	if err := syscall.Listen(fd, maxPeers); err != nil {
		return "", -1, os.NewSyscallError("listen", err)
	}
	return path, fd, os.Rename(newborn, path)
}

// own makes a folder that only the user may enter, or makes sure that it is one: somebody else could have made it first.
func own(folder string, user uint32) error {
	if err := os.Mkdir(folder, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	st, err := os.Lstat(folder)
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || !st.IsDir() || sys.Uid != user || st.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s is not a folder of this user's alone", folder)
	}
	return nil
}

// sweep removes sockets that nobody listens to any more, and those that did not come as far.
func sweep(folder string) {
	names, err := os.ReadDir(folder)
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

func (s *server) stop() {
	s.stopped.Store(true)
	os.Remove(s.path)
	s.p.guard.Closing(s.fd)
	s.file.Close()
	s.mu.Lock()
	for c := range s.peers {
		c.hurry() // what they wait for does not come
	}
	s.mu.Unlock()
	s.done.Wait()
}

// accept answers each importer in a goroutine of its own.
func (s *server) accept(raw syscall.RawConn) {
	defer s.done.Done()
	for {
		var fd int
		var err error
		if raw.Read(func(at uintptr) bool {
			fd, _, err = syscall.Accept4(int(at), syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
			return err != syscall.EAGAIN
		}) != nil || s.stopped.Load() {
			if err == nil && fd > 0 {
				syscall.Close(fd)
			}
			return
		}
		if err != nil {
			if err != syscall.EINTR && err != syscall.ECONNABORTED { // no descriptors left: importers wait in line
				time.Sleep(50 * time.Millisecond)
			}
			continue
		}
		c, err := newConn(fd, s.p.guard, s.p.patience)
		if err != nil {
			continue
		}
		s.done.Add(1)
		go func() {
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
		}()
	}
}

func (s *server) enter(c *conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.peers) == maxPeers {
		return fmt.Errorf("%d processes are being answered already", maxPeers)
	}
	if s.stopped.Load() {
		return errors.New("it shares nothing any more")
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

// answer is one conversation. An error is what the importer is to be told; one that hung up is told nothing.
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
	e, err := s.p.a.Exported(id)
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

// spoken is an error of the conversation, nil where there is nobody left to tell.
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
	return fmt.Sprintf(" (%s has all %d file descriptors open that it may: raise ulimit -n)", who, limit.Cur)
}
