//go:build linux && amd64

package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TestTraceCannotWrite: the exit code is the program's, also where its trace cannot be written to the end, which one line
// says; and a pipe that takes everything is as good as a file.
func TestTraceCannotWrite(t *testing.T) {
	x := newTraced(t)
	for name, c := range map[string]struct {
		program []string
		read    int64
		code    int
	}{
		"no reader":       {[]string{"exit", "7"}, 16, 7},
		"or it fails":     {[]string{"signal", "11"}, 16, 139},
		"and all is well": {[]string{"exit", "0"}, 16, 0},
		"all is read":     {[]string{"everything"}, 1 << 30, 0},
	} {
		from, to, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		// What ends before it is read is written in whole: so the reader goes first.
		cmd := x.command(append([]string{"trace", "-o", "/dev/fd/3", "--", "sh", "-c", `read go; exec "$@"`, "sh", x.program, "dlsym"}, c.program...)...)
		cmd.ExtraFiles = []*os.File{to}
		var errs strings.Builder
		cmd.Stderr = &errs
		wait, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		to.Close()
		var got strings.Builder
		if c.read < 1<<20 {
			_, _ = io.CopyN(&got, from, c.read)
			from.Close()
			wait.Close()
		} else {
			wait.Close()
			_, _ = io.Copy(&got, from)
			from.Close()
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != c.code {
			t.Errorf("%s: code %d, want %d\n%s", name, code, c.code, &errs)
		}
		if whole := c.read > 1<<20; strings.Contains(errs.String(), "the trace is not whole") == whole ||
			!strings.Contains(errs.String(), "never freed") || !strings.HasSuffix(errs.String(), "\n") {
			t.Errorf("%s: %s", name, &errs)
		} else if f, err := open.Read(strings.NewReader(got.String()), name); whole && (err != nil || f.Driver == nil || !f.Driver.Ended) {
			t.Errorf("%s: %v, %+v", name, err, f)
		}
	}
}

// TestTraceNested: a program that is traced within one that is traced has each of its calls recorded once, by the inner
// one, which says so; other audit libraries stay.
func TestTraceNested(t *testing.T) {
	x := newTraced(t)
	outer := x.dir + "/outer.cistern"
	inner := x.command("trace", "-o", x.dir+"/inner.cistern", "--", x.program, "dlsym", "everything")
	cmd := x.command(append([]string{"trace", "-o", outer, "--", "env", "CISTERN_TEST_AS_COMMAND=1"}, inner.Args...)...)
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &errs)
	}
	once, _, _, _ := x.run(nil, "--", x.program, "dlsym", "everything")
	if d := x.read(x.dir + "/inner.cistern"); len(d.Calls) != len(once.Calls) || len(d.Processes) != 1 {
		t.Errorf("the inner one has %d calls of %d processes, want %d of one", len(d.Calls), len(d.Processes), len(once.Calls))
	}
	if d := x.read(outer); len(d.Calls) != 0 || !strings.Contains(errs.String(), "this command is being traced itself") ||
		!strings.Contains(errs.String(), "no process that could be seen loaded libcuda.so.1") {
		t.Errorf("the outer one has %d calls\n%s", len(d.Calls), &errs)
	}
	for _, c := range []struct {
		asked, others string
		ours          bool
	}{{"", "", false}, {"/a.so:/b.so", "/a.so:/b.so", false}, {"/lib/" + audit.Library, "", true}, {"/a.so:/x.so:/b.so", "/a.so:/b.so", true}} {
		if others, ours := otherAudits(c.asked, "/x.so"); strings.Join(others, ":") != c.others || ours != c.ours {
			t.Errorf("%q: %q, %v", c.asked, others, ours)
		}
	}
}

// TestTraceDrivers: a driver that is loaded again after it was unloaded is seen again; a second one beside it is not, which
// is said.
func TestTraceDrivers(t *testing.T) {
	x := newTraced(t)
	source := filepath.Join(x.dir, "drivers.c")
	if err := os.WriteFile(source, []byte(`#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
typedef unsigned long long dptr;
static void *use(void *lib) {
	int (*init)(unsigned) = dlsym(lib, "cuInit"), (*retain)(void **, int) = dlsym(lib, "cuDevicePrimaryCtxRetain");
	int (*push)(void *) = dlsym(lib, "cuCtxPushCurrent_v2"), (*get)(dptr *, size_t) = dlsym(lib, "cuMemAlloc_v2");
	void *context;
	dptr p;
	if (init(0) || retain(&context, 0) || push(context) || get(&p, 4096))
		exit(7);
	return lib;
}
int main(int argc, char **argv) {
	if (argc > 1) {
		use(dlopen(getenv("STANDIN"), RTLD_NOW));
		use(dlmopen(LM_ID_NEWLM, getenv("STANDIN"), RTLD_NOW));
		return 0;
	}
	for (int i = 0; i < 3; i++)
		dlclose(use(dlopen(getenv("STANDIN"), RTLD_NOW)));
	return 0;
}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	program := x.compile("drivers", source, "-ldl")
	if d, _, errs, code := x.run(nil, "--stacks", "native", "--", program); code != 0 || len(d.Calls) != 3 || len(d.End.Unknown) != 0 {
		t.Errorf("loaded three times: code %d, %d calls, %v\n%s", code, len(d.Calls), d.End.Unknown, errs)
	}
	if d, _, errs, code := x.run(nil, "--", program, "two"); code != 0 || len(d.Calls) != 1 || !strings.Contains(errs, "not seen: all of a second libcuda.so.1") {
		t.Errorf("two at once: code %d, %d calls\n%s", code, len(d.Calls), errs)
	}
}
