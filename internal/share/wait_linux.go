package share

import (
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/internal/socket"
)

// poller has one thread wait for the sockets of all conversations, so that importers that say nothing cost no thread each.
type poller struct {
	guard Guard
	near  socket.Socket // of a pair
	wake  socket.Socket // the other: what is written to it ends a wait

	mu    sync.Mutex
	waits map[*wait]bool // +checklocks:mu
	// +checklocks:mu
	ended bool           // no conversation is left
	done  sync.WaitGroup // the thread
}

// wait is one waiting conversation.
type wait struct {
	fd     int
	events int16
	until  time.Time // zero: for ever
	over   chan struct{}
}

func newPoller(g Guard) (*poller, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	p := &poller{guard: g, waits: map[*wait]bool{}}
	for i, at := range []*socket.Socket{&p.near, &p.wake} {
		g.Opened(fds[i])
		if *at, err = socket.Of(fds[i]); err != nil {
			at.FD = fds[i]
		}
	}
	p.done.Go(p.run)
	return p, nil
}

// await waits until the descriptor is ready, or its time is over, or release or end is called, and reports whether the poller
// goes on.
func (p *poller) await(fd int, events int16, until time.Time) bool {
	w := &wait{fd, events, until, make(chan struct{})}
	p.mu.Lock()
	ended := p.ended
	if !ended {
		p.waits[w] = true
	}
	p.mu.Unlock()
	if ended {
		return false
	}
	p.kick()
	<-w.over
	return true
}

// release ends the waits for a descriptor.
func (p *poller) release(fd int) {
	p.mu.Lock()
	p.drop(func(w *wait) bool { return w.fd == fd })
	p.mu.Unlock()
	p.kick() // it must not go on looking at a descriptor that will be closed
}

// stop ends the poller, and returns when its sockets are closed.
func (p *poller) stop() {
	p.end()
	p.kick()
	p.done.Wait()
}

// end ends all waits, now and from now on.
func (p *poller) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.drop(func(*wait) bool { return true })
}

// drop ends some waits. The caller holds mu.
//
// +checklocks:p.mu
func (p *poller) drop(some func(*wait) bool) {
	for w := range p.waits {
		if some(w) {
			delete(p.waits, w)
			close(w.over)
		}
	}
}

func (p *poller) kick() {
	if p.wake.Ours() {
		_, _ = syscall.Write(p.wake.FD, []byte{0}) // full, it wakes as well
	}
}

// run is the thread that waits. It ends after end, and where the program closed its sockets.
func (p *poller) run() {
	for {
		fds, list, left := p.list()
		if list == nil {
			break
		}
		err := socket.Poll(fds, left)
		var said [64]byte
		if p.near.Ours() && p.wake.Ours() {
			_, _ = syscall.Read(p.near.FD, said[:])
		} else {
			err = socket.ErrClosed
		}
		if err != nil {
			p.end()
			break
		}
		now := time.Now()
		p.mu.Lock()
		for i, w := range list {
			if p.waits[w] && (fds[i+1].Revents != 0 || !w.until.IsZero() && !w.until.After(now)) {
				delete(p.waits, w)
				close(w.over)
			}
		}
		p.mu.Unlock()
	}
	p.near.CloseBy(p.guard)
	p.wake.CloseBy(p.guard)
}

// list is what is to be waited for, the poller's own socket first, and for how long; nil after end.
func (p *poller) list() (fds []socket.PollFD, list []*wait, left time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil, nil, 0
	}
	fds, list, left = []socket.PollFD{{FD: int32(p.near.FD), Events: socket.In}}, []*wait{}, -1
	for w := range p.waits {
		fds, list = append(fds, socket.PollFD{FD: int32(w.fd), Events: w.events}), append(list, w)
		if !w.until.IsZero() {
			if d := max(time.Until(w.until), 0); left < 0 || d < left {
				left = d
			}
		}
	}
	return fds, list, left
}
