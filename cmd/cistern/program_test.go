package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain is also the command itself: run and record replace the process that they are called in.
func TestMain(m *testing.M) {
	if os.Getenv("CISTERN_TEST_PEAK") != "" { // prints its own peak: that of its usage has this process's, from which it is started
		code := run(context.Background(), os.Args[1:], os.Stdin, io.Discard, os.Stderr)
		fmt.Println(peakResident())
		os.Exit(code)
	}
	if os.Getenv("CISTERN_TEST_AS_COMMAND") != "" {
		os.Unsetenv("CISTERN_TEST_AS_COMMAND")
		main()
	}
	if name := os.Getenv("CISTERN_TEST_PUBLISHES"); name != "" {
		publishForTop(name)
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
	os.Exit(m.Run())
}

// longest is how long a test waits for what is to come. A busy machine stops programs for seconds, again and again.
const longest = 3 * time.Minute

// asCommand runs the command as a process with these variables, besides those that a shell needs.
func asCommand(t *testing.T, vars []string, args ...string) (out, errs string, code int) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("programs are run on Linux only")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pkg, err := filepath.Abs("../../python/cistern")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	library := filepath.Join(t.TempDir(), "libcistern.so")
	if err := os.WriteFile(library, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "CISTERN_TEST_AS_COMMAND=1", "CISTERN_PYTHON_PACKAGE=" + pkg,
		"CISTERN_LIBRARY=" + library}, vars...)
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

// variables are what the program that was started saw.
func variables(t *testing.T, out string) environment {
	t.Helper()
	return strings.Split(strings.TrimSuffix(out, "\n"), "\n")
}

func TestRunSetsTheEnvironment(t *testing.T) {
	out, errs, code := asCommand(t, []string{"PYTHONPATH=/a:/b", "CISTERN_CONF=limit:1GiB"}, "run", "--no-build", "--", "env")
	if code != 0 || errs != "" {
		t.Fatalf("code %d: %s", code, errs)
	}
	env := variables(t, out)
	inject, err := filepath.Abs("../../python/cistern/_inject")
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"PYTHONPATH": inject + ":/a:/b", "CISTERN_CONF": "limit:1GiB", envInject: "run",
		envChecked: "limit:1GiB", "CISTERN_BUILD": "0"} {
		if got := env.get(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	// Once more inside changes what it is told to.
	out, _, _ = asCommand(t, []string{"PYTHONPATH=" + inject + ":/a", "_CISTERN_INJECT=record", "_CISTERN_RECORD_PARENT=1"},
		"run", "--conf", "chunk:4MiB", "env")
	env = variables(t, out)
	for key, want := range map[string]string{"PYTHONPATH": inject + ":/a", "CISTERN_CONF": "chunk:4MiB", envInject: "run",
		"_CISTERN_RECORD_PARENT": "", "CISTERN_BUILD": ""} {
		if got := env.get(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
}

// TestRunKeepsWhereMemoryGoes: the flags of attribution are settings of the program, beside the user's own.
func TestRunKeepsWhereMemoryGoes(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "made", "oom")
	for _, c := range []struct{ conf, args, want string }{
		{"", "--history 500", "history:500"},
		{"limit:1GiB", "--history 500 --stacks all", "limit:1GiB,history:500,stacks:all,stack_sample:64KiB"},
		{"", "--stacks python --stack-sample 0", "stacks:python,stack_sample:0"},
		{"stacks:native", "--stack-sample 1MiB", "stacks:native,stack_sample:1MiB"},
		{"stack_sample:2MiB,stacks:python", "--stacks python", "stack_sample:2MiB,stacks:python"},
		{"stack_sample:1MiB,stacks:python", "--stack-sample 1024KiB", "stack_sample:1MiB,stacks:python"},
		{"", "--stacks off", "stacks:off"},
		{"stacks:all", "--stacks all", "stacks:all,stack_sample:64KiB"},
		{"", "--stacks all --stack-sample 0", "stacks:all,stack_sample:0"},
		{"", "--report " + folder, "report:" + folder},
		{"history:7", "--report " + folder + " --report-child", "history:7,report:" + folder + ",report_child:true"},
		{"", "--history 0 --report " + folder, "history:0,report:" + folder},
		{"report:" + folder, "--report-child", "report:" + folder + ",report_child:true"},
	} {
		out, errs, code := asCommand(t, []string{"CISTERN_CONF=" + c.conf}, append(append([]string{"run"}, strings.Fields(c.args)...), "--", "env")...)
		env := variables(t, out)
		if code != 0 || errs != "" || env.get("CISTERN_CONF") != c.want || env.get(envChecked) != c.want {
			t.Errorf("%q and %s: code %d, %q, settings %q, want %q", c.conf, c.args, code, errs, env.get("CISTERN_CONF"), c.want)
		}
		if command := env.get(envCommand); strings.Contains(c.args, "--report-child") != (command != "") {
			t.Errorf("%s: the command is named %q", c.args, command)
		}
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) != 0 {
		t.Errorf("%v, %v is in the folder", err, left)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ conf, args, want string }{
		{"history:500", "--history 501", "--history 501: the settings say history:500 already: give one of them"},
		{"stacks:native", "--stacks python", "--stacks python: the settings say stacks:native already"},
		{"report:/elsewhere", "--report " + folder, "--report " + folder + ": the settings say report:/elsewhere already"},
		{"", "--history -1", "--history: history -1: must be a number of events"},
		{"", "--stacks both", "--stacks both: expected off, python, native or all"},
		{"", "--stacks native,limit:3GiB", "--stacks native,limit:3GiB: expected off, python, native or all"},
		{"", "--stack-sample many --stacks native", "--stack-sample: setting stack_sample:many:"},
		{"", "--stack-sample 1MiB", "needs stacks"},
		{"", "--report-child", "needs report"},
		{"", "--report " + file, "exists and is not a folder"},
		{"", "--report " + file + "/below", "not a directory"},
		{"", "--report " + dir + "/a,b", "a setting ends at a comma"},
		{"nonsense", "--history 5", "CISTERN_CONF: setting"},
	} {
		out, errs, code := asCommand(t, []string{"CISTERN_CONF=" + c.conf}, append(append([]string{"run"}, strings.Fields(c.args)...), "--", "env")...)
		if code != exitBad || out != "" || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q and %s: code %d, %q, want %q", c.conf, c.args, code, errs, c.want)
		}
	}
}

func TestRunTakesTheProgramsArguments(t *testing.T) {
	for _, args := range [][]string{
		{"run", "--", "echo", "--conf", "x", "-o"},
		{"run", "echo", "--conf", "x", "-o"},
		{"record", "-o", filepath.Join(t.TempDir(), "r.pickle"), "echo", "--conf", "x", "-o"},
	} {
		want, status := "", exitOK
		if args[0] == "record" {
			want, status = "cistern: no recording: no process initialised CUDA through PyTorch\n", exitNoRecording
		}
		if out, errs, code := asCommand(t, nil, args...); out != "--conf x -o\n" || errs != want || code != status {
			t.Errorf("%v: code %d, %q, %q", args, code, out, errs)
		}
	}
}

func TestRunEndsAsTheProgramDoes(t *testing.T) {
	if _, _, code := asCommand(t, nil, "run", "--", "sh", "-c", "exit 5"); code != 5 {
		t.Errorf("code %d, want 5", code)
	}
	for _, c := range []struct {
		program, want string
	}{
		{"no-such-program", "cistern: no-such-program: cannot be started: executable file not found in $PATH\n"},
		{os.TempDir(), "cannot be started: "},
		{"../../python/hatch_build.py", "put python in front"},
	} {
		_, errs, code := asCommand(t, nil, "run", "--", c.program)
		if code != exitBad || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: code %d, %q", c.program, code, errs)
		}
	}
}

func TestRunNeedsItsParts(t *testing.T) {
	for vars, want := range map[string]string{
		"CISTERN_PYTHON_PACKAGE=/no/package": "the Python package cistern is missing: looked in /no/package",
		"CISTERN_LIBRARY=/no/lib.so":         "CISTERN_LIBRARY: there is no file /no/lib.so",
	} {
		_, errs, code := asCommand(t, []string{vars}, "run", "--", "true")
		if code != exitBad || !strings.Contains(errs, want) {
			t.Errorf("%s: code %d, %q", vars, code, errs)
		}
	}
}

func TestRecordSetsTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	out, errs, code := asCommand(t, []string{"PWD=" + dir}, "record", "-o", filepath.Join(dir, "x.pickle.gz"), "--stacks", "off",
		"--max-entries", "7", "--", "env")
	if code != exitNoRecording || errs != "cistern: no recording: no process initialised CUDA through PyTorch\n" {
		t.Fatalf("code %d: %s", code, errs)
	}
	env := variables(t, out)
	for key, want := range map[string]string{envInject: "record", "_CISTERN_RECORD": filepath.Join(dir, "x.pickle.gz"),
		"_CISTERN_RECORD_STACKS": "off", "_CISTERN_RECORD_ENTRIES": "7"} {
		if got := env.get(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v is left", err, left)
	}
}

func TestDoctor(t *testing.T) {
	py, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip("no python3")
	}
	vars := []string{"CISTERN_CONF=driver:sim:80GiBx2", "HOME=" + t.TempDir(), "LD_PRELOAD="}
	out, errs, code := asCommand(t, vars, "doctor", "--json", "--python", py)
	var d diagnosis
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("code %d, %v: %s%s", code, err, out, errs)
	}
	if len(d.Devices) != 2 || d.Devices[0].Bytes != 80<<30 || !d.Devices[0].VMM || d.Driver == nil || d.Driver.Name != "sim" {
		t.Errorf("devices %+v, driver %+v", d.Devices, d.Driver)
	}
	if d.Python == nil || d.Python.Python.Version == "" {
		t.Errorf("python is %+v", d.Python)
	}
	if want := min(len(d.Problems), 1); code != want {
		t.Errorf("code %d with the problems %q", code, d.Problems)
	}
	text, _, again := asCommand(t, vars, "doctor", "--python", py)
	if again != code || strings.Count(text, "PROBLEM") != len(d.Problems) || !strings.Contains(text, "device 1 ") {
		t.Errorf("code %d, want %d:\n%s", again, code, text)
	}
	_, errs, code = asCommand(t, append(vars, "CISTERN_CONF=nonsense"), "doctor", "--json", "--python", py)
	if code != exitMismatch || errs != "" {
		t.Errorf("bad settings: code %d, %q", code, errs)
	}
}

func TestDoctorOnTheEnvironment(t *testing.T) {
	var d diagnosis
	d.environment(environment{"LD_PRELOAD=/x/libcuda_hook.so /y/libjemalloc.so", "CUDA_VISIBLE_DEVICES="})
	if len(d.Problems) != 2 || !slices.ContainsFunc(d.Problems, func(p string) bool { return strings.Contains(p, "libcuda_hook") }) {
		t.Errorf("problems %q", d.Problems)
	}
	d = diagnosis{}
	d.environment(environment{"CUDA_VISIBLE_DEVICES=0"})
	if len(d.Problems) != 0 {
		t.Errorf("problems %q", d.Problems)
	}
}
