package live

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"golang.org/x/sys/unix"
)

// fileName is what readers look for.
const (
	fileName     = "cistern-live"
	unlistedName = "cistern-status"
)

// The places in the file for locks, beyond its end. Its maker holds one for as long as it has the file open; readers hold
// those that say that they watch and ask, the second added.
const (
	aliveAt   = 1 << 39
	watchedAt = 1 << 40
	askedAt   = 1 << 41
)

// Page is one that this process publishes. A goroutine of its own refreshes it until Close.
type Page struct {
	file    string
	id      identity
	gauges  func(into []Device) []Device
	details func() []Details
	dropped atomic.Uint64

	eager atomic.Bool // refreshed as if it were watched

	mu     sync.Mutex // held to change what follows; the goroutine reads it without
	fd     int
	device uint64 // of the file, to know it by
	inode  uint64

	// What follows is the goroutine's.
	mem      []byte
	number   uint64 // of the part of the figures that was written last
	detailed uint64 // of that of the details, which have turns of their own: they are written once in a few refreshes
	devices  []Device
	buffer   []byte
	nextLook time.Time // when details may be made again
	remade   int

	stopped deadline.Event // from Close on
	done    chan struct{}
}

// Publish makes a page about p, this process or one that it traces (Updated, Dropped and Devices do not matter; PID 0 is
// this process), and keeps it current from a goroutine of its own: gauges appends the devices as they are now to what it
// is given, which is empty; details, which is asked right after it and only while a reader wants them, is for the
// same devices in the same order, and may be nil. Neither may call Close.
func Publish(p Process, gauges func(into []Device) []Device, details func() []Details) (*Page, error) {
	return publish(fileName, p, gauges, details)
}

// PublishUnlisted is Publish without being found by List: only readers that Page.Descriptor is sent to have the page.
func PublishUnlisted(p Process, gauges func(into []Device) []Device) (*Page, error) {
	return publish(unlistedName, p, gauges, nil)
}

// publish is Publish with a file of another name, which readers do not find.
func publish(file string, p Process, gauges func(into []Device) []Device, details func() []Details) (*Page, error) {
	start, err := startOf("/proc/self")
	if err != nil {
		return nil, fmt.Errorf("publishing the memory of this process: %w", err)
	}
	page := &Page{file: file, id: identity{Maker: os.Getpid(), MakerStart: start, PID: p.PID, Start: p.Start, Name: p.Name, Args: p.Args, Kind: p.Kind,
		Version: p.Version, Conf: p.Conf, Place: p.Place}, gauges: gauges, details: details, done: make(chan struct{})}
	if page.id.PID == 0 {
		page.id.PID, page.id.Start = page.id.Maker, start
	}
	if err := page.make(); err != nil {
		return nil, fmt.Errorf("publishing the memory of this process: %w", err)
	}
	go page.run()
	return page, nil
}

// SetDropped says how many events were lost.
func (p *Page) SetDropped(n uint64) { p.dropped.Store(n) }

// Close ends the page.
func (p *Page) Close() {
	p.stopped.Set()
	<-p.done
}

// wait waits for so long, and reports whether the page goes on. No timer of Go's does that: with its first one the runtime
// opens descriptors (epoll) that it needs from then on, and a program that closes all that it does not know would end with
// that. For the same reason no file is opened as os does.
func (p *Page) wait(d time.Duration) bool { return !p.stopped.Wait(d) }

// make makes the file and its mapping.
func (p *Page) make() error {
	fd, err := unix.MemfdCreate(p.file, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err) // it is closed already
	}
	p.mu.Lock()
	p.fd, p.device, p.inode = fd, uint64(st.Dev), st.Ino
	p.mu.Unlock()
	mem, err := p.sealed(fd)
	if err == nil {
		// A kernel without such locks (Linux before 3.15, some sandboxes) has no readers that ask either.
		_ = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: aliveAt, Len: 1})
		if err = encodeIdentity(mem, p.id); err != nil {
			unix.Munmap(mem)
		}
	}
	if err != nil {
		p.close()
		return err
	}
	p.mem = mem
	return nil
}

// close closes the descriptor if it is the page's.
func (p *Page) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ours() {
		unix.Close(p.fd)
	}
}

// Descriptor is another descriptor of the page's file, for a reader that it is sent to. The caller closes it.
func (p *Page) Descriptor() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ours() { // closing a copy of a file of the program's would end the program's locks on it
		return -1, errTaken
	}
	fd, err := unix.FcntlInt(uintptr(p.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("the status segment: fcntl: %w", err)
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || uint64(st.Dev) != p.device || st.Ino != p.inode {
		unix.Close(fd)
		return -1, errTaken
	}
	return fd, nil
}

// SetEager has the page refreshed as often as if a reader watched it.
func (p *Page) SetEager(eager bool) { p.eager.Store(eager) }

// errTaken is that the program closed the descriptor while the page was made.
var errTaken = errors.New("the program closed the descriptor of the status segment")

// sealed gives the file its size for good, and maps it: other processes may open it to read.
func (p *Page) sealed(fd int) ([]byte, error) {
	// Where files may not be as large the kernel would send a signal that ends the program.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil || limit.Cur < pageBytes {
		return nil, fmt.Errorf("files may not be larger than %d bytes (ulimit -f)", limit.Cur)
	}
	if !p.ours() {
		return nil, errTaken
	}
	if err := unix.Ftruncate(fd, pageBytes); err != nil {
		return nil, fmt.Errorf("ftruncate: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, pageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if !p.ours() { // the mapping may be another file's
		unix.Munmap(mem)
		return nil, errTaken
	}
	// A child of fork has no use for it. That is a wish.
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	// Before Linux 5.1 a reader could write; what it writes is overwritten.
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_FUTURE_WRITE); err != nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("sealing: %w", err)
	}
	return mem, nil
}

// ours reports whether the descriptor still is the page's: programs close all that they find open, and then others have
// the number.
func (p *Page) ours() bool {
	var st unix.Stat_t
	return unix.Fstat(p.fd, &st) == nil && uint64(st.Dev) == p.device && st.Ino == p.inode
}

func (p *Page) run() {
	defer close(p.done)
	defer func() {
		if p.mem == nil {
			return
		}
		unix.Munmap(p.mem)
		p.close()
	}()
	for next := time.Duration(0); p.wait(next); {
		if !p.ours() && !p.remake() {
			return
		}
		next = p.refresh(time.Now())
	}
}

// remake makes another page in the place of one whose descriptor is gone. A program that makes that a habit is let be.
func (p *Page) remake() bool {
	unix.Munmap(p.mem)
	p.mem = nil
	p.remade++
	return p.remade <= 10 && p.make() == nil
}

// refresh writes what is now, and returns when to do so next.
func (p *Page) refresh(now time.Time) time.Duration {
	p.number++
	p.devices = p.gauges(p.devices[:0])
	p.buffer = encodeGauges(p.buffer[:0], now, p.dropped.Load(), p.devices)
	put(p.mem[gaugesAt+p.number%2*gaugesStep:], p.number, p.buffer)
	asked := p.askedAt(askedAt, now)
	if asked && p.details != nil && now.After(p.nextLook) {
		text, err := encodeDetails(p.buffer[:0], now, p.details())
		p.nextLook = now.Add(max(Every-EveryWatched/2, detailsShare*time.Since(now)))
		if err == nil {
			p.tell(text, p.nextLook)
		}
	}
	if !asked && !p.nextLook.IsZero() {
		p.nextLook = time.Time{}
		p.tell(p.written(), now)
	}
	if asked || p.eager.Load() || p.askedAt(watchedAt, now) {
		return EveryWatched
	}
	return Every
}

// tell writes details that stand until then, and a little longer: on a busy machine, or where there are very many blocks, it is
// long until they are made again.
func (p *Page) tell(text []byte, until time.Time) {
	if len(text) < detailsHead {
		return
	}
	le.PutUint64(text, uint64(until.UnixNano()))
	p.detailed++
	put(p.mem[detailsAt+p.detailed%2*detailsStep:], p.detailed, text)
	p.buffer = text
}

// written is a copy of the details that were written last.
func (p *Page) written() []byte {
	part := p.mem[detailsAt+p.detailed%2*detailsStep:]
	return append(p.buffer[:0], part[head:][:min(le.Uint64(part[16:]), detailsHead+detailsMax)]...)
}

// askedAt reports whether a reader holds a lock there.
func (p *Page) askedAt(at int64, now time.Time) bool {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: at + now.Unix() - askedFor, Len: askedFor + 2}
	return unix.FcntlFlock(uintptr(p.fd), unix.F_OFD_GETLK, &lock) == nil && lock.Type != unix.F_UNLCK
}
