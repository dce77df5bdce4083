//go:build linux && amd64

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/rerun"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// traced is what a test traces programs with.
type traced struct {
	t       *testing.T
	dir     string
	program string // testdata/traced.c
	standin string
	library string
}

func newTraced(t *testing.T) *traced {
	t.Helper()
	x := &traced{t: t, dir: t.TempDir(), standin: standin.Build(t)}
	rerun.OnChange(t, "../../audit/*", "../../scripts/audit.sh", "../libcistern/pystack.*", "testdata/traced.*", "testdata/traced_go/*", "testdata/*.c")
	x.library = x.build(audit.Library, "../../scripts/audit.sh")
	x.program = x.compile("traced", "testdata/traced.c", "-ldl", "-pthread")
	return x
}

func (x *traced) compile(name, source string, flags ...string) string {
	x.t.Helper()
	return x.build(name, "cc", append(append([]string{"-O1", "-w", source}, flags...), "-o")...)
}

// compiled is what was built by the command line, without the output file, as building takes longer than most tests.
var compiled sync.Map // string → func() ([]byte, error)

// build is a copy of its own for the test of what a command writes to a file, its last argument.
func (x *traced) build(name, command string, args ...string) string {
	x.t.Helper()
	out := filepath.Join(x.dir, name)
	once, _ := compiled.LoadOrStore(strings.Join(append(args, command), "\x00"), sync.OnceValues(func() ([]byte, error) {
		if text, err := exec.Command(command, append(args, out)...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s %v: %w\n%s", command, args, err, text)
		}
		return os.ReadFile(out)
	}))
	file, err := once.(func() ([]byte, error))()
	if err == nil {
		syscall.ForkLock.RLock() // a child of a test beside this one would have the file open for writing: it could not be run
		err = os.WriteFile(out, file, 0o755)
		syscall.ForkLock.RUnlock()
	}
	if err != nil {
		x.t.Fatal(err)
	}
	return out
}

// command is cistern with these arguments, as a process.
func (x *traced) command(args ...string) *exec.Cmd {
	x.t.Helper()
	self, err := os.Executable()
	if err != nil {
		x.t.Fatal(err)
	}
	cmd := exec.CommandContext(x.t.Context(), self, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CISTERN_TEST_AS_COMMAND=1", "CISTERN_AUDIT_LIBRARY=" + x.library, "STANDIN=" + x.standin,
		"GORACE=atexit_sleep_ms=10"} // not the second for which the race detector waits at the end of each process
	return cmd
}

// run traces a program and is what was written, what the command said, and its exit code.
func (x *traced) run(vars []string, args ...string) (f *recording.Driver, stdout, stderr string, code int) {
	x.t.Helper()
	file := filepath.Join(x.dir, "run.cistern")
	cmd := x.command(append([]string{"trace", "-o", file}, args...)...)
	cmd.Env = append(cmd.Env, vars...)
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		x.t.Fatal(err)
	}
	return x.read(file), o.String(), e.String(), cmd.ProcessState.ExitCode()
}

func (x *traced) read(file string) *recording.Driver {
	x.t.Helper()
	f, err := open.File(file)
	if err != nil {
		x.t.Fatal(err)
	}
	if f.Driver == nil {
		x.t.Fatalf("%s is no driver trace", file)
	}
	return f.Driver
}

var logged = regexp.MustCompile(`(?m)^(cuMem\w*|cuIpc\w*)\(.*\) = (\d+)`)

// TestTraceSeesEveryCall: what the driver logs is what the trace has, in its order, however the functions are reached.
func TestTraceSeesEveryCall(t *testing.T) {
	x := newTraced(t)
	rpath := "-Wl,-rpath," + filepath.Dir(x.standin)
	linked := func(name string, flags ...string) string {
		return x.compile(name, "testdata/traced.c", append([]string{"-DLINKED", x.standin, rpath, "-pthread"}, flags...)...)
	}
	for _, c := range []struct{ program, how, inner string }{
		{x.program, "dlsym", "0"}, {x.program, "proc", "0"}, {x.program, "proc1", "0"}, {x.program, "ptsz", "0"},
		{x.program, "proc", "1"}, {x.program, "ptsz", "1"}, // answers that no symbol names
		{linked("lazy", "-Wl,-z,lazy"), "linked", "0"}, {linked("now", "-Wl,-z,now"), "linked", "0"}, {linked("noplt", "-fno-plt"), "linked", "0"},
	} {
		log := filepath.Join(t.TempDir(), "log")
		d, stdout, stderr, code := x.run([]string{"STANDIN_LOG=" + log, "STANDIN_INNER=" + c.inner}, "--stacks", "native", "--", c.program, c.how, "everything")
		if code != 0 || stdout != "" || !d.Ended || d.End.Dropped+d.End.Lost != 0 || len(d.End.Unknown) != 0 {
			t.Errorf("%s %s: code %d, %+v\n%s", filepath.Base(c.program), c.how, code, d.End, stderr)
		}
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		var want, got []string
		for _, m := range logged.FindAllStringSubmatch(string(text), -1) {
			want = append(want, m[1]+" "+m[2])
		}
		for i := range d.Calls {
			q := &d.Calls[i]
			name := q.Kind.String()
			switch q.Kind { // what the stand-in makes of some
			case recording.MemAllocPitch:
				name = "cuMemAlloc"
			case recording.MemAllocHost:
				name = "cuMemHostAlloc"
			case recording.MemAllocAsync:
				name = "cuMemAllocFromPoolAsync"
			}
			got = append(got, fmt.Sprintf("%s %d", name, q.Result))
			if q.Thread == 0 || q.TimeNS == 0 || q.TookNS == 0 || q.Device != 0 || d.Processes[q.Process].PID == 0 {
				t.Errorf("call %d is %+v", i, q)
			}
			if frames := d.StackFrames(q.Stack); len(frames) == 0 || frames[0].Func != "everything" || frames[0].File != c.program {
				t.Errorf("call %d, %s, is by %v", i, q.Kind, frames)
			} else if !slices.ContainsFunc(frames, func(f recording.Frame) bool { return f.Func == "main" }) {
				t.Errorf("call %d, %s: main is not on the stack %v", i, q.Kind, frames)
			}
		}
		// The stand-in asks itself for attributes of pools through the audit library, which is no call of the program's.
		want = slices.DeleteFunc(want, func(s string) bool {
			return strings.HasPrefix(s, "cuMemPoolGetAttribute") || strings.HasPrefix(s, "cuMemGetInfo")
		})
		if len(got) < 30 || !slices.Equal(got, want) {
			t.Errorf("%s %s: the trace has %d calls, the driver's log %d:\n%v\n%v", filepath.Base(c.program), c.how, len(got), len(want), got, want)
		}
		s := analyze.SummarizeDriver(d)
		if s.KeptBytes != 5<<20 || s.KeptCount != 2 || len(s.Devices) != 1 || s.Devices[0].OOMs != 1 || s.HostPeak != 12288 || s.Managed != 1<<20 {
			t.Errorf("%s %s: summary %+v", filepath.Base(c.program), c.how, s)
		}
		if !strings.Contains(stderr, "never freed: 5.00 MiB in 2 allocations") || !strings.Contains(stderr, "  everything .../") {
			t.Errorf("the table is\n%s", stderr)
		}
	}
}

// TestTraceFollows: threads, and the children of fork and exec.
func TestTraceFollows(t *testing.T) {
	x := newTraced(t)
	for what, c := range map[string]struct{ processes, calls, kept int }{
		"threads": {1, 2 * 8 * 200, 0}, "fork": {4, 1 + 3*2*200, 1}, "exec": {2, 1 + 38, 0},
	} {
		d, _, stderr, code := x.run(nil, "--", x.program, "proc", what, "200")
		s := analyze.SummarizeDriver(d)
		if code != 0 || d.End.Dropped+d.End.Lost != 0 || len(d.Processes) != c.processes || what != "exec" && (len(d.Calls) != c.calls || s.KeptCount != c.kept) {
			t.Errorf("%s: code %d, %d processes, %d calls, %d kept, %+v\n%s", what, code, len(d.Processes), len(d.Calls), s.KeptCount, d.End, stderr)
		}
		threads := map[uint32]bool{}
		for i := range d.Calls {
			threads[d.Calls[i].Thread] = true
		}
		if what == "threads" && len(threads) != 8 || what == "fork" && len(threads) != 4 {
			t.Errorf("%s: %d threads", what, len(threads))
		}
		if what == "fork" && d.Processes[1].Parent != d.Processes[0].PID {
			t.Errorf("processes %+v", d.Processes)
		}
		if what == "exec" && !slices.ContainsFunc(d.Calls, func(q recording.Call) bool { return q.Process == 1 && q.Kind == recording.MemMap }) {
			t.Errorf("exec: nothing of the second program: %+v", d.Processes)
		}
	}
}

// TestTraceDirect: the driver's own way of doing it, replayed, holds at most what the trace says.
// TestTraceVisibleDevices: processes that see other devices under one number are told apart, and a device is the same for all.
func TestTraceVisibleDevices(t *testing.T) {
	t.Parallel()
	x := newTraced(t)
	program := x.program + " dlsym everything"
	script := "CUDA_VISIBLE_DEVICES=1 " + program + "; CUDA_VISIBLE_DEVICES=0 " + program + "; CUDA_VISIBLE_DEVICES=3 " + program + "; CUDA_VISIBLE_DEVICES=1 " + program
	d, _, stderr, code := x.run(nil, "--", "sh", "-c", script)
	if code != 0 {
		t.Fatal(code, stderr)
	}
	gpu := map[int16]byte{} // the last byte of the UUID, by number
	for _, g := range d.GPUs {
		gpu[g.Number] = g.UUID[15]
		if g.UUID[0] != 0x20 || g.Name != "Stand-in GPU 0" || g.Total != 64<<30 {
			t.Errorf("%+v", g)
		}
	}
	used := map[uint32]byte{} // by process
	for _, c := range d.Calls {
		if c.Kind == recording.MemAlloc {
			used[c.Process] = gpu[c.Device]
		}
	}
	if len(gpu) != 3 || len(used) != 4 || used[0] != 1 || used[1] != 0 || used[2] != 3 || used[3] != 1 {
		t.Errorf("numbers %v, devices by process %v", gpu, used)
	}
	s := analyze.SummarizeDriver(d)
	for _, x := range s.Devices {
		if x.UUID != fmt.Sprintf("GPU-20212223-2425-2627-2829-2a2b2c2d2e%02x", gpu[int16(x.Device)]) || x.Name == "" {
			t.Errorf("%+v", x)
		}
	}
}

func TestTraceDirect(t *testing.T) {
	x := newTraced(t)
	d, _, stderr, _ := x.run(nil, "--", x.program, "dlsym", "everything")
	file := filepath.Join(x.dir, "run.cistern")
	out, err := x.command("replay", "--json", "--policy", "direct", "--policy", "torch", "--policy", "cistern", file).Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	m := regexp.MustCompile(`"policy": "direct"(?s:.*?)"peak_live_bytes": (\d+),\s*"peak_reserved_bytes": (\d+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("%s", out)
	}
	dev := analyze.SummarizeDriver(d).Devices[0]
	if live, _ := strconv.ParseUint(string(m[1]), 10, 64); live != dev.PeakRequested {
		t.Errorf("replay has %d live bytes at the peak, the trace %d requested", live, dev.PeakRequested)
	}
	// Pools hold 32 MiB at a time, and the stand-in's addresses begin anywhere in a page: replay knows neither.
	if reserved, _ := strconv.ParseUint(string(m[2]), 10, 64); reserved < dev.PeakRequested || reserved > dev.PeakHeld {
		t.Errorf("direct reserves %d bytes; the trace has %d requested and %d held", reserved, dev.PeakRequested, dev.PeakHeld)
	}
	for _, args := range [][]string{{"inspect", file}, {"convert", file, "-o", filepath.Join(x.dir, "c.cistern")}, {"convert", file, "-o", filepath.Join(x.dir, "c.pickle")}} {
		if out, err := x.command(args...).CombinedOutput(); err != nil || args[0] == "inspect" && !strings.Contains(string(out), "never freed: 5.00 MiB") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
	// Names in JSON are like everywhere else, and so are frames.
	out, err = x.command("inspect", "--json", file).Output()
	odd := regexp.MustCompile(`"\w*[A-Z]\w*": .*|"\w+": null`).FindAll(out, -1)
	if err != nil || len(odd) > 0 || !bytes.Contains(out, []byte(`"spent_ns"`)) || !regexp.MustCompile(`"frames": \[\s*"everything .*/traced"`).Match(out) {
		t.Errorf("%v, %q\n%s", err, odd, out)
	}
	if again := x.read(filepath.Join(x.dir, "c.cistern")); len(again.Calls) != len(d.Calls) {
		t.Errorf("%d calls after converting, %d before", len(again.Calls), len(d.Calls))
	}
}

// TestTraceEnds: the exit status is the program's, and signals reach it.
func TestTraceEnds(t *testing.T) {
	x := newTraced(t)
	for _, c := range []struct {
		args []string
		code int
		said string
	}{{[]string{"exit", "0"}, 0, ""}, {[]string{"exit", "7"}, 7, "status 7\n"}, {[]string{"signal", "9"}, 137, "status 137: signal 9, killed\n"},
		{[]string{"signal", "11"}, 139, "status 139: signal 11, segmentation fault\n"}, {[]string{"signal", "15"}, 143, "status 143: signal 15, terminated\n"}} {
		d, _, said, code := x.run(nil, append([]string{"--", x.program, "dlsym"}, c.args...)...)
		if code != c.code || d.End.Status != c.code || len(d.Calls) != 1 {
			t.Errorf("%v: code %d, want %d; %+v", c.args, code, c.code, d.End)
		}
		if !strings.Contains(said, c.said) || c.said == "" && strings.Contains(said, "ended with status") {
			t.Errorf("%v: of its end is said %q, want %q", c.args, said, c.said)
		}
	}
	cmd := x.command("trace", "--", x.program, "dlsym", "forever")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Error(err)
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 143 {
		t.Errorf("code %d after SIGTERM, want 143", code)
	}
	script := filepath.Join(x.dir, "script")
	if err := os.WriteFile(script, []byte("echo hello\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"trace -- no-such-program", "cannot be started"}, {"trace -- " + script, "put its interpreter in front"}, {"trace -o /no/folder/x -- true", "cannot be written"},
		{"trace -o - -- true", "standard output is the program's"}, {"trace", "no program named"},
	} {
		out, err := x.command(strings.Fields(c.args)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) || strings.Count(string(out), "\n") != 1 {
			t.Errorf("%s: %v, %q", c.args, err, out)
		}
	}
}

// TestTraceKilled kills the program, in C or in Python, and in half of the cases the tracer, at any moment: the file is
// readable.
func TestTraceKilled(t *testing.T) {
	x := newTraced(t)
	python, _ := exec.LookPath("python3")
	times := 100
	if testing.Short() {
		times = 20
	}
	r := rand.New(rand.NewPCG(testkit.Seed(t), 0))
	for i := range times {
		file := filepath.Join(x.dir, fmt.Sprintf("killed-%d.cistern", i))
		program := []string{x.program, "proc", "forever"}
		if python != "" && i%4 >= 2 {
			program = []string{python, "testdata/traced.py", x.standin, "forever"}
		}
		cmd := x.command(append([]string{"trace", "--stacks=all", "-o", file, "--"}, program...)...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
		child := x.child(cmd.Process.Pid)
		if i%2 == 1 {
			x.awaitTrace(file, "a file that can be read", func(*recording.Driver) bool { return true })
			time.Sleep(time.Duration(r.IntN(150)) * time.Millisecond)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = syscall.Kill(child, syscall.SIGKILL)
		} else {
			_ = syscall.Kill(child, syscall.SIGKILL)
			_ = cmd.Wait()
		}
		d := x.read(file)
		if tracer := i%2 == 1; d.Ended == tracer || !tracer && (len(d.Calls) == 0 || cmd.ProcessState.ExitCode() != 137) {
			t.Fatalf("time %d: %d calls, ended %v, code %d", i, len(d.Calls), d.Ended, cmd.ProcessState.ExitCode())
		}
	}
}

// child is the process that a tracer started.
func (x *traced) child(pid int) int { return x.below(pid, 1) }

// below is the process so many generations below another one. It is looked for from the top each time: before its first program
// a Go program starts a process that ends at once, to see how processes are started here.
func (x *traced) below(pid, generations int) (below int) {
	x.t.Helper()
	x.await(fmt.Sprintf("a process %d below process %d", generations, pid), func() bool {
		below = pid
		for range generations {
			below = childOf(below)
		}
		return below != 0
	})
	return below
}

// childOf is a process's only child, 0 where it has none, or more.
func childOf(pid int) (child int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range tasks {
		text, _ := os.ReadFile(f)
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			child = n
		}
	}
	return child
}

// await waits until something is so.
func (x *traced) await(what string, is func() bool) {
	x.t.Helper()
	for end := time.Now().Add(longest); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			x.t.Fatalf("%s: waited for in vain", what)
		}
	}
}

// awaitTrace waits until the trace in a file that is being written is so.
func (x *traced) awaitTrace(file, what string, is func(d *recording.Driver) bool) (d *recording.Driver) {
	x.t.Helper()
	x.await(what, func() bool {
		f, err := open.File(file)
		if err != nil || f.Driver == nil || !is(f.Driver) {
			return false
		}
		d = f.Driver
		return true
	})
	return d
}

// TestTraceWithoutCUDA: programs that do not use CUDA, or cannot be seen, run as they do without.
func TestTraceWithoutCUDA(t *testing.T) {
	x := newTraced(t)
	static := x.compile("static", "testdata/traced.c", "-DLINKED", "-Wl,--unresolved-symbols=ignore-all", "-static", "-pthread")
	programs := map[string][]string{
		"bash":         {"bash", "-c", "echo $0 $((6*7)); exit 3"},
		"a C program":  {x.program, "", "nothing"},
		"Go":           {"go", "version"}, // as it is distributed, which may be static
		"static":       {static, "", "nothing"},
		"only loading": {x.program, "dlsym", "load"},
	}
	if _, err := exec.LookPath("python3"); err == nil {
		programs["python"] = []string{"python3", "-c", "import os, ctypes, json; print(len(os.listdir('/proc/self/task')))"}
	}
	for name, args := range programs {
		if _, err := exec.LookPath(args[0]); err != nil {
			t.Logf("%s: %v", name, err)
			continue
		}
		plain := exec.Command(args[0], args[1:]...)
		plain.Env = append(os.Environ(), "STANDIN="+x.standin)
		want, _ := plain.Output()
		cmd := x.command(append([]string{"trace", "--"}, args...)...)
		cmd.Env = append(cmd.Env, "HOME="+os.Getenv("HOME"))
		var errs strings.Builder
		cmd.Stderr = &errs
		got, _ := cmd.Output()
		if string(got) != string(want) || cmd.ProcessState.ExitCode() != plain.ProcessState.ExitCode() ||
			!strings.Contains(errs.String(), "no call of the driver allocated or freed memory") {
			t.Errorf("%s: code %d, %q, want %q\n%s", name, cmd.ProcessState.ExitCode(), got, want, &errs)
		}
		if name != "Go" && name == "static" != strings.Contains(errs.String(), "is statically linked") {
			t.Errorf("%s: %s", name, &errs)
		}
	}
}

// TestSlowTraceCost: what a program without CUDA pays to start, and what a call costs, in CPU time. A machine that
// does other work as well makes both longer all the same, so of many runs the shortest count, and the limits are far from
// what is usual: 0.05 ms, and half a microsecond.
func TestSlowTraceCost(t *testing.T) {
	slow.Only(t)
	x := newTraced(t)
	start := func(vars ...string) time.Duration {
		cmd := exec.Command(x.program, "", "nothing")
		cmd.Env = vars
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	plain, audited := time.Hour, time.Hour
	for range 100 {
		plain = min(plain, start())
		audited = min(audited, start("LD_AUDIT="+x.library, audit.Variable+"=0:/nowhere"))
	}
	if audited-plain > time.Millisecond {
		t.Errorf("a program without CUDA takes %v, audited %v", plain, audited)
	}
	call := func(args ...string) float64 {
		best := 1e9
		for range 5 {
			var cmd *exec.Cmd
			if len(args) == 0 {
				cmd = exec.Command(x.program, "dlsym", "time", "20000")
				cmd.Env = []string{"STANDIN=" + x.standin}
			} else {
				cmd = x.command(append(args, "--", x.program, "dlsym", "time", "20000")...)
			}
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			ns, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
			if err != nil {
				t.Fatal(err)
			}
			best = min(best, ns)
		}
		return best
	}
	alone, with, stacks := call(), call("trace"), call("trace", "--stacks=native")
	t.Logf("starting: %v, audited %v; a call: %.0f ns, traced %.0f ns, with stacks %.0f ns", plain, audited, alone, with, stacks)
	if with-alone > 5000 {
		t.Errorf("a call takes %.0f ns, traced %.0f", alone, with)
	}
}
