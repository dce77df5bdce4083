//go:build linux && amd64

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/analyze"
	nvmlstandin "github.com/cistern-gpu/cistern/internal/nvml/standin"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// open lets every user reach what a test made.
func (x *traced) open() {
	x.t.Helper()
	for _, file := range []string{x.dir, filepath.Dir(x.standin)} {
		for ; file != os.TempDir() && file != "/"; file = filepath.Dir(file) {
			if err := os.Chmod(file, 0o755); err != nil {
				x.t.Fatal(err)
			}
		}
	}
}

// heedsOwners reports whether programs get the rights of their owner, of files that root gives away.
func heedsOwners(t *testing.T) bool {
	t.Helper()
	var fs unix.Statfs_t
	if err := unix.Statfs(t.TempDir(), &fs); err != nil {
		t.Fatal(err)
	}
	on, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	return os.Getuid() == 0 && err == nil && on == 0 && fs.Flags&unix.ST_NOSUID == 0
}

// untraced traces a script that goes on as long as there is the file HELD, until the trace names processes that are so. HELD in
// the script stands for its path.
func (x *traced) untraced(flags []string, script string, so func(list []recording.Untraced) bool) (d *recording.Driver, stdout, stderr string, code int) {
	x.t.Helper()
	dir := x.t.TempDir()
	(&traced{t: x.t, dir: dir, standin: x.standin}).open()
	held, file := filepath.Join(dir, "held"), filepath.Join(dir, "run.cistern")
	if err := os.WriteFile(held, nil, 0o644); err != nil {
		x.t.Fatal(err)
	}
	cmd := x.command(append(append([]string{"trace", "-o", file}, flags...), "--", "sh", "-c", strings.ReplaceAll(script, "HELD", held))...)
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	if err := cmd.Start(); err != nil {
		x.t.Fatal(err)
	}
	x.awaitTrace(file, "a file that says who is missing", func(d *recording.Driver) bool { return so(d.Untraced) })
	time.Sleep(400 * time.Millisecond) // for whoever else would be accused
	if err := os.Remove(held); err != nil {
		x.t.Fatal(err)
	}
	_ = cmd.Wait() // its state says how it ended
	return x.read(file), o.String(), e.String(), cmd.ProcessState.ExitCode()
}

// TestTraceUntraced: processes that use the driver and cannot be seen are listed, with the reason.
func TestTraceUntraced(t *testing.T) {
	x := newTraced(t)
	if os.Getuid() == 0 {
		x.open()
		x.standin = x.readable(x.standin)
	}
	// A C library in a program cannot give the driver memory for each thread, so that it calls nothing else.
	source := filepath.Join(x.dir, "static.c")
	if err := os.WriteFile(source, []byte(`#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
	void *lib = dlopen(getenv("STANDIN"), RTLD_NOW);
	int (*init)(unsigned) = lib == NULL ? NULL : (int (*)(unsigned))dlsym(lib, "cuInit");
	for (int i = 0; i < 60000 && access(argv[1], F_OK) == 0; i++)
		usleep(10000);
	return init == NULL || init(0) != 0;
}`), 0o600); err != nil {
		t.Fatal(err)
	}
	static := x.compile("static", source, "-static", "-ldl")
	hold := "STANDIN=" + x.standin + " " + x.program + " dlsym hold HELD"
	const cleared = "was started without LD_AUDIT in its environment, as by env -i or sudo"
	type try struct {
		flags  []string
		script string
		why    string
	}
	tries := map[string]try{
		"env -i":            {nil, "env -i " + hold, cleared},
		"some of it kept":   {nil, "env -i PATH=/bin A= HOME=/ " + hold, cleared},
		"without LD_AUDIT":  {nil, "env -u LD_AUDIT " + hold, cleared},
		"without its ring":  {nil, "env -u CISTERN_AUDIT " + hold, "was started without CISTERN_AUDIT in its environment"},
		"static":            {nil, "STANDIN=" + x.standin + " " + static + " HELD", "is statically linked"},
		"deeper":            {nil, `sh -c "env -i sh -c '` + hold + `; exit 0'; exit 0"; exit 0`, cleared},
		"forked twice":      {[]string{"--follow"}, "(setsid env -i " + hold + " &)", cleared},
		"forks":             {nil, "env -i " + hold + " 3", cleared},
		"itself":            {nil, "exec env -i " + hold, cleared},
		"in the background": {nil, "env -i " + hold + " & while [ -e HELD ]; do sleep 0.05; done", cleared},
	}
	if heedsOwners(t) {
		owned := x.compile("owned", "testdata/traced.c", "-ldl", "-pthread")
		if err := os.Chown(owned, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(owned, 0o755|os.ModeSetuid); err != nil {
			t.Fatal(err)
		}
		tries["setuid"] = try{nil, "STANDIN=" + x.standin + " " + owned + " dlsym hold HELD", "has rights of its own"}
	}
	if os.Getuid() == 0 {
		if _, err := exec.LookPath("setpriv"); err == nil {
			tries["another user"] = try{nil, "STANDIN=" + x.standin + " setpriv --reuid 65534 --clear-groups " + x.program + " dlsym hold HELD",
				"runs as another user, number 65534, and cannot open the ring for recorded calls"}
		}
	}
	for name, c := range tries {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait
			x := *x
			x.t = t
			d, stdout, stderr, code := x.untraced(c.flags, c.script, func(list []recording.Untraced) bool { return len(list) > 0 })
			if code != 0 || stdout != "" {
				t.Fatalf("code %d, %s\n%s", code, stdout, stderr)
			}
			if len(d.Untraced) != 1 || !strings.HasPrefix(d.Untraced[0].Why, c.why) {
				t.Fatalf("untraced are %+v\n%s", d.Untraced, stderr)
			}
			u := d.Untraced[0]
			flat := strings.Join(strings.Fields(stderr), " ")
			line := fmt.Sprintf("process %d, %s, used the driver and is not in this trace: it %s", u.PID, filepath.Base(u.Program), c.why)
			if strings.Count(flat, line) != 1 || !filepath.IsAbs(u.Program) {
				t.Errorf("%s is not said once of %+v:\n%s", line, u, stderr)
			}
			if len(d.Calls) > 0 {
				t.Errorf("there are %d calls of what is listed as untraced", len(d.Calls))
			}
		})
	}
	// A process whose parent ends is known from when it had one: the look that found the witness has seen it as well.
	witness := x.compile("witness", "testdata/traced.c", "-ldl", "-pthread")
	seen := "env -i STANDIN=" + x.standin + " " + witness + " dlsym hold HELD"
	is := func(program string, list []recording.Untraced) bool {
		return slices.ContainsFunc(list, func(u recording.Untraced) bool { return u.Program == program && u.Why == cleared })
	}
	t.Run("its parent is gone", func(t *testing.T) {
		x := *x
		x.t = t
		parent := filepath.Join(t.TempDir(), "parent")
		script := `sh -c '(: > PARENT; while kill -0 $$ 2> /dev/null; do sleep 0.05; done; exec env -i ` + hold + `) & while [ -e PARENT.not ] || [ ! -e PARENT ]; do sleep 0.05; done' &
while [ ! -e PARENT ]; do sleep 0.05; done; ` + seen + ` & wait`
		ends := parent + ".not"
		if err := os.WriteFile(ends, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		d, _, stderr, _ := x.untraced(nil, strings.ReplaceAll(script, "PARENT", parent), func(list []recording.Untraced) bool {
			if is(witness, list) {
				_ = os.Remove(ends)
			}
			return len(list) > 1
		})
		if len(d.Untraced) != 2 || !is(witness, d.Untraced) || !is(x.program, d.Untraced) {
			t.Errorf("untraced are %+v\n%s", d.Untraced, stderr)
		}
	})
	for name, others := range map[string]string{
		"traced":         hold + " & " + hold + " & ",
		"no driver":      "env -i sh -c 'while [ -e HELD ]; do sleep 0.05; done' & ",
		"only looked at": "env -i STANDIN=" + x.standin + " " + x.program + " '' look HELD & ",
	} {
		t.Run(name, func(t *testing.T) {
			x := *x
			x.t = t
			var since time.Time // then others are seen as well; they are looked at for longer than what is not certain takes
			d, _, stderr, _ := x.untraced(nil, others+seen+" & wait", func(list []recording.Untraced) bool {
				if since.IsZero() && is(witness, list) {
					since = time.Now()
				}
				return !since.IsZero() && time.Since(since) > 1500*time.Millisecond
			})
			if len(d.Untraced) != 1 || strings.Count(stderr, "is not in this trace") != 1 {
				t.Errorf("accused: %v\n%s", d.Untraced, stderr)
			}
		})
	}
}

// TestTraceUntracedOtherUser: a process of another user cannot be looked into. That it uses the driver, NVML tells.
func TestTraceUntracedOtherUser(t *testing.T) {
	if !heedsOwners(t) {
		t.Skip("wants a program that is root's")
	}
	if !hostNumbers() {
		t.Skip("in here the driver knows processes by other numbers")
	}
	x := newTraced(t)
	x.open()
	if err := os.Chmod(x.program, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	library := nvmlstandin.Build(t)
	x.standin, x.library = x.readable(x.standin), x.readable(x.library)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	self, library = x.readable(self), x.readable(library)
	describe := func(machine string, more ...string) {
		t.Helper()
		nvmlstandin.Change(t, machine, append([]string{"driver version=580.65.06",
			`gpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200" bus=0 total=150000 used=4000`}, more...)...)
		if err := os.Chmod(machine, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, uses := range []bool{false, true} {
		t.Run(fmt.Sprint(uses), func(t *testing.T) {
			t.Parallel()
			x := *x
			x.t = t
			machine := filepath.Join(t.TempDir(), "machine")
			describe(machine)
			(&traced{t: t, dir: filepath.Dir(machine), standin: x.standin}).open()
			// One that no GPU serves is not listed, however long it runs: so long that others were listed before.
			stay := 6500
			if uses {
				stay = 600_000
			}
			file := filepath.Join(filepath.Dir(machine), "run.cistern")
			cmd := x.command("trace", "-o", file, "--", "sh", "-c", fmt.Sprintf("%s dlsym stay %d & wait", x.program, stay))
			cmd.Path, cmd.Dir = self, x.dir
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(library), "STANDIN_NVML="+machine)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			var e strings.Builder
			cmd.Stderr = &e
			if err := os.Chmod(filepath.Dir(machine), 0o777); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			pid := x.below(cmd.Process.Pid, 2)
			t.Cleanup(func() {
				if cmd.ProcessState == nil {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			})
			if uses {
				describe(machine, fmt.Sprintf("process gpu=0 pid=%d bytes=500", pid))
				x.await("a file that tells of it", func() bool {
					f, err := open.File(file)
					return err == nil && f.Driver != nil && len(f.Driver.Untraced) > 0
				})
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			}
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v\n%s", err, &e)
			}
			said := strings.Contains(strings.Join(strings.Fields(e.String()), " "),
				fmt.Sprintf("process %d, traced, used the driver and is not in this trace: it runs as another user, number 0", pid))
			if said != uses {
				t.Errorf("it uses a GPU: %v; it is listed: %v\n%s", uses, said, &e)
			}
		})
	}
}

// readable is a copy that every user may read and run, in a folder of its own, as libraries have names.
func (x *traced) readable(file string) string {
	x.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		x.t.Fatal(err)
	}
	dir, err := os.MkdirTemp(x.dir, "")
	if err != nil {
		x.t.Fatal(err)
	}
	file = filepath.Join(dir, filepath.Base(file))
	if err := os.WriteFile(file, text, 0o755); err != nil {
		x.t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		x.t.Fatal(err)
	}
	return file
}

// TestTraceUntracedCutOff: what is known of them is in the file at once, is printed at once on a terminal, and comes
// out of everything that reads the file.
func TestTraceUntracedCutOff(t *testing.T) {
	x := newTraced(t)
	file, held := filepath.Join(x.dir, "cut.cistern"), filepath.Join(x.dir, "held")
	if err := os.WriteFile(held, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := x.command("trace", "--live", "-o", file, "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11; do env -i STANDIN="+x.standin+" "+x.program+" dlsym hold "+held+" & done; wait")
	live, err := os.Create(filepath.Join(x.dir, "live"))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	cmd.Stderr = live
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := func() (string, int) {
		text, err := os.ReadFile(live.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text), strings.Count(string(text), "used the driver and is not in this trace")
	}
	d := x.awaitTrace(file, "a file that says who is missing, and lines that do", func(d *recording.Driver) bool {
		_, n := said()
		return len(d.Untraced) == 11 && n >= analyze.MostUntraced
	})
	time.Sleep(2 * flushEvery) // should more be said
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	_ = os.Remove(held)
	if text, n := said(); n != analyze.MostUntraced || strings.Contains(text, "never freed") {
		t.Errorf("while it ran it was said %d times\n%s", n, text)
	}
	again := filepath.Join(x.dir, "again.cistern")
	if out, err := x.command("convert", file, "-o", again).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, file := range []string{file, again} {
		out, err := x.command("inspect", file).CombinedOutput()
		if n := strings.Count(string(out), "used the driver"); err != nil || n != 8 || !strings.Contains(string(out), "nor are 3 more that used it") {
			t.Errorf("%v: %s", err, out)
		}
		out, err = x.command("inspect", "--json", file).Output()
		var said inspections
		if jerr := json.Unmarshal(out, &said); err != nil || jerr != nil || len(said.Drivers) != 1 || len(said.Drivers[0].Untraced) != 11 || said.Drivers[0].Untraced[0] != d.Untraced[0] {
			t.Errorf("%v, %v: %s", err, jerr, out)
		}
	}
}

// TestTraceUntracedNone: of many processes that come and go, all traced, none is listed.
func TestTraceUntracedNone(t *testing.T) {
	x := newTraced(t)
	script := `i=0; while [ $i -lt 60 ]; do for j in 1 2 3 4; do ` + x.program + ` proc stay $((i % 3 * 10)) & done; (` + x.program + ` dlsym fork 5 &); env -i true; i=$((i + 1)); done; wait`
	d, _, stderr, code := x.run(nil, "--follow", "--", "sh", "-c", script)
	if code != 0 || len(d.Untraced) > 0 || strings.Contains(stderr, "is not in this trace") {
		t.Errorf("code %d, %+v\n%s", code, d.Untraced, stderr)
	}
	if n := len(d.Processes); n != 60*8 {
		t.Errorf("%d processes", n)
	}
}
