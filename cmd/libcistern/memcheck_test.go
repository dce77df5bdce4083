//go:build linux && cgo

package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/slow"
)

type checkedProgram struct {
	source string
	args   []string
}

// ownFolder stands for a folder that only this run of the program has.
const ownFolder = "OWN FOLDER"

// arguments are those of a run.
func (p checkedProgram) arguments(t *testing.T) []string {
	args := slices.Clone(p.args)
	for i := range args {
		if args[i] == ownFolder {
			args[i] = t.TempDir()
		}
	}
	return args
}

// The programs of testdata again, under tools that watch every access.

var checkedPrograms = []checkedProgram{
	{"behaviour.c", []string{"/dev/null", "/dev/null"}},
	{"pools.c", nil},
	{"arguments.c", nil},
	{"callbacks.c", nil},
	{"labels.c", nil},
	{"upstreams.c", nil},
	{"pausing.c", []string{"20"}},
	{"threads.c", []string{"300"}},
	{"forks.c", nil},
	{"sharing.c", nil},
	{"magazines.c", []string{"3000"}},
	{"stacks.c", []string{"20"}},
	{"oom.c", []string{ownFolder, "threads"}},
	{"oom.c", []string{ownFolder, "function"}},
}

// needSanitizer skips the test where programs cannot be compiled with it.
func needSanitizer(t *testing.T, name string) {
	t.Helper()
	probe := exec.Command(compiler("CC", "cc"), "-fsanitize="+name, "-x", "c", "-", "-o", "/dev/null")
	probe.Stdin = strings.NewReader("int main(void) { return 0; }\n")
	if err := quiet(probe); err != nil {
		t.Skipf("the compiler has no -fsanitize=%s: %v", name, err)
	}
}

// TestSlowAddressSanitizer: the shim, Go's accesses to C memory and the programs, with leaks.
func TestSlowAddressSanitizer(t *testing.T) {
	slow.Only(t)
	t.Parallel()
	needSanitizer(t, "address")
	library := libraryFor(t, "asan", "-asan")
	for _, p := range checkedPrograms {
		leaks := "1"
		if p.source == "forks.c" {
			leaks = "0" // a child has no thread that owns the memory of its parent's threads
		}
		passes(t, "driver:sim:8GiBx2", []string{"ASAN_OPTIONS=detect_leaks=" + leaks},
			append([]string{program(t, p.source, library, "-fsanitize=address")}, p.arguments(t)...)...)
	}
}

// TestSlowValgrind: built with the tag by which Go's runtime tells valgrind of its stacks and heap, and with a fair turn for
// each thread, because some never wait. Leaks are left to
// TestSlowAddressSanitizer: valgrind takes what only Go's stacks refer to for lost.
func TestSlowValgrind(t *testing.T) {
	slow.Only(t)
	t.Parallel()
	valgrind := need(t, "valgrind")
	library := libraryFor(t, "valgrind", "", "valgrind")
	for _, p := range checkedPrograms {
		passes(t, "driver:sim:8GiBx2", []string{"GODEBUG=asyncpreemptoff=1"}, append([]string{valgrind, "-q", "--error-exitcode=9",
			"--fair-sched=yes", "--leak-check=no", program(t, p.source, library)}, p.arguments(t)...)...)
	}
}
