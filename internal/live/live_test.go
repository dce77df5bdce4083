//go:build linux

package live

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/testkit"
	"golang.org/x/sys/unix"
)

// hidden is what pages are called that nobody else finds: other tests and whoever runs cistern top on this machine look at what is,
// and ask it.
var hidden = fmt.Sprintf("%s-test-%d", fileName, os.Getpid())

// TestMain is also the publishers: processes that the tests start.
func TestMain(m *testing.M) {
	if how := os.Getenv("LIVE_TEST_PUBLISHER"); how != "" {
		publisher(how)
		return
	}
	os.Exit(m.Run())
}

// publisher publishes a device whose figures are all the same, larger by one each time, and says so.
func publisher(how string) {
	var n atomic.Uint64
	p, err := Of(0)
	if err != nil {
		panic(err)
	}
	p.Kind, p.Version, p.Conf = KindCistern, "1.2", "limit:1GiB"
	page, err := publish(os.Getenv("LIVE_TEST_FILE"), p, func(into []Device) []Device {
		d, n := Device{Name: "GPU"}, n.Add(1)
		for _, f := range d.figures() {
			*f = n
		}
		return append(into, d)
	}, func() []Details { return []Details{{Tags: []Use{{"weights", 1, n.Load()}}}} })
	if err != nil {
		panic(err)
	}
	fmt.Println("ready")
	if how == "busy" { // much faster than it really goes
		for i := uint64(1 << 32); ; i++ {
			put(page.mem[gaugesAt+i%2*gaugesStep:], i, encodeGauges(nil, time.Now(), 0, page.gauges(nil)))
		}
	}
	select {}
}

func start(t *testing.T, how string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LIVE_TEST_PUBLISHER="+how, "LIVE_TEST_FILE="+hidden)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// ours has a test fail for what could not be read of this process, of some others, or at all. What else publishes on this machine,
// as another run of these tests does, may do so as badly as it likes.
func ours(t *testing.T, errs []error, others ...int) {
	t.Helper()
	for _, err := range errs {
		var pid int
		if n, _ := fmt.Sscanf(err.Error(), "process %d: ", &pid); n == 0 || slices.Contains(append(others, os.Getpid()), pid) {
			t.Fatal(err)
		}
	}
}

// readerOf finds the reader of one process among all that are hidden.
func readerOf(t *testing.T, pid int) *Reader {
	t.Helper()
	return readerIn(t, hidden, pid)
}

func readerIn(t *testing.T, file string, pid int) *Reader {
	t.Helper()
	all, errs := list(t.Context(), file, nil)
	var found *Reader
	for _, r := range all {
		if r.pid == pid && found == nil {
			found = r
		} else {
			r.Close()
		}
	}
	if found != nil {
		t.Cleanup(found.Close)
	}
	ours(t, errs, pid)
	return found
}

// eventually waits for something to become so.
func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s", what)
		}
	}
}

func read(t *testing.T, r *Reader, details bool) Process {
	t.Helper()
	p, err := r.Read(details)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPublish(t *testing.T) {
	before := testkit.Descriptors(t)
	goroutines := runtime.NumGoroutine()
	var reserved, detailed atomic.Uint64
	page, err := Publish(Process{Name: "me", Args: []string{"a", "b"}, Kind: KindCistern, Version: "0.5", Conf: "x:y"},
		func(into []Device) []Device {
			return append(into, Device{Ordinal: 3, Name: "GPU", Reserved: reserved.Add(1)})
		},
		func() []Details { return []Details{{Tags: []Use{{"weights", 1, detailed.Add(1)}}}} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(page.Close)
	r := readerIn(t, fileName, os.Getpid())
	if r == nil {
		t.Fatal("the page was not found")
	}
	self, err := Of(0)
	if err != nil {
		t.Fatal(err)
	}
	var p Process
	began := time.Now()
	eventually(t, "there are figures of now", func() bool { p = read(t, r, false); return len(p.Devices) == 1 && !p.Updated.Before(began) })
	if p.Updated.After(time.Now()) {
		t.Errorf("updated at %v, and now it is %v", p.Updated, time.Now())
	}
	want := Process{PID: os.Getpid(), Start: self.Start, Name: "me", Args: []string{"a", "b"}, Kind: KindCistern, Version: "0.5", Conf: "x:y",
		Updated: p.Updated, Devices: []Device{{Ordinal: 3, Name: "GPU", Reserved: p.Devices[0].Reserved}}}
	if !reflect.DeepEqual(p, want) {
		t.Errorf("read\n%+v; want\n%+v", p, want)
	}
	// Details come when they are asked for. How often all is refreshed see TestDetailsInTurn.
	eventually(t, "there are details", func() bool {
		p = read(t, r, true)
		return p.Devices[0].Details != nil
	})
	if d := p.Devices[0].Details; len(d.Tags) != 1 || d.Tags[0].Name != "weights" {
		t.Errorf("details %+v", d)
	}
	n := reserved.Load()
	eventually(t, "it is refreshed", func() bool { return read(t, r, false).Devices[0].Reserved > n })
	// Known readers are found again, and end with the page.
	again, errs := List(t.Context(), r)
	ours(t, errs)
	found := false
	for _, o := range again {
		found = found || o == r
		if o != r {
			o.Close()
		}
	}
	if !found {
		t.Error("a known reader was not found again")
	}
	page.Close()
	page.Close()
	after, errs := List(t.Context(), r)
	for _, o := range after {
		if o == r {
			t.Error("a closed page is still there")
		}
		o.Close()
	}
	ours(t, errs)
	if _, err := r.Read(false); !errors.Is(err, os.ErrClosed) {
		t.Errorf("reading what is closed: %v", err)
	}
	eventually(t, "nothing is left", func() bool { return testkit.Descriptors(t) <= before && runtime.NumGoroutine() <= goroutines })
}

// The questions end with the reader, also when it is stopped: a lock names the second.
func TestAskedNoMore(t *testing.T) {
	page, err := publish(hidden, Process{}, func(into []Device) []Device { return into }, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	r := readerOfFile(t, page)
	ask := func(at int64, s int) bool {
		now := time.Now()
		if held := max(r.held[0], r.held[1]); held != 0 {
			now = time.Unix(held, 0) // of the last question, however long ago that was
		}
		return page.askedAt(at, now.Add(time.Duration(s)*time.Second))
	}
	if ask(watchedAt, 0) || ask(askedAt, 0) {
		t.Error("asked before any reader did")
	}
	read(t, r, false)
	if !ask(watchedAt, 0) || ask(askedAt, 0) {
		t.Error("being watched, it does not know, or thinks that it is asked")
	}
	read(t, r, true)
	if !ask(askedAt, 0) || !ask(askedAt, 1) || !ask(watchedAt, 1) {
		t.Error("being asked, it does not know")
	}
	if ask(askedAt, 10) || ask(watchedAt, 10) {
		t.Error("asked ten seconds after the last question")
	}
	r.Close()
	if ask(watchedAt, 0) || ask(askedAt, 0) {
		t.Error("asked without a reader")
	}
}

// A reader has no way to change the page.
func TestReaderCannotWrite(t *testing.T) {
	cmd := start(t, "idle")
	r := readerOf(t, cmd.Process.Pid)
	read(t, r, false)
	path := fmt.Sprintf("/proc/self/fd/%d", r.fd)
	if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
		defer f.Close()
		if _, err := f.WriteAt([]byte("x"), gaugesAt); err == nil {
			t.Error("written")
		}
		if err := f.Truncate(1); err == nil {
			t.Error("made smaller")
		}
		if err := f.Truncate(1 << 30); err == nil {
			t.Error("made larger")
		}
		if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Error("mapped to be written")
		}
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096); err == nil {
			t.Error("the range was deallocated")
		}
	}
	read(t, r, false)
}

// A process that has a page open need not be its maker: children of fork have it too.
func TestOnlyTheMaker(t *testing.T) {
	page, err := publish(hidden, Process{}, func(into []Device) []Device { return append(into, Device{}) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	dup, err := unix.Dup(page.fd)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(dup), "page")
	cmd := exec.Command("sleep", "100")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if link, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/3", cmd.Process.Pid)); !(&scan{file: hidden}).isPage(link) {
		t.Fatalf("the child has %q open", link)
	}
	if r := readerOf(t, cmd.Process.Pid); r != nil {
		t.Error("another process's page was taken for its own")
	}
	if r := readerOf(t, os.Getpid()); r == nil {
		t.Error("the maker is not found")
	}
}

// A page about another process goes when that does.
func TestTraced(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	var about Process
	eventually(t, "it has its arguments", func() bool { // an instant after it has its program
		var err error
		if about, err = Of(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		return about.Args != nil
	})
	about.Kind = KindTraced
	page, err := publish(hidden, about, func(into []Device) []Device { return append(into, Device{Reserved: 5}) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	page.SetDropped(9)
	r := readerOf(t, os.Getpid())
	if p := read(t, r, false); p.PID != cmd.Process.Pid || p.Kind != KindTraced || p.Start != about.Start || len(p.Args) != 2 || p.Args[1] != "100" {
		t.Errorf("%+v", p)
	}
	eventually(t, "losses are published", func() bool { return read(t, r, false).Dropped == 9 })
	cmd.Process.Kill()
	cmd.Wait()
	if _, err := r.Read(false); !errors.Is(err, ErrEnded) {
		t.Errorf("after it ended: %v", err)
	}
	if r := readerOf(t, os.Getpid()); r != nil {
		t.Error("a page about a process that ended is listed")
	}
}

func TestStopped(t *testing.T) {
	cmd := start(t, "idle")
	r := readerOf(t, cmd.Process.Pid)
	eventually(t, "there are figures", func() bool { return !read(t, r, false).Updated.IsZero() })
	cmd.Process.Signal(syscall.SIGSTOP)
	eventually(t, "all of it has stopped", func() bool {
		states, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", cmd.Process.Pid))
		if err != nil || len(states) == 0 {
			t.Fatal(states, err)
		}
		return !slices.ContainsFunc(states, func(file string) bool {
			text, err := os.ReadFile(file)
			return err != nil || !strings.Contains(string(text), ") T ")
		})
	})
	p := read(t, r, false)
	time.Sleep(Every + EveryWatched) // in which one that is not stopped would refresh its page
	if again := read(t, r, false); !again.Updated.Equal(p.Updated) || len(p.Devices) != 1 {
		t.Errorf("a stopped process's figures are of %v, and then of %v: %+v", p.Updated, again.Updated, p)
	}
	if readerOf(t, cmd.Process.Pid) == nil {
		t.Error("a stopped process is not found")
	}
	cmd.Process.Signal(syscall.SIGCONT)
	eventually(t, "it goes on", func() bool { return read(t, r, false).Updated.After(p.Updated) })
	cmd.Process.Kill()
	cmd.Wait()
	if _, err := r.Read(false); !errors.Is(err, ErrEnded) {
		t.Errorf("after its end: %v", err)
	}
}

// TestKilled reads fifty processes that write as fast as they can while they are killed at random, half of them once they were
// read: each answer is one that the process wrote as a whole, or that it has ended.
func TestKilled(t *testing.T) {
	before := testkit.Descriptors(t)
	const many = 50
	var wg sync.WaitGroup
	var reads atomic.Int64
	for range 5 {
		wg.Go(func() {
			for i := range many / 5 {
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "LIVE_TEST_PUBLISHER=busy", "LIVE_TEST_FILE="+hidden)
				out, err := cmd.StdoutPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := out.Read(make([]byte, 6)); err != nil {
					t.Error(err)
				}
				kill := func() {
					time.AfterFunc(time.Duration(rand.IntN(30))*time.Millisecond, func() { cmd.Process.Kill() })
				}
				const first = 5
				n := 0
				if i%2 == 0 {
					kill()
				}
				s := scan{file: hidden, known: map[page]*Reader{}, seen: map[page]bool{}}
				for clear(s.seen); len(s.found) == 0 && s.failed == nil && syscall.Kill(cmd.Process.Pid, 0) == nil && !ended(cmd.Process.Pid); clear(s.seen) {
					s.process(cmd.Process.Pid)
				}
				if s.failed != nil {
					t.Error(s.failed)
				}
				for _, r := range s.found {
					for {
						p, err := r.Read(true)
						if err != nil {
							if !errors.Is(err, ErrEnded) {
								t.Error(err)
							}
							break
						}
						reads.Add(1)
						if n++; n == first && i%2 == 1 {
							kill()
						}
						for _, d := range p.Devices {
							for i, f := range d.figures() {
								if *f != d.Total {
									t.Errorf("figure %d is %d, the first %d", i, *f, d.Total)
								}
							}
						}
					}
					r.Close()
				}
				cmd.Process.Kill()
				cmd.Wait()
			}
		})
	}
	wg.Wait()
	t.Logf("%d reads", reads.Load())
	if reads.Load() < many {
		t.Errorf("only %d reads", reads.Load())
	}
	eventually(t, "nothing is left open", func() bool { return testkit.Descriptors(t) <= before })
}

func ended(pid int) bool {
	_, err := startOf("/proc/" + strconv.Itoa(pid))
	return err != nil
}

// A program may close all descriptors that it finds: the page comes back under another, and the program's own files are left
// alone.
func TestDescriptorClosed(t *testing.T) {
	page, err := publish(hidden, Process{}, func(into []Device) []Device { return append(into, Device{}) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := readerOf(t, os.Getpid())
	eventually(t, "there are figures", func() bool { return !read(t, r, false).Updated.IsZero() })
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	number := page.fd
	if err := unix.Dup3(int(file.Fd()), number, unix.O_CLOEXEC); err != nil { // it has the number now
		t.Fatal(err)
	}
	defer unix.Close(number)
	var again *Reader
	eventually(t, "the page comes back", func() bool { again = readerOf(t, os.Getpid()); return again != nil })
	eventually(t, "it has figures", func() bool { return len(read(t, again, false).Devices) == 1 })
	page.Close()
	var st, want unix.Stat_t
	if unix.Fstat(number, &st) != nil || unix.Fstat(int(file.Fd()), &want) != nil || st.Ino != want.Ino || st.Size != 0 {
		t.Errorf("the program's own file was touched: %+v", st)
	}
}

// What other processes call a page is looked at with care.
func TestHostilePages(t *testing.T) {
	good := written(t, someID, someDevices(), nil)
	self, err := Of(0)
	if err != nil {
		t.Fatal(err)
	}
	mine := someID
	mine.Maker, mine.MakerStart, mine.PID, mine.Start = self.PID, self.Start, self.PID, self.Start
	shrinks := written(t, mine, someDevices(), nil)
	newer := append([]byte(nil), shrinks...)
	le.PutUint64(newer[8:], version+1)
	files := map[string][]byte{"empty": nil, "short": good[:10], "random": []byte(strings.Repeat("nonsense", 1000)), "another's": good, "shrinks": shrinks, "newer": newer}
	fds := map[string]int{}
	for name, contents := range files {
		fd, err := unix.MemfdCreate(hidden, unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		fds[name] = fd
		defer unix.Close(fd)
		if _, err := unix.Write(fd, contents); err != nil {
			t.Fatal(err)
		}
		if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: aliveAt, Len: 1}); err != nil {
			t.Fatal(err)
		}
	}
	readers, errs := list(t.Context(), hidden, nil)
	var texts []string
	for _, err := range errs {
		texts = append(texts, strings.TrimPrefix(err.Error(), fmt.Sprintf("process %d: ", os.Getpid())))
	}
	for _, want := range []string{"the status segment is too short", "this is not a status segment of Cistern", "its status segment has layout 3, this cistern reads layout 2: use the version that the program uses"} {
		if !strings.Contains(strings.Join(texts, "\n"), want) {
			t.Errorf("errors are %q, want %q among them", texts, want)
		}
	}
	n := 0
	for _, r := range readers {
		defer r.Close()
		if r.pid != os.Getpid() {
			continue
		}
		n++
		if p := read(t, r, true); len(p.Devices) != 2 {
			t.Errorf("%+v", p)
		}
		if err := unix.Ftruncate(fds["shrinks"], 100); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Read(true); err == nil || !strings.Contains(err.Error(), "too short") {
			t.Errorf("a page that shrank: %v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d pages are this process's, want 1", n)
	}
}

// Where files may not be large enough there is no page, and no signal.
func TestFileSizeLimit(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 1000
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &low); err != nil {
		t.Skip(err)
	}
	_, err := publish(hidden, Process{}, func(into []Device) []Device { return into }, nil)
	if e := unix.Setrlimit(unix.RLIMIT_FSIZE, &limit); e != nil {
		t.Fatal(e)
	}
	if err == nil || !strings.Contains(err.Error(), "ulimit -f") {
		t.Errorf("%v", err)
	}
}

// TestManyPages: a process with more pages than needed does not take all descriptors of a reader. One that has as many of
// others' open, as a reader has, is not such a process.
func TestManyPages(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	for range mostPages + 20 {
		fd, err := unix.MemfdCreate(hidden, unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(dup), "page"))
		mem := make([]byte, pageBytes)
		start, err := startOf("/proc/self")
		if err == nil {
			err = encodeIdentity(mem, identity{Maker: os.Getpid(), MakerStart: start, PID: os.Getpid(), Start: start})
		}
		if err == nil {
			_, err = unix.Pwrite(fd, mem[:identityAt+identityMax], 0)
		}
		if err == nil {
			err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: aliveAt, Len: 1})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	readers, errs := list(t.Context(), hidden, nil)
	ours := 0
	for _, r := range readers {
		if r.pid == os.Getpid() {
			ours++
		}
		r.Close()
	}
	if ours == 0 || ours > mostPages {
		t.Errorf("%d pages are open", ours)
	}
	said, alien := 0, fmt.Sprintf("process %d: ", cmd.Process.Pid)
	for _, err := range errs {
		if strings.Contains(err.Error(), fmt.Sprintf("process %d: it has more than %d status segments", os.Getpid(), mostPages)) {
			said++
		}
		if strings.HasPrefix(err.Error(), alien) {
			t.Error(err)
		}
	}
	if said != 1 {
		t.Errorf("it says %v", errs)
	}
}

// TestListEnds: List stops when it is asked to.
func TestListEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, errs := list(ctx, hidden, nil); len(r) != 0 || len(errs) != 1 || !errors.Is(errs[0], context.Canceled) {
		t.Errorf("%v, %v", r, errs)
	}
}

func BenchmarkList(b *testing.B) {
	for b.Loop() {
		all, _ := List(b.Context())
		for _, r := range all {
			r.Close()
		}
	}
}

func BenchmarkRead(b *testing.B) {
	page, err := Publish(Process{}, func(into []Device) []Device { return append(into, someDevices()...) }, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer page.Close()
	all, _ := List(b.Context())
	own := slices.IndexFunc(all, func(r *Reader) bool { return r.pid == os.Getpid() })
	if own < 0 {
		b.Fatal("its own page is not found")
	}
	for b.Loop() {
		if _, err := all[own].Read(false); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRefresh is what a refresh costs without a reader, beside taking the figures.
func BenchmarkRefresh(b *testing.B) {
	page, err := Publish(Process{}, func(into []Device) []Device { return append(into, someDevices()...) }, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer page.Close()
	b.ReportAllocs()
	other := &Page{file: page.file, id: page.id, gauges: page.gauges}
	if err := other.make(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if !other.ours() {
			b.Fatal("not ours")
		}
		other.refresh(time.Now())
	}
	unix.Close(other.fd)
	unix.Munmap(other.mem)
}
