//go:build linux && cgo

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	cudastandin "github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/event"
	nvmlstandin "github.com/cistern-gpu/cistern/internal/nvml/standin"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// oomFiles are the files of a folder, by number.
func oomFiles(t *testing.T, dir string) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(dir, "oom-*-*.cistern"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestReportFile: what the file of a request that failed says.
func TestReportFile(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "reports")
	p := program(t, "oom.c", libraryPath(t))
	conf := "driver:sim:2GiB,stacks:native,history:1000,report:" + dir
	r := run(t, conf, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3G"}, p, dir, "settings")
	if r.err != nil || !strings.HasSuffix(r.out, "ok\n") {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	list := oomFiles(t, dir)
	if len(list) != 1 {
		t.Fatalf("files %v", list)
	}
	if want := fmt.Sprintf("cistern: out of memory on device 0: wrote %s; cistern report %s explains it\n", list[0], list[0]); r.report != want {
		t.Errorf("it says %q, want %q", r.report, want)
	}
	read, err := open.File(list[0])
	if err != nil {
		t.Fatal(err)
	}
	tr := read.Traces[0]
	if len(tr.Failures) != 1 {
		t.Fatalf("%d failures", len(tr.Failures))
	}
	f := tr.Failures[0]
	e := tr.Events[f.Event]
	if e.Kind != event.OOM || e.Thread != f.Thread || f.Thread == 0 || int(f.Thread) != f.PID || f.Requested != 900<<20 {
		t.Errorf("%+v of %+v", f, e)
	}
	if fn := functions(tr, f.Stack); fn[0] != "fails" || fn[1] != "main" {
		t.Errorf("it was asked for from %v", fn)
	}
	if len(f.Lines) < 3 || !strings.Contains(f.Lines[0], "out of memory on device 0: tried to allocate 900.00 MiB") ||
		!strings.Contains(f.Lines[1], "load_model in oom_c") {
		t.Errorf("lines %q", f.Lines)
	}
	opts, err := config.Parse(conf)
	if err != nil {
		t.Fatal(err)
	}
	if f.Conf != opts.String() || f.Program[0] != p || f.Limit != 512<<20 || f.Device != "Cistern simulated GPU" || len(f.Steps) == 0 ||
		name(tr.Libraries, int(f.Library)) != "c" {
		t.Errorf("%+v", f)
	}
	limits := map[string]uint64{}
	for _, l := range f.Limits {
		limits[l.Kind] = l.Bytes
	}
	if limits["cistern"] != 512<<20 || limits["device"] != 2<<30 || limits["mps"] != 3<<30 {
		t.Errorf("limits %+v", f.Limits)
	}
	held := 0
	for _, s := range tr.Final {
		for _, b := range s.Blocks {
			if b.State == recording.Active {
				held++
				if fn := functions(tr, b.Stack); fn[0] != "load_model" || name(tr.Tags, int(b.Tag)) != "weights" || b.Requested != 300<<20 {
					t.Errorf("%+v from %v", b, fn)
				}
			}
		}
	}
	if held != 1 {
		t.Errorf("%d blocks are held", held)
	}
}

// TestReportWithoutStacks: the request that failed has its stack all the same, of C, or of Python and C.
func TestReportWithoutStacks(t *testing.T) {
	t.Parallel()
	python := need(t, "python3")
	const script = `
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.cistern_malloc.restype = ctypes.c_void_p
def train(size): return lib.cistern_malloc(ctypes.c_ssize_t(size), 0, None)
assert not train(900 << 20)
lib.cistern_tag_push(b"tagged")
assert not train(900 << 20)
`
	for name, c := range map[string]struct {
		args []string
		conf string
		want []string // frames, in this order
	}{
		"C":                       {[]string{program(t, "oom.c", libraryPath(t)), "FOLDER", "settings"}, "", []string{"fails", "main"}},
		"C with history":          {[]string{program(t, "oom.c", libraryPath(t)), "FOLDER", "settings"}, ",history:100", []string{"fails", "main"}},
		"Python":                  {[]string{python, "-c", script, libraryPath(t)}, ",limit:500MiB", []string{"train", "<module>"}},
		"Python with some stacks": {[]string{python, "-c", script, libraryPath(t)}, ",limit:500MiB,stacks:python,stack_sample:4GiB,history:100", []string{"train", "<module>"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			args := slices.Clone(c.args)
			for i := range args {
				if args[i] == "FOLDER" {
					args[i] = dir
				}
			}
			r := run(t, "driver:sim:2GiB,report:"+dir+c.conf, nil, args...)
			list := oomFiles(t, dir)
			if r.err != nil || len(list) == 0 {
				t.Fatalf("%v, files %v\n%s%s", r.err, list, r.out, r.report)
			}
			for _, file := range list {
				read, err := open.File(file)
				if err != nil {
					t.Fatal(err)
				}
				tr := read.Traces[0]
				f := tr.Failures[0]
				at, all := 0, functions(tr, f.Stack)
				for _, fn := range all {
					if at < len(c.want) && fn == c.want[at] {
						at++
					}
				}
				if at != len(c.want) {
					t.Errorf("it was asked for from %v, want %v", all, c.want)
				}
				if strings.Contains(c.conf, "history") && (f.Event < 0 || tr.Events[f.Event].Stack != f.Stack || tr.Events[f.Event].Thread != f.Thread) {
					t.Errorf("event %d", f.Event)
				}
			}
		})
	}
}

// TestReportNeighbours: the other processes on the device, by the stand-ins of the driver and of NVML; that NVML hangs costs two
// seconds.
func TestReportNeighbours(t *testing.T) {
	t.Parallel()
	driver, library := cudastandin.Build(t), nvmlstandin.Build(t)
	machine := []string{"driver version=580.65.06", `gpu uuid=GPU-20212223-2425-2627-2829-2a2b2c2d2e00 name="Stand-in GPU 0" total=150000 used=4000`,
		"process pid=4711 bytes=1000 name=/usr/bin/python3", "process pid=4712 bytes=na"}
	for name, c := range map[string]struct {
		more    string
		unknown string
	}{"told": {"counts reserved=used", ""}, "hanging": {"hang call=nvmlDeviceGetUUID", "NVML did not answer within 2s"}} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "machine")
			nvmlstandin.Change(t, file, append(machine, c.more)...)
			// NVML's two seconds, and the ten, may also be the machine's, which does other things too: not each time.
			var f *recording.Failure
			for tries := 0; ; tries++ {
				dir := t.TempDir()
				r := run(t, "driver:nvidia:"+driver+",report:"+dir, []string{"LD_LIBRARY_PATH=" + filepath.Dir(library), "STANDIN_NVML=" + file},
					program(t, "oom.c", libraryPath(t)), dir, "settings")
				if r.err != nil {
					t.Fatalf("%v, in %v\n%s%s", r.err, r.took, r.out, r.report)
				}
				read, err := open.File(oomFiles(t, dir)[0])
				if err != nil {
					t.Fatal(err)
				}
				f = read.Traces[0].Failures[0]
				if r.took <= 10*time.Second && f.OthersUnknown == c.unknown {
					break
				}
				if tries == 4 {
					t.Fatalf("in %v, others unknown: %q, want %q", r.took, f.OthersUnknown, c.unknown)
				}
			}
			if c.unknown != "" {
				if len(f.Others) != 0 {
					t.Errorf("%+v", f.Others)
				}
				return
			}
			want := []recording.Neighbour{{PID: 4711, Name: "/usr/bin/python3", Bytes: 1000}, {PID: 4712}}
			if f.UUID != "GPU-20212223-2425-2627-2829-2a2b2c2d2e00" || f.Device != "Stand-in GPU 0" || !slices.Equal(f.Others, want) {
				t.Errorf("%s %s: %+v", f.UUID, f.Device, f.Others)
			}
		})
	}
}

// TestReports: where files are written, and where not, and that they have a history without a setting.
func TestReports(t *testing.T) {
	t.Parallel()
	p := program(t, "oom.c", libraryPath(t))
	for _, what := range []string{"function", "threads", "silent", "fork", "closing", "limit"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			passes(t, "driver:sim:2GiB", nil, p, dir, what)
			list := oomFiles(t, dir)
			if what == "threads" && len(list) != 5 {
				t.Errorf("files %v", list)
			}
			for _, file := range list {
				f, err := open.File(file)
				if err != nil || len(f.Traces[0].Failures) != 1 {
					t.Errorf("%s: %v", file, err)
					continue
				}
				// A history begins with the reports.
				if e, tr := f.Traces[0].Failures[0].Event, f.Traces[0]; e < 0 || tr.Events[e].Kind != event.OOM {
					t.Errorf("%s: it is event %d of %d", file, e, len(tr.Events))
				}
			}
		})
	}
	// Settings that say so have none.
	dir := t.TempDir()
	if r := run(t, "driver:sim:2GiB,history:0,report:"+dir, nil, p, dir, "settings"); r.err != nil {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	if f, err := open.File(oomFiles(t, dir)[0]); err != nil || f.Traces[0].Failures[0].Event != -1 || len(f.Traces[0].Events) != 0 {
		t.Errorf("%+v, %v", f.Traces[0].Failures[0], err)
	}
	dir = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(dir, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	r := run(t, "driver:sim:2GiB", nil, p, dir, "trouble")
	if lines := strings.Split(strings.TrimSuffix(r.report, "\n"), "\n"); r.err != nil || len(lines) != 5 ||
		!strings.Contains(lines[0], "no file of it: mkdir "+dir+": not a directory") || !strings.HasSuffix(lines[4], "; that is not said of later ones") {
		t.Errorf("%v: it says\n%s", r.err, r.report)
	}
}

// TestReportOfTheLast: a program that catches its first failures has a file of a later one all the same, and no line for each.
func TestReportOfTheLast(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := run(t, "driver:sim:2GiB", nil, program(t, "oom.c", libraryPath(t)), dir, "again")
	if lines := strings.Split(strings.TrimSuffix(r.report, "\n"), "\n"); r.err != nil || len(lines) != 5 ||
		!strings.HasSuffix(lines[4], "; of later failures the newest takes its place") {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	list := oomFiles(t, dir)
	for i, file := range list {
		f, err := open.File(file)
		if err != nil {
			t.Fatal(err)
		}
		// All that failed is in the history, which began with the first.
		tr, failed := f.Traces[0], 0
		for _, e := range tr.Events {
			if e.Kind == event.OOM {
				failed++
			}
		}
		said := slices.ContainsFunc(tr.Notes, func(n string) bool { return strings.Contains(n, fmt.Sprintf("out-of-memory number %d since", failed)) })
		if said != (i == 4) || i < 4 && failed != i+1 || i == 4 && failed < 6 {
			t.Errorf("%s: %d failures, notes %q", file, failed, tr.Notes)
		}
	}
	if len(list) != 5 {
		t.Errorf("files %v", list)
	}
}

// TestReportChild: the command is started apart from the program.
func TestReportChild(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	command := filepath.Join(t.TempDir(), "explain")
	script := "#!/bin/sh\nls /proc/self/fd >\"$2.fds\"\ngrep -e SigBlk -e SigIgn /proc/self/status\nps -o ppid=,sid= $$\necho \"$@\"\nenv | grep -e CISTERN -e LD_PRELOAD\nsleep 0.3\necho >\"$4\"\n"
	if err := os.WriteFile(command, []byte(script), 0o777); err != nil {
		t.Fatal(err)
	}
	r := run(t, "driver:sim:2GiB", []string{"CISTERN_COMMAND=" + command}, program(t, "oom.c", libraryPath(t)), dir, "child")
	if r.err != nil || !strings.HasSuffix(r.out, "ok\n") {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	file := oomFiles(t, dir)[0]
	text, err := os.ReadFile(file + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	// Two signals are the C library's own, which it has ignored in what it starts.
	if len(lines) != 4 || !strings.HasSuffix(lines[0], "0000000000000000") || !strings.HasSuffix(lines[1], "0000000180000000") ||
		lines[3] != fmt.Sprintf("report %s -o %s.html --private", file, file) {
		t.Errorf("the command's signals, parent, arguments, environment:\n%s", text)
	}
	// What ls has open is 0, 1, 2 and the folder that it lists.
	if fds, err := os.ReadFile(file + ".fds"); err != nil || strings.Join(strings.Fields(string(fds)), " ") != "0 1 2 3" {
		t.Errorf("descriptors %q, %v", fds, err)
	}
	if !strings.Contains(r.report, "and is writing "+file+".html and "+file+".txt") {
		t.Errorf("it says %s", r.report)
	}
}
