//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/live"
)

// publishForTop is a process on Cistern over the simulated device, which holds and gives back memory until it is killed.
func publishForTop(name string) {
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	drv := sim.New(sim.Options{Capacity: 8 << 30})
	engine, err := allocator.New(drv, allocator.Options{})
	check(err)
	dev, err := engine.Device(0)
	check(err)
	stream, err := dev.Stream(0)
	check(err)
	info, err := drv.DeviceInfo(0)
	check(err)
	_, err = dev.Alloc(3<<30, stream)
	check(err)
	self, err := live.Of(0)
	check(err)
	self.Kind, self.Args, self.Version = live.KindCistern, []string{name, "--for", "top"}, "test"
	_, err = live.Publish(self, func(into []live.Device) []live.Device {
		var g allocator.Gauges
		dev.Gauges(&g)
		return append(into, live.Device{UUID: info.UUID, Name: info.Name, Total: info.TotalBytes, Reserved: g.Reserved, Allocated: g.Allocated,
			Active: g.Active, Cached: g.Cached, PeakReserved: g.PeakReserved, PeakAllocated: g.PeakAllocated, DriverCalls: g.DriverCalls})
	}, func() []live.Details {
		return []live.Details{{Tags: []live.Use{{Name: "weights-of-" + name, Blocks: 1, Bytes: 3 << 30}}}}
	})
	check(err)
	fmt.Println("ready")
	for {
		var held []cuda.Ptr
		for i := range 8 {
			p, err := dev.Alloc(uint64(i+1)<<26, stream)
			check(err)
			held = append(held, p)
		}
		time.Sleep(50 * time.Millisecond)
		for _, p := range held {
			check(engine.Free(p))
		}
		check(dev.Trim())
	}
}

// publishers starts processes on Cistern.
func publishers(t *testing.T, names ...string) []*exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var all []*exec.Cmd
	for _, name := range names {
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env = append(os.Environ(), "CISTERN_TEST_PUBLISHES="+name)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Fatalf("%s did not get ready: %v", name, err)
		}
		all = append(all, cmd)
	}
	return all
}

// terminal is a pseudo-terminal with cistern top on it.
type terminal struct {
	t    *testing.T
	side *os.File // the one that a person has
	cmd  *exec.Cmd

	mu  sync.Mutex
	out bytes.Buffer
	eof chan struct{}
}

func onTerminal(t *testing.T, width, height uint16, vars []string, args ...string) *terminal {
	t.Helper()
	side, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { side.Close() })
	if err := unix.IoctlSetPointerInt(int(side.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(side.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	x := &terminal{t: t, side: side, eof: make(chan struct{})}
	x.resize(width, height)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	x.cmd = exec.CommandContext(t.Context(), self, args...)
	x.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TERM=xterm-256color", "SSH_TTY=/dev/pts/0", "LANG=C.UTF-8", "CISTERN_TEST_AS_COMMAND=1"}, vars...)
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = other, other, other
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(x.eof)
		b := make([]byte, 1<<16)
		for {
			n, err := side.Read(b)
			x.mu.Lock()
			x.out.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return // EIO when the last one who had the other side has closed it
			}
		}
	}()
	return x
}

func (x *terminal) resize(width, height uint16) {
	x.t.Helper()
	if err := unix.IoctlSetWinsize(int(x.side.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: height, Col: width}); err != nil {
		x.t.Fatal(err)
	}
}

func (x *terminal) press(keys string) {
	x.t.Helper()
	if _, err := x.side.WriteString(keys); err != nil {
		x.t.Fatal(err)
	}
}

// seen is all that was written so far.
func (x *terminal) seen() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.String()
}

// await waits until what is written after it was called has all of these words. The terminal changes its size again and
// again, upon each of which everything is drawn anew.
func (x *terminal) await(words ...string) string {
	x.t.Helper()
	begin, timeout := time.Now(), 250*time.Millisecond // with drawing, which takes a busy machine a while
	for width := uint16(100); ; width, timeout = 201-width, min(2*timeout, 4*time.Second) {
		from := len(x.seen())
		x.resize(width, 24)
		for drawn := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			over := time.Since(drawn) > timeout
			text := ansi.Strip(x.seen()[from:])
			missing := slices.IndexFunc(words, func(w string) bool { return !strings.Contains(text, w) })
			if missing < 0 {
				return text
			}
			if time.Since(begin) > longest {
				x.t.Fatalf("%q is not shown:\n%s", words[missing], text)
			}
			if over {
				break
			}
		}
	}
}

// awaitWithout awaits words in a list that is drawn from its first line to its last without another one, which was there
// before and may be in what is drawn until a key or a change is noticed.
func (x *terminal) awaitWithout(gone string, words ...string) {
	x.t.Helper()
	const first, last = "cistern top", "q quit"
	for begin := time.Now(); ; {
		text := x.await(append(words, first, last)...)
		frame := text[strings.LastIndex(text, first):]
		if strings.Contains(frame, last) && !strings.Contains(frame, gone) {
			return
		}
		if time.Since(begin) > longest {
			x.t.Fatalf("%q is still shown:\n%s", gone, text)
		}
	}
}

// ends waits for the command, and checks that the terminal is as it was.
func (x *terminal) ends(code int) {
	x.t.Helper()
	done := make(chan error, 1)
	go func() { done <- x.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(longest):
		x.t.Fatal("it does not end")
	}
	<-x.eof
	if got := x.cmd.ProcessState.ExitCode(); got != code {
		x.t.Errorf("exit code %d, want %d", got, code)
	}
	out := x.seen()
	if strings.Count(out, "\x1b[?1049h") != 1 || !strings.Contains(out[strings.Index(out, "\x1b[?1049h"):], "\x1b[?1049l") {
		x.t.Errorf("the other screen was not entered and left once: %q", out[max(0, len(out)-200):])
	}
	_, after, _ := strings.Cut(out, "\x1b[?1049l")
	if left := strings.TrimSpace(ansi.Strip(after)); left != "" {
		x.t.Errorf("left on the terminal: %q", left)
	}
	if !strings.Contains(out, "\x1b[?25h") {
		x.t.Error("the cursor stays hidden")
	}
}

// The whole of it: two processes on Cistern, a terminal, keys, another size, a process that ends and one that stops.
func TestTopOnATerminal(t *testing.T) {
	// With names of their own: others may run this test on this machine.
	trainer, server := fmt.Sprint("trainer", os.Getpid()), fmt.Sprint("server", os.Getpid())
	processes := publishers(t, trainer, server)
	x := onTerminal(t, 100, 24, nil, "top", "--interval", "200ms", "--sort", "name")
	x.await("cistern top", trainer+" --f", server+" --f", "Cistern simulated", "RESERVED", "by name", "q quit")
	x.press("/" + trainer + "\r")
	x.awaitWithout(server, "filter "+trainer)
	x.press("\r")
	x.await("weights-of-"+trainer, "version test", "3.00G")
	x.press("\x1b[B\t")
	x.await("none: no allocation names a library")
	x.press("\x1b") // a lone escape is known as one after a while
	x.await("filter "+trainer, "PROGRAM")
	x.press("\x1b")
	x.await(server)
	x.press("?")
	x.await("any key goes back")
	x.press(" ")
	x.await("PROGRAM")
	if err := processes[0].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	x.await("stale", "s old")
	if err := processes[1].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	x.awaitWithout(server, trainer)
	x.resize(20, 5)
	time.Sleep(300 * time.Millisecond)
	x.press("q")
	x.ends(exitOK)
}

func TestTopEndsOnInterrupts(t *testing.T) {
	x := onTerminal(t, 80, 24, []string{"NO_COLOR=yes"}, "top")
	x.await("cistern top", "PROGRAM")
	x.press("\x03")
	x.ends(exitOK)
	if out := x.seen(); strings.Contains(out, "\x1b[32m") || strings.Contains(out, "\x1b[34m") {
		t.Error("colours in spite of NO_COLOR")
	}
	x = onTerminal(t, 80, 24, nil, "top")
	x.await("cistern top", "PROGRAM")
	if err := x.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	x.ends(exitSignal + int(syscall.SIGTERM))
}

// Without a terminal it says what to do instead; --once and --json are the same machine.
func TestTopOnceOfThisMachine(t *testing.T) {
	process := publishers(t, "trainer")[0].Process
	// What a process does not say in time, as it is stopped by a busy machine, is not shown: then it is asked again.
	until := func(what string, so func(out string) bool, args ...string) {
		t.Helper()
		for begin := time.Now(); ; {
			out, errs, code := asCommand(t, nil, args...)
			if code != exitOK || errs != "" {
				t.Fatalf("code %d: %s%s", code, out, errs)
			}
			if so(out) {
				return
			}
			if time.Since(begin) > longest {
				t.Fatalf("%s is not in\n%s", what, out)
			}
		}
	}
	until("the trainer with its weights", func(out string) bool {
		return strings.Contains(out, "trainer --for top") && strings.Contains(out, "weights-of-trainer")
	}, "top", "--once", "--details", "--sort", "pid", "--interval", "300ms")
	until("the trainer's rate", func(out string) bool {
		rates := 0
		for line := range strings.Lines(out) {
			var doc topDocument
			if err := json.Unmarshal([]byte(line), &doc); err != nil {
				t.Fatal(err)
			}
			found := false
			for _, p := range doc.Processes {
				if p.PID == process.Pid {
					found = true
					if !slices.Equal(p.Arguments, []string{"trainer", "--for", "top"}) || p.Kind != "cistern" || p.Reserved == nil || *p.Reserved < 3<<30 || p.Program != filepath.Base(os.Args[0]) {
						t.Errorf("%s", line)
					}
					if p.Rate != nil && *p.Rate >= 1 {
						rates++
					}
				}
			}
			if !found {
				t.Fatalf("no trainer in %s", line)
			}
		}
		return rates == 2
	}, "top", "--json", "--count", "2", "--interval", "300ms")
	_, errs, code := asCommand(t, nil, "top")
	if code != exitBad || !strings.Contains(errs, "standard input is not a terminal: use cistern top --once") {
		t.Errorf("code %d: %s", code, errs)
	}
}
