//go:build linux && cgo

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TestStacks: native ones, through every function that hands memory out.
func TestStacks(t *testing.T) {
	t.Parallel()
	p := program(t, "stacks.c", libraryPath(t))
	for _, conf := range []string{"", ",backend:malloc", ",magazine:off", ",history:1000"} {
		passes(t, "driver:sim:8GiB"+conf, nil, p)
	}
}

// TestPythonStacks: Python's, and both.
func TestPythonStacks(t *testing.T) {
	t.Parallel()
	for _, conf := range []string{"", ",history:1000"} {
		passes(t, "driver:sim:8GiB"+conf, nil, need(t, "python3"), "testdata/stacks.py", libraryPath(t))
	}
}

// TestStacksWhileLoading: a thread that waits for the dynamic linker's lock holds none of the library's.
func TestStacksWhileLoading(t *testing.T) {
	t.Parallel()
	library := program(t, "loading.c", "", "-DLIBRARY", "-shared", "-fPIC")
	passes(t, "driver:sim:8GiB", nil, program(t, "loading.c", libraryPath(t), "-rdynamic"), library)
}

// TestStacksOfTheFirstRequest: what the settings say holds for the request that starts the library.
func TestStacksOfTheFirstRequest(t *testing.T) {
	t.Parallel()
	python := need(t, "python3")
	const program = `
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.cistern_malloc.restype = ctypes.c_void_p
def first(): return lib.cistern_malloc(ctypes.c_ssize_t(1 << 20), 0, None)
first()
use, n = (ctypes.c_uint64 * 4)(), ctypes.c_size_t()
assert lib.cistern_stack_usage(0, use, 1, ctypes.byref(n)) == 0 and n.value == 1
text = ctypes.create_string_buffer(10000)
assert lib.cistern_stack_text(ctypes.c_uint32(use[0]), text, 10000) == 0
print(text.value.decode().splitlines()[0])
`
	for _, stacks := range []string{"python", "all,stack_sample:1MiB"} {
		r := run(t, "driver:sim:8GiB,stacks:"+stacks, nil, python, "-c", program, libraryPath(t))
		if want := "first <string>:5\n"; r.err != nil || r.report != "" || stacks == "python" && r.out != want {
			t.Errorf("%s: %v %q %s, want %q", stacks, r.err, r.out, r.report, want)
		}
	}
}

// TestUnknownPython: what is not available is reported once, and the rest is done.
func TestUnknownPython(t *testing.T) {
	t.Parallel()
	p := program(t, "oldpython.c", libraryPath(t), "-rdynamic")
	for _, stacks := range []string{"python", "all"} {
		r := run(t, "driver:sim:8GiB,stacks:"+stacks, nil, p, stacks)
		want := "cistern: stacks of Python's functions: its frames are known from Python 3.10 to 3.14 only\n"
		if r.err != nil || r.out != "ok\n" || r.report != want {
			t.Errorf("%s: %v\n%s%s, want %s", stacks, r.err, r.out, r.report, want)
		}
	}
}

// TestNamesOfCxx: as people write them.
func TestNamesOfCxx(t *testing.T) {
	t.Parallel()
	need(t, compiler("CXX", "c++"))
	passes(t, "driver:sim:8GiB,stacks:native", nil, program(t, "names.cc", libraryPath(t)))
}

// TestAdapterFrames: of a stack through a library that stands between this one and others, that library's own frames are left
// out.
func TestAdapterFrames(t *testing.T) {
	t.Parallel()
	python := need(t, "python3")
	dir := t.TempDir()
	source := filepath.Join(dir, "x.c")
	const text = "void *cistern_malloc(long, int, void *);\nvoid *%s(void) { void *p = cistern_malloc(1 << 20, 0, 0); __asm__ volatile(\"\" ::: \"memory\"); return p; }\n"
	const script = `
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
adapter, other = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[3])
lib = ctypes.CDLL(sys.argv[1])
for f in adapter.between, other.outside:
    f.restype = ctypes.c_void_p
    p = f()
    use, n = (ctypes.c_uint64 * 4)(), ctypes.c_size_t()
    assert lib.cistern_stack_usage(0, use, 1, ctypes.byref(n)) == 0 and n.value == 1
    text = ctypes.create_string_buffer(10000)
    assert lib.cistern_stack_text(ctypes.c_uint32(use[0]), text, 10000) == 0
    print(text.value.decode().split()[0])
    lib.cistern_release(ctypes.c_void_p(p))
`
	libs := []string{"-c", script, libraryPath(t)}
	for name, function := range map[string]string{"libcistern_x.so": "between", "other.so": "outside"} {
		if err := os.WriteFile(source, fmt.Appendf(nil, text, function), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := quiet(exec.Command(compiler("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", filepath.Join(dir, name), source)); err != nil {
			t.Fatal(err)
		}
	}
	libs = append(libs, filepath.Join(dir, "libcistern_x.so"), filepath.Join(dir, "other.so"))
	r := run(t, "driver:sim:8GiB,stacks:native", nil, append([]string{python}, libs...)...)
	lines := strings.Fields(r.out)
	if r.err != nil || len(lines) != 2 || lines[0] == "between" || lines[1] != "outside" {
		t.Errorf("%v: the innermost frames are %q, want one of libffi's and outside\n%s", r.err, lines, r.report)
	}
}

// TestTraceWrite: a history in Cistern's format has labels.
func TestTraceWrite(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "x.cistern")
	r := run(t, "driver:sim:8GiB,history:1000,stacks:native", nil, program(t, "history.c", libraryPath(t)), file)
	if r.err != nil || !strings.HasSuffix(r.out, "ok\n") {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	var asker, main uint32
	if _, err := fmt.Sscan(r.out, &asker, &main); err != nil {
		t.Fatal(err)
	}
	f, err := open.File(file)
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Traces[0]
	if !tr.FromStart || len(tr.Initial) != 0 || tr.Threads[asker] != "asker" || tr.Threads[main] == "" || tr.Threads[main] == "asker" {
		t.Errorf("from the start: %v, %d blocks before it, threads %v", tr.FromStart, len(tr.Initial), tr.Threads)
	}
	var got []string
	for _, e := range tr.Events {
		if e.Kind != event.Alloc && e.Kind != event.FreeRequested {
			continue
		}
		who := map[uint32]string{asker: "asker", main: "main"}[e.Thread]
		got = append(got, fmt.Sprintf("%v %d by %s, tag %q, library %q, from %s", e.Kind, e.Size>>20, who, name(tr.Tags, int(e.Tag)),
			name(tr.Libraries, int(e.Library)), strings.Join(functions(tr, e.Stack)[:1], " ")))
	}
	want := []string{
		`alloc 1 by asker, tag "weights", library "program", from ask`,
		`alloc 2 by main, tag "", library "somebody", from main`,
		`free_requested 1 by main, tag "weights", library "program", from ask`, // as of where it was asked for
	}
	if !slices.Equal(got, want) {
		t.Errorf("events:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	blocks := 0
	for _, s := range tr.Final {
		for _, b := range s.Blocks {
			if b.State != recording.Active {
				continue
			}
			blocks++
			if fn := functions(tr, b.Stack); b.Requested != 2<<20 || tr.Libraries[b.Library] != "somebody" || b.Tag != 0 || fn[0] != "main" {
				t.Errorf("a block %+v, from %v", b, fn)
			}
		}
	}
	if blocks != 1 {
		t.Errorf("%d blocks are held at the end", blocks)
	}
}

// name is an entry of a table, "" where it has none.
func name(table []string, i int) string {
	if i < len(table) {
		return table[i]
	}
	return ""
}

// functions are those of a stack, innermost first, at least one.
func functions(t *recording.Trace, stack uint32) []string {
	var out []string
	for _, f := range t.Stacks[stack] {
		out = append(out, t.Frames[f].Func)
	}
	return append(out, "")
}
