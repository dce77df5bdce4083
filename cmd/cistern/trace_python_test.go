//go:build linux && amd64

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/recording"
)

// pythons are the interpreters of this machine whose frames are known, by version: those on PATH, those of pyenv, and
// those that CISTERN_PYTHONS names.
func pythons(t *testing.T) map[string]string {
	t.Helper()
	names := []string{"python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"}
	if root, err := exec.Command("pyenv", "root").Output(); err == nil {
		kept, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "versions", "3.1[0-4]*", "bin", "python3"))
		names = append(names, kept...)
	}
	found := map[string]string{}
	for _, name := range append(names, filepath.SplitList(os.Getenv("CISTERN_PYTHONS"))...) {
		out, err := exec.Command(name, "-c", "import sys, ctypes; print('%d.%d' % sys.version_info[:2], sys.executable or '"+name+"')").Output()
		version, file, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
		if err == nil && ok && slices.Contains([]string{"3.10", "3.11", "3.12", "3.13", "3.14"}, version) && found[version] == "" {
			found[version] = file
		}
	}
	if len(found) == 0 {
		t.Skip("there is no Python from 3.10 to 3.14")
	}
	return found
}

// TestTracePython: the stack of each call is the one that Python has there, whatever code it is in.
func TestTracePython(t *testing.T) {
	x := newTraced(t)
	for version, python := range pythons(t) {
		for _, c := range []struct{ kinds, what string }{{"python", "everything"}, {"all", "everything"}, {"python", "threads"}, {"all", "forked"}} {
			d, stdout, stderr, code := x.run([]string{"PYTHONIOENCODING=utf-8"}, "--stacks="+c.kinds, "--", python, "testdata/traced.py", x.standin, c.what)
			where := version + " " + c.kinds + " " + c.what
			if code != 0 || d.End.Dropped+d.End.Lost != 0 {
				t.Fatalf("%s: code %d, %+v\n%s%s", where, code, d.End, stdout, stderr)
			}
			var want, got []string
			for line := range strings.Lines(stdout) {
				want = append(want, strings.TrimSpace(line))
			}
			native := 0
			for i := range d.Calls {
				q := &d.Calls[i]
				if q.Kind != recording.MemAlloc {
					continue
				}
				text := fmt.Sprint(q.Size)
				frames := d.StackFrames(q.Stack)
				first := slices.IndexFunc(frames, func(f recording.Frame) bool { return f.Line > 0 })
				if first < 1 {
					t.Fatalf("%s: call %d is by %v", where, i, frames)
				}
				for k, f := range frames[first:] {
					if f.Line == 0 {
						t.Errorf("%s: call %d has a native frame within those of Python: %v", where, i, frames)
					}
					file := path.Base(f.File)
					if k == 0 {
						text += fmt.Sprintf(" %s:%s", file, f.Func)
					} else {
						text += fmt.Sprintf(" %s:%s:%d", file, f.Func, f.Line)
					}
				}
				for _, f := range frames[:first] {
					if strings.HasPrefix(f.Func, "_PyEval") || f.Func == "main" {
						t.Errorf("%s: %s is shown", where, f.Func)
					}
				}
				native = max(native, first)
				got = append(got, text)
			}
			if c.kinds == "python" && native != 1 || c.kinds != "python" && native < 3 {
				t.Errorf("%s: %d native frames", where, native)
			}
			slices.Sort(want)
			slices.Sort(got)
			// Of very long names the end is kept.
			for i := range want {
				if strings.Contains(want[i], strings.Repeat("x", 300)) {
					want[i] = strings.ReplaceAll(want[i], strings.Repeat("x", 300), "")
				}
			}
			for i := range got {
				got[i] = strings.ReplaceAll(got[i], strings.Repeat("x", 300), "")
			}
			shorter := func(s string) string { return strings.TrimLeft(s, "x") }
			if !slices.EqualFunc(want, got, func(a, b string) bool {
				return slices.EqualFunc(strings.Fields(a), strings.Fields(b), func(a, b string) bool { return shorter(a) == shorter(b) })
			}) || len(want) < 8 && c.what != "forked" {
				t.Errorf("%s: the trace has\n%s\nPython said\n%s", where, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			if c.what == "everything" && !strings.Contains(stderr, "  allocate .../testdata/traced.py:") {
				t.Errorf("%s: the table is\n%s", where, stderr)
			}
		}
	}
}

// TestTracePythonTogether: the first calls of a process have their stacks, also those that are made at the same moment.
func TestTracePythonTogether(t *testing.T) {
	x := newTraced(t)
	meet := x.compile("meet.so", "testdata/meet.c", "-shared", "-fPIC")
	for version, python := range pythons(t) {
		for range rounds(4) {
			d, _, stderr, code := x.run(nil, "--stacks=python", "--", python, "testdata/traced.py", x.standin, "together", meet)
			if code != 0 || len(d.Calls) != 8 {
				t.Fatalf("%s: code %d, %d calls, want 8\n%s", version, code, len(d.Calls), stderr)
			}
			for i := range d.Calls {
				frames := d.StackFrames(d.Calls[i].Stack)
				if !slices.ContainsFunc(frames, func(f recording.Frame) bool { return strings.HasSuffix(f.Func, "work") && f.Line > 0 }) {
					t.Errorf("%s: call %d is by %v; %+v\n%s", version, i, frames, d.End, stderr)
				}
			}
		}
	}
}

// TestTracePythonEnds: calls are made as Python ends, by threads too that it no longer waits for.
func TestTracePythonEnds(t *testing.T) {
	x := newTraced(t)
	for version, python := range pythons(t) {
		for range rounds(5) {
			d, stdout, stderr, code := x.run(nil, "--stacks=all", "--", python, "testdata/traced.py", x.standin, "ending")
			plain := exec.Command(python, "testdata/traced.py", x.standin, "ending")
			want, err := plain.Output()
			if err != nil || code != 0 || stdout != string(want) {
				t.Fatalf("%s: code %d, want %v; %q, want %q\n%s", version, code, err, stdout, want, stderr)
			}
			found := 0
			for i := range d.Calls {
				frames := d.StackFrames(d.Calls[i].Stack)
				if d.Calls[i].Size == 1<<20 && slices.ContainsFunc(frames, func(f recording.Frame) bool { return f.Func == "allocate" && f.Line > 0 }) {
					found++
				}
			}
			if found != 1 {
				t.Errorf("%s: the call of the exit handler has no stack\n%s", version, stderr)
			}
		}
	}
}

// TestTraceStackKinds: the words of --stacks, and a Python whose frames are not known, which is one line.
func TestTraceStackKinds(t *testing.T) {
	x := newTraced(t)
	for _, word := range []string{"--stacks=x", "--stacks=native+python", "--stacks=none", "--stacks=", "--stacks"} { // of the last, the word is --
		out, err := x.command("trace", word, "--", "true").CombinedOutput()
		if err == nil || !strings.Contains(string(out), ": expected off, python, native or all\n") || strings.Count(string(out), "\n") != 1 {
			t.Errorf("%s: %v, %q", word, err, out)
		}
	}
	for _, words := range [][]string{{"--stacks", "python"}, {"--stacks=native"}, {"--stacks", "all"}, {"--stacks", "off"}} {
		if out, err := x.command(append(append([]string{"trace"}, words...), "echo", "x")...).CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "x\n") {
			t.Errorf("%v: %v, %q", words, err, out)
		}
	}
	if d, _, _, _ := x.run(nil, "--stacks=python", "--", x.program, "dlsym", "everything"); len(d.StackFrames(d.Calls[0].Stack)) != 1 {
		t.Error("without Python a call has more than its caller")
	}
	root, err := exec.Command("pyenv", "root").Output()
	old, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "versions", "3.9.*", "bin", "python3"))
	if err != nil || len(old) == 0 {
		t.Skip("pyenv has no Python 3.9")
	}
	d, _, stderr, code := x.run(nil, "--stacks=python", "--", old[0], "testdata/traced.py", x.standin, "threads")
	if code != 0 || len(d.Calls) < 400 || strings.Count(stderr, "no frames of Python: its frames are known from Python 3.10") != 1 {
		t.Errorf("code %d, %d calls\n%s", code, len(d.Calls), stderr)
	}
}

// TestSlowTracePythonCost: a call whose stack is known costs a few microseconds of CPU time more, 30 frames deep; the
// limit is far from the 1.5 us that is usual, as what other work leaves in the caches counts as well.
func TestSlowTracePythonCost(t *testing.T) {
	slow.Only(t)
	x := newTraced(t)
	for version, python := range pythons(t) {
		took := func(args ...string) float64 {
			out, err := x.command(append(args, python, "testdata/traced.py", x.standin, "cost")...).Output()
			ns, perr := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
			if err != nil || perr != nil {
				t.Fatal(err, perr)
			}
			return ns
		}
		off, py, both := took("trace", "--"), took("trace", "--stacks=python", "--"), took("trace", "--stacks=all", "--")
		t.Logf("%s: a call from 30 frames of Python: traced %.0f ns, with its frames %.0f ns, with native ones too %.0f ns", version, off, py, both)
		if py-off > 30000 {
			t.Errorf("%s: a call takes %.0f ns, with frames of Python %.0f ns", version, off, py)
		}
	}
}
