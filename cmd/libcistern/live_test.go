//go:build linux && cgo

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// shower is a running live.c.
type shower struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.Writer
	out   *bufio.Scanner
	child int // of fork
}

func showing(t *testing.T, conf string, args ...string) *shower {
	t.Helper()
	return showingWith(t, libraryPath(t), conf, args...)
}

func showingWith(t *testing.T, library, conf string, args ...string) *shower {
	t.Helper()
	s := &shower{t: t, cmd: exec.Command(program(t, "live.c", library), args...)}
	s.cmd.Env = append(os.Environ(), "CISTERN_CONF=driver:sim:8GiBx2"+conf)
	s.cmd.Stderr = os.Stderr
	in, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.in, s.out = in, bufio.NewScanner(out)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s.child != 0 {
			_ = syscall.Kill(s.child, syscall.SIGKILL)
		}
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	s.ready()
	return s
}

// ready waits until the program waits for the next line.
func (s *shower) ready() {
	s.t.Helper()
	for s.out.Scan() {
		if s.out.Text() == "ready" {
			return
		}
		s.child, _ = strconv.Atoi(s.out.Text())
	}
	s.t.Fatal("the program has ended")
}

// step has it go on.
func (s *shower) step() {
	s.t.Helper()
	fmt.Fprintln(s.in)
	s.ready()
}

// reader is that of its page, nil where it has none.
func (s *shower) reader() *live.Reader {
	s.t.Helper()
	return readerOf(s.t, s.cmd.Process.Pid)
}

func readerOf(t *testing.T, pid int) *live.Reader {
	t.Helper()
	all, errs := live.List(t.Context())
	for _, err := range errs {
		if strings.HasPrefix(err.Error(), fmt.Sprintf("process %d: ", pid)) || !strings.HasPrefix(err.Error(), "process ") { // not another's
			t.Fatal(err)
		}
	}
	var found *live.Reader
	for _, r := range all {
		if p, err := r.Read(false); err == nil && p.PID == pid && found == nil {
			found = r
			t.Cleanup(r.Close)
			continue
		}
		r.Close()
	}
	return found
}

// until reads until the page is as wanted.
func until(t *testing.T, r *live.Reader, details bool, what string, so func(p live.Process) bool) live.Process {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		p, err := r.Read(details)
		if err != nil {
			t.Fatal(err)
		}
		if so(p) {
			return p
		}
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s: %+v", what, p)
		}
	}
}

// TestShown: two processes show what they hold, to readers, and no more than that.
func TestShown(t *testing.T) {
	t.Parallel()
	const limit = 1 << 30
	a, b := showing(t, ",limit:1GiB"), showing(t, "", "an argument", "--another")
	if a.reader() != nil {
		t.Error("there is a page before a device is in use")
	}
	a.step()
	b.step()
	ra, rb := a.reader(), b.reader()
	if ra == nil || rb == nil {
		t.Fatal("a process is not found")
	}
	p := until(t, ra, false, "64 and 8 MiB are held", func(p live.Process) bool {
		return len(p.Devices) == 1 && p.Devices[0].Allocated == 72<<20
	})
	if d := p.Devices[0]; d.Ordinal != 0 || d.Name == "" || d.UUID == [16]byte{} || d.Total != 8<<30 || d.Limit != limit || d.Reserved < d.Allocated ||
		d.Active != d.Allocated || d.Cached != d.Reserved-d.Active || d.PeakReserved < d.Reserved || d.PeakAllocated != d.Allocated ||
		d.DriverCalls == 0 || d.OOMs != 0 || d.Details != nil || d.Requests < 2 || d.Slow.Count() < 2 {
		t.Errorf("%+v", d)
	}
	if p.Kind != live.KindCistern || p.Version != cistern.Version || !strings.HasSuffix(p.Conf, ",limit:1073741824") || p.Name != filepath.Base(a.cmd.Path) {
		t.Errorf("%+v", p)
	}
	p = until(t, rb, true, "there are details", func(p live.Process) bool { return len(p.Devices) == 1 && p.Devices[0].Details != nil })
	if !slices.Equal(p.Args, b.cmd.Args) {
		t.Errorf("command line %q, want %q", p.Args, b.cmd.Args)
	}
	all := []live.Use{{Name: "training", Blocks: 2, Bytes: 72 << 20}}
	tags := []live.Use{{Name: "weights", Blocks: 1, Bytes: 64 << 20}, {Blocks: 1, Bytes: 8 << 20}}
	if d := p.Devices[0].Details; !slices.Equal(d.Tags, tags) || !slices.Equal(d.Libraries, all) ||
		!slices.Equal(d.Pools, []live.Use{{Name: "default", Blocks: 2, Bytes: 72 << 20}}) {
		t.Errorf("details %+v", d)
	}
	// What happens next is seen, on both devices.
	b.step()
	p = until(t, rb, true, "the second device has details", func(p live.Process) bool {
		return len(p.Devices) == 2 && p.Devices[1].Details != nil && len(p.Devices[0].Details.Tags) == 1
	})
	if p.Devices[0].Allocated != 8<<20 || p.Devices[0].PeakAllocated != 72<<20 || p.Devices[1].Ordinal != 1 || p.Devices[1].Allocated != 2<<20 {
		t.Errorf("%+v", p.Devices)
	}
	// One that ended is gone at once, one that is killed as well.
	fmt.Fprintln(b.in)
	if err := b.cmd.Wait(); err != nil {
		t.Error(err)
	}
	_ = a.cmd.Process.Kill()
	_ = a.cmd.Wait()
	for _, r := range []*live.Reader{ra, rb} {
		if _, err := r.Read(true); !errors.Is(err, live.ErrEnded) {
			t.Errorf("after its end: %v", err)
		}
	}
}

// TestShownStacks: where blocks come from, while that is known.
func TestShownStacks(t *testing.T) {
	t.Parallel()
	s := showing(t, ",stacks:native")
	s.step()
	r := s.reader()
	if r == nil {
		t.Fatal("there is no page")
	}
	p := until(t, r, true, "stacks are published", func(p live.Process) bool {
		return len(p.Devices) == 1 && p.Devices[0].Details != nil && len(p.Devices[0].Details.Stacks) == 2
	})
	for i, size := range []uint64{64 << 20, 8 << 20} {
		if u := p.Devices[0].Details.Stacks[i]; u.Bytes != size || u.Blocks != 1 || !strings.Contains(u.Name, "main") {
			t.Errorf("stack %d is %+v", i, u)
		}
	}
}

// TestShownSettings: no reader may look where the settings forbid it.
func TestShownSettings(t *testing.T) {
	t.Parallel()
	s := showing(t, ",top:off")
	s.step()
	time.Sleep(100 * time.Millisecond) // nothing is to come
	if s.reader() != nil {
		t.Error("there is a page with top:off")
	}
	if n := pages(t, s.cmd.Process.Pid); n != 0 {
		t.Errorf("%d pages with top:off", n)
	}
}

// pages is how many a process has open.
func pages(t *testing.T, pid int) (n int) {
	t.Helper()
	return openNow(t, pid, "cistern-live")
}

// openNow is how many descriptors of that kind a process has open.
func openNow(t *testing.T, pid int, kind string) (n int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if link, _ := os.Readlink(f); strings.Contains(link, kind) {
			n++
		}
	}
	return n
}

// TestShownForked: a child of fork has the page open and is not taken for its maker; nor does the page outlive that.
func TestShownForked(t *testing.T) {
	t.Parallel()
	s := showing(t, "", "fork")
	s.step()
	if s.child == 0 || pages(t, s.child) != 1 || pages(t, s.cmd.Process.Pid) != 1 {
		t.Fatalf("child %d has %d pages open", s.child, pages(t, s.child))
	}
	r := s.reader()
	if r == nil || readerOf(t, s.child) != nil {
		t.Error("the page is not its maker's alone")
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	if _, err := r.Read(false); !errors.Is(err, live.ErrEnded) || s.reader() != nil || readerOf(t, s.child) != nil {
		t.Errorf("after its end, with a child that lives: %v", err)
	}
}

// TestShownClosed: a program that closes all descriptors is seen again.
func TestShownClosed(t *testing.T) {
	t.Parallel()
	s := showing(t, "", "close")
	s.step()
	var r *live.Reader
	for end := time.Now().Add(time.Minute); r == nil && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		r = s.reader()
	}
	if r == nil {
		t.Fatal("it is not seen again")
	}
	until(t, r, false, "72 MiB are held", func(p live.Process) bool { return len(p.Devices) == 1 && p.Devices[0].Allocated == 72<<20 })
}

// TestShownBroken: after a bug in the library, which then does nothing any more, its page goes and the program stays.
func TestShownBroken(t *testing.T) {
	t.Parallel()
	s := showingWith(t, libraryFor(t, "inject", "", "cistern_inject"), "", "panic")
	s.step()
	r := s.reader()
	if r == nil {
		t.Fatal("there is no page before")
	}
	s.step()
	var err error
	for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		_, err = r.Read(true)
	}
	if !errors.Is(err, live.ErrEnded) || pages(t, s.cmd.Process.Pid) != 0 {
		t.Errorf("afterwards: %v, %d pages", err, pages(t, s.cmd.Process.Pid))
	}
	s.step()
}

// TestSlowShownIdle: what the page costs an idle process, in CPU time. The least of a few: the machine may
// be busy.
func TestSlowShownIdle(t *testing.T) {
	slow.Only(t)
	s := showing(t, "")
	s.step()
	// Go's poller would come with its first timer or file: programs that close all descriptors would end with it.
	if n := openNow(t, s.cmd.Process.Pid, "eventpoll"); n != 0 {
		t.Errorf("the library has %d pollers open", n)
	}
	const most, span = 0.001, 3 * time.Second
	least := 1.0
	for range 5 {
		begin, before := time.Now(), cpu(t, s.cmd.Process.Pid)
		time.Sleep(span)
		least = min(least, (cpu(t, s.cmd.Process.Pid)-before).Seconds()/time.Since(begin).Seconds())
		if least < most/2 {
			break
		}
	}
	t.Logf("%.4f %% of a processor", least*100)
	if least > most {
		t.Errorf("an idle process takes %.4f %% of a processor, at most %.4f %%", least*100, most*100)
	}
}

// cpu is what all threads of a process have used.
func cpu(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil {
			ns, _, _ := strings.Cut(string(text), " ")
			n, _ := strconv.ParseInt(ns, 10, 64)
			sum += time.Duration(n)
		}
	}
	if sum == 0 {
		t.Skip("the kernel does not say what threads have used")
	}
	return sum
}

// TestUnusedIsReleased: a program that does nothing more gives back what exceeds the limit of free memory.
func TestUnusedIsReleased(t *testing.T) {
	t.Parallel()
	s := showing(t, ",cache_limit:4MiB,cache_decay:0s")
	s.step()
	r := s.reader()
	if r == nil {
		t.Fatal("the process is not found")
	}
	until(t, r, false, "72 MiB are held", func(p live.Process) bool { return len(p.Devices) == 1 && p.Devices[0].Allocated == 72<<20 })
	s.step() // it frees 64 MiB
	until(t, r, false, "at most 4 MiB are free", func(p live.Process) bool {
		return len(p.Devices) > 0 && p.Devices[0].Allocated == 8<<20 && p.Devices[0].Cached <= 4<<20
	})
}
