//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/rerun"
)

// The tests build the library as `make` does, once, and run programs in C, C++ and Python against it, over the
// simulated device.

var scratch string // folder of everything that is built

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "libcistern"); err != nil {
		panic(err)
	}
	// What the tests' own garbage collection is set to is not for programs.
	os.Unsetenv("GOGC")
	os.Unsetenv("GOMEMLIMIT")
	// In the background of a script, or under nohup, these are ignored, and would be by every program that a test starts.
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	code := m.Run()
	os.RemoveAll(scratch)
	os.Exit(code)
}

// built makes each thing once, however many tests want it.
var built sync.Map // name → func() error

func build(t *testing.T, name string, f func(out string) error) string {
	t.Helper()
	out := filepath.Join(scratch, name)
	once, _ := built.LoadOrStore(name, sync.OnceValue(func() error {
		if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
			return err
		}
		return f(out)
	}))
	if err := once.(func() error)(); err != nil {
		t.Fatal(err)
	}
	return out
}

// outside skips a test of other processes' code with -short, as under the race detector, which sees nothing of it.
func outside(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs programs that are not this one")
	}
}

// libraryFor is the path of libcistern.so as the go command builds it with flags and tags. Locks are checked in it.
func libraryFor(t *testing.T, name, flags string, tags ...string) string {
	t.Helper()
	outside(t)
	return build(t, name+"/libcistern.so", func(out string) error {
		cmd := exec.Command("make", "--no-print-directory", "-C", "../..", "library", "LIBRARY="+out,
			"GOBUILDFLAGS="+flags+" -tags="+strings.Join(append(tags, "lockrank"), ","))
		return quiet(cmd)
	})
}

func libraryPath(t *testing.T) string { return libraryFor(t, "lib", "") }

// program compiles one of testdata, linked against the library that lies at lib unless that is empty.
func program(t *testing.T, source, lib string, flags ...string) string {
	t.Helper()
	outside(t)
	rerun.OnChange(t, filepath.Join("testdata", source), "testdata/check.h")
	name := "bin/" + strings.ReplaceAll(source, ".", "_") + strings.Join(flags, "")
	if lib != "" {
		name += "_" + filepath.Base(filepath.Dir(lib))
	}
	return build(t, name, func(out string) error {
		cc := compiler("CC", "cc")
		args := []string{"-std=gnu11"}
		if strings.HasSuffix(source, ".cc") {
			cc, args = compiler("CXX", "c++"), []string{"-std=c++17"}
		}
		args = append(args, "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", "-pthread")
		args = append(args, flags...)
		args = append(args, "-o", out, filepath.Join("testdata", source))
		if lib != "" {
			args = append(args, "-L"+filepath.Dir(lib), "-lcistern", "-Wl,-rpath,"+filepath.Dir(lib))
		}
		return quiet(exec.Command(cc, append(args, "-ldl")...))
	})
}

func compiler(variable, otherwise string) string {
	if c := os.Getenv(variable); c != "" {
		return c
	}
	return otherwise
}

// need is the path of a tool; without it the test is skipped, unless CISTERN_TOOLS_TEST=1 makes that a failure.
func need(t *testing.T, tool string) string {
	t.Helper()
	path, err := exec.LookPath(tool)
	if err == nil {
		return path
	}
	if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
	return ""
}

// quiet runs a command; the error has what it printed.
func quiet(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}

// result is how a program ended.
type result struct {
	out, report string
	err         error
	took        time.Duration
}

// run runs a program with settings. It must end by itself: under valgrind, on a busy machine, that takes longest, and how long it
// takes says nothing else of it.
func run(t *testing.T, conf string, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(append(os.Environ(), "CISTERN_CONF="+conf), env...)
	var out, report bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &report
	begin := time.Now()
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s hangs:\n%s%s", strings.Join(args, " "), &out, &report)
	}
	return result{out.String(), report.String(), err, time.Since(begin)}
}

// passes runs a program, which prints "ok" when all its checks hold.
func passes(t *testing.T, conf string, env []string, args ...string) {
	t.Helper()
	r := run(t, conf, env, args...)
	if r.err != nil || !strings.HasSuffix(r.out, "ok\n") {
		t.Errorf("%s: %v\n%s%s", filepath.Base(args[0]), r.err, r.out, r.report)
	}
}

func TestPools(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiB", nil, program(t, "pools.c", libraryPath(t)))
}

func TestArguments(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiB", nil, program(t, "arguments.c", libraryPath(t)))
}

func TestThreads(t *testing.T) {
	t.Parallel()
	p := program(t, "threads.c", libraryPath(t))
	for _, conf := range []string{"", ",backend:malloc", ",history:1000", ",single_handle:true", ",chunk:2MiB", ",magazine:off", ",stages:grow"} {
		passes(t, "driver:sim:8GiB"+conf, nil, p)
	}
}

func TestCallbacks(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiBx2", nil, program(t, "callbacks.c", libraryPath(t)))
}

// TestLabels: memory by label, and functions that are taken back.
func TestLabels(t *testing.T) {
	t.Parallel()
	p := program(t, "labels.c", libraryPath(t))
	for _, conf := range []string{"", ",backend:malloc", ",magazine:off"} {
		passes(t, "driver:sim:8GiBx2"+conf, nil, p)
	}
}

func TestUpstreams(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiB", nil, program(t, "upstreams.c", libraryPath(t)))
}

func TestPausing(t *testing.T) {
	t.Parallel()
	p := program(t, "pausing.c", libraryPath(t))
	for _, conf := range []string{"", ",single_handle:true", ",magazine:off", ",chunk:2MiB"} {
		passes(t, "driver:sim:8GiBx2"+conf, nil, p)
	}
}

func TestForks(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiB", nil, program(t, "forks.c", libraryPath(t)))
}

// TestPanics: a bug becomes an error.
func TestPanics(t *testing.T) {
	t.Parallel()
	passes(t, "driver:sim:8GiB", nil, program(t, "panics.c", libraryFor(t, "inject", "", "cistern_inject")))
}

func TestHeaderInC(t *testing.T) {
	t.Parallel()
	header := filepath.Join(scratch, "header.c")
	if err := os.WriteFile(header, []byte("#include \"cistern.h\"\nint main(void) { return cistern_version() == 0; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(compiler("CC", "cc"), "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I.", "-fsyntax-only", header)
	if err := quiet(cmd); err != nil {
		t.Error(err)
	}
}

func TestHeaderInCxx(t *testing.T) {
	t.Parallel()
	need(t, compiler("CXX", "c++"))
	passes(t, "driver:sim:8GiB", nil, program(t, "header.cc", libraryPath(t)))
}

// TestBadSettings: what is wrong with the settings is the error of the first call, and can be put right.
func TestBadSettings(t *testing.T) {
	t.Parallel()
	p := program(t, "settings.c", libraryPath(t))
	for conf, words := range map[string]string{
		"colour:red":                    "unknown setting \"colour\"",
		"driver:sim:8GiB,chunk:3":       "must be a multiple of 2 MiB",
		"driver:sim:lots":               "driver \"sim:lots\"",
		"driver:nvidia:/no/such/lib.so": "/no/such/lib.so",
	} {
		passes(t, conf, nil, p, words)
	}
}

// TestVersion: the header says the engine's.
func TestVersion(t *testing.T) {
	header, err := os.ReadFile("cistern.h")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(cistern.Version, ".")
	if len(parts) != 3 {
		t.Fatalf("version %s has not three numbers", cistern.Version)
	}
	for name, value := range map[string]string{"": fmt.Sprintf("%q", cistern.Version), "_MAJOR": parts[0], "_MINOR": parts[1], "_PATCH": parts[2]} {
		if want := "#define CISTERN_VERSION" + name + " " + value + "\n"; !strings.Contains(string(header), want) {
			t.Errorf("cistern.h lacks %s", want)
		}
	}
}
