package share

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/socket"
	"golang.org/x/sys/unix"
)

// Timeout is how long each side waits for the next word of the other.
const Timeout = 10 * time.Second

// Guard records what a child of fork must close and what must go when the process exits. Its methods are called from
// any goroutine.
type Guard interface {
	socket.Guard
	Listening(path string) // a socket is there now
	Panicked(v any)        // a bug in Cistern, in a goroutine without a caller
}

// Process shares the memory of one allocator, and opens others'.
type Process struct {
	a       *engine.Allocator
	guard   Guard
	timeout time.Duration
	user    uint32 // whose processes are answered and asked

	identity [16]byte
	token    [16]byte
	unsure   error // why there are none

	mu sync.Mutex
	// +checklocks:mu
	server *server // nil until something is shared
}

// New prepares sharing; it does nothing until something is shared or opened. guard may be nil.
func New(a *engine.Allocator, guard Guard) *Process {
	if guard == nil {
		guard = noGuard{}
	}
	p := &Process{a: a, guard: guard, timeout: Timeout, user: uint32(os.Geteuid())}
	p.unsure = cmp.Or(random(p.identity[:]), random(p.token[:]))
	return p
}

// random fills b with what cannot be guessed. Package crypto/rand could, but starts a timer of Go's (see package deadline) and ends the
// process where there is nothing random.
func random(b []byte) error {
	if n, err := unix.Getrandom(b, 0); err == nil && n == len(b) {
		return nil
	}
	f, err := nopoll.Open("/dev/urandom") // a sandbox without the call
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.ReadFull(f, b)
	return err
}

type noGuard struct{}

func (noGuard) Opened(int)       {}
func (noGuard) Closing(int)      {}
func (noGuard) Listening(string) {}
func (noGuard) Panicked(v any)   { panic(v) }

// Share makes the block that starts at ptr available, until it is freed, and returns the handle for it: the same one
// while it is live.
func (p *Process) Share(ptr cuda.Ptr) (string, error) {
	if p.unsure != nil {
		return "", fmt.Errorf("share: no random numbers: %w", p.unsure)
	}
	e, err := p.a.Sharing.Export(ptr)
	if err != nil {
		return "", err
	}
	s, err := p.listen()
	if err != nil {
		return "", fmt.Errorf("share: no socket to pass memory over: %w", err)
	}
	h := Handle{PID: os.Getpid(), Process: p.identity, Token: p.token, ID: e.ID, UUID: e.Shared.UUID, Size: e.Shared.Size, Socket: s.path}
	return h.String(), nil
}

// listen starts to answer, once.
func (p *Process) listen() (*server, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil && !p.server.alive() {
		p.server.stop()
		p.server = nil
	}
	if p.server == nil {
		s, err := p.serve()
		if err != nil {
			return nil, err
		}
		p.server = s
	}
	return p.server, nil
}

// Open makes the memory that the handle names usable by the device and returns the address of its first byte. Opened
// again it is not mapped again; each Open is undone by one Close. A handle of this process's own gives the block itself.
func (p *Process) Open(handle string, dev cuda.Device) (cuda.Ptr, error) {
	h, err := Parse(handle)
	if err != nil {
		return 0, err
	}
	if h.Process == p.identity {
		return p.openOwn(h, dev)
	}
	r, err := p.ask(h)
	if err != nil {
		return 0, err
	}
	defer r.close()
	return p.a.Sharing.Open(dev, string(h.Process[:]), r.offered, r.descriptor)
}

// openOwn opens what this process shared itself. For the memory's own device nothing is to be mapped.
func (p *Process) openOwn(h Handle, dev cuda.Device) (cuda.Ptr, error) {
	e, err := p.a.Sharing.Exported(h.ID)
	if err != nil {
		return 0, err
	}
	if e.Device == dev {
		return p.a.Sharing.OpenOwn(e)
	}
	if len(e.Shared.Chunks) == 0 || e.Shared.Pool != (cuda.PoolPtr{}) {
		return 0, fmt.Errorf("this process shared the memory itself and can open it on device %d only", e.Device)
	}
	last := -1
	shut := func() {
		if last >= 0 {
			p.guard.Closing(last)
			syscall.Close(last)
			last = -1
		}
	}
	defer shut()
	return p.a.Sharing.Open(dev, string(h.Process[:]), e.Shared, func(i int) (int, error) {
		shut()
		fd, err := e.Descriptor(i)
		if err == nil {
			last = fd
			p.guard.Opened(fd)
		}
		return fd, err
	})
}

// Close undoes one Open. The caller knows that the GPU is done with the memory.
func (p *Process) Close(ptr cuda.Ptr) error { return p.a.Sharing.Close(ptr) }

// Stop ends answering and removes the socket, for programs that stop sharing while they go on. What others have open
// stays open.
func (p *Process) Stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil {
		p.server.stop()
		p.server = nil
	}
}

// errEnded is that the other side hung up.
var errEnded = errors.New("the connection ended")
