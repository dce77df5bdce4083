//go:build linux && cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// example compiles one of examples/c against the library, with the warnings that a careful stranger has on.
func example(t *testing.T, source string) string {
	t.Helper()
	file := filepath.Join("..", "..", "examples", "c", source)
	if _, err := os.ReadFile(file); err != nil { // so that the go command knows that the result depends on it
		t.Fatal(err)
	}
	lib := filepath.Dir(libraryPath(t))
	return build(t, "examples/"+source+".out", func(out string) error {
		cc, std := compiler("CC", "cc"), "-std=c99"
		if strings.HasSuffix(source, ".cpp") {
			cc, std = compiler("CXX", "c++"), "-std=c++17"
		}
		return quiet(exec.Command(cc, std, "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I.", file, "-L"+lib, "-lcistern",
			"-Wl,-rpath,"+lib, "-o", out))
	})
}

// prints runs an example; what it prints has these lines, in this order, among others.
func prints(t *testing.T, lines []string, args ...string) {
	t.Helper()
	r := run(t, "driver:sim:8GiB", nil, args...)
	if r.err != nil || r.report != "" {
		t.Errorf("%v\n%s%s", r.err, r.out, r.report)
	}
	if !regexp.MustCompile(`(?ms)^` + strings.Join(lines, `$.*^`) + `$`).MatchString(r.out) {
		t.Errorf("printed\n%s\nwant among them\n%s", r.out, strings.Join(lines, "\n"))
	}
}

func TestExamples(t *testing.T) {
	t.Parallel()
	paused := []string{
		`two libraries: 26\d MiB held, 264 MiB handed out, 0 MiB paused`,
		`  guest      1 blocks    200 MiB`,
		`  tour       1 blocks     64 MiB`,
		`code 1: .*100\.00 MiB.*`,
		`paused 2 blocks, 300 MiB of physical memory`,
		`paused: 6\d MiB held, 364 MiB handed out, 300 MiB paused`,
		`resumed 2 blocks, 300 MiB of contents`,
		`at the end: 0 MiB held, 0 MiB handed out, 0 MiB paused`,
	}
	memory := example(t, "memory.c")
	prints(t, paused, memory)
	prints(t, paused, memory, "host_numa")
	prints(t, []string{`two libraries: .*`, `code 1: .*`, `not paused: .*pinned.*`, `at the end: 0 MiB held, .*`}, memory, "pinned")
}

func TestExampleInCxx(t *testing.T) {
	t.Parallel()
	need(t, compiler("CXX", "c++"))
	prints(t, []string{`sum 549756338176 of 1048576 numbers in 8388608 bytes of the pool`,
		`then 0 bytes are handed out and \d{7,} cached`}, example(t, "containers.cpp"))
}
