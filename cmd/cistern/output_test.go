//go:build linux

package main

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/report"
)

// selfCommand is the command as a process, in the folder of the test.
func selfCommand(t *testing.T, args ...string) (cmd *exec.Cmd, errs *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd, errs = exec.CommandContext(t.Context(), self, args...), &bytes.Buffer{}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CISTERN_TEST_AS_COMMAND=1"}
	cmd.Stderr = errs
	return cmd, errs
}

// codeOf is how a command ended.
func codeOf(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

// TestSignalsLeaveNoFile: a signal that ends the command leaves nothing beside the output.
func TestSignalsLeaveNoFile(t *testing.T) {
	inFolder(t)
	runs := [][]string{{"convert", "-", "-o", "out.csv"}, {"replay", "--policy", "torch", "--record", "out.pickle", "-"}}
	if report.CheckBundle() == nil {
		runs = append(runs, []string{"report", "-", "-o", "out.html"}, []string{"diff", "tiny.pickle", "-", "--html", "out.html"})
	}
	for _, args := range runs {
		for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
			before := names(t)
			cmd, errs := selfCommand(t, args...)
			stdin, err := cmd.StdinPipe() // which stays open, so that the command waits
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(longest); len(names(t)) == len(before) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			if len(names(t)) == len(before) {
				t.Fatalf("%v: no file is being written\n%s", args, errs)
			}
			if err := cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
			code := codeOf(t, cmd.Wait())
			stdin.Close()
			if after := names(t); !slices.Equal(before, after) || code != exitSignal+int(s) ||
				errs.String() != "cistern: interrupted\n" {
				t.Errorf("%v, %v: code %d, files before %v, after %v\n%s", args, s, code, before, after, errs)
			}
		}
	}
}

// TestInterruptedStatus: every command that can run long ends with 130 after Ctrl-C, with one line.
func TestInterruptedStatus(t *testing.T) {
	pkg, err := filepath.Abs("../../python/cistern")
	if err != nil {
		t.Fatal(err)
	}
	inFolder(t)
	interrupt := func(cmd *exec.Cmd, errs *bytes.Buffer) {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if code := codeOf(t, cmd.Wait()); code != 130 || errs.String() != "cistern: interrupted\n" {
			t.Errorf("%v: code %d, %q", cmd.Args[1:], code, errs)
		}
	}
	// More than a pipe takes has been written when the command reads.
	rows := "Thread,Time,Action,Pointer,Size,Stream\n" + strings.Repeat("1,10:00:00.000001,allocate,0x7f8a00000000,1048576,0x0\n", 3000)
	for _, args := range [][]string{{"replay", "-"}, {"inspect", "-"}, {"tune", "-"}, {"report", "-"}, {"diff", "tiny.pickle", "-"},
		{"convert", "-", "-o", "out.csv"}} {
		cmd, errs := selfCommand(t, args...)
		stdin, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			_, err = io.WriteString(stdin, rows)
		}
		if err != nil {
			t.Fatal(err)
		}
		interrupt(cmd, errs)
		stdin.Close()
	}
	cmd, errs := selfCommand(t, "top", "--json", "--count", "1000000", "--interval", "100ms")
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		_, err = stdout.Read(make([]byte, 1))
	}
	if err != nil {
		t.Fatal(err)
	}
	interrupt(cmd, errs)
	interpreter := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(interpreter, []byte("#!/bin/sh\n: > asked\nexec sleep 600\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"doctor", "build-adapter"} {
		cmd, errs := selfCommand(t, name, "--python", interpreter)
		cmd.Env = append(cmd.Env, "CISTERN_PYTHON_PACKAGE="+pkg)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(longest); os.Remove("asked") != nil; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s asks no Python: %s", name, errs)
			}
		}
		interrupt(cmd, errs)
	}
}

// TestReaderOfOutputStops: an output whose reader has gone ends the command without a word, whatever writes it.
func TestReaderOfOutputStops(t *testing.T) {
	inFolder(t)
	runs := [][]string{{"replay", "--policy", "torch", "--record", "-", "tiny.pickle"}, {"inspect", "tiny.pickle"},
		{"convert", "tiny.pickle", "-o", "/dev/stdout", "--to", "csv"}, {"convert", "tiny.pickle", "-o", "/dev/fd/1", "--to", "csv"}}
	for _, to := range formatNames() {
		runs = append(runs, []string{"convert", "tiny.pickle", "-o", "-", "--to", to})
	}
	for _, args := range runs {
		reader, writer, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd, errs := selfCommand(t, args...)
		cmd.Stdout = writer
		if slices.Contains(args, "/dev/fd/1") {
			defer reader.Close() // a pipe without a reader cannot be opened again
		} else {
			reader.Close()
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		writer.Close()
		code := codeOf(t, cmd.Wait())
		if want := map[bool]int{true: exitOK, false: exitBad}[slices.Contains(args, "/dev/fd/1")]; code != want || strings.Contains(errs.String(), "cistern: ") {
			t.Errorf("%v: code %d, want %d, and %q", args, code, want, errs)
		}
	}
}

// TestOutputsThatAreNotPlainFiles: links, standard output by its name, a FIFO.
func TestOutputsThatAreNotPlainFiles(t *testing.T) {
	inFolder(t)
	want, _, code := cistern(t, "", "convert", "tiny.pickle", "-o", "-", "--to", "csv")
	if code != exitOK {
		t.Fatal(code)
	}
	is := func(path, text string) {
		t.Helper()
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%s has %d bytes, %v; want %d", path, len(got), err, len(text))
		}
	}
	if err := errors.Join(os.Mkdir("there", 0o755), os.Symlink("there/out.csv", "link.csv")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // where it leads nowhere, and where there is a file
		if _, errs, code := cistern(t, "", "convert", "tiny.pickle", "-o", "link.csv"); code != exitOK {
			t.Fatal(errs)
		}
		is("there/out.csv", want)
		if st, err := os.Lstat("link.csv"); err != nil || st.Mode()&fs.ModeSymlink == 0 {
			t.Errorf("the link became %v, %v", st, err)
		}
	}

	// A shell's `{ echo before; cistern … -o /dev/stdout; echo after; } >file`.
	for _, name := range []string{"-", "/dev/stdout"} {
		file, err := os.Create("file")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteString("before\n"); err != nil {
			t.Fatal(err)
		}
		cmd, errs := selfCommand(t, "convert", "tiny.pickle", "-o", name, "--to", "csv")
		cmd.Stdout = file
		if err := cmd.Run(); err != nil {
			t.Fatal(err, errs)
		}
		if _, err := file.WriteString("after\n"); err != nil {
			t.Fatal(err)
		}
		file.Close()
		is("file", "before\n"+want+"after\n")
	}

	if err := syscall.Mkfifo("fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, errs := selfCommand(t, "convert", "tiny.pickle", "-o", "fifo", "--to", "csv")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	is("fifo", want)
	if err := cmd.Wait(); err != nil {
		t.Error(err, errs)
	}
	if _, errs, code := cistern(t, "", "convert", "tiny.pickle", "-o", os.DevNull, "--to", "csv"); code != exitOK {
		t.Error(errs)
	}
}

// TestTraceIsPrivate: what is recorded of a program is for its owner only; a file that exists keeps its permissions.
func TestTraceIsPrivate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.cistern")
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	for _, want := range []fs.FileMode{0o600, 0o644} {
		f, err := createTrace(file)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if st, err := os.Stat(file); err != nil || st.Mode() != want {
			t.Errorf("mode %v, %v; want %v", st.Mode(), err, want)
		}
		if err := os.Chmod(file, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOutputIsAnInput: a recording is not overwritten by what is made of it.
func TestOutputIsAnInput(t *testing.T) {
	inFolder(t)
	if err := errors.Join(os.Symlink("tiny.pickle", "link"), os.Link("tiny.pickle", "hard")); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile("tiny.pickle")
	if err != nil {
		t.Fatal(err)
	}
	runs := [][]string{
		{"convert", "tiny.pickle", "-o", "tiny.pickle", "--to", "csv"},
		{"convert", "tiny.pickle", "-o", "./link", "--to", "csv"},
		{"convert", "link", "-o", "hard", "--to", "csv"},
		{"replay", "--policy", "torch", "--record", "tiny.pickle", "tiny.pickle"},
	}
	if report.CheckBundle() == nil {
		runs = append(runs, []string{"report", "two.pickle", "tiny.pickle", "-o", "tiny.pickle"},
			[]string{"diff", "two.pickle", "tiny.pickle", "--html", "link"}, []string{"replay", "--html", "tiny.pickle", "tiny.pickle"})
	}
	for _, args := range runs {
		_, errs, code := cistern(t, "", args...)
		if code != exitBad || !strings.Contains(errs, "is an input as well") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: code %d, %q", args, code, errs)
		}
	}
	if after, err := os.ReadFile("tiny.pickle"); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the input changed: %v", err)
	}
	if _, err := open.File("hard"); err != nil {
		t.Error(err)
	}
}

// TestRecordThroughALink: the file that the program's processes are given is the link's target.
func TestRecordThroughALink(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("run.pickle", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if got, err := recordOutput(filepath.Join(dir, "link")); err != nil || got != filepath.Join(dir, "run.pickle") {
		t.Errorf("%q, %v", got, err)
	}
}

// TestOutputAlone: standard output has the file that was asked for there, and nothing else.
func TestOutputAlone(t *testing.T) {
	inFolder(t)
	runs := [][]string{{"replay", "--policy", "torch", "--record", "-", "tiny.pickle"}}
	if report.CheckBundle() == nil {
		runs = append(runs, []string{"report", "tiny.pickle", "-o", "-"}, []string{"replay", "tiny.pickle", "--html", "-", "--json"},
			[]string{"diff", "tiny.pickle", "tagged.pickle", "--html", "-"})
	}
	for _, args := range runs {
		out, errs, code := cistern(t, "", args...)
		begins := "<!doctype html>"
		if slices.Contains(args, "--record") {
			begins = "\x80" // of a pickle
		}
		if code != exitOK || !strings.HasPrefix(out, begins) || !strings.Contains(errs, "tiny.pickle") {
			t.Errorf("%v: code %d, standard output begins with %.40q, standard error is %.200q", args, code, out, errs)
		}
	}
}
