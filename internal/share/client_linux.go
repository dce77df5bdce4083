package share

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/memory"
)

// request is a conversation with a process that shares memory.
type request struct {
	h       Handle
	c       *conn
	offered memory.Shared

	fds   []int // of the chunks from next on
	next  int
	given int // the one that descriptor returned last, -1 none
}

// ask connects and learns what the memory is made of.
func (p *Process) ask(h Handle) (*request, error) {
	fd, err := p.dial(h)
	if err != nil {
		return nil, err
	}
	c, err := newConn(fd, p.guard, p.timeout)
	if err != nil {
		return nil, err
	}
	r := &request{h: h, c: c, given: -1}
	if err = r.greet(p); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// dial connects to the exporter's socket.
func (p *Process) dial(h Handle) (int, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open: %w", os.NewSyscallError("socket", err))
	}
	wait := deadline.Deadline{Limit: p.timeout}
	wait.Poll(func() bool {
		err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: h.Socket})
		return err != syscall.EAGAIN && err != syscall.EINTR // EAGAIN: too many are in line
	})
	if err == nil {
		return fd, nil
	}
	syscall.Close(fd)
	switch err {
	case syscall.ECONNREFUSED:
		return -1, fmt.Errorf("process %d, which shared the memory, has ended", h.PID)
	case syscall.ENOENT, syscall.ENOTDIR:
		return -1, fmt.Errorf("process %d, which shared the memory, has ended, or its %s is not this process's (containers need it in common)",
			h.PID, filepath.Dir(filepath.Dir(h.Socket)))
	case syscall.EAGAIN:
		return -1, fmt.Errorf("process %d, which shared the memory, did not answer for %v", h.PID, p.timeout)
	case syscall.EACCES, syscall.EPERM:
		return -1, fmt.Errorf("process %d, which shared the memory, belongs to another user", h.PID)
	}
	return -1, fmt.Errorf("open: connecting to process %d: %w", h.PID, err)
}

// greet sends the request.
func (r *request) greet(p *Process) error {
	user, err := r.c.user()
	if err != nil {
		return err
	}
	if user != p.user {
		return fmt.Errorf("process %d, which shared the memory, belongs to another user (%d, this one is %d)", r.h.PID, user, p.user)
	}
	b, err := r.say(hello(r.h.Token, r.h.ID), kindOffer, nil)
	if err != nil {
		return err
	}
	r.offered, err = parseOffer(b)
	return err
}

// say sends a message and receives the one that is due, or the exporter's reason for another. It may have said that, and
// hung up, before it heard anything.
func (r *request) say(message []byte, due kind, fds *[]int) ([]byte, error) {
	if err := r.c.send(message); err != nil && !errors.Is(err, errEnded) {
		return nil, r.explain(err)
	}
	k, b, err := r.c.next(fds, due, kindRefusal)
	if err != nil {
		return nil, r.explain(err)
	}
	if k == kindRefusal {
		return nil, &RefusedError{PID: r.h.PID, Words: oneLine(string(b))}
	}
	return b, nil
}

// RefusedError is what the sharing process answered instead of memory.
type RefusedError struct {
	PID   int
	Words string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("process %d, which shared the memory, refused: %s", e.PID, e.Words)
}

// explain names the process in an error of the conversation.
func (r *request) explain(err error) error {
	switch {
	case errors.Is(err, errEnded):
		return fmt.Errorf("process %d, which shared the memory, ended or closed the connection before the memory was open", r.h.PID)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("process %d, which shared the memory, did not answer for %v", r.h.PID, r.c.timeout)
	}
	return fmt.Errorf("opening memory of process %d: %w", r.h.PID, err)
}

// descriptor gives the descriptor of the i-th chunk, which it closes when the next is asked for.
func (r *request) descriptor(i int) (int, error) {
	r.shut()
	if len(r.fds) == 0 || i != r.next {
		if err := r.fetch(i); err != nil {
			return -1, err
		}
	}
	r.given, r.fds = r.fds[0], r.fds[1:]
	r.next++
	return r.given, nil
}

// fetch asks for descriptors from the i-th on. Where this process may have no more open, it gets those that there is room
// for, and asks for fewer where there is none.
func (r *request) fetch(i int) error {
	for want := min(maxBatch, len(r.offered.Chunks)-i); ; want /= 2 {
		r.drop()
		b, err := r.say(span(kindWant, i, want), kindBatch, &r.fds)
		if err != nil {
			return err
		}
		first, n := parseSpan(b)
		got := len(r.fds)
		if first != uint32(i) || n == 0 || n > uint32(want) || got > int(n) {
			return fmt.Errorf("process %d sent %d descriptors for %d chunks from %d on, asked for %d from %d on", r.h.PID, got, n, first,
				want, i)
		}
		if got > 0 {
			r.next = i
			return nil
		}
		if want == 1 {
			return fmt.Errorf("process %d's descriptors could not be received%s", r.h.PID, exhausted("this process"))
		}
	}
}

func (r *request) shut() {
	if r.given >= 0 {
		r.c.guard.Closing(r.given)
		syscall.Close(r.given)
		r.given = -1
	}
}

func (r *request) drop() {
	for _, fd := range r.fds {
		r.c.guard.Closing(fd)
		syscall.Close(fd)
	}
	r.fds = nil
}

func (r *request) close() {
	r.shut()
	r.drop()
	r.c.close()
}
