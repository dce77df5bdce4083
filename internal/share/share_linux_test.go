package share

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

const mib = 1 << 20

// party is what a process is to another one: an allocator of its own, over a simulated driver of its own.
type party struct {
	*Process
	t    testing.TB
	drv  *sim.Driver
	dev  *engine.Device
	st   *engine.Stream
	fds  guard
	base sim.Live
}

// guard checks that what is reported as open is, and counts it.
type guard struct {
	t    testing.TB
	mu   sync.Mutex
	open map[int]int
	// Of those which are sockets, and the most that were open of the others.
	sockets map[int]bool
	most    int
	path    string
}

func (g *guard) Opened(fd int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0); errno != 0 || g.open[fd] != 0 {
		g.t.Errorf("descriptor %d is reported as open: %v, %d times", fd, errno, g.open[fd])
	}
	g.open[fd]++
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFSOCK {
		g.sockets[fd] = true // how many there are is up to others as well: a process that makes a socket removes abandoned ones
	}
	g.most = max(g.most, len(g.open)-len(g.sockets))
}

func (g *guard) Closing(fd int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open[fd] == 0 {
		g.t.Errorf("descriptor %d is to be closed and was not opened", fd)
	}
	delete(g.open, fd)
	delete(g.sockets, fd)
}

func (g *guard) peak() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.most
}

func (g *guard) Listening(path string) { g.path = path }
func (g *guard) Panicked(v any)        { g.t.Errorf("panic: %v", v) }

func newParty(t testing.TB, opts config.Options) *party {
	t.Helper()
	if sim.Exportable == cuda.HandleNone {
		t.Skip("no descriptors here")
	}
	p := &party{t: t, fds: guard{t: t, open: map[int]int{}, sockets: map[int]bool{}}}
	p.drv = sim.New(sim.Options{Handles: sim.Exportable, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }})
	a, err := engine.New(p.drv, opts)
	must(t, err)
	p.Process = New(a, &p.fds)
	p.timeout = time.Minute // no answer here takes longer than a busy machine does
	p.dev, err = a.Device(0)
	must(t, err)
	p.st, err = p.dev.Stream(cuda.StreamLegacy)
	must(t, err)
	p.base = p.drv.Leaks()
	t.Cleanup(func() {
		p.Stop()
		p.fds.mu.Lock()
		defer p.fds.mu.Unlock()
		if len(p.fds.open) != 0 {
			t.Errorf("descriptors %v were not closed", p.fds.open)
		}
		if _, err := os.Stat(p.fds.path); p.fds.path != "" && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket %s is still there: %v", p.fds.path, err)
		}
	})
	return p
}

// must stops the test on an error.
var must = testkit.Must

func (p *party) alloc(size uint64) cuda.Ptr {
	p.t.Helper()
	ptr, err := p.dev.Alloc(size, p.st)
	must(p.t, err)
	return ptr
}

func (p *party) share(ptr cuda.Ptr) string {
	p.t.Helper()
	h, err := p.Share(ptr)
	must(p.t, err)
	return h
}

// uses opens memory, has the GPU use all of it, and closes it.
func (p *party) uses(handle string, size uint64) {
	p.t.Helper()
	ptr, err := p.Open(handle, 0)
	if err != nil {
		p.t.Error(err)
		return
	}
	if err := p.drv.Use(0, cuda.StreamLegacy, ptr, size); err != nil {
		p.t.Error(err)
	}
	if err := p.drv.StreamSynchronize(0, cuda.StreamLegacy); err != nil {
		p.t.Error(err)
	}
	if err := p.Close(ptr); err != nil {
		p.t.Error(err)
	}
	if now := p.drv.Leaks(); now != p.base {
		p.t.Errorf("left %+v", now)
	}
}

// refused wants one line with these words, and nothing left behind.
func (p *party) refused(handle, words string) {
	p.t.Helper()
	_, err := p.Open(handle, 0)
	if err == nil || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "\n") {
		p.t.Errorf("%v; want one line with %q", err, words)
	}
	if now := p.drv.Leaks(); now != p.base {
		p.t.Errorf("left %+v", now)
	}
}

// leaves waits until no more descriptors are open than so many: the other side of a connection ends after this one.
func leaves(t *testing.T, most int) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); testkit.Descriptors(t) > most; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors are open, at most %d should be", testkit.Descriptors(t), most)
		}
	}
}

func TestShare(t *testing.T) {
	for name, opts := range map[string]config.Options{"chunks": {}, "segments": {Backend: config.BackendMalloc}} {
		t.Run(name, func(t *testing.T) {
			from, to := newParty(t, opts), newParty(t, opts)
			before := testkit.Descriptors(t)
			for _, size := range []uint64{1, 300 << 10, 3*mib + 5, 100 * mib} {
				ptr := from.alloc(size)
				h := from.share(ptr)
				if len(h) > MaxHandle || strings.ContainsFunc(h, func(r rune) bool { return r <= ' ' || r > '~' }) {
					t.Errorf("the handle is %q", h)
				}
				if again := from.share(ptr); again != h {
					t.Errorf("the handle is %q, then %q", h, again)
				}
				to.uses(h, size)
				to.uses(h, size)
				must(t, from.a.Free(ptr))
				to.refused(h, "was freed by the process that shared it")
				from.refused2(h, "was freed by the process that shared it")
			}
			from.Stop()
			leaves(t, before+1) // the poller's, made by the first connection
		})
	}
}

// refused2 is refused for a party that has memory of its own.
func (p *party) refused2(handle, words string) {
	p.t.Helper()
	if _, err := p.Open(handle, 0); err == nil || !strings.Contains(err.Error(), words) {
		p.t.Errorf("%v; want %q", err, words)
	}
}

// 80 GB in chunks of 32 MiB are 2,500 descriptors: more than a process may have open.
func TestManyChunks(t *testing.T) {
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = uint64(testkit.Descriptors(t)) + 60 // for both parties, whose batches are up to 64 each
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	const size = 80 << 30
	h := from.share(from.alloc(size))
	to.uses(h, size)
	if n := max(from.fds.peak(), to.fds.peak()); n != maxBatch {
		t.Errorf("up to %d chunks' descriptors were open at once, want %d", n, maxBatch)
	}
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low))
	to.uses(h, size)
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
}

func TestNoDescriptorLeft(t *testing.T) {
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	h := from.share(from.alloc(mib))
	to.uses(h, mib)
	low := limit
	low.Cur = 3
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low))
	_, err := to.Open(h, 0)
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, syscall.EMFILE) {
		t.Errorf("%v; want that there are too many open files", err)
	}
	to.uses(h, mib)
}

func TestRefused(t *testing.T) {
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	good := from.share(from.alloc(mib))
	h, err := Parse(good)
	must(t, err)

	to.refused("", "not a handle that Cistern made")
	to.refused(strings.Repeat("A", 64), "not a handle that Cistern made")
	bad := h
	bad.Token[3] ^= 1
	to.refused(bad.String(), "not one of this process's")
	bad = h
	bad.ID += 5
	to.refused(bad.String(), "no memory was ever shared under number")
	bad = h
	bad.Socket = "/nowhere/cistern-0/1.sock"
	to.refused(bad.String(), "has ended, or its /nowhere is not this process's")
	if _, err := to.Open(good, 7); !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("a device that does not exist: %v", err)
	}

	to.user++
	to.refused(good, "belongs to another user")
	to.user--
	ours, theirs := pair(t)
	c, err := newConn(theirs, noGuard{}, time.Minute)
	must(t, err)
	stranger := Process{a: from.a, guard: noGuard{}, user: from.user + 1, token: from.token}
	err = (&server{p: &stranger}).answer(c)
	c.close()
	syscall.Close(ours)
	if err == nil || !strings.Contains(err.Error(), "is not shared with user") {
		t.Errorf("another user's memory: %v", err)
	}
	to.uses(good, mib)
}

// A process of another user does not even get to the socket.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal("needs root, to become another user")
		}
		t.Skip("needs root, to become another user")
	}
	from := newParty(t, config.Options{})
	from.share(from.alloc(mib))
	done := make(chan error)
	go func() {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err == nil {
			// The thread becomes the user nobody and ends with the goroutine, which stays locked to it.
			runtime.LockOSThread()
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
				err = errno
			} else {
				err = fmt.Errorf("connect: %w", syscall.Connect(fd, &syscall.SockaddrUnix{Name: from.fds.path}))
			}
			syscall.Close(fd)
		}
		done <- err
	}()
	if err := <-done; !errors.Is(err, syscall.EACCES) {
		t.Errorf("another user's connection: %v; want permission denied", err)
	}
}

func TestOwnHandle(t *testing.T) {
	p := newParty(t, config.Options{})
	ptr := p.alloc(3 * mib)
	h := p.share(ptr)
	for range 2 {
		if got, err := p.Open(h, 0); got != ptr || err != nil {
			t.Errorf("opened at %#x, %v; the block is at %#x", uint64(got), err, uint64(ptr))
		}
	}
	must(t, p.Close(ptr))
	must(t, p.Close(ptr))
	if err := p.Close(ptr); err == nil {
		t.Error("closed once too often")
	}
	must(t, p.a.Free(ptr))
}

func TestOwnHandleOnAnotherDevice(t *testing.T) {
	for backend, says := range map[config.Backend]string{config.BackendVMM: "", config.BackendMalloc: "on device 0 only"} {
		drv := sim.New(sim.Options{Devices: 2, Handles: sim.Exportable, Check: sim.CheckOrder})
		a, err := engine.New(drv, config.Options{Backend: backend})
		must(t, err)
		p := New(a, nil)
		t.Cleanup(p.Stop)
		dev, err := a.Device(0)
		must(t, err)
		st, err := dev.Stream(cuda.StreamLegacy)
		must(t, err)
		ptr, err := dev.Alloc(70*mib, st)
		must(t, err)
		h, err := p.Share(ptr)
		must(t, err)
		q, err := p.Open(h, 1)
		if says != "" {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %v; want %q", backend, err, says)
			}
			continue
		}
		must(t, err)
		must(t, drv.Use(1, cuda.StreamLegacy, q, 70*mib))
		must(t, drv.StreamSynchronize(1, cuda.StreamLegacy))
		must(t, p.Close(q))
	}
}

func TestThousandCycles(t *testing.T) {
	from, to := newParty(t, config.Options{ChunkMax: 2 * mib}), newParty(t, config.Options{})
	h := from.share(from.alloc(20 * mib))
	to.uses(h, 20*mib)
	before := testkit.Descriptors(t)
	for range 1000 {
		to.uses(h, 20*mib)
	}
	leaves(t, before)
}

func TestManyImporters(t *testing.T) {
	from := newParty(t, config.Options{ChunkMax: 2 * mib})
	h := from.share(from.alloc(50 * mib))
	var wg sync.WaitGroup
	for range 16 {
		to := newParty(t, config.Options{})
		wg.Go(func() {
			for range 10 {
				to.uses(h, 50*mib)
			}
		})
	}
	wg.Wait()
}

func TestFolder(t *testing.T) {
	user := uint32(os.Geteuid())
	dir := t.TempDir()
	folder := filepath.Join(dir, "mine")
	must(t, own(folder, user))
	must(t, own(folder, user))
	if err := own(folder, user+1); err == nil {
		t.Error("a folder of another user's is as good")
	}
	must(t, os.Chmod(folder, 0o755))
	if err := own(folder, user); err == nil {
		t.Error("a folder that every user may enter is as good")
	}
	must(t, os.Chmod(folder, 0o700))
	must(t, os.Symlink(folder, filepath.Join(dir, "link")))
	if err := own(filepath.Join(dir, "link"), user); err == nil {
		t.Error("a link is as good")
	}
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	if err := own(filepath.Join(dir, "file"), user); err == nil {
		t.Error("a file is as good")
	}

	// What is swept.
	p := &Process{guard: noGuard{}, user: user}
	live, fd, err := p.bind(folder)
	must(t, err)
	dead, fd2, err := p.bind(folder)
	must(t, err)
	syscall.Close(fd2)
	socket := func(name string, age time.Duration) string {
		path := filepath.Join(folder, name)
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		must(t, err)
		must(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
		must(t, syscall.Close(fd))
		must(t, os.Chtimes(path, time.Now(), time.Now().Add(-age)))
		return path
	}
	old, young := socket("1-2.new", time.Hour), socket("1-3.new", 0)
	other := filepath.Join(folder, "other.sock")
	must(t, os.WriteFile(other, nil, 0o600))
	sweep(folder)
	for path, want := range map[string]bool{live: true, dead: false, old: false, young: true, other: true} {
		if _, err := os.Lstat(path); (err == nil) != want {
			t.Errorf("%s: %v", filepath.Base(path), err)
		}
	}
	syscall.Close(fd)
}

// Where one place is not available, the next is used.
func TestFolderElsewhere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	must(t, os.Mkdir(dir, 0o700))
	p := &Process{guard: noGuard{}, user: uint32(os.Geteuid())}
	if _, _, err := p.bind(filepath.Join(dir, "cistern")); err == nil || !strings.Contains(err.Error(), "a handle cannot have this path") {
		t.Errorf("a name of %d characters: %v", len(dir), err)
	}
	if _, _, err := p.bind("/proc/nowhere/cistern"); err == nil {
		t.Error("a folder was made in /proc")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("after a failure there is %v, %v", left, err)
	}
}

// A process without a descriptor for a socket leaves no folder behind, in any place.
func TestFolderWithoutSocket(t *testing.T) {
	common, temporary := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temporary)
	t.Setenv("XDG_RUNTIME_DIR", "")
	defer func(was string) { shm = was }(shm)
	shm = common
	var limit syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: limit.Max}))
	p := &Process{guard: noGuard{}, user: uint32(os.Geteuid())}
	_, _, err := p.place()
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, syscall.EMFILE) {
		t.Errorf("without a descriptor: %v", err)
	}
	for _, parent := range []string{common, temporary} {
		if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
			t.Errorf("in %s there is %v, %v", parent, left, err)
		}
	}
}

// Another user who takes the name of the folder first blocks no other.
func TestFolderTaken(t *testing.T) {
	short := func() string { // a socket's name has to be
		dir, err := os.MkdirTemp("", "s")
		must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		return dir
	}
	for what, run := range map[string]string{"runtime folder": short(), "none": "", "one that is no place": "/proc/nowhere"} {
		t.Run(what, func(t *testing.T) {
			common := short()
			t.Setenv("XDG_RUNTIME_DIR", run)
			defer func(was string) { shm = was }(shm)
			shm = common
			must(t, os.Mkdir(filepath.Join(common, fmt.Sprintf("cistern-%d", os.Geteuid())), 0o777)) // which every user may enter
			must(t, os.Chmod(filepath.Join(common, fmt.Sprintf("cistern-%d", os.Geteuid())), 0o777))
			from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
			to.uses(from.share(from.alloc(mib)), mib)
			want := common
			if what == "runtime folder" {
				want = run
			}
			folder := filepath.Dir(from.fds.path)
			if filepath.Dir(folder) != want {
				t.Errorf("the socket is %s, want it below %s", from.fds.path, want)
			}
			from.Stop()
			if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder %s stays: %v", folder, err)
			}
		})
	}
}

// Where the program closed all descriptors, sharing begins again, and none of what has their numbers now is touched.
func TestDescriptorsClosed(t *testing.T) {
	from, to := newParty(t, config.Options{}), newParty(t, config.Options{})
	h := from.share(from.alloc(mib))
	to.uses(h, mib)
	s := from.server
	mine := map[int]*os.File{}
	for _, fd := range []int{s.at.FD, s.poller.near.FD, s.poller.wake.FD} { // before any is closed: the poller then closes the others
		file, err := os.CreateTemp(t.TempDir(), "")
		must(t, err)
		mine[fd] = file
	}
	for fd, file := range mine {
		must(t, syscall.Dup3(int(file.Fd()), fd, 0))
	}
	for _, file := range mine {
		file.Close()
	}
	to.uses(from.share(from.alloc(2*mib)), 2*mib)
	for fd := range mine {
		var st syscall.Stat_t
		if err := syscall.Fstat(fd, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Size != 0 {
			t.Errorf("descriptor %d, which is the program's: %v, %+v", fd, err, st)
		}
		syscall.Close(fd)
	}
}
