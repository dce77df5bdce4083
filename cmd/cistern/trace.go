package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/report"
)

func newTrace(a *app) *cobra.Command {
	var out string
	var live, follow bool
	stacks := stacksOff
	c := &cobra.Command{
		Use:   "trace [flags] [-o FILE] -- PROGRAM [ARGUMENT]...",
		Short: "Record the CUDA driver calls of a program that allocate or free memory",
		Long: "Trace runs a program in any language and records the calls of the CUDA driver that allocate or free memory: plain,\n" +
			"managed, page-locked, stream-ordered and virtual memory, and memory of other processes. Each call has its size, address,\n" +
			"stream, device, thread, result and duration. Child processes are traced too. FILE is a Cistern trace; cistern replay\n" +
			"shows how a caching allocator would have met its requests.\n\n" +
			"The table at the end goes to standard error: peak memory, the time of the calls, and what was never freed. The exit\n" +
			"status is the program's, or 128 and the number of the signal that ended it; 2 if the program was not started. If FILE\n" +
			"could not be written to its end, a line says so, and the status stays the same. FILE can be read while the program runs;\n" +
			"it then lacks at most the last tenth of a second. It ends with the program or, with --follow, with the last process that\n" +
			"the program started. Processes that run longer are listed.\n\n" +
			"The dynamic linker loads a small library into the processes (LD_AUDIT). It cannot trace statically linked programs,\n" +
			"programs with the rights of their owner (setuid), or processes that the program starts with a cleared environment (such\n" +
			"as env -i, sudo), as another user, with a /proc of their own, or through a daemon, as containers are: run cistern trace\n" +
			"in the container. Untraced processes below the program are listed with the reason if they used the driver and ran for some\n" +
			"tenths of a second.\n\n" +
			"--stacks native reads return addresses from the stack, so some frames may be stale. --stacks python reads the frames of\n" +
			"Python 3.10 to 3.14 without the GIL. --stacks all has the native frames first and the Python frames after them, without\n" +
			"the frames of the interpreter.",
		Example: "  cistern trace -o run.cistern -- python train.py\n" +
			"  cistern trace --stacks all -o run.cistern -- python train.py",
		Args: programArgs,
		RunE: func(c *cobra.Command, args []string) error {
			t, err := a.newTracing(args, out, tracedKinds[stacks])
			if err != nil {
				return err
			}
			return t.run(live, follow)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().StringVarP(&out, "output", "o", "", "`file` to write; without it there is only the table")
	c.Flags().BoolVar(&live, "live", false, "print the allocated memory every second, to standard error")
	c.Flags().BoolVar(&follow, "follow", false, "record until all processes that the program started have ended, not only itself")
	addStacks(c, &stacks, "record where calls come from, `kinds` of frames (native cost most)", stackWords...)
	return c
}

// tracedKinds are the kinds of --stacks for the audit library.
var tracedKinds = map[stackKinds]audit.Stacks{stacksOff: 0, stacksNative: audit.Native, stacksPython: audit.Python,
	stacksAll: audit.Native | audit.Python}

// auditLibrary finds the library where it is in the source tree, in a wheel and in a bundle.
func auditLibrary() (string, error) {
	if named := environ.Get("CISTERN_AUDIT_LIBRARY"); named != "" {
		named, err := filepath.Abs(named)
		if err == nil && !isFile(named) {
			err = fmt.Errorf("CISTERN_AUDIT_LIBRARY: there is no file %s", named)
		}
		return named, err
	}
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	var folders []string
	for _, up := range []string{"", "..", "../.."} {
		folder := filepath.Join(filepath.Dir(exe), up, "lib")
		if file := filepath.Join(folder, audit.Library); isFile(file) {
			return file, nil
		}
		folders = append(folders, folder)
	}
	return "", fmt.Errorf("%s is missing: looked in %s; set CISTERN_AUDIT_LIBRARY to its path", audit.Library, strings.Join(folders, ", "))
}

// tracing is one program under trace.
type tracing struct {
	a *app
	child
	ring *audit.Ring
	file *os.File // nil where only the table is wanted
	rec  *recorder
}

// newTracing prepares everything that can fail before the program starts.
func (a *app) newTracing(args []string, out string, stacks audit.Stacks) (*tracing, error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, audit.ErrNotLinux
	}
	program, err := newChild(args, nil)
	if err != nil {
		return nil, err
	}
	library, err := auditLibrary()
	if err != nil {
		return nil, err
	}
	if strings.ContainsAny(library, ": ") {
		return nil, fmt.Errorf("%s: the dynamic linker cannot load a file with a colon or a space in its name", library)
	}
	if why := audit.Blind(program.cmd.Path); why != "" {
		fmt.Fprintf(a.err, "cistern: %s\n", oneLine(fmt.Sprintf("%s %s; it runs untraced, programs that it starts are traced", args[0], why)))
	}
	t := &tracing{a: a, child: program}
	if t.ring, err = audit.New(audit.Slots, stacks); err != nil {
		return nil, err
	}
	var w io.Writer = io.Discard
	if out != "" {
		if t.file, err = createTrace(out); err != nil {
			t.ring.Close()
			return nil, err
		}
		w = t.file
	}
	if t.rec, err = newRecorder(w, args); err != nil {
		t.close()
		return nil, cannotWrite(out, err)
	}
	env := environment(os.Environ())
	env.set(audit.Variable, t.ring.Value())
	others, nested := otherAudits(env.get("LD_AUDIT"), library)
	if nested {
		fmt.Fprintln(a.err, "cistern: this command is being traced itself: the program is recorded here, and not by that other cistern trace")
	}
	env.set("LD_AUDIT", strings.Join(append([]string{library}, others...), ":"))
	t.cmd.Env = env
	return t, nil
}

// otherAudits are the audit libraries that are asked for already, without ours, and whether that was among them: loaded twice
// it would see every call twice.
func otherAudits(asked, library string) (others []string, ours bool) {
	for _, file := range strings.FieldsFunc(asked, func(r rune) bool { return r == ':' }) {
		if file == library || filepath.Base(file) == audit.Library {
			ours = true
		} else {
			others = append(others, file)
		}
	}
	return others, ours
}

// createTrace opens the file as it will be: what is written is there, whatever happens to this process.
func createTrace(out string) (*os.File, error) {
	if out == "-" {
		return nil, errors.New("-o -: standard output is the program's: name a file")
	}
	f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, outfile.Private)
	if err != nil {
		return nil, cannotWrite(out, err)
	}
	return f, nil
}

func (t *tracing) close() {
	if t.file != nil {
		t.file.Close()
	}
	t.ring.Close()
}

const (
	flushEvery = 100 * time.Millisecond
	idleLeast  = time.Millisecond
	idleMost   = 16 * time.Millisecond
	batch      = 1 << 14 // records between two looks at the clock
	endsShare  = 200     // the part of the time, as its inverse, in which ended processes are looked for
)

// run starts the program, records until it has ended, and with follow whatever it started, and says what was seen.
func (t *tracing) run(live, follow bool) error {
	defer t.close()
	defer t.rec.live.close()
	if follow {
		if err := adopt(); err != nil {
			return fmt.Errorf("--follow: %w", err)
		}
	}
	passed, err := t.start()
	if err != nil {
		return err
	}
	defer passed()
	out := newLookout(t)
	ended := make(chan struct{})
	go func() {
		t.wait()
		if follow {
			t.waitForOthers()
		}
		close(ended)
	}()
	var failed error // of writing; the program goes on
	flushed, shown, look := time.Now(), time.Now(), time.Now()
	idle := idleLeast
	timer := time.NewTimer(idle)
	over := false
	for !over {
		n := t.ring.Drain(batch, false, t.rec.record)
		wait := time.Duration(0) // a process that goes on may keep this busy
		if n > 0 {
			idle = idleLeast
		} else {
			idle = min(2*idle, idleMost)
			wait = idle
			if !t.ring.Waits() {
				t.rec.run.CloseEnded() // of those that had ended at the last look, all has been read
			}
		}
		timer.Reset(wait)
		select {
		case <-ended:
			over = true
		case <-timer.C:
		}
		now := time.Now()
		if !now.Before(look) {
			t.rec.lookForEnds()
			look = now.Add(min(max(endsShare*time.Since(now), idleMost), flushEvery))
		}
		if now.Sub(flushed) >= flushEvery {
			flushed = now
			t.rec.live.refresh(now, t.ring.Dropped())
			known := len(t.rec.untraced)
			t.rec.missing(out.take())
			if err := t.rec.flush(); err != nil && failed == nil {
				failed = err
			}
			for i := known; live && i < min(len(t.rec.untraced), analyze.MostUntraced); i++ {
				fmt.Fprintln(t.a.err, "cistern: "+oneLine(analyze.UntracedLine(&t.rec.untraced[i])))
			}
			if live && now.Sub(shown) >= time.Second {
				shown = now
				fmt.Fprintln(t.a.err, "cistern: "+t.rec.state(t.ring))
			}
		}
	}
	t.ring.Stop()
	t.ring.Drain(audit.Slots, true, t.rec.record) // which is all that can be in it
	if t.ring.Spoiled() {
		t.rec.tell("a program overwrote the memory that calls are recorded in: later calls are missing")
	}
	t.rec.missing(out.end())
	t.rec.leave(follow)
	t.a.status = exitStatus(t.cmd.ProcessState)
	summary, err := t.rec.end(t.ring, t.a.status)
	if failed == nil {
		failed = err
	}
	if t.file != nil {
		summary.Path = t.file.Name()
	}
	fmt.Fprintln(t.a.err)
	report.WriteDriver(t.a.err, summary, t.a.styleOf(t.a.err, isTerminal(t.a.err)))
	for _, why := range t.rec.why {
		fmt.Fprintf(t.a.err, "cistern: %s\n", oneLine(why))
	}
	if failed == nil && t.file != nil {
		failed = t.file.Sync()
		if errors.Is(failed, syscall.EINVAL) || errors.Is(failed, syscall.ENOTSUP) { // a pipe, which is nothing to be kept
			failed = nil
		}
	}
	if failed != nil {
		// The exit code is the program's, not that of what was written about it.
		fmt.Fprintf(t.a.err, "cistern: %s\n", oneLine(fmt.Sprintf("the trace is not whole: %v", failed)))
	}
	return nil
}

// lookProgram finds a program as a shell does.
func lookProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrDot) {
		err = nil
	}
	if err == nil {
		return path, nil
	}
	var e *exec.Error
	if errors.As(err, &e) {
		err = e.Err
	}
	if isFile(name) && strings.HasSuffix(name, ".py") {
		return "", fmt.Errorf("%s: cannot be started: it is not a program: put python in front", name)
	}
	return "", fmt.Errorf("%s: cannot be started: %w", name, err)
}
