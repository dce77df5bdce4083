//go:build linux && cgo

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// process is a program of testdata/peer.c that runs the commands it is sent.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	ended bool
}

func startPeer(t *testing.T, conf string, env ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(program(t, "peer.c", libraryPath(t)))}
	p.cmd.Env = append(append(os.Environ(), "CISTERN_CONF="+conf), env...)
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.end)
	return p
}

// end has the process exit.
func (p *process) end() {
	if p.ended {
		return
	}
	p.ended = true
	p.in.Close()
	stuck := time.AfterFunc(2*time.Minute, func() { p.cmd.Process.Kill() })
	defer stuck.Stop()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the program ended with %v", err)
	}
}

// kill ends it as nothing can be done about.
func (p *process) kill() {
	p.ended = true
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// tell sends a command and returns the answer.
func (p *process) tell(format string, args ...any) string {
	p.t.Helper()
	command := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		p.t.Fatalf("%.100s: %v", command, err)
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.t.Fatalf("%.100s: %v", command, err)
	}
	return strings.TrimSuffix(line, "\n")
}

func (p *process) wants(want, format string, args ...any) {
	p.t.Helper()
	if got := p.tell(format, args...); got != want {
		p.t.Errorf("%.100s: %q, want %q", fmt.Sprintf(format, args...), got, want)
	}
}

// number is the answer to a command that makes something.
func (p *process) number(format string, args ...any) int {
	p.t.Helper()
	got := p.tell(format, args...)
	n, err := strconv.Atoi(got)
	if err != nil {
		p.t.Fatalf("%.100s: %s", fmt.Sprintf(format, args...), got)
	}
	return n
}

// open is how many descriptors the process has open by itself: it has more for a moment whenever another process that begins to
// share looks whether this one is there.
func (p *process) open() int {
	p.t.Helper()
	n := p.number("descriptors")
	for range 4 {
		time.Sleep(5 * time.Millisecond)
		n = min(n, p.number("descriptors"))
	}
	return n
}

// drains waits until the process has no more descriptors open than it had before importers came: it sees them go when it comes
// to it.
func (p *process) drains(before int) {
	p.t.Helper()
	n := p.number("descriptors")
	for end := time.Now().Add(time.Minute); n > before && time.Now().Before(end); n = p.number("descriptors") {
		time.Sleep(10 * time.Millisecond)
	}
	if n > before {
		p.t.Errorf("the exporter has %d descriptors open, before it had %d", n, before)
	}
}

// forks has the process fork a child that has nothing open of what is shared. A descriptor that was being opened or closed just
// then may be copied into one, but not into each of a few.
func (p *process) forks() {
	p.t.Helper()
	got := ""
	for tries := 0; tries < 5 && got != "0 sockets, 0 chunks"; tries++ {
		got = p.tell("fork")
	}
	if got != "0 sockets, 0 chunks" {
		p.t.Errorf("a child has %s open", got)
	}
}

func (p *process) handle(block int) string {
	p.t.Helper()
	h := p.tell("share %d", block)
	if !strings.HasPrefix(h, "cistern-share:1:") {
		p.t.Fatalf("share: %s", h)
	}
	return h
}

// fails wants CISTERN_INVALID with one line that has these words, each time, and soon: an exporter that never answers is waited for
// ten seconds. One of a few answers has to be soon, as the machine may be busy.
func (p *process) fails(words string, within time.Duration, format string, args ...any) {
	p.t.Helper()
	soonest := time.Hour
	for tries := 0; tries < 5 && soonest > within; tries++ {
		start := time.Now()
		got := p.tell(format, args...)
		if !strings.HasPrefix(got, "error 2 ") || !strings.Contains(got, words) {
			p.t.Errorf("%.60s: %q, want an error with %q", fmt.Sprintf(format, args...), got, words)
		}
		soonest = min(soonest, time.Since(start))
	}
	if soonest > within {
		p.t.Errorf("%.60s: took %v at least", fmt.Sprintf(format, args...), soonest)
	}
}

func socketOf(t *testing.T, handle string) string {
	t.Helper()
	f := strings.Split(handle, ":")
	if _, err := os.Stat(f[len(f)-1]); err != nil {
		t.Fatal(err)
	}
	return f[len(f)-1]
}

// Bytes that one process writes are the other's, whatever the memory is made of.
func TestShareContents(t *testing.T) {
	t.Parallel()
	driver := "driver:nvidia:" + standin.Build(t)
	for _, conf := range []string{"", ",chunk:2MiB", ",backend:malloc", ",single_handle:true"} {
		sharesContents(t, startPeer(t, driver+conf), startPeer(t, driver+conf))
	}
	for _, upstream := range []string{"async:handles=posix", "statistics|async:handles=posix,initial=64MiB,threshold=1GiB"} {
		from, to := startPeer(t, driver), startPeer(t, driver)
		from.wants("ok", "pool %s", upstream)
		sharesContents(t, from, to)
		// Without handles there is one line, and the memory is as it was.
		from.wants("ok", "pool async")
		block := from.number("alloc 5000")
		if got := from.tell("share %d", block); !strings.HasPrefix(got, "error ") || !strings.Contains(got, "handles=posix") {
			t.Errorf("sharing memory of a pool without handles: %q", got)
		}
		from.wants("ok", "free %d", block)
	}
}

func sharesContents(t *testing.T, from, to *process) {
	t.Helper()
	for i, size := range []int{1, 5000, 300 << 10, 3<<20 + 77, 70 << 20} {
		from.tell("alloc %d", size)
		block := from.number("alloc %d", size)
		from.wants("ok", "fill %d %d", block, i+1)
		h := from.handle(block)
		open := to.number("open %d %s", size, h)
		to.wants("ok", "check %d %d", open, i+1)
		to.wants("ok", "fill %d %d", open, i+100)
		from.wants("ok", "check %d %d", block, i+100)
		again := to.number("open %d %s", size, h)
		to.wants("1", "same %d %d", open, again)
		to.wants("ok", "close %d", open)
		to.wants("ok", "check %d %d", again, i+100) // it is still open
		to.wants("ok", "close %d", again)
		to.fails("close", 5*time.Second, "close %d", again)
		own := from.number("open %d %s", size, h)
		from.wants("1", "same %d %d", own, block)
		from.wants("ok", "close %d", own)
		from.wants("ok", "free %d", block)
		to.fails("was freed by the process that shared it", 5*time.Second, "open %d %s", size, h)
	}
}

// Over the simulated device, a process that has a pool's memory open is killed, and others go on.
func TestSharePooledSimulated(t *testing.T) {
	t.Parallel()
	from, to, dies := startPeer(t, "driver:sim:1GiB"), startPeer(t, "driver:sim:1GiB"), startPeer(t, "driver:sim:1GiB")
	from.wants("ok", "pool async:handles=posix")
	block := from.number("alloc %d", 70<<20)
	h := from.handle(block)
	dies.number("open %d %s", 70<<20, h)
	open := to.number("open %d %s", 70<<20, h)
	to.wants("0 more descriptors", "cycle 100 %s", h)
	dies.kill()
	to.wants("ok", "close %d", open)
	to.wants("0 more descriptors", "cycle 100 %s", h)
	from.wants("ok", "free %d", block)
	from.number("alloc %d", 900<<20) // which takes the memory that was shared
}

func TestShareThroughMagazines(t *testing.T) {
	t.Parallel()
	p := startPeer(t, "driver:sim:8GiB")
	p.wants("ok", "pairs")
	p.wants("ok", "arguments")
}

// 80 GB are thousands of descriptors, of which a process may have few.
func TestShareManyChunks(t *testing.T) {
	t.Parallel()
	from, to := startPeer(t, "driver:sim"), startPeer(t, "driver:sim")
	const size = 80 << 30
	h := from.handle(from.number("alloc %d", size))
	to.tell("alloc 512")
	for _, p := range []*process{from, to} {
		n := p.number("descriptors")
		p.wants("ok", "limit %d", n+20)
	}
	reserved := to.tell("reserved")
	open := to.number("open %d %s", size, h)
	to.wants(reserved, "reserved")
	to.wants("ok", "close %d", open)
	to.wants("0 more descriptors", "cycle 10 %s", h)
}

func TestShareThousandTimes(t *testing.T) {
	t.Parallel()
	from, to := startPeer(t, "driver:sim:8GiB"), startPeer(t, "driver:sim:8GiB")
	h := from.handle(from.number("alloc %d", 100<<20))
	before := from.open()
	to.wants("0 more descriptors", "cycle 10 %s", h)
	to.wants("0 more descriptors", "cycle 1000 %s", h)
	from.drains(before)
}

// A process that was killed, with a child of fork that has all its descriptors, is known to be gone at once.
func TestShareOfDeadProcess(t *testing.T) {
	t.Parallel()
	from, to := startPeer(t, "driver:sim:8GiB"), startPeer(t, "driver:sim:8GiB")
	h := from.handle(from.number("alloc %d", 3<<20))
	before := from.open()
	held := to.number("open %d %s", 3<<20, h)
	from.drains(before)
	from.forks()
	path := socketOf(t, h)
	from.kill()
	to.fails("has ended", 5*time.Second, "open %d %s", 3<<20, h)
	to.wants("ok", "close %d", held) // what is open stays
	// The next that shares cleans up.
	next := startPeer(t, "driver:sim:8GiB")
	next.handle(next.number("alloc 1"))
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the dead process's socket is still there: %v", err)
	}
}

func TestShareOfStoppedProcess(t *testing.T) {
	t.Parallel()
	from, to := startPeer(t, "driver:sim:8GiB"), startPeer(t, "driver:sim:8GiB")
	h := from.handle(from.number("alloc %d", 3<<20))
	if err := from.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus // stopping takes a moment
	if _, err := syscall.Wait4(from.cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatal(status, err)
	}
	to.fails("did not answer for 10s", 15*time.Second, "open %d %s", 3<<20, h)
	if err := from.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	to.wants("ok", "close %d", to.number("open %d %s", 3<<20, h))
}

// Importers that are killed on the way cost the exporter nothing.
func TestShareWithDyingImporters(t *testing.T) {
	t.Parallel()
	const size = 20 << 30
	from := startPeer(t, "driver:sim,chunk:2MiB")
	h := from.handle(from.number("alloc %d", size))
	before := from.open()
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10 {
		to := startPeer(t, "driver:sim")
		fmt.Fprintf(to.in, "cycle 1000 %s\n", h)
		time.Sleep(20*time.Millisecond + time.Duration(rng.IntN(30_000))*time.Microsecond)
		to.kill()
	}
	to := startPeer(t, "driver:sim")
	to.wants("0 more descriptors", "cycle 3 %s", h)
	from.drains(before)
	from.wants("ok", "free 0")
}

// The socket goes with its process, and not with a child of it.
func TestShareEnds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from := startPeer(t, "driver:sim:8GiB", "TMPDIR="+dir)
	path := socketOf(t, from.handle(from.number("alloc 1")))
	if st, err := os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the folder of the socket: %v, %v", st.Mode(), err)
	}
	from.forks()
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	from.end()
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// What is no handle is refused in a line.
func TestShareGarbage(t *testing.T) {
	t.Parallel()
	from, to := startPeer(t, "driver:sim:8GiB"), startPeer(t, "driver:sim:8GiB")
	h := from.handle(from.number("alloc %d", 3<<20))
	rng := rand.New(rand.NewPCG(3, 4))
	to.wants("ok", "close %d", to.number("open 1 %s", h))
	before := to.tell("descriptors")
	for range 300 {
		b := []byte(h)
		for range 1 + rng.IntN(3) {
			b[rng.IntN(len(b))] = byte('!' + rng.IntN('~'-'!'+1))
		}
		if string(b) == h {
			continue
		}
		got := to.tell("open 1 %s", b)
		if n, err := strconv.Atoi(got); err == nil { // what was changed only describes: the process id, the size, the device
			to.wants("ok", "close %d", n)
		} else if !strings.HasPrefix(got, "error 2 ") {
			t.Errorf("%s: %s", b, got)
		}
	}
	to.wants(before, "descriptors")
	to.wants("ok", "close %d", to.number("open 1 %s", h))
}
