//go:build linux && amd64

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TestTraceOtherWays: memory that comes and goes without a call that allocates or frees it.
func TestTraceOtherWays(t *testing.T) {
	x := newTraced(t)
	program := x.compile("graphs", "testdata/graphs.c", "-ldl")
	for _, how := range []string{"1", "0", "2"} { // by dlsym, and through cuGetProcAddress: plain, and with a default stream for each thread
		for _, inner := range []string{"0", "1"} {
			x.otherWays(program, how, inner)
		}
	}
}

func (x *traced) otherWays(program, how, inner string) {
	t := x.t
	d, _, stderr, code := x.run([]string{"STANDIN_INNER=" + inner}, "--", program, how)
	if len(d.End.Unknown) > 0 {
		t.Errorf("not seen: %v", d.End.Unknown)
	}
	if code != 0 {
		t.Fatalf("code %d\n%s", code, stderr)
	}
	// What is held after each call that changes it, in MiB.
	run := analyze.NewDriverRun()
	tracker := driver.NewTracker()
	var held uint64
	var got []string
	for i := range d.Calls {
		q := &d.Calls[i]
		before := held
		tracker.Call(q, func(h *driver.Holding) {
			if h.Memory.OnDevice() {
				held += h.Size
			}
		}, func(h *driver.Holding) {
			if h.Memory.OnDevice() {
				held -= h.Size
			}
		})
		run.Call(q)
		if held != before {
			got = append(got, fmt.Sprintf("%s %d", q.Kind, held>>20))
		}
	}
	want := []string{"cuMemAlloc 1", "cuGraphUpload 9", "cuGraphLaunch 13", "cuDeviceGraphMemTrim 5", "cuDeviceGraphMemTrim 1",
		"cuMemCreate 3", "cuMemCreate 7", "cuMemMapArrayAsync 5", "cuArrayDestroy 1", "cuMemAlloc 21", "cuCtxDestroy 1"}
	if !slices.Equal(got, want) {
		t.Errorf("held: %q\nwant  %q", got, want)
	}
	count := map[recording.CallKind]int{}
	for i := range d.Calls {
		count[d.Calls[i].Kind]++
	}
	// Launches that change nothing are no events, and what is captured is no allocation of a pool.
	if count[recording.GraphLaunch] != 1 || count[recording.GraphUpload] != 1 || count[recording.GraphAddMemAllocNode] != 3 || count[recording.MemAllocAsync] != 0 {
		t.Errorf("calls: %v", count)
	}
	s := analyze.SummarizeDriver(d)
	if dev := s.Devices[0]; dev.PeakRequested != 21<<20 || s.KeptBytes != 1<<20 || s.HostPeak != 8192 || s.Managed != 1<<20 {
		t.Errorf("summary: %+v", s)
	}
	// Whatever reads events finds them whole.
	out, err := x.command("replay", "--policy", "direct", filepath.Join(x.dir, "run.cistern")).CombinedOutput()
	if err != nil || strings.Contains(string(out), "left out") {
		t.Errorf("replay: %v\n%s", err, out)
	}
	if !strings.Contains(stderr, "never freed: 1.00 MiB in 1 allocation") {
		t.Errorf("the table is\n%s", stderr)
	}
}

// TestTraceLeft: a process that outlives the program is named, and with --follow recorded until it ends or the user has had
// enough.
func TestTraceLeft(t *testing.T) {
	x := newTraced(t)
	left := func(stdout string) int {
		pid, err := strconv.Atoi(strings.TrimSpace(stdout))
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	// Were it to wait for the process that is left, that would be for ever.
	d, stdout, stderr, code := x.run(nil, "--", x.program, "dlsym", "leave", "0")
	pid := left(stdout)
	if code != 3 || len(d.Calls) < 2 || !strings.Contains(stderr, fmt.Sprintf("still running, and no longer recorded: %d (traced); --follow", pid)) {
		t.Errorf("code %d, %d calls\n%s", code, len(d.Calls), stderr)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("process %d: %v", pid, err)
	}
	d, _, stderr, code = x.run(nil, "--follow", "--", x.program, "dlsym", "leave", "300")
	if code != 3 || len(d.Calls) != 2+600 || d.End.Status != 3 || strings.Contains(stderr, "still running") {
		t.Errorf("--follow: code %d, %d calls\n%s", code, len(d.Calls), stderr)
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		file := filepath.Join(x.dir, fmt.Sprintf("stopped-%d.cistern", sig))
		cmd := x.command("trace", "--follow", "-o", file, "--", x.program, "dlsym", "leave", "0")
		var o, e bytes.Buffer
		cmd.Stdout, cmd.Stderr = &o, &e
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		x.leaves(file, 100)
		_ = cmd.Process.Signal(sig)
		stuck := time.AfterFunc(longest, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		stuck.Stop()
		pid := left(o.String())
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Errorf("%v: process %d: %v", sig, pid, err)
		}
		if d := x.read(file); cmd.ProcessState.ExitCode() != 3 || !d.Ended || len(d.Calls) < 100 || !strings.Contains(e.String(), "still running") || strings.Contains(e.String(), "--follow") {
			t.Errorf("%v: code %d, %d calls\n%s", sig, cmd.ProcessState.ExitCode(), len(d.Calls), &e)
		}
	}
}

// leaves waits until a trace has so many calls, and its program has ended and left behind who makes them.
func (x *traced) leaves(file string, calls int) {
	x.t.Helper()
	x.awaitTrace(file, fmt.Sprintf("%d calls, and the program's end", calls), func(d *recording.Driver) bool {
		if len(d.Calls) < calls {
			return false
		}
		_, err := os.Stat(fmt.Sprintf("/proc/%d", d.Processes[0].PID))
		return err != nil
	})
}

// TestSlowTraceLanguages: programs in Rust and in Go that call the driver, linked to it or looking it up, end as they do
// without being traced, and every call is seen.
func TestSlowTraceLanguages(t *testing.T) {
	slow.Only(t)
	x := newTraced(t)
	folder := filepath.Dir(x.standin)
	programs := map[string]string{}
	build := func(name string, env []string, args ...string) {
		out := filepath.Join(x.dir, name)
		if _, err := exec.LookPath(args[0]); err != nil {
			t.Logf("not tried: %s: %v", name, err)
			return
		}
		cmd := exec.Command(args[0], append(args[1:], "-o", out)...)
		if args[0] == "go" { // which wants its flags first
			cmd = exec.Command("go", "build", "-o", out, args[2])
		}
		cmd.Env = append(os.Environ(), env...)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
		programs[name] = out
	}
	link := x.standin + " -Wl,-rpath," + folder
	build("rust, linked", nil, "rustc", "--edition=2024", "-O", "testdata/traced.rs", "-C", "link-args="+link)
	build("rust, looked up", nil, "rustc", "--edition=2024", "--cfg", "looked_up", "testdata/traced.rs")
	build("go, linked", []string{"CGO_ENABLED=1", "CGO_LDFLAGS=" + link, "CGO_LDFLAGS_ALLOW=.*"}, "go", "build", "./testdata/traced_go")
	build("go, looked up", []string{"CGO_ENABLED=1", "CGO_CFLAGS=-DLOOKED_UP"}, "go", "build", "./testdata/traced_go")
	if len(programs) < 2 {
		t.Skip("there is neither Rust nor Go")
	}
	for name, program := range programs {
		plain := exec.Command(program)
		plain.Env = []string{"STANDIN=" + x.standin}
		want, _ := plain.Output()
		for _, stacks := range []string{"off", "all"} {
			d, stdout, stderr, code := x.run(nil, "--stacks="+stacks, "--", program)
			if code != 5 || plain.ProcessState.ExitCode() != 5 || stdout != string(want) {
				t.Fatalf("%s: code %d, %q; want %d, %q\n%s", name, code, stdout, plain.ProcessState.ExitCode(), want, stderr)
			}
			count, threads := map[recording.CallKind]int{}, map[uint32]bool{}
			for i := range d.Calls {
				count[d.Calls[i].Kind]++
				threads[d.Calls[i].Thread] = true
				if frames := d.StackFrames(d.Calls[i].Stack); len(frames) == 0 {
					t.Errorf("%s: call %d has no caller", name, i)
				}
			}
			s := analyze.SummarizeDriver(d)
			if len(d.Calls) != 12 || count[recording.MemAlloc] != 8 || count[recording.MemFree] != 4 || len(threads) != 4 || s.KeptBytes != 4<<20 || d.End.Dropped+d.End.Lost != 0 {
				t.Errorf("%s: calls %v of %d threads, %d bytes kept, %+v", name, count, len(threads), s.KeptBytes, d.End)
			}
		}
	}
}

// TestTracePeakOfEnded: processes one after the other hold at most what one of them held, also where a process becomes the next
// one; those at the same time hold it together, and what a process's first thread held stays while there are others.
func TestTracePeakOfEnded(t *testing.T) {
	x := newTraced(t)
	for _, c := range []struct {
		script string
		most   uint64 // MiB, requested
	}{
		{`"$0" dlsym stay $1; sleep $2; "$0" dlsym stay $1; sleep $2; "$0" dlsym stay $1`, 1},
		{`exec "$0" dlsym become $1`, 1},
		{`"$0" dlsym outlive $1`, 2},
		{`"$0" dlsym stay $1 & "$0" dlsym stay $1; wait`, 2},
	} {
		// That a process is there, and then that it has ended, is seen a few times a second, if this one runs.
		for ms := 300; ; ms *= 4 {
			d, _, stderr, code := x.run(nil, "--", "/bin/sh", "-c", c.script, x.program, strconv.Itoa(ms), fmt.Sprint(float64(ms)/1000))
			s := analyze.SummarizeDriver(d)
			if code != 0 || len(s.Devices) != 1 || s.KeptCount != len(d.Processes) {
				t.Fatalf("%s: code %d, %+v\n%s", c.script, code, s, stderr)
			}
			v := s.Devices[0]
			said := fmt.Sprintf("%s requested", units.FormatBytes(v.PeakRequested))
			if v.PeakRequested == c.most*(s.KeptBytes/uint64(s.KeptCount)) && strings.Contains(stderr, said) {
				break
			}
			if ms > 20000 {
				t.Errorf("%s: %+v requested of %d by each process\n%s", c.script, v, s.KeptBytes/uint64(s.KeptCount), stderr)
				break
			}
		}
	}
}

// TestTracePeakOfTurns: what processes hold one after the other is not added up, however late their records are read: here after
// all of them have ended.
func TestTracePeakOfTurns(t *testing.T) {
	x := newTraced(t)
	for _, c := range []struct {
		what  string
		turns int
		most  uint64 // GiB at a time
	}{{"turns", 1000, 1}, {"zombies", 300, 1}, {"overlap", 300, 2}} {
		ring, err := audit.New(audit.Slots, 0)
		if err != nil {
			t.Fatal(err)
		}
		program := exec.CommandContext(t.Context(), x.program, "dlsym", c.what, strconv.Itoa(c.turns))
		program.Env = []string{"STANDIN=" + x.standin, "LD_AUDIT=" + x.library, audit.Variable + "=" + ring.Value()}
		if out, err := program.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", c.what, err, out)
		}
		var file bytes.Buffer
		r, err := newRecorder(&file, program.Args)
		if err != nil {
			t.Fatal(err)
		}
		ring.Drain(audit.Slots, true, r.record)
		s, err := r.end(ring, 0)
		if err != nil {
			t.Fatal(err)
		}
		ring.Close()
		f, err := open.Read(&file, "file")
		if err != nil {
			t.Fatal(err)
		}
		for which, s := range map[string]*analyze.DriverSummary{"live": s, "file": analyze.SummarizeDriver(f.Driver)} {
			if len(s.Devices) != 1 || s.KeptCount != c.turns || s.Devices[0].PeakRequested != c.most<<30 {
				t.Errorf("%s, %s: %d devices, %d kept; want a peak of %d GiB on one", c.what, which, len(s.Devices), s.KeptCount, c.most)
				for _, d := range s.Devices {
					t.Errorf("a peak of %s", units.FormatBytes(d.PeakRequested))
				}
			}
		}
	}
}
